"""The formats of float8 checkpoints: what a recipe becomes in config.json, and which tensors each weight has.

    format                      recipe                          weights                 activations
    compressed-tensors          rowwise, rowwise_with_gw_hp     a scale per row         dynamic, per token
                                rowwise_with_tensorwise_weight  one scale               dynamic, per token
                                tensorwise                      one scale               dynamic, per tensor
                                delayed, static                 one scale               static, per tensor
    compressed-tensors-block    any                             a scale per 128 x 128   dynamic, per 128 of a token
    fp8                         any                             a scale per 128 x 128   dynamic, per 128 of a token

A float8 weight `<linear>.weight`, e4m3 [N, K], comes with its scale, float32: [N, 1] per row, [1] per tensor,
[ceil(N / 128), ceil(K / 128)] per block; value = code * scale. It is called `<linear>.weight_scale`, in fp8 (the format
of DeepSeek's checkpoints) `<linear>.weight_scale_inv`. Static activations add `<linear>.input_scale`, [1]. These are
the names, shapes and dtypes that compressed-tensors 0.20 and transformers 5.23 write, and that the
CompressedTensorsW8A8Fp8 of vLLM (its main branch, October 2025) and of SGLang register.

The two block formats hold the codes of the recipe `blockwise` and of weights that `freeze_to_float8` stored so; weights
of other recipes are quantized again. Under a blockwise config compressed-tensors is compressed-tensors-block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quaver.cast_config import ALL
from quaver.config import CastConfig, Float8LinearConfig
from quaver.scaling import BLOCK_SIZE

COMPRESSED_TENSORS = "compressed-tensors"
BLOCKS = "compressed-tensors-block"
FP8 = "fp8"
HIGH_PRECISION = "high-precision"
FORMATS = (COMPRESSED_TENSORS, BLOCKS, FP8)

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Sibling linears that servers fuse into one, which has one scale where scales are per tensor."""

_SCALE_NAMES = {COMPRESSED_TENSORS: "weight_scale", FP8: "weight_scale_inv"}
"""The leaf name of a weight's scale, by `quant_method`."""


@dataclass(frozen=True)
class WeightFormat:
    """How the weights of one recipe are stored, and how a server quantizes the inputs of these linears."""

    method: str
    """The `quant_method`."""
    weights: str
    """The compressed-tensors strategy: "channel" (a scale per row), "tensor" or "block"."""
    activations: str | None
    """The strategy "token", "tensor" or "group"; None for activations in high precision."""
    is_static: bool
    """Whether the scale of the activations is stored."""

    @property
    def scale_name(self) -> str:
        """The leaf name of a weight's scale."""
        return _SCALE_NAMES[self.method]

    def quantization_config(self, ignore: Sequence[str], cut_inputs: Sequence[str] = ()) -> dict[str, Any]:
        """The `quantization_config` of config.json.

        Args:
            ignore: names the modules that stay in high precision.
            cut_inputs: names those whose inputs are no multiple of a group of activations. compressed-tensors raises
                for such groups, so these linears have activations in high precision.
        """
        if self.method == FP8:
            return {
                "quant_method": FP8,
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE],
                "modules_to_not_convert": list(ignore),
            }
        inputs = None
        if self.activations is not None:
            inputs = _quantization_args(self.activations, is_dynamic=not self.is_static)
        group = {
            "targets": ["Linear"],
            "weights": _quantization_args(self.weights, is_dynamic=False),
            "input_activations": inputs,
            "output_activations": None,
        }
        groups = {"group_0": group}
        if cut_inputs and self.activations == "group":
            groups["group_1"] = {**group, "targets": list(cut_inputs), "input_activations": None}
        return {
            "quant_method": COMPRESSED_TENSORS,
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignore),
        }


def _quantization_args(strategy: str, *, is_dynamic: bool) -> dict[str, Any]:
    args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": is_dynamic}
    if strategy == "group":
        args["group_size"] = BLOCK_SIZE
    if strategy == "block":
        args["block_structure"] = [BLOCK_SIZE, BLOCK_SIZE]
    return args


def weight_format(format: str, config: Float8LinearConfig) -> WeightFormat:
    """Return how `format` holds the linears with `config`.

    Raises:
        ValueError: an unknown format.
        NotImplementedError: the format does not hold the codes, because they are not e4m3.
    """
    if format not in FORMATS:
        raise ValueError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    weight, input = config.casts.weight.row, config.casts.input.row
    for name, cast in (("weight", weight), ("input", input)):
        if not cast.is_disabled and cast.float8_dtype is not torch.float8_e4m3fn:
            raise NotImplementedError(f"{name}: checkpoints hold codes in e4m3, got {cast}; export with another recipe")
    sharing = weight.known_sharing("export")
    if format != COMPRESSED_TENSORS or ALL not in sharing:
        return WeightFormat(FP8 if format == FP8 else COMPRESSED_TENSORS, "block", "group", False)
    weights = "tensor" if sharing == (ALL, ALL) else "channel"
    return WeightFormat(format, weights, _strategy(input), input.is_persistent)


def _strategy(input: CastConfig) -> str | None:
    if input.is_disabled:
        return None
    sharing = input.known_sharing("export")
    if ALL not in sharing:
        raise NotImplementedError(f"input: expected tensorwise or row-wise scales as those of the weight, got {input}")
    return "tensor" if sharing == (ALL, ALL) else "token"

"""The formats of float8 checkpoints: what a recipe becomes in config.json, and which tensors each weight has.

    format                      recipe                          weights                 activations
    compressed-tensors          rowwise, rowwise_with_gw_hp     a scale per row         dynamic, per token
                                rowwise_with_tensorwise_weight  one scale               dynamic, per token
                                tensorwise                      one scale               dynamic, per tensor
                                delayed, static                 one scale               static, per tensor
    compressed-tensors-block    any                             a scale per 128 x 128   dynamic, per 128 of a token
    compressed-tensors-mxfp8    any                             E8M0, a scale per 32    dynamic, per 32 of a token
    fp8                         any                             a scale per 128 x 128   dynamic, per 128 of a token
    comfyui                     mxfp8, mxfp8_with_gw_hp         E8M0, a scale per 32    dynamic, per 32 of a token
                                delayed, static                 one scale               static, per tensor
                                any other                       one scale               in high precision

A float8 weight `<linear>.weight`, e4m3 [N, K], comes with its scale, float32: [N, 1] per row, [1] per tensor,
[ceil(N / 128), ceil(K / 128)] per block; or the bytes of E8M0, uint8 [N, K / 32]; value = code * scale. It is called
`<linear>.weight_scale`, in fp8 (the format of DeepSeek's checkpoints) `<linear>.weight_scale_inv`. Static activations
add `<linear>.input_scale`, [1]. These are the names, shapes and dtypes that compressed-tensors 0.20 and transformers
5.23 write, and that the CompressedTensorsW8A8Fp8 of vLLM (its main branch, October 2025) and of SGLang register, and
vLLM's CompressedTensorsW8A8Mxfp8.

The formats of 128 x 128 hold the codes of the recipe `blockwise` and of weights that `freeze_to_float8` stored so,
compressed-tensors-mxfp8 those of `mxfp8`, whose 32 x 32 blocks have 32 equal rows of scales; weights of other recipes
are quantized again. Under a blockwise config compressed-tensors is that of the two which has its blocks.

comfyui is one file for ComfyUI, whose layers have marks (comfyui.py); it holds the codes of recipes with one scale and
of `mxfp8`. ComfyUI scales activations dynamically only in MXFP8: without a static scale it would cast them unscaled, so
the mark of such a layer asks for a matmul in high precision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.export import comfyui
from quaver.kernels.operands import Operand
from quaver.recipes.cast_config import ALL, ScaleCalculationMode
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.formats import E4M3
from quaver.recipes.scaling import BLOCK_SIZE, dynamic_cast, dynamic_cast_blocks

COMPRESSED_TENSORS = "compressed-tensors"
BLOCKS = "compressed-tensors-block"
MXFP8 = "compressed-tensors-mxfp8"
FP8 = "fp8"
COMFYUI = comfyui.COMFYUI
HIGH_PRECISION = "high-precision"
FORMATS = (COMPRESSED_TENSORS, BLOCKS, MXFP8, FP8, COMFYUI)

GROUP_SIZE = 32
"""How many elements of a row share a scale in MXFP8."""

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Sibling linears that servers fuse into one, which has one scale where scales are per tensor."""

_SCALE_NAMES = {COMPRESSED_TENSORS: "weight_scale", FP8: "weight_scale_inv", COMFYUI: "weight_scale"}
"""The leaf name of a weight's scale, by method."""

_BLOCK_SIZES = {"block": (BLOCK_SIZE, BLOCK_SIZE), "group": (1, GROUP_SIZE)}
"""The rows and columns that share a scale, by the strategies of weights in blocks."""


@dataclass(frozen=True)
class WeightFormat:
    """How the weights of one recipe are stored, and how a server quantizes the inputs of these linears."""

    method: str
    """The `quant_method`; "comfyui" for one file without a config.json."""
    weights: str
    """The compressed-tensors strategy: "channel" (a scale per row), "tensor", "block", or "group" (MXFP8)."""
    activations: str | None
    """The strategy "token", "tensor" or "group"; None for activations in high precision."""
    is_static: bool
    """Whether the scale of the activations is stored."""

    @property
    def scale_name(self) -> str:
        """The leaf name of a weight's scale."""
        return _SCALE_NAMES[self.method]

    @property
    def block_size(self) -> tuple[int, int] | None:
        """The rows and columns that share a scale; None where it is one of a row or of the tensor."""
        return _BLOCK_SIZES.get(self.weights)

    @property
    def is_mx(self) -> bool:
        """Whether scales are E8M0, one byte each."""
        return self.weights == "group"

    @property
    def is_file(self) -> bool:
        """Whether a checkpoint is one file, with marks at its layers."""
        return self.method == COMFYUI

    @property
    def mark(self) -> Tensor | None:
        """The tensor that marks a layer as quantized; None in formats without marks."""
        if not self.is_file:
            return None
        return comfyui.mark("mxfp8" if self.is_mx else "float8_e4m3fn", is_hp=self.activations is None)

    def held(self, operand: Operand, weight: CastConfig) -> Operand | None:
        """The codes [N, K] of the forward with scales of the format; None where it cannot hold them.

        Args:
            operand: of the forward's matmul.
            weight: how it was cast.
        """
        scale = operand.dequant_scale
        if self.block_size is None:
            return operand if not self.is_file or (scale is not None and scale.numel() == 1) else None
        if not self.is_mx:
            return operand if weight.block_size == self.block_size else None
        if scale is None or weight.block_size is None or weight.block_size[1] != GROUP_SIZE or not _is_e8m0(scale):
            return None
        return Operand(operand.data, scale.repeat_interleave(weight.block_size[0], 0)[: operand.data.shape[0]])

    def quantized(self, weight: Tensor, *, power_of_2: bool = False) -> Operand:
        """A weight [N, K] in the blocks of the format, or with one scale.

        Args:
            weight: in high precision.
            power_of_2: round the scales to powers of two; those of MXFP8 are such.
        """
        if self.weights == "tensor":
            codes, _, scale = dynamic_cast(weight, E4M3.dtype, power_of_2=power_of_2)
            return Operand(codes, scale)
        if self.block_size is None:
            raise RuntimeError(f"{self.weights}: expected a format of blocks, or of one scale")
        codes, _, scale = dynamic_cast_blocks(
            weight,
            E4M3.dtype,
            power_of_2=power_of_2,
            block_size=self.block_size,
            mode=ScaleCalculationMode.RCEIL.value if self.is_mx else "",
        )
        return Operand(codes, scale)

    def stored_codes(self, codes: Tensor) -> Tensor:
        """The codes as the checkpoint has them, contiguous."""
        return comfyui.padded(codes) if self.is_file and self.is_mx else codes.contiguous()

    def stored_scale(self, dequant_scale: Tensor) -> Tensor:
        """A scale as the checkpoint has it, contiguous; one number has one dim, and none in comfyui."""
        scale = dequant_scale.contiguous()
        if self.is_mx:
            e8m0 = scale.to(torch.float8_e8m0fnu).view(torch.uint8)
            return comfyui.tiled(e8m0) if self.is_file else e8m0
        if self.is_file:
            return scale.reshape(()).clone()
        return scale if scale.dim() else scale.reshape(1).clone()  # it may be shared

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
            inputs = self._quantization_args(self.activations, is_dynamic=not self.is_static)
        group = {
            "targets": ["Linear"],
            "weights": self._quantization_args(self.weights, is_dynamic=False),
            "input_activations": inputs,
            "output_activations": None,
        }
        groups = {"group_0": group}
        if cut_inputs and self.activations == "group":
            groups["group_1"] = {**group, "targets": list(cut_inputs), "input_activations": None}
        return {
            "quant_method": COMPRESSED_TENSORS,
            "format": "mxfp8-quantized" if self.is_mx else "float-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignore),
        }

    def _quantization_args(self, strategy: str, *, is_dynamic: bool) -> dict[str, Any]:
        args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": is_dynamic}
        if self.is_mx:
            return {**args, "group_size": GROUP_SIZE, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        if strategy == "group":
            args["group_size"] = BLOCK_SIZE
        if strategy == "block":
            args["block_structure"] = [BLOCK_SIZE, BLOCK_SIZE]
        return args


def _is_e8m0(scale: Tensor) -> bool:
    """Whether every scale is a power of two that E8M0 has."""
    return scale.to(torch.float8_e8m0fnu).float().equal(scale)


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
    is_mx = weight.scale_calculation_mode is not None and sharing[1] == GROUP_SIZE
    if format == COMFYUI:
        is_static = input.is_persistent and not is_mx
        return WeightFormat(COMFYUI, "group" if is_mx else "tensor", _comfyui_strategy(is_mx, is_static), is_static)
    if format == MXFP8 or (format == COMPRESSED_TENSORS and is_mx):
        return WeightFormat(COMPRESSED_TENSORS, "group", "group", False)
    if format != COMPRESSED_TENSORS or ALL not in sharing:
        return WeightFormat(FP8 if format == FP8 else COMPRESSED_TENSORS, "block", "group", False)
    weights = "tensor" if sharing == (ALL, ALL) else "channel"
    return WeightFormat(format, weights, _strategy(input), input.is_persistent)


def _comfyui_strategy(is_mx: bool, is_static: bool) -> str | None:
    if is_mx:
        return "group"
    return "tensor" if is_static else None


def _strategy(input: CastConfig) -> str | None:
    if input.is_disabled:
        return None
    sharing = input.known_sharing("export")
    if ALL not in sharing:
        raise NotImplementedError(f"input: expected tensorwise or row-wise scales as those of the weight, got {input}")
    return "tensor" if sharing == (ALL, ALL) else "token"

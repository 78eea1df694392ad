"""compressed-tensors: scales per row, tensor, 128 x 128 block or MXFP8 block, in groups of linears by name.

compressed-tensors 0.20 and transformers 5.23 write tensors with the same names, shapes and dtypes. Readers are
CompressedTensorsW8A8Fp8 of vLLM (main branch, October 2025) and of SGLang, and vLLM's CompressedTensorsW8A8Mxfp8.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from torch import nn

from quaver.export.formats.base import GROUP_SIZE, WeightFormat
from quaver.export.formats.stored import LINEAR_TARGET, StoredFormat, parse_block_size
from quaver.recipes.config import CastConfig
from quaver.recipes.scale_layout import BLOCK_SIZE
from quaver.runtime.errors import InputError
from quaver.runtime.module_names import join_names

METHOD = "compressed-tensors"
BLOCK_FORMAT = "compressed-tensors-block"


class CompressedTensors(WeightFormat):
    """The format with the granularity and the codes of the recipe."""

    has_linears = True

    @classmethod
    def from_casts(cls, weight: CastConfig, input: CastConfig) -> Self:
        layout = weight.require_layout("export")
        if has_mx_scales(weight):
            return cls("group", "group")
        if layout.is_blockwise:
            return cls("block", "group")
        weights = "tensor" if layout.is_tensorwise else "channel"
        return cls(weights, _choose_activations(input), input.is_persistent)

    def check_weights(self, model: nn.Module, sizes: Mapping[str, Sequence[int]], ignore: Sequence[str]) -> None:
        """Refuse rows that groups of MXFP8 do not divide: compressed-tensors cannot read them."""
        ragged = [f"{name.removesuffix('.weight')} {size}" for name, size in sizes.items() if size[1] % GROUP_SIZE]
        if ragged and self.is_mx:
            raise NotImplementedError(
                f"MXFP8: expected weights whose columns are a multiple of {GROUP_SIZE}, got {join_names(ragged)}; use "
                f"the format {BLOCK_FORMAT}, which quantizes again, or leave these in high precision"
            )

    def make_quantization_config(
        self, ignore: Sequence[str], ragged_inputs: Sequence[str] = (), *, has_kv_scales: bool = False
    ) -> dict[str, Any]:
        inputs = None
        if self.activation_strategy is not None:
            inputs = self._make_quantization_args(self.activation_strategy, is_dynamic=not self.has_activation_scales)
        group = {
            "targets": ["Linear"],
            "weights": self._make_quantization_args(self.weight_strategy, is_dynamic=False),
            "input_activations": inputs,
            "output_activations": None,
        }
        groups = {"group_0": group}
        if ragged_inputs and self.activation_strategy == "group":
            # compressed-tensors raises for groups that do not divide inputs.
            groups["group_1"] = {**group, "targets": list(ragged_inputs), "input_activations": None}
        return {
            "quant_method": METHOD,
            "format": "mxfp8-quantized" if self.is_mx else "float-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": list(ignore),
            **({"kv_cache_scheme": _make_args("tensor", is_dynamic=False)} if has_kv_scales else {}),
        }

    def _make_quantization_args(self, strategy: str, *, is_dynamic: bool) -> dict[str, Any]:
        args = _make_args(strategy, is_dynamic=is_dynamic)
        if self.is_mx:
            return {**args, "group_size": GROUP_SIZE, "scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}
        if strategy == "group":
            args["group_size"] = BLOCK_SIZE
        if strategy == "block":
            args["block_structure"] = [BLOCK_SIZE, BLOCK_SIZE]
        return args


class CompressedTensorsBlocks(CompressedTensors):
    """Blocks of 128 x 128 for any recipe."""

    @classmethod
    def from_casts(cls, weight: CastConfig, input: CastConfig) -> Self:
        return cls("block", "group")


class CompressedTensorsMXFP8(CompressedTensors):
    """MXFP8 for any recipe."""

    @classmethod
    def from_casts(cls, weight: CastConfig, input: CastConfig) -> Self:
        return cls("group", "group")


def has_mx_scales(weight: CastConfig) -> bool:
    """Return whether MXFP8 holds the scales of this cast."""
    return weight.scale_calculation_mode is not None and weight.require_layout("export").columns == GROUP_SIZE


def _make_args(strategy: str, *, is_dynamic: bool) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": is_dynamic}


def _choose_activations(input: CastConfig) -> str | None:
    if input.is_disabled:
        return None
    layout = input.require_layout("export")
    if layout.is_blockwise:
        raise NotImplementedError(f"input: expected tensorwise or rowwise scales as those of the weight, got {input}")
    return "tensor" if layout.is_tensorwise else "token"


def make_stored_format(quantization: Mapping[str, Any]) -> StoredFormat:
    """Return the format of a folder with this quantization_config. Raises ValueError, NotImplementedError."""
    if quantization.get("transform_config"):
        raise NotImplementedError(
            "transform_config in config.json: the weights are those of a rotated model; dequantize the model with "
            "compressed-tensors, which rotates them back"
        )
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(group, dict) for group in groups.values()):
        raise InputError(f"config_groups in config.json: expected an object of groups, got {type(groups).__name__}")
    token_scales: dict[str, bool] = {}
    for group in groups.values():
        inputs, targets = group.get("input_activations"), group.get("targets")
        has_token_scales = isinstance(inputs, dict) and inputs.get("strategy") != "tensor"
        token_scales |= dict.fromkeys(
            map(str, targets if isinstance(targets, list) else [LINEAR_TARGET]), has_token_scales
        )
    for pattern in (target.removeprefix("re:") for target in token_scales if target.startswith("re:")):
        try:
            re.compile(pattern)
        except re.error as error:
            raise InputError(f"targets in config.json: {pattern!r} is no regular expression: {error}") from error
    sizes = dict.fromkeys(size for group in groups.values() for size in _iter_block_sizes(group))
    return StoredFormat(METHOD, tuple(sizes), token_scales)


def _iter_block_sizes(group: dict[str, Any]) -> Iterator[tuple[int, int]]:
    weights = group.get("weights")
    weights = weights if isinstance(weights, dict) else {}
    actual = {name: weights.get(name) for name in ("type", "num_bits", "strategy")}
    strategies = ("tensor", "channel", "block", "group")
    if (actual["type"], actual["num_bits"]) != ("float", 8) or actual["strategy"] not in strategies:
        raise NotImplementedError(
            f"the weights in config.json: expected 8-bit floats with one scale per {', '.join(strategies)}, got "
            f"{actual}; dequantize the model with compressed-tensors"
        )
    if actual["strategy"] == "block":
        yield parse_block_size(weights.get("block_structure"))
    elif actual["strategy"] == "group":
        yield parse_block_size([1, weights.get("group_size")])

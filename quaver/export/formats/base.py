"""`WeightFormat`: the interface of a format that an export writes. Each format is a subclass in a separate file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quaver.kernels.operands import Operand, require
from quaver.recipes.cast_config import ScaleCalculationMode
from quaver.recipes.config import CastConfig
from quaver.recipes.formats import E4M3
from quaver.recipes.scale_layout import BLOCK_SIZE, ROWWISE, TENSORWISE, ScaleLayout
from quaver.recipes.scaling import dynamic_cast, dynamic_cast_blocks

GROUP_SIZE = 32
"""The number of elements of a row that share a scale in MXFP8."""

_BLOCK_SIZES = {"block": (BLOCK_SIZE, BLOCK_SIZE), "group": (1, GROUP_SIZE)}
"""The rows and columns of a block, by the strategy of the weights."""


@dataclass(frozen=True)
class WeightFormat:
    """How a format stores the weights of one recipe, and how a server quantizes the inputs of these linears."""

    weight_strategy: str
    """The strategy "channel" (a scale per row), "tensor", "block" (128 x 128) or "group" (MXFP8)."""
    activation_strategy: str | None
    """The strategy "token", "tensor" or "group"; None for activations in high precision."""
    has_activation_scales: bool = False
    """Whether the checkpoint has scales of activations."""

    scale_name: ClassVar[str] = "weight_scale"
    """The leaf name of a weight's scale."""
    is_file: ClassVar[bool] = False
    """Whether a checkpoint is one file, without config.json, scales of a KV cache or fused scales."""
    has_linears: ClassVar[bool] = False
    """Whether the format stores Llama 4's experts as linears rather than stacks."""

    @classmethod
    def from_casts(cls, weight: CastConfig, input: CastConfig) -> Self:
        """Return the format for linears with these casts; by default blocks of 128 x 128.

        Raises:
            NotImplementedError: the format does not hold them.
        """
        return cls("block", "group")

    @property
    def block_size(self) -> tuple[int, int] | None:
        """The rows and columns of a block; None for scales per row or per tensor."""
        return _BLOCK_SIZES.get(self.weight_strategy)

    @property
    def is_mx(self) -> bool:
        """Whether scales are E8M0, one byte each."""
        return self.weight_strategy == "group"

    def can_hold(self, weight: CastConfig) -> bool:
        """Return whether the format stores the codes and scales of this cast unchanged."""
        if self.is_mx:
            is_e8m0 = weight.scale_calculation_mode is not None
            return is_e8m0 and weight.block_size is not None and weight.block_size[1] == GROUP_SIZE
        is_by_strategy = {"tensor": weight.is_tensorwise, "channel": weight.is_rowwise}
        return is_by_strategy.get(self.weight_strategy, weight.block_size == self.block_size)

    def convert_operand(self, operand: Operand, weight: CastConfig) -> Operand | None:
        """Return the operand with the format's layout of scales, or None if the format cannot hold its codes.

        Args:
            operand: the weight [N, K] in the forward's matmul.
            weight: the cast of the weight.
        """
        scale = require(operand.dequant_scale, "the dequant_scale")
        if self.is_mx:
            is_e8m0 = scale.to(torch.float8_e8m0fnu).float().equal(scale)
            if weight.block_size is None or weight.block_size[1] != GROUP_SIZE or not is_e8m0:
                return None
            row_scales = scale.repeat_interleave(weight.block_size[0], 0)[: operand.data.shape[0]]
            return Operand(operand.data, row_scales, ScaleLayout(1, GROUP_SIZE))
        if self.weight_strategy == "tensor":
            return operand if scale.numel() == 1 else None
        return operand if self.block_size in (None, weight.block_size) else None

    def quantize(self, weight: Tensor, *, power_of_2: bool = False) -> Operand:
        """Quantize a weight [N, K] in high precision with the format's layout of scales.

        `power_of_2`: round the scales to powers of two. MXFP8 always does.
        """
        if self.block_size is None:
            layout = ROWWISE if self.weight_strategy == "channel" else TENSORWISE
            dim = None if layout.is_tensorwise else 1
            codes, _, scale = dynamic_cast(weight, E4M3.dtype, dim, power_of_2=power_of_2)
        else:
            layout = ScaleLayout(*self.block_size)
            rule = ScaleCalculationMode.RCEIL.value if self.is_mx else ""
            codes, _, scale = dynamic_cast_blocks(
                weight, E4M3.dtype, power_of_2=power_of_2, block_size=self.block_size, rule=rule
            )
        return Operand(codes, scale, layout)

    def iter_tensors(self, name: str, operand: Operand) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the weight `name` in a checkpoint, by name."""
        yield name, self.convert_codes(operand.data)
        yield self.get_scale_name(name), self.convert_scale(require(operand.dequant_scale, "the dequant_scale"))

    def get_scale_name(self, name: str) -> str:
        """Return the name of the scale of the weight `name`."""
        return f"{name.removesuffix('weight')}{self.scale_name}"

    def convert_codes(self, codes: Tensor) -> Tensor:
        """Return the codes as the checkpoint has them, contiguous."""
        return codes.contiguous()

    def convert_scale(self, dequant_scale: Tensor) -> Tensor:
        """Return a scale as the checkpoint has it, contiguous: bytes of E8M0, or float32; [1] for a scalar."""
        scale = dequant_scale.contiguous()
        if self.is_mx:
            return scale.to(torch.float8_e8m0fnu).view(torch.uint8)
        return scale if scale.dim() else scale.reshape(1).clone()  # several weights may share it

    def make_quantization_config(
        self, ignore: Sequence[str], ragged_inputs: Sequence[str] = (), *, has_kv_scales: bool = False
    ) -> dict[str, Any]:
        """Return the `quantization_config` of config.json.

        Args:
            ignore: the names of modules that stay in high precision.
            ragged_inputs: the names of modules whose inputs are not a multiple of 128.
            has_kv_scales: whether the checkpoint has scales of a KV cache.
        Raises:
            NotImplementedError: the control "high-precision", which is not written as a folder.
        """
        raise NotImplementedError("format: high-precision is for iter_float8_weights; save_pretrained writes a folder")

    @classmethod
    def list_unsupported(cls, model: nn.Module, linears: Sequence[str], stacks: Sequence[str]) -> list[str]:
        """Return the float8 `linears` that stay in high precision in this format.

        Raises:
            NotImplementedError: the format does not hold stacks of experts.
        """
        return []

    def check_weights(self, model: nn.Module, sizes: Mapping[str, Sequence[int]], ignore: Sequence[str]) -> None:
        """Raise NotImplementedError for weights that no reader of the format loads.

        `sizes`: the rows and columns of each matrix, by the name of the float8 weight in the model.
        """

    def check_target(self, path: Path, names: Sequence[str], **folder_options: object) -> None:
        """Raise ValueError if tensors with these names cannot be written to `path`, or options are for folders only."""

    def iter_warnings(self, ragged: Sequence[str], high_precision_linears: Sequence[str]) -> Iterator[str]:
        """Yield what readers cannot do with `ragged` weights, and why `high_precision_linears` are not in float8."""
        yield from ()

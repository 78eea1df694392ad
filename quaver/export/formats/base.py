"""`WeightFormat`: what an export asks of the format that it writes. A format is a subclass, in a file of its own."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from quaver.kernels.operands import Operand
from quaver.recipes.cast_config import ScaleCalculationMode
from quaver.recipes.config import CastConfig
from quaver.recipes.formats import E4M3
from quaver.recipes.scale_layout import BLOCK_SIZE, ROWWISE, TENSORWISE, ScaleLayout
from quaver.recipes.scaling import dynamic_cast, dynamic_cast_blocks

GROUP_SIZE = 32
"""How many elements of a row share a scale in MXFP8."""

_BLOCK_SIZES = {"block": (BLOCK_SIZE, BLOCK_SIZE), "group": (1, GROUP_SIZE)}
"""The rows and columns that share a scale, by the strategies of weights in blocks."""


@dataclass(frozen=True)
class WeightFormat:
    """How a format holds the weights of one recipe, and how a server quantizes the inputs of these linears."""

    weights: str
    """The strategy "channel" (a scale per row), "tensor", "block" (128 x 128) or "group" (MXFP8)."""
    activations: str | None
    """The strategy "token", "tensor" or "group"; None for activations in high precision."""
    is_static: bool = False
    """Whether the scale of the activations is stored."""

    scale_name: ClassVar[str] = "weight_scale"
    """The leaf name of a weight's scale."""
    is_file: ClassVar[bool] = False
    """Whether a checkpoint is one file without a config.json; KV caches and fused scales are not for it."""
    has_linears: ClassVar[bool] = False
    """Whether Llama 4's experts are linears in it, and not stacks."""

    @classmethod
    def of(cls, weight: CastConfig, input: CastConfig) -> Self:
        """The format of linears whose operands are cast so, by default in blocks of 128 x 128.

        Raises:
            NotImplementedError: it does not hold them.
        """
        return cls("block", "group")

    @property
    def block_size(self) -> tuple[int, int] | None:
        """The rows and columns that share a scale; None where it is one of a row or of the tensor."""
        return _BLOCK_SIZES.get(self.weights)

    @property
    def is_mx(self) -> bool:
        """Whether scales are E8M0, one byte each."""
        return self.weights == "group"

    def holds(self, weight: CastConfig) -> bool:
        """Whether the codes and scales of weights that are cast so are stored as they are."""
        if self.is_mx:
            is_e8m0 = weight.scale_calculation_mode is not None
            return is_e8m0 and weight.block_size is not None and weight.block_size[1] == GROUP_SIZE
        known = {"tensor": weight.is_tensorwise, "channel": weight.is_rowwise}
        return known.get(self.weights, weight.block_size == self.block_size)

    def held(self, operand: Operand, weight: CastConfig) -> Operand | None:
        """The codes [N, K] of the forward with scales of the format; None where it cannot hold them.

        Args:
            operand: of the forward's matmul.
            weight: how it was cast.
        """
        scale = typing.cast(Tensor, operand.dequant_scale)
        if self.is_mx:
            if weight.block_size is None or weight.block_size[1] != GROUP_SIZE or not _is_e8m0(scale):
                return None
            of_rows = scale.repeat_interleave(weight.block_size[0], 0)[: operand.data.shape[0]]
            return Operand(operand.data, of_rows, ScaleLayout(1, GROUP_SIZE))
        if self.weights == "tensor":
            return operand if scale.numel() == 1 else None
        return operand if self.block_size in (None, weight.block_size) else None

    def quantized(self, weight: Tensor, *, power_of_2: bool = False) -> Operand:
        """A weight [N, K] in high precision with scales of the format.

        `power_of_2`: round the scales to powers of two; those of MXFP8 are such.
        """
        if self.block_size is None:
            layout = ROWWISE if self.weights == "channel" else TENSORWISE
            dim = None if layout.is_tensorwise else 1
            codes, _, scale = dynamic_cast(weight, E4M3.dtype, dim, power_of_2=power_of_2)
        else:
            layout = ScaleLayout(*self.block_size)
            mode = ScaleCalculationMode.RCEIL.value if self.is_mx else ""
            codes, _, scale = dynamic_cast_blocks(
                weight, E4M3.dtype, power_of_2=power_of_2, block_size=self.block_size, mode=mode
            )
        return Operand(codes, scale, layout)

    def tensors(self, name: str, operand: Operand) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the weight `name` in a checkpoint."""
        yield name, self.stored_codes(operand.data)
        yield self.name_of_scale(name), self.stored_scale(typing.cast(Tensor, operand.dequant_scale))

    def name_of_scale(self, name: str) -> str:
        """The name of the scale of the weight `name`."""
        return f"{name.removesuffix('weight')}{self.scale_name}"

    def stored_codes(self, codes: Tensor) -> Tensor:
        """The codes as the checkpoint has them, contiguous."""
        return codes.contiguous()

    def stored_scale(self, dequant_scale: Tensor) -> Tensor:
        """A scale as the checkpoint has it, contiguous: bytes of E8M0, or float32, [1] for one number."""
        scale = dequant_scale.contiguous()
        if self.is_mx:
            return scale.to(torch.float8_e8m0fnu).view(torch.uint8)
        return scale if scale.dim() else scale.reshape(1).clone()  # it may be shared

    def quantization_config(
        self, ignore: Sequence[str], cut_inputs: Sequence[str] = (), *, has_kv_scales: bool = False
    ) -> dict[str, Any]:
        """The `quantization_config` of config.json.

        Args:
            ignore: names the modules that stay in high precision.
            cut_inputs: names those whose inputs are no multiple of 128.
            has_kv_scales: whether the checkpoint has scales of a KV cache.
        Raises:
            NotImplementedError: the control, which no folder holds.
        """
        raise NotImplementedError("format: high-precision is for iter_float8_weights; save_pretrained writes a folder")

    @classmethod
    def left_out(cls, model: nn.Module, linears: Sequence[str], stacks: Sequence[str]) -> list[str]:
        """Those of the float8 `linears` that stay in high precision in this format.

        Raises:
            NotImplementedError: it holds no stacks of experts.
        """
        return []

    def check(self, model: nn.Module, sizes: Mapping[str, Sequence[int]], ignore: Sequence[str]) -> None:
        """Raise NotImplementedError for weights that no reader of the format reads.

        `sizes`: the rows and columns of each matrix, by the names of float8 weights in the model.
        """

    def check_target(self, path: Path, names: Sequence[str], **of_folder: object) -> None:
        """Raise ValueError if a model with tensors `names` cannot be written as `path` with the options of a folder."""

    def warnings(self, ragged: Sequence[str], kept: Sequence[str]) -> Iterator[str]:
        """What readers cannot do with the weights that are `ragged`, and why linears are `kept` in high precision."""
        yield from ()


def _is_e8m0(scale: Tensor) -> bool:
    """Whether every scale is a power of two that E8M0 has."""
    return scale.to(torch.float8_e8m0fnu).float().equal(scale)

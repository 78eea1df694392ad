"""Quantizers of a matrix that tensor-parallel ranks share, with the scales of the whole matrix.

A scale reduces a dim. Where the ranks share that dim, they take the maximum of their amaxes before they quantize (a
number, or a vector as long as the other dim); where they do not, a rank's own amax is that of the whole matrix. So
codes and scales are those of one device.

A persistent scale that is initialized is equal on every rank since the last sync, so nothing is exchanged. Until then
the ranks agree on the scale of the whole matrix, as in dynamic scaling. All must join that collective: they decide by
`PersistentScale.is_initialized`, which is equal on every rank too, and is read when the cast runs, not when it is
traced. So to a compiler this cast is one operation.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from quaver.distributed.collectives import all_gather, max_over_ranks
from quaver.gemm import along_contracted
from quaver.kernels.cast import cast_with_persistent_scale, cast_with_scale, matrix_amax, record, record_amax
from quaver.kernels.cpu import check_memory
from quaver.quantize import CastPair, Operand, Operands, Quantizer, Scales, merged, scales_of
from quaver.scaling import PLAIN_TYPES, PersistentScale


class TensorParallelQuantizer(Quantizer):
    """Quantizes this rank's part of a matrix that the ranks of `group` share along `sharded_dim`. A collective."""

    __slots__ = ("group", "sharded_dim")

    def __init__(self, casts: CastPair, scale: PersistentScale | None, group: ProcessGroup, sharded_dim: int) -> None:
        super().__init__(casts, scale)
        self.group, self.sharded_dim = group, sharded_dim

    def tensor_scales(self, operands: Operands) -> Scales | None:
        """See `Quantizer`; row scales may be those of this rank's rows only, so tensor scales do not follow."""
        return operands.tensor_scales

    def _quantize_tensorwise(self, hp: Tensor, last: bool, first: bool, scales: Scales | None) -> Operands:
        if scales is not None or self.scale is None:
            return super()._quantize_tensorwise(hp, last, first, scales or self._agreed_scales(hp, None))
        quantize = torch.ops.quaver.cast_with_agreed_scale if _is_traced(self.scale) else _cast_with_agreed_scale
        quant_scale, is_initialized = self.scale.quant_scale, self.scale.is_initialized
        dtype, power_of_2, group_name = self.casts.last.float8_dtype, self.casts.power_of_2, self.group.group_name
        codes, *made, observed = quantize(hp, quant_scale, is_initialized, dtype, power_of_2, group_name)
        record(self.scale, observed)
        scales = Scales(*made)
        return Operands(
            Operand(along_contracted(codes, 1), scales.dequant) if last else None,
            Operand(along_contracted(codes, 0), scales.dequant) if first else None,
            scales,
        )

    def _quantize_rowwise(self, hp: Tensor, last: bool, first: bool) -> Operands:
        agrees_last, agrees_first = last and self.sharded_dim == 1, first and self.sharded_dim == 0
        made = Operands(None, None)
        if agrees_last or agrees_first:
            scales = self._agreed_scales(hp, self.sharded_dim)
            row_scale, column_scale = (scales.quant, None) if agrees_last else (None, scales.quant)
            codes = cast_with_scale(hp, self.casts.last.float8_dtype, row_scale, column_scale)
            last_op, first_op = (None if code is None else Operand(code, scales.dequant) for code in codes)
            made = Operands(last_op, first_op, row_scales=scales)
        if last != agrees_last or first != agrees_first:
            made = merged(made, super()._quantize_rowwise(hp, last != agrees_last, first != agrees_first))
        return made

    def _agreed_scales(self, hp: Tensor, dim: int | None) -> Scales:
        """The scales of the whole matrix that reduce `dim`. A collective."""
        amax = max_over_ranks(matrix_amax(hp, dim), self.group)
        return scales_of(amax, self.casts.last.float8_dtype, self.casts.power_of_2)


class GatheringQuantizer(TensorParallelQuantizer):
    """Quantizes this rank's tokens of an activation and all-gathers the codes: the operands are those of the whole.

    Args:
        token_dim: the dim of the activation [..., K] that is sharded.
    """

    __slots__ = ("token_dim",)

    def __init__(self, casts: CastPair, scale: PersistentScale | None, group: ProcessGroup, token_dim: int) -> None:
        super().__init__(casts, scale, group, 0)
        self.token_dim = token_dim

    def __call__(self, hp: Tensor, *, last: bool, first: bool, scales: Scales | None = None) -> Operands:
        """See `Quantizer`; `hp` is this rank's part [..., tokens, ..., K], the operands are of the whole."""
        casts, token_dim = self.casts, self.token_dim % hp.dim()
        if (last and casts.last.is_disabled) or (first and casts.first.is_disabled):
            # High precision has to travel for one of them; the other is quantized from it, as on one device.
            hp = hp if hp.dtype is casts.hp_dtype else hp.to(casts.hp_dtype)
            return Quantizer(casts, self.scale)(all_gather(hp, token_dim, self.group), last=last, first=first)
        one_cast = not (casts.last.is_rowwise or casts.first.is_rowwise)  # serves both matmuls
        made = super().__call__(hp, last=last or one_cast, first=first and not one_cast)
        last_op = None if made.last is None else self._gathered(made.last, hp.shape, token_dim)
        first_op = None if made.first is None else self._gathered(made.first, hp.shape, token_dim)
        if one_cast:
            first_op = last_op
        return Operands(
            _laid_out(last_op, 1) if last and last_op is not None else None,
            _laid_out(first_op, 0) if first and first_op is not None else None,
        )

    def _gathered(self, operand: Operand, shape: torch.Size, token_dim: int) -> Operand:
        codes = all_gather(operand.data.contiguous().view(shape), token_dim, self.group)
        scale = operand.dequant_scale
        if scale is not None and scale.dim() and scale.shape[1] == 1 != shape[-1]:  # a scale per token travels too
            scale = all_gather(scale.view(*shape[:-1], 1), token_dim, self.group).view(-1, 1)
        return Operand(codes.flatten(0, -2), scale)


def _laid_out(operand: Operand, contracted_dim: int) -> Operand:
    return operand._replace(data=along_contracted(operand.data, contracted_dim))


# ---- with a persistent scale -----------------------------------------------------------------------------------------


def _is_traced(scale: PersistentScale) -> bool:
    # Functions that Dynamo does not look into (AllGatherInput) are traced with tensors that have no value to decide by.
    return torch.compiler.is_dynamo_compiling() or type(scale.is_initialized) not in PLAIN_TYPES


def _cast_with_agreed_scale(
    hp: Tensor,
    quant_scale: Tensor,
    is_initialized: Tensor,
    float8_dtype: torch.dtype,
    power_of_2: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row codes, quant_scale, dequant_scale, and float32 [2]: the amax of this rank's part, and saturated elements."""
    check_memory(hp, quant_scale, is_initialized)
    observed, hp = hp.new_zeros(2, dtype=torch.float32), hp.contiguous()
    scale = PersistentScale(quant_scale, observed, is_initialized)
    if is_initialized:
        codes, _, quant, dequant = cast_with_persistent_scale(hp, scale, float8_dtype, True, False, power_of_2)
        return codes, quant.clone(), dequant, observed
    own = matrix_amax(hp, None)
    record_amax(scale, own)
    # Functional collectives take the name of a group, too.
    amax = max_over_ranks(own, group_name)  # type: ignore[arg-type]
    scales = scales_of(amax, float8_dtype, power_of_2)
    codes = cast(Tensor, cast_with_scale(hp, float8_dtype, scales.quant, None)[0])
    return codes, *scales, observed


_library = torch.library.Library("quaver", "FRAGMENT")
_library.define(
    "cast_with_agreed_scale(Tensor hp, Tensor quant_scale, Tensor is_initialized, ScalarType float8_dtype, "
    "bool power_of_2, str group_name) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("cast_with_agreed_scale", _cast_with_agreed_scale, "CompositeExplicitAutograd")


@torch.library.register_fake("quaver::cast_with_agreed_scale", lib=_library)
def _fake_cast_with_agreed_scale(
    hp: Tensor, quant_scale: Tensor, is_initialized: Tensor, float8_dtype: torch.dtype, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale, observed = hp.new_empty((), dtype=torch.float32), hp.new_empty(2, dtype=torch.float32)
    return hp.new_empty(hp.shape, dtype=float8_dtype), scale, torch.empty_like(scale), observed

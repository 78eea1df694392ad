"""Quantizers of a matrix that tensor-parallel ranks shard, with the scales of the whole matrix.

A scale reduces a dim. If that dim is sharded, the ranks take the maximum of their amaxes before they quantize: one
number, or a vector as long as the other dim. Otherwise a rank's own amax equals the whole matrix's. So codes and scales
are bit-identical to one device.

A block's scale depends on that block alone, so shards of whole blocks need no collective. If a shard's features end
inside a block, `check_can_be_sharded` raises. If its tokens do, they are all-gathered in high precision first.

A known persistent scale is equal on every rank since the last sync and needs no collective. Before it is known, the
ranks compute a scale as in dynamic scaling. All ranks must join that collective, so they decide by
`PersistentScale.is_known`, which is equal on every rank. It is read when the cast runs, not when it is traced, so this
cast is one op to a compiler.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from quaver.kernels.cast import cast_with_scale, compute_matrix_amax, to_row_major
from quaver.kernels.cpu import check_memory
from quaver.kernels.operands import Operand, Operands, require
from quaver.kernels.persistent_cast import cast_with_persistent_scale, record_amax, update_amax_buffer
from quaver.linear.gemm import lay_out_columns, lay_out_rows
from quaver.linear.quantize import Quantizer
from quaver.recipes.config import CastConfig
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scale_layout import COLUMNWISE, ROWWISE, TENSORWISE
from quaver.recipes.scaling import PLAIN_TYPES, CastScales, PersistentScale, choose_factor, compute_scales
from quaver.runtime.collectives import all_gather, all_reduce_max
from quaver.runtime.compile_hints import is_compiling, store_once


class TensorParallelQuantizer(Quantizer):
    """Quantizes this rank's shard of a matrix that the ranks of `group` shard along `sharded_dim`. A collective."""

    __slots__ = ("group", "sharded_dim")

    def __init__(
        self,
        casts: OperandCasts,
        hp_dtype: torch.dtype,
        scale: PersistentScale | None,
        group: ProcessGroup,
        sharded_dim: int,
    ) -> None:
        super().__init__(casts, hp_dtype, scale)
        self.group, self.sharded_dim = group, sharded_dim

    def derive_scales(self, cast: CastConfig, operands: Operands) -> CastScales | None:
        """See `Quantizer`. Rowwise scales may cover this rank's rows only, so no tensorwise scale follows."""
        operand = operands.row or operands.column
        is_tensorwise = operand is not None and operand.quant_scale is not None and operand.quant_scale.dim() == 0
        return super().derive_scales(cast, operands) if is_tensorwise else None

    def apply_cast(
        self, cast: CastConfig, hp: Tensor, *, row: bool, column: bool, scales: CastScales | None
    ) -> Operands:
        """See `Quantizer`. Scales that reduce the sharded dim are those of the whole matrix."""
        if cast.is_disabled or cast.require_layout("tensor parallelism").is_blockwise:
            return super().apply_cast(cast, hp, row=row, column=column, scales=scales)
        if not cast.require_layout("tensor parallelism").is_tensorwise:
            return self._cast_rowwise(cast, hp, row=row, column=column)
        if scales is not None or self.scale is None:
            scales = scales or self._compute_whole_scales(cast, hp, None)
            return super().apply_cast(cast, hp, row=row, column=column, scales=scales)
        quantize = torch.ops.quaver.cast_with_whole_scale if _is_traced(self.scale) else _cast_with_whole_scale
        quant_scale, is_known = self.scale.quant_scale, self.scale.is_known
        dtype, power_of_2, group_name = cast.float8_dtype, self.casts.power_of_2, self.group.group_name
        codes, quant, dequant, recorded_amax = quantize(hp, quant_scale, is_known, dtype, power_of_2, group_name)
        update_amax_buffer(self.scale, recorded_amax)
        return Operands(
            Operand(lay_out_rows(codes), dequant, TENSORWISE, quant) if row else None,
            Operand(lay_out_columns(codes), dequant, TENSORWISE, quant) if column else None,
        )

    def _cast_rowwise(self, cast: CastConfig, hp: Tensor, *, row: bool, column: bool) -> Operands:
        row_spans_ranks, column_spans_ranks = row and self.sharded_dim == 1, column and self.sharded_dim == 0
        spanning = local = Operands(None, None)
        if row_spans_ranks or column_spans_ranks:
            scales = self._compute_whole_scales(cast, hp, self.sharded_dim)
            quant, dequant, _ = scales
            factor = choose_factor(scales, cast.rule)
            row_scale, column_scale = (factor, None) if row_spans_ranks else (None, factor)
            codes = cast_with_scale(hp, cast.float8_dtype, row_scale, column_scale, cast.rule)
            spanning = Operands(
                Operand(codes[0], dequant, ROWWISE, quant) if row_spans_ranks else None,
                Operand(codes[1], dequant, COLUMNWISE, quant) if column_spans_ranks else None,
            )
        if row != row_spans_ranks or column != column_spans_ranks:
            local_row, local_column = row and not row_spans_ranks, column and not column_spans_ranks
            local = super().apply_cast(cast, hp, row=local_row, column=local_column, scales=None)
        return Operands(spanning.row or local.row, spanning.column or local.column)

    def _compute_whole_scales(self, cast: CastConfig, hp: Tensor, dim: int | None) -> CastScales:
        """Return the whole matrix's scales, computed over `dim`, or over both dims for None. A collective."""
        amax = all_reduce_max(compute_matrix_amax(hp, dim), self.group)
        amax = amax.to(hp.dtype) if cast.rule else amax  # exact: an amax is an element of `hp`; see `compute_scales`
        power_of_2 = self.casts.power_of_2
        return compute_scales(amax, cast.float8_dtype, power_of_2, cast.rule, is_blockwise=cast.is_blockwise)


class GatheringQuantizer(TensorParallelQuantizer):
    """Quantizes this rank's tokens of an activation [..., K] and all-gathers the codes of the whole activation.

    Args:
        sequence_dim: the sharded dim.
    """

    __slots__ = ("sequence_dim",)

    def __init__(
        self,
        casts: OperandCasts,
        hp_dtype: torch.dtype,
        scale: PersistentScale | None,
        group: ProcessGroup,
        sequence_dim: int,
    ) -> None:
        super().__init__(casts, hp_dtype, scale, group, 0)
        self.sequence_dim = sequence_dim

    def __call__(self, hp: Tensor, *, row: bool, column: bool, scales: CastScales | None = None) -> Operands:
        """See `Quantizer`. `hp` is this rank's part [..., tokens, ..., K]; operands are of the whole activation."""
        casts, sequence_dim = self.casts, self.sequence_dim % hp.dim()
        row_tokens = _count_tokens_per_scale(casts.row, 0)
        column_tokens = row_tokens if casts.is_dequantized else _count_tokens_per_scale(casts.column, 1)
        consecutive_tokens = math.prod(hp.shape[sequence_dim:-1])  # also in the whole activation
        needs_hp = (row and casts.row.is_disabled) or (column and casts.column_source.is_disabled)
        cuts_row_blocks = row and row_tokens and consecutive_tokens % row_tokens
        cuts_column_blocks = column and column_tokens and consecutive_tokens % column_tokens
        if needs_hp or cuts_row_blocks or cuts_column_blocks:
            # One operand needs the all-gather in high precision, and the other is quantized from the result.
            hp = hp if hp.dtype is self.hp_dtype else hp.to(self.hp_dtype)
            gathered = all_gather(hp, sequence_dim, self.group)
            return Quantizer(casts, self.hp_dtype, self.scale)(gathered, row=row, column=column, scales=scales)
        shares_codes = casts.shares_codes  # then the row operand alone is gathered
        local = super().__call__(hp, row=row or shares_codes, column=column and not shares_codes, scales=scales)
        row_operand = column_operand = None
        gathered_row = None if local.row is None else self._gather(local.row, hp.shape, sequence_dim, row_tokens)
        gathered_column = gathered_row
        if not shares_codes and local.column is not None:
            gathered_column = self._gather(local.column, hp.shape, sequence_dim, column_tokens)
        if gathered_row is not None and gathered_row.dequant_scale is not None:
            store_once(gathered_row.data, before=gathered_row.dequant_scale)  # stored once for all readers
        if gathered_row is not None and (row or casts.is_dequantized):
            row_operand = gathered_row._replace(data=lay_out_rows(gathered_row.data))
        if casts.is_dequantized:
            return Operands(row_operand, row_operand)
        if gathered_column is not None and column:
            column_operand = gathered_column._replace(data=_lay_out_columns_if_eager(gathered_column.data))
        return Operands(row_operand, column_operand)

    def _gather(self, operand: Operand, shape: torch.Size, sequence_dim: int, tokens_per_scale: int) -> Operand:
        codes = all_gather(to_row_major(operand.data).view(shape), sequence_dim, self.group)
        scale = operand.dequant_scale
        if scale is not None and tokens_per_scale:
            local_scales = scale.view(math.prod(shape[:sequence_dim]), -1, scale.shape[1])
            scale = all_gather(local_scales, 1, self.group).flatten(0, 1)
        return Operand(codes.flatten(0, -2), scale, operand.layout)


def _lay_out_columns_if_eager(codes: Tensor) -> Tensor:
    """Run `lay_out_columns` in eager code.

    Inductor would lose column-major strides in the views to [..., K] and back, so there the backward's matmul copies.
    """
    return codes if is_compiling() else lay_out_columns(codes)


def _count_tokens_per_scale(cast: CastConfig, direction: int) -> int:
    """Count the tokens that share a scale in row (0) or column (1) codes; 0 if all tokens do."""
    return cast.require_layout("tensor parallelism")[direction]


def _is_traced(scale: PersistentScale) -> bool:
    # In functions that Dynamo calls opaquely (InputAllGather), AOTAutograd traces with tensors that have no values.
    return torch.compiler.is_dynamo_compiling() or type(scale.is_known) not in PLAIN_TYPES


def _cast_with_whole_scale(
    hp: Tensor,
    quant_scale: Tensor,
    is_known: Tensor,
    float8_dtype: torch.dtype,
    power_of_2: bool,
    group_name: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return row codes, quant_scale, dequant_scale, and this rank's update of `PersistentScale.amax_buffer`."""
    check_memory(hp, quant_scale, is_known)
    recorded_amax, hp = hp.new_zeros(2, dtype=torch.float32), hp.contiguous()
    scale = PersistentScale(quant_scale, recorded_amax, is_known)
    if is_known:
        operands = cast_with_persistent_scale(hp, scale, float8_dtype, True, False, power_of_2)
        operand = require(operands.row, "the row operand")
        return (
            operand.data,
            require(operand.quant_scale, "the quant_scale").clone(),
            require(operand.dequant_scale, "the dequant_scale"),
            recorded_amax,
        )
    local_amax = compute_matrix_amax(hp, None)
    record_amax(scale, local_amax)
    # Functional collectives also take the name of a group.
    amax = all_reduce_max(local_amax, group_name)  # type: ignore[arg-type]
    scales = compute_scales(amax, float8_dtype, power_of_2)
    codes, _ = cast_with_scale(hp, float8_dtype, scales.quant, None, "")
    return codes, scales.quant, scales.dequant, recorded_amax


_library = torch.library.Library("quaver", "FRAGMENT")
_library.define(
    "cast_with_whole_scale(Tensor hp, Tensor quant_scale, Tensor is_known, ScalarType float8_dtype, "
    "bool power_of_2, str group_name) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("cast_with_whole_scale", _cast_with_whole_scale, "CompositeExplicitAutograd")


@torch.library.register_fake("quaver::cast_with_whole_scale", lib=_library)
def _fake_cast_with_whole_scale(
    hp: Tensor, quant_scale: Tensor, is_known: Tensor, float8_dtype: torch.dtype, *_: object
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scale, recorded_amax = hp.new_empty((), dtype=torch.float32), hp.new_empty(2, dtype=torch.float32)
    return hp.new_empty(hp.shape, dtype=float8_dtype), scale, torch.empty_like(scale), recorded_amax

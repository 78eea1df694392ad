"""Casts of a matrix that tensor-parallel ranks share, with the scales of the whole matrix.

A scale reduces a dim. Where the ranks share that dim, their amaxes are reduced before the cast (a number, or a vector
as long as the other dim); where they do not, a rank's own amax is the whole one. So codes and scales are those of one
device.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from quaver import scaling
from quaver.casts import Layouts, MatrixCasts, Operand, Scales
from quaver.config import CastConfig, Float8LinearConfig
from quaver.distributed.agreed_cast import cast_with_agreed_scale
from quaver.distributed.collectives import gather, max_over_ranks
from quaver.gemm import along_contracted
from quaver.kernels.cast import cast_with_scale, record_amax, shared_amax
from quaver.scaling import PersistentScale


class TensorParallelQuantizer(MatrixCasts):
    """The casts of this rank's part of a matrix that a group has spread along `spread_dim`."""

    __slots__ = ("group", "spread_dim")
    _agrees = True

    def __init__(
        self,
        config: Float8LinearConfig,
        hp_dtype: torch.dtype,
        kept: PersistentScale | None,
        group: ProcessGroup,
        spread_dim: int,
    ) -> None:
        super().__init__(config, hp_dtype, kept)
        self.group, self.spread_dim = group, spread_dim

    def tensorwise_scales(self) -> Scales | None:
        return self._scales.get(None)  # those of rows may be this rank's rows only

    def codes(self, hp: Tensor, cast: CastConfig, contracted_dim: int) -> Operand:
        """As `cast`, but in the layout of `hp`, to be gathered."""
        dim = contracted_dim if cast.is_rowwise else None
        codes = self._cast(hp, cast.float8_dtype, dim)
        return Operand(codes, self._scales[dim].dequant)

    def _cast(self, hp: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
        if (dim is not None and dim != self.spread_dim) or dim in self._scales:
            return super()._cast(hp, dtype, dim)
        if self.kept is not None:
            power_of_2 = self.config.round_scales_to_power_of_2
            codes, quant, dequant = cast_with_agreed_scale(hp, self.kept, dtype, power_of_2, self.group)
            self._scales[dim] = Scales(quant, dequant)
            return codes
        return cast_with_scale(hp, self._agreed(hp, dtype, dim).quant, dtype)

    def _agreed(self, hp: Tensor, dtype: torch.dtype, dim: int | None) -> Scales:
        """The scales of the whole matrix along `dim`, known from then on. A collective."""
        known = self._scales.get(dim)
        if known is None:
            own = shared_amax(hp, dim)
            if self.kept is not None:
                record_amax(self.kept, own)
            amax = max_over_ranks(own, self.group)
            quant = scaling.amax_to_quant_scale(amax, dtype, power_of_2=self.config.round_scales_to_power_of_2)
            known = self._scales[dim] = Scales(quant, scaling.to_dequant_scale(quant))
        return known

    # The kernels that write layouts find a rank's own amaxes; what the ranks share is agreed on before.

    def _layouts_of_whole(self, hp: Tensor, dtype: torch.dtype, rows: bool, columns: bool, sums: bool) -> Layouts:
        if self.kept is None or not self.kept.is_initialized:
            self._agreed(hp, dtype, None)
        return super()._layouts_of_whole(hp, dtype, rows, columns, sums)

    def _layouts_of_rows(self, hp: Tensor, dtype: torch.dtype, rows: bool, columns: bool, sums: bool) -> Layouts:
        if (columns, rows)[self.spread_dim]:
            self._agreed(hp, dtype, self.spread_dim)
        if rows and columns and 1 - self.spread_dim not in self._scales:
            of_rows = super()._layouts_of_rows(hp, dtype, True, False, False)
            of_columns = super()._layouts_of_rows(hp, dtype, False, True, False)
            return Layouts((of_rows.codes[0], of_columns.codes[1]), (of_rows.scales[0], of_columns.scales[1]), None)
        return super()._layouts_of_rows(hp, dtype, rows, columns, sums)


def gathered_operands(
    local: Tensor,
    dim: int,
    group: ProcessGroup,
    last: CastConfig | None,
    first: CastConfig | None,
    config: Float8LinearConfig,
    hp_dtype: torch.dtype,
    kept: PersistentScale | None,
) -> tuple[Operand | None, Operand | None]:
    """Both operands of the matrix [M, K] of which each rank of `group` holds `local` [..., K], spread along `dim`.

    Args:
        last, first: how to cast it for the matmul that contracts K, and for the one that contracts M; None for neither.
    """
    if any(cast is not None and cast.is_disabled for cast in (last, first)):
        # High precision has to travel for one of them; the other is cast from it, as on one device.
        whole = gather(local.to(hp_dtype) if local.dtype is not hp_dtype else local, dim, group)
        casts, rows = MatrixCasts(config, hp_dtype, kept), whole.flatten(0, -2)
        return casts.both(rows, last, first)[:2]
    spread = TensorParallelQuantizer(config, hp_dtype, kept, group, 0)
    rows = local.reshape(-1, local.shape[-1])

    def gathered(cast: CastConfig, contracted_dim: int) -> Operand:
        codes, scale = spread.codes(rows, cast, contracted_dim)
        whole = gather(codes.view(local.shape), dim, group).flatten(0, -2)
        if scale is not None and scale.dim() and contracted_dim == 1:  # one per token: they travel beside the codes
            scale = gather(scale.view(*local.shape[:-1], 1), dim, group).view(-1, 1)
        return Operand(whole, scale)

    last_op = None if last is None else gathered(last, 1)
    if first is None:
        first_op = None
    elif last is not None and not last.is_rowwise and not first.is_rowwise:
        first_op = last_op
    else:
        first_op = gathered(first, 0)
    return _laid_out(last_op, 1, config), _laid_out(first_op, 0, config)


def _laid_out(operand: Operand | None, contracted_dim: int, config: Float8LinearConfig) -> Operand | None:
    if operand is None:
        return None
    return operand._replace(data=along_contracted(operand.data, contracted_dim, emulate=config.emulate))

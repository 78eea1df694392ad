"""The float8 casts of one matrix: each amax read once, each layout cast once, shared between all who ask.

A linear's operand enters two matmuls, and an activation may enter several linears (q, k and v; gate and up).
`MatrixCasts` remembers what was made of one matrix; `casts_of_activation` finds that of an activation again. Where the
layout matters, on hardware that multiplies float8, both casts come from the same reads (kernels/layouts.py).

Nothing lives longer for it: the activation and its casts are held by weak references. Scales (a few numbers) stay as
long as the activation, so a cast that has died is made again without another read for its amax. A changed
activation is never taken for the old one: its version counter is compared, as autograd compares it for saved tensors.
"""

from __future__ import annotations

import typing
import weakref
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from quaver.config import CastConfig, Float8LinearConfig
from quaver.gemm import along_contracted, reads_along_contracted
from quaver.kernels import layout_ops, layouts
from quaver.kernels.cast import cast_with_persistent_scale, cast_with_scale, dynamic_cast, dynamic_cast_axes, record
from quaver.scaling import PersistentScale, to_dequant_scale


class Operand(NamedTuple):
    """One operand of one matmul: float8 with its dequant_scale, or high precision with None."""

    data: Tensor
    dequant_scale: Tensor | None

    def t(self) -> Operand:
        scale = self.dequant_scale
        return Operand(self.data.t(), scale if scale is None or scale.dim() == 0 else scale.t())


class Operands(NamedTuple):
    """A matrix [rows, columns] as each of its two matmuls reads it; None for what was not wanted."""

    last: Operand | None
    """For the matmul that contracts its last dim."""
    first: Operand | None
    """For the one that contracts its first."""
    column_sums: Tensor | None = None
    """float32 [columns], where they were wanted and came from the same read."""


class CastInput(NamedTuple):
    """An input of linears of one config, cast while it was computed and never written (quaver/producers.py)."""

    stand_in: Tensor
    """Has the input's shape and dtype and its place in the graph of autograd, and no memory of its own."""
    operands: Operands
    config: Float8LinearConfig


class Scales(NamedTuple):
    """The scale of one cast, both ways: float32, shape () or that of the matrix with the contracted dim 1."""

    quant: Tensor
    dequant: Tensor


class Layouts(NamedTuple):
    """Codes for the matmul that contracts the last dim and for the one that contracts the first, and their scales."""

    codes: tuple[Tensor | None, ...]
    scales: tuple[Scales | None, ...]
    column_sums: Tensor | None


def _are_alike(last: CastConfig, first: CastConfig) -> bool:
    """Whether one kernel makes both casts."""
    same = last.is_rowwise == first.is_rowwise and last.target_dtype == first.target_dtype
    return same and not last.is_disabled and not first.is_disabled


_CONVERTED = (None, -1)  # the key of a matrix in another high-precision dtype


class MatrixCasts:
    """What has been made of one matrix [rows, columns] under one config. The matrix is given to each call, not kept.

    A scale is known by the dim that it reduces, None for tensorwise; a cast by that and the dim its matmul contracts.
    """

    __slots__ = ("_data", "_scales", "_strong", "config", "hp_dtype", "kept")
    _agrees: ClassVar[bool] = False
    """Whether scales are agreed on with other ranks, so that no cast may take those of the amaxes that it finds."""

    def __init__(
        self,
        config: Float8LinearConfig,
        hp_dtype: torch.dtype,
        kept: PersistentScale | None = None,
        *,
        weak: bool = False,
    ) -> None:
        """`weak`: hold casts by weak references, for a memory that outlives the call that made it."""
        self.config = config
        self.hp_dtype = hp_dtype
        self.kept = kept
        self._strong = not weak
        self._scales: dict[int | None, Scales] = {}
        self._data: dict[tuple[int | None, int], Tensor | weakref.ref[Tensor]] = {}

    def cast(self, hp: Tensor, cast: CastConfig, contracted_dim: int) -> Operand:
        """`hp` as an operand of the matmul that contracts `contracted_dim`, in the layout that it reads.

        A disabled cast gives `hp` in the high-precision dtype of the matmul.
        """
        if cast.is_disabled:
            return Operand(hp if hp.dtype is self.hp_dtype else self._converted(hp), None)
        dim = contracted_dim if cast.is_rowwise else None
        key = (dim, contracted_dim)
        data = codes = None
        if self._data:
            data = self._alive(key)
            codes = self._alive((None, 1 - contracted_dim)) if dim is None and not self._is_counted(hp) else None
        if data is None:
            if codes is None and self.lays_out(hp):
                made = self._in_layouts(hp, cast, rows=contracted_dim == 1, columns=contracted_dim == 0)
                return typing.cast(Operand, made.last if contracted_dim == 1 else made.first)
            if codes is None:
                codes = self._cast(hp, cast.float8_dtype, dim)
            data = codes if codes.is_cpu else along_contracted(codes, contracted_dim, emulate=self.config.emulate)
            self._remember(key, data)
        return Operand(data, self._scales[dim].dequant)

    def both(
        self, hp: Tensor, last: CastConfig | None, first: CastConfig | None, *, column_sums: bool = False
    ) -> Operands:
        """`hp` as the operand of both of its matmuls, from the same reads where one kernel makes both casts.

        Args:
            last, first: how it is cast for the matmul that contracts its last dim, and its first; None for neither.
            column_sums: add up the columns where that costs no read of its own.
        """
        if last is not None and first is not None and _are_alike(last, first):
            if self.lays_out(hp):
                dims = (1, 0) if last.is_rowwise else (None, None)
                if all(self._alive((dim, contracted)) is None for dim, contracted in zip(dims, (1, 0), strict=True)):
                    return self._in_layouts(hp, last, rows=True, columns=True, column_sums=column_sums)
            elif hp.is_cpu and last.is_rowwise and not self._scales and not self._agrees:
                return self._along_both(hp, last.float8_dtype)
        return Operands(
            None if last is None else self.cast(hp, last, 1), None if first is None else self.cast(hp, first, 0)
        )

    def _along_both(self, hp: Tensor, dtype: torch.dtype) -> Operands:
        """Both row-wise casts of a matrix of which nothing is known yet, on a CPU."""
        row_codes, *of_rows, column_codes, quant, dequant = dynamic_cast_axes(
            hp, dtype, self.config.round_scales_to_power_of_2
        )
        self._scales[1], self._scales[0] = Scales(*of_rows), Scales(quant, dequant)
        return Operands(
            Operand(self._remember((1, 1), row_codes), self._scales[1].dequant),
            Operand(self._remember((0, 0), column_codes), dequant),
        )

    def know(self, scales: Scales) -> None:
        """Take these tensorwise scales, made at an earlier cast of the matrix, for the casts to come."""
        self._scales[None] = scales

    def lays_out(self, hp: Tensor) -> bool:
        """Whether `hp` is cast by the kernels that write the layouts of its matmuls.

        In compiled code only some are: [Note: whose casts compiled code runs] in kernels/layout_ops.py.
        """
        if hp.is_cpu or not reads_along_contracted(hp.device, self.config.emulate):
            return False
        return not torch.compiler.is_compiling() or self.kept is not None or layout_ops.COMPILED_CODE_CALLS_KERNELS

    def _is_counted(self, hp: Tensor) -> bool:
        """Whether somebody counts operations, who must not see a transpose where he saw a cast.

        That is a selective checkpoint: its recomputation finds the other layout alive, which its forward let go.
        """
        return layout_ops.under_dispatch_mode() and self.lays_out(hp)

    def _in_layouts(
        self, hp: Tensor, cast: CastConfig, *, rows: bool, columns: bool, column_sums: bool = False
    ) -> Operands:
        """The casts for the matmul that contracts the last dim (`rows`), the first (`columns`) or both."""
        make = self._layouts_of_rows if cast.is_rowwise else self._layouts_of_whole
        codes, scales, sums = make(hp, cast.float8_dtype, rows, columns, column_sums)
        operands: list[Operand | None] = [None, None]
        for index, (data, scale) in enumerate(zip(codes, scales, strict=True)):
            if data is not None and scale is not None:
                contracted_dim = 1 - index
                dim = contracted_dim if cast.is_rowwise else None
                self._scales[dim] = scale
                operands[index] = Operand(self._remember((dim, contracted_dim), data), scale.dequant)
        return Operands(operands[0], operands[1], sums)

    def _layouts_of_whole(self, hp: Tensor, dtype: torch.dtype, rows: bool, columns: bool, sums: bool) -> Layouts:
        power_of_2 = self.config.round_scales_to_power_of_2
        known = self.tensorwise_scales()
        if known is not None:
            codes = layouts.cast_with_scales(
                hp, dtype, row_scale=known.quant if rows else None, column_scale=known.quant if columns else None
            )
            return Layouts(codes, (known, known), None)
        if self.kept is None:
            made = layouts.cast_layouts(hp, dtype, rows=rows, columns=columns, power_of_2=power_of_2, column_sums=sums)
        else:
            made, seen = layouts.cast_with_persistent_scale(
                hp, self.kept.quant_scale, dtype, rows=rows, columns=columns, power_of_2=power_of_2, column_sums=sums
            )
            record(self.kept, seen)
        scale = Scales(made.quant_scale, made.dequant_scale)
        return Layouts((made.row_codes, made.column_codes), (scale, scale), made.column_sums)

    def _layouts_of_rows(self, hp: Tensor, dtype: torch.dtype, rows: bool, columns: bool, sums: bool) -> Layouts:
        known = (self._scales.get(1) if rows else None, self._scales.get(0) if columns else None)
        if (known[0] is not None) == rows and (known[1] is not None) == columns:
            row_scale, column_scale = (None if each is None else each.quant for each in known)
            return Layouts(
                layouts.cast_with_scales(hp, dtype, row_scale=row_scale, column_scale=column_scale), known, None
            )
        power_of_2 = self.config.round_scales_to_power_of_2
        made = layouts.cast_axes(hp, dtype, rows=rows, columns=columns, power_of_2=power_of_2, column_sums=sums)
        axes = (made.rows, made.columns)
        scales = tuple(None if each is None else Scales(each.quant_scale, each.dequant_scale) for each in axes)
        return Layouts(tuple(None if each is None else each.codes for each in axes), scales, made.column_sums)

    def tensorwise_scales(self) -> Scales | None:
        """The tensorwise scales of the matrix if it has been cast, without reading it again.

        After a row-wise cast it is the smallest quant_scale: a scale falls with its amax, rounding included, and is
        NaN where one amax is.
        """
        known = self._scales.get(None)
        if known is None and self._scales:
            of_rows = next(iter(self._scales.values())).quant
            if of_rows.numel():
                quant = of_rows.min()
                known = self._scales[None] = Scales(quant, to_dequant_scale(quant))
        return known

    def _cast(self, hp: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
        """Cast with the scales that are known for `dim`, or else with those of hp's own amaxes, known from then on."""
        known = None
        if self._scales:
            known = self.tensorwise_scales() if dim is None else self._scales.get(dim)
        if known is not None:
            return cast_with_scale(hp, known.quant, dtype)
        power_of_2 = self.config.round_scales_to_power_of_2
        if self.kept is None:
            codes, quant, dequant = dynamic_cast(hp, dtype, dim, power_of_2)
        else:
            codes, quant, dequant = cast_with_persistent_scale(hp, self.kept, dtype, power_of_2)
        self._scales[dim] = Scales(quant, dequant)
        return codes

    def _converted(self, hp: Tensor) -> Tensor:
        """`hp` in the high-precision dtype of the matmul, where autocast asks for another than it has."""
        data = self._alive(_CONVERTED)
        return self._remember(_CONVERTED, hp.to(self.hp_dtype)) if data is None else data

    def _remember(self, key: tuple[int | None, int], data: Tensor) -> Tensor:
        self._data[key] = data if self._strong else weakref.ref(data)
        return data

    def _alive(self, key: tuple[int | None, int]) -> Tensor | None:
        known = self._data.get(key)
        return known() if isinstance(known, weakref.ref) else known


class _ActivationCasts(MatrixCasts):
    """The casts of an activation, and what it was when they were made."""

    __slots__ = ("tensor", "version")

    def __init__(
        self, activation: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype, kept: PersistentScale | None
    ) -> None:
        super().__init__(config, hp_dtype, kept, weak=True)
        key = id(activation)

        def forget(_: weakref.ref[Tensor], known: dict[int, _ActivationCasts] = _activations) -> None:
            known.pop(key, None)  # the dictionary itself, which outlives this module's globals at interpreter exit

        self.tensor = weakref.ref(activation, forget)
        self.version = activation._version


_activations: dict[int, _ActivationCasts] = {}


def casts_of_activation(
    activation: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype, kept: PersistentScale | None = None
) -> MatrixCasts:
    """The casts of an activation: one object for all linears of one config that are given the same unchanged tensor.

    Linears with a kept scale share it where they have the same one (`Float8LinearConfig.shared_inputs`).

    A new one under the compiler, which shares equal computations itself, and for inference tensors, which count no
    versions.
    """
    if torch.compiler.is_dynamo_compiling() or activation.is_inference():
        return MatrixCasts(config, hp_dtype, kept)
    known = _activations.get(id(activation))
    if (
        known is None
        or known.tensor() is not activation
        or known.version != activation._version
        or known.config is not config
        or known.hp_dtype is not hp_dtype
        or known.kept is not kept
    ):
        known = _activations[id(activation)] = _ActivationCasts(activation, config, hp_dtype, kept)
    return known

"""Quantizers: from one high-precision matrix to its float8 operands for its two matmuls.

A matrix enters two matmuls. The dot products of one run along its rows, those of the other along its columns:

                 columns
             +-------------+
             | --------->  |     row operand       contracts the last dim
        rows | |           |                       of input and weight for output, of grad_output for grad_input
             | |           |     column operand    contracts the first dim
             | v           |                       of grad_output and input for grad_weight, of weight for grad_input
             +-------------+

    operands = quantizer(matrix, row=True, column=True)
    operands.row, operands.column

Every file says row and column in this sense, from config.py (`casts.weight.column`) to the kernels. Row-wise scales
follow the dot products: the row operand has one per row [rows, 1], the column operand one per column [1, columns].
Tensorwise, both operands have one scale, and on a CPU one set of codes; blockwise (weights), one set of codes and
scales. A cast that the config disables gives the matrix itself, in high precision.

Three quantizers share this interface:

    Quantizer                        scales from the matrix; from an earlier step where the scale is persistent
    CachedQuantizer                  the same, for an activation that q, k and v read one after another
    TensorParallelQuantizer          the same scales for a matrix that ranks share (distributed/)

[Note: sharing an activation] q, k and v read one activation, which is quantized once for all of them. The cache holds
the operands of the last activation that a linear quantized while it recorded gradients. In evaluation there is no
cache. Each linear is served once: one that is called twice quantizes twice, because version counters miss writes
through numpy, `.data`, shared memory or a captured graph. Such a write between two linears that read one activation is
still missed. The entry goes when another activation is quantized, when the backward of a linear begins, or when the
activation dies. It serves the same tensor object at the same version, under the same dispatch mode. So under selective
checkpointing the forward and its recomputation, each under a mode of its own, issue the same operations. Dynamo traces
no cache; a compiler removes equal operations itself.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quaver.config import CastConfig, OperandCasts
from quaver.gemm import Operand
from quaver.kernels.cast import CASTS, Places, cast_with_persistent_scale, cast_with_scale
from quaver.scaling import PersistentScale, amax_to_quant_scale, to_dequant_scale
from quaver.torch_private.dispatch import count_dispatch_modes, dispatch_mode_at
from quaver.torch_private.versions import version_of


class Scales(NamedTuple):
    """The scale of one cast in both directions: float32: (), the matrix's with the contracted dim 1, or blocks'."""

    quant: Tensor
    dequant: Tensor


def scales_of(amax: Tensor, float8_dtype: torch.dtype, power_of_2: bool) -> Scales:
    """The scales that bring `amax` (float32, any shape) to the largest number of `float8_dtype`."""
    quant = amax_to_quant_scale(amax, float8_dtype, power_of_2=power_of_2)
    return Scales(quant, to_dequant_scale(quant))


class Operands(NamedTuple):
    """A matrix [rows, columns] as its two matmuls read it; None for an operand that was not asked for."""

    row: Operand | None
    column: Operand | None


def present(operand: Operand | None) -> Operand:
    """The operand. Raises RuntimeError if the matrix was not quantized for it."""
    if operand is None:
        raise RuntimeError("a matrix was quantized for one of its two matmuls, and both read it")
    return operand


class Quantizer:
    """Quantizes one operand of a linear.

    Args:
        casts: how, in each direction.
        hp_dtype: the dtype that a disabled cast gives.
        scale: its persistent scale, where the casts have one.
    """

    __slots__ = ("casts", "hp_dtype", "scale")

    def __init__(self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None = None) -> None:
        self.casts, self.hp_dtype, self.scale = casts, hp_dtype, scale

    def __call__(self, hp: Tensor, *, row: bool, column: bool, scales: Scales | None = None) -> Operands:
        """Quantize `hp` for one of its matmuls, or for both.

        Args:
            hp: [..., columns], float32, bfloat16 or float16; leading dims are rows.
            row, column: which operands to make.
            scales: tensorwise scales that are known from an earlier cast of the same matrix.
        """
        if not (row or column):
            return Operands(None, None)
        casts, hp = self.casts, as_matrix(hp)
        if casts.is_one or not (row and column):
            return self.cast(casts.row if row else casts.column, hp, row, column, scales)
        # A row-wise cast goes first: its scales give the tensorwise one without another read.
        columns_first = casts.column.is_rowwise
        earlier, later = (casts.column, casts.row) if columns_first else (casts.row, casts.column)
        made = self.cast(earlier, hp, not columns_first, columns_first, scales)
        other = self.cast(later, hp, columns_first, not columns_first, scales or self.scales_for(later, made))
        return Operands(made.row or other.row, made.column or other.column)

    def cast(self, cast: CastConfig, hp: Tensor, row: bool, column: bool, scales: Scales | None) -> Operands:
        """Quantize `hp` [rows, columns] by one cast."""
        if cast.is_disabled:
            converted = Operand(hp if hp.dtype is self.hp_dtype else hp.to(self.hp_dtype), None)
            return Operands(converted if row else None, converted if column else None)
        float8_dtype, power_of_2 = cast.float8_dtype, self.casts.power_of_2
        if cast.is_tensorwise and scales is not None:
            of_row, of_column = (row or hp.is_cpu), (column and not hp.is_cpu)  # on a CPU row codes serve both
            quant, dequant = scales
            codes = cast_with_scale(hp, float8_dtype, quant if of_row else None, quant if of_column else None)
            places = codes[0], quant, dequant, codes[1], None, None
        elif cast.is_persistent and self.scale is not None:
            places = cast_with_persistent_scale(hp, self.scale, float8_dtype, row, column, power_of_2)
        else:
            places = CASTS[cast.scaling_granularity](hp, float8_dtype, row, column, power_of_2)
        return operands_of(places, row, column)

    def scales_for(self, cast: CastConfig, operands: Operands) -> Scales | None:
        """The tensorwise scales of a matrix that was quantized, for a tensorwise `cast` of it, without another read.

        None for another cast, and where they do not follow. After a row-wise cast it is the smallest quant_scale: a
        scale falls with its amax, rounding included, and is NaN where an amax is.
        """
        if not cast.is_tensorwise:
            return None
        operand = operands.row or operands.column
        if operand is None or operand.quant_scale is None or operand.dequant_scale is None:
            return None
        if operand.quant_scale.dim() == 0:
            return Scales(operand.quant_scale, operand.dequant_scale)
        if not operand.quant_scale.numel():
            return None
        quant = operand.quant_scale.min()
        return Scales(quant, to_dequant_scale(quant))


def operands_of(places: Places, row: bool, column: bool) -> Operands:
    """The operands that were asked for, of what a cast returned (kernels/cast.py)."""
    row_codes, row_quant, row_dequant, column_codes, column_quant, column_dequant = places
    of_row = of_column = Operand(row_codes, row_dequant, row_quant)
    if not _is_absent(column_quant):
        of_column = Operand(column_codes, column_dequant, column_quant)
    elif not _is_absent(column_codes):
        of_column = Operand(column_codes, row_dequant, row_quant)
    return Operands(of_row if row else None, of_column if column else None)


def _is_absent(place: Tensor | None) -> bool:
    return place is None or place.dim() == 1


def as_matrix(hp: Tensor) -> Tensor:
    """[..., columns] as a contiguous [rows, columns]."""
    return (hp if hp.dim() == 2 else hp.reshape(-1, hp.shape[-1])).contiguous()


class PreparedOperands(Protocol):
    """The operands of a weight while a `cast_weights_once` is open (weights/cast_once.py)."""

    operands: Operands

    def check(self, weight: Tensor) -> None:
        """Raise RuntimeError if `weight` is not the tensor that was quantized, or was written to since."""


class LinearSharding(Protocol):
    """The quantizers of a linear that tensor parallelism shards; distributed/linear_sharding.py implements it."""

    mesh: Any
    """The DeviceMesh of tensor parallelism, one axis."""

    def local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """This rank's part of weight and bias, differentiably, and the bias to add to the reduced output."""

    def input_quantizer(
        self, input: Tensor, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None, reader: int
    ) -> Quantizer:
        """For this rank's part of the input; `reader` is as for `cached_quantizer`."""

    def weight_quantizer(self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None) -> Quantizer:
        """For this rank's part of the weight."""

    def grad_output_quantizer(
        self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None
    ) -> Quantizer:
        """For this rank's part of grad_output."""

    def reduce_output(self, output: Tensor, leading: torch.Size) -> Tensor:
        """The result from every rank's `output` [M, N] for an input [*leading, K]: [M, N], or [*leading, N] sharded."""


# ---- [Note: sharing an activation] -----------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """The operands of one activation, and what they are valid for."""

    activation: weakref.ref[Tensor]
    version: int
    dispatch_mode: weakref.ref[Any] | None
    """Held weakly, because the mode of a checkpoint holds all that its policy saved."""
    casts: OperandCasts
    hp_dtype: torch.dtype
    scale: PersistentScale | None
    scale_version: int
    operands: Operands
    readers: frozenset[int]
    """The linears that were given these operands, by id."""

    def serves(self, activation: Tensor, quantizer: CachedQuantizer, dispatch_mode: Any) -> bool:
        return (
            self.activation() is activation
            and quantizer.reader not in self.readers
            and self.version == version_of(activation)
            and (None if self.dispatch_mode is None else self.dispatch_mode()) is dispatch_mode
            and self.scale is quantizer.scale
            and self.scale_version == _version_of(quantizer.scale)
            and self.casts == quantizer.casts
            and self.hp_dtype is quantizer.hp_dtype
        )


def _version_of(scale: PersistentScale | None) -> int:
    """See [Note: stale scales] in scale_state.py."""
    return -1 if scale is None else version_of(scale.quant_scale)


_entry: _Entry | None = None


def _clear_if(activation: weakref.ref[Tensor]) -> None:
    entry = _entry
    if entry is not None and entry.activation is activation:
        clear_cached_operands()


def clear_cached_operands() -> None:
    """Drop the entry; called when the backward of a linear begins."""
    global _entry
    _entry = None


class CachedQuantizer(Quantizer):
    """Quantizes an activation once for the linears that read it one after another.

    Args:
        reader: the id of the linear.
    """

    __slots__ = ("reader",)

    def __init__(self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None, reader: int) -> None:
        super().__init__(casts, hp_dtype, scale)
        self.reader = reader

    def __call__(self, hp: Tensor, *, row: bool, column: bool, scales: Scales | None = None) -> Operands:
        """See `Quantizer`; `hp` is the activation itself."""
        global _entry
        mode, known, readers = _innermost_dispatch_mode(), Operands(None, None), frozenset((self.reader,))
        entry = _entry  # read once: another thread may replace it
        if entry is not None and entry.serves(hp, self, mode):
            known, readers = entry.operands, entry.readers | readers
            if (not row or known.row is not None) and (not column or known.column is not None):
                _entry = entry._replace(readers=readers)
                return known
        _entry = entry = None  # its memory goes before more is taken
        missing = self.casts.row if known.row is None else self.casts.column
        made = super().__call__(
            hp,
            row=row and known.row is None,
            column=column and known.column is None,
            scales=self.scales_for(missing, known),
        )
        made = Operands(known.row or made.row, known.column or made.column)
        weak_mode = None if mode is None else weakref.ref(mode)
        _entry = _Entry(
            weakref.ref(hp, _clear_if),
            version_of(hp),
            weak_mode,
            self.casts,
            self.hp_dtype,
            self.scale,
            _version_of(self.scale),
            made,
            readers,
        )
        return made


def cached_quantizer(
    activation: Tensor, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None, reader: int
) -> Quantizer:
    """The quantizer of an activation; a `CachedQuantizer` where [Note: sharing an activation] allows it.

    Args:
        reader: the id of the linear if it records gradients, else 0.
    """
    if torch.compiler.is_dynamo_compiling() or not reader or activation.is_inference():
        return Quantizer(casts, hp_dtype, scale)
    # Autograd saves this activation for backward, so an entry would outlive its readers.
    if casts.column.is_disabled and activation.dtype is hp_dtype:
        return Quantizer(casts, hp_dtype, scale)
    return CachedQuantizer(casts, hp_dtype, scale, reader)


def _innermost_dispatch_mode() -> Any:
    depth = count_dispatch_modes()
    return dispatch_mode_at(depth - 1) if depth else None

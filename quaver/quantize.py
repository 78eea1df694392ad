"""Quantizers: from one high-precision matrix to its float8 operands for its two matmuls.

    quantized = quantizer(matrix, last=True, first=True)
    quantized.last      the operand of the matmul that contracts the matrix's last dim
    quantized.first     the operand of the one that contracts its first dim

Tensorwise, both operands have one scale, and on a CPU one set of codes; blockwise (weights), one set of codes and
scales; rowwise, each has a scale for every row or column along its contracted dim. A cast that the config disables
gives the matrix itself, in high precision.

Four quantizers share this interface:

    Quantizer                        scales from the matrix; from an earlier step where the scale is persistent
    CachedQuantizer                  the same, for an activation that q, k and v read one after another
    TensorParallelQuantizer          the same scales for a matrix that ranks share (distributed/)
    PreparedOperands                 operands that were quantized before: by an all-gather, or `cast_weights_once`

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

from quaver.config import CastConfig, Float8LinearConfig
from quaver.kernels.cast import (
    cast_blockwise,
    cast_rowwise,
    cast_tensorwise,
    cast_with_persistent_scale,
    cast_with_scale,
)
from quaver.scaling import PersistentScale, amax_to_quant_scale, to_dequant_scale


class Operand(NamedTuple):
    """One operand of one matmul: float8 codes with their dequant_scale, or a matrix in high precision with None."""

    data: Tensor
    dequant_scale: Tensor | None

    def t(self) -> Operand:
        """The transposed operand; a row-wise scale is transposed with it."""
        scale = self.dequant_scale
        return Operand(self.data.t(), scale if scale is None or scale.dim() == 0 else scale.t())


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

    last: Operand | None
    """For the matmul that contracts the last dim."""
    first: Operand | None
    """For the one that contracts the first."""
    tensor_scales: Scales | None = None
    """The tensorwise scales, where the matrix was quantized with them."""
    row_scales: Scales | None = None
    """The row-wise scales of one of the operands, where it has them."""


class CastPair(NamedTuple):
    """How one operand of a linear is quantized for each of its two matmuls."""

    last: CastConfig
    """For the matmul that contracts the last dim: output of input and weight, grad_input of grad_output."""
    first: CastConfig
    """For the one that contracts the first dim: grad_weight of input and grad_output, grad_input of weight."""
    power_of_2: bool
    hp_dtype: torch.dtype
    """The dtype that a disabled cast gives."""


INPUT, WEIGHT, GRAD_OUTPUT = 0, 2, 4
"""Where the casts of each operand begin in `Float8LinearConfig.casts`."""


def cast_pair(config: Float8LinearConfig, operand: int, hp_dtype: torch.dtype) -> CastPair:
    """The casts of INPUT, WEIGHT or GRAD_OUTPUT."""
    casts = config.casts
    return CastPair(casts[operand], casts[operand + 1], config.round_scales_to_power_of_2, hp_dtype)


class Quantizer:
    """Quantizes one operand of a linear.

    Args:
        casts: how.
        scale: its persistent scale, where the casts have one.
    """

    __slots__ = ("casts", "scale")

    def __init__(self, casts: CastPair, scale: PersistentScale | None = None) -> None:
        self.casts, self.scale = casts, scale

    def __call__(self, hp: Tensor, *, last: bool, first: bool, scales: Scales | None = None) -> Operands:
        """Quantize `hp` for the matmul that contracts its last dim, for the one that contracts its first, or for both.

        Args:
            hp: [..., columns], float32, bfloat16 or float16; leading dims are rows.
            last, first: which operands to make.
            scales: tensorwise scales that are known from an earlier cast of the same matrix.
        """
        casts, hp = self.casts, as_matrix(hp)
        fp8 = last and not casts.last.is_disabled, first and not casts.first.is_disabled
        if casts.last.is_blockwise and any(fp8):
            codes, _, dequant = cast_blockwise(hp, casts.last.float8_dtype, casts.power_of_2)
            operand = Operand(codes, dequant)
            return Operands(operand if last else None, operand if first else None)
        rowwise = fp8[0] and casts.last.is_rowwise, fp8[1] and casts.first.is_rowwise
        tensorwise = fp8[0] and not rowwise[0], fp8[1] and not rowwise[1]
        made = Operands(None, None, scales)
        if rowwise[0] or rowwise[1]:
            made = self._quantize_rowwise(hp, *rowwise)
        if tensorwise[0] or tensorwise[1]:
            if scales is None and made.row_scales is not None:
                scales = self.tensor_scales(made)
            by_tensor = self._quantize_tensorwise(hp, *tensorwise, scales)
            made = merged(made, by_tensor) if made.row_scales is not None else by_tensor
        if last != fp8[0] or first != fp8[1]:
            converted = Operand(hp if hp.dtype is casts.hp_dtype else hp.to(casts.hp_dtype), None)
            made = merged(made, Operands(converted if last != fp8[0] else None, converted if first != fp8[1] else None))
        return made

    def tensor_scales(self, operands: Operands) -> Scales | None:
        """The tensorwise scales of a matrix that was quantized, without another read of it; None if it was not.

        After a row-wise cast it is the smallest quant_scale: a scale falls with its amax, rounding included, and is NaN
        where an amax is.
        """
        if operands.tensor_scales is not None or operands.row_scales is None or not operands.row_scales.quant.numel():
            return operands.tensor_scales
        quant = operands.row_scales.quant.min()
        return Scales(quant, to_dequant_scale(quant))

    def _quantize_tensorwise(self, hp: Tensor, last: bool, first: bool, scales: Scales | None) -> Operands:
        dtype, power_of_2 = self.casts.last.float8_dtype, self.casts.power_of_2
        if hp.is_cpu:  # one tensor of codes serves both matmuls
            rows, columns = True, False
        else:
            rows, columns = last, first
        if scales is not None:
            quant = scales.quant
            row_codes, column_codes = cast_with_scale(hp, dtype, quant if rows else None, quant if columns else None)
        elif self.scale is None:
            row_codes, column_codes, *made = cast_tensorwise(hp, dtype, rows, columns, power_of_2)
            scales = Scales(*made)
        else:
            row_codes, column_codes, *made = cast_with_persistent_scale(
                hp, self.scale, dtype, rows, columns, power_of_2
            )
            scales = Scales(*made)
        if hp.is_cpu:
            column_codes = row_codes
        return Operands(
            Operand(row_codes, scales.dequant) if last and row_codes is not None else None,
            Operand(column_codes, scales.dequant) if first and column_codes is not None else None,
            scales,
        )

    def _quantize_rowwise(self, hp: Tensor, last: bool, first: bool) -> Operands:
        row_codes, *of_rows, column_codes, column_quant, column_dequant = cast_rowwise(
            hp, self.casts.last.float8_dtype, last, first, self.casts.power_of_2
        )
        row_scales = Scales(*of_rows) if last else Scales(column_quant, column_dequant)
        return Operands(
            Operand(row_codes, of_rows[1]) if last else None,
            Operand(column_codes, column_dequant) if first else None,
            row_scales=row_scales,
        )


def as_matrix(hp: Tensor) -> Tensor:
    """[..., columns] as [rows, columns], as the kernels of its device read it."""
    matrix = hp if hp.dim() == 2 else hp.reshape(-1, hp.shape[-1])
    return matrix if matrix.is_cpu else matrix.contiguous()


def merged(operands: Operands, others: Operands) -> Operands:
    """What either has; `operands` first."""
    return Operands(
        operands.last or others.last,
        operands.first or others.first,
        operands.tensor_scales or others.tensor_scales,
        operands.row_scales or others.row_scales,
    )


class LinearSharding(Protocol):
    """The quantizers of a linear that tensor parallelism shards; distributed/linear_sharding.py implements it."""

    mesh: Any
    """The DeviceMesh of tensor parallelism, one axis."""

    def local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """This rank's part of weight and bias, differentiably, and the bias to add to the reduced output."""

    def input_quantizer(self, input: Tensor, casts: CastPair, scale: PersistentScale | None, reader: int) -> Quantizer:
        """For this rank's part of the input; `reader` is as for `cached_quantizer`."""

    def weight_quantizer(self, casts: CastPair, scale: PersistentScale | None) -> Quantizer:
        """For this rank's part of the weight."""

    def grad_output_quantizer(self, casts: CastPair, scale: PersistentScale | None) -> Quantizer:
        """For this rank's part of grad_output."""

    def reduce_output(self, output: Tensor, leading: torch.Size) -> Tensor:
        """The result from every rank's `output` [M, N] for an input [*leading, K]: [M, N], or [*leading, N] sharded."""


class PreparedOperands(Quantizer):
    """Operands that were quantized before the linear runs, in the place of a quantizer."""

    __slots__ = ("operands",)

    def __init__(self, operands: Operands, casts: CastPair) -> None:
        super().__init__(casts)
        self.operands = operands

    def __call__(self, hp: Tensor, *, last: bool, first: bool, scales: Scales | None = None) -> Operands:
        """The prepared operands. Raises RuntimeError if one of them is missing."""
        last_op, first_op = self.operands[:2]
        if (last and last_op is None) or (first and first_op is None):
            raise RuntimeError("an operand of this linear was quantized for one of its two matmuls, and both read it")
        return self.operands


# ---- [Note: sharing an activation] -----------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """The operands of one activation, and what they are valid for."""

    activation: weakref.ref[Tensor]
    version: int
    dispatch_mode: weakref.ref[Any] | None
    """Held weakly, because the mode of a checkpoint holds all that its policy saved."""
    casts: CastPair
    scale: PersistentScale | None
    scale_version: int
    operands: Operands
    readers: frozenset[int]
    """The linears that were given these operands, by id."""

    def serves(self, activation: Tensor, quantizer: CachedQuantizer, dispatch_mode: Any) -> bool:
        return (
            self.activation() is activation
            and quantizer.reader not in self.readers
            and self.version == activation._version
            and (None if self.dispatch_mode is None else self.dispatch_mode()) is dispatch_mode
            and self.scale is quantizer.scale
            and self.scale_version == _version_of(quantizer.scale)
            and self.casts == quantizer.casts
        )


def _version_of(scale: PersistentScale | None) -> int:
    """See [Note: stale scales] in scale_state.py."""
    return -1 if scale is None else scale.quant_scale._version


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

    def __init__(self, casts: CastPair, scale: PersistentScale | None, reader: int) -> None:
        super().__init__(casts, scale)
        self.reader = reader

    def __call__(self, hp: Tensor, *, last: bool, first: bool, scales: Scales | None = None) -> Operands:
        """See `Quantizer`; `hp` is the activation itself."""
        global _entry
        mode, known, readers = _innermost_dispatch_mode(), Operands(None, None), frozenset((self.reader,))
        entry = _entry  # read once: another thread may replace it
        if entry is not None and entry.serves(hp, self, mode):
            known, readers = entry.operands, entry.readers | readers
            if (not last or known.last is not None) and (not first or known.first is not None):
                _entry = entry._replace(readers=readers)
                return known
        _entry = entry = None  # its memory goes before more is taken
        made = merged(
            known,
            super().__call__(
                hp,
                last=last and known.last is None,
                first=first and known.first is None,
                scales=self.tensor_scales(known),
            ),
        )
        weak_mode = None if mode is None else weakref.ref(mode)
        _entry = _Entry(
            weakref.ref(hp, _clear_if),
            hp._version,
            weak_mode,
            self.casts,
            self.scale,
            _version_of(self.scale),
            made,
            readers,
        )
        return made


def cached_quantizer(activation: Tensor, casts: CastPair, scale: PersistentScale | None, reader: int) -> Quantizer:
    """The quantizer of an activation; a `CachedQuantizer` where [Note: sharing an activation] allows it.

    Args:
        reader: the id of the linear if it records gradients, else 0.
    """
    if torch.compiler.is_dynamo_compiling() or not reader or activation.is_inference():
        return Quantizer(casts, scale)
    # Autograd saves this activation for backward, so an entry would outlive its readers.
    if casts.first.is_disabled and activation.dtype is casts.hp_dtype:
        return Quantizer(casts, scale)
    return CachedQuantizer(casts, scale, reader)


def _innermost_dispatch_mode() -> Any:
    depth = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(depth - 1) if depth else None

"""`FrozenState`: a frozen float8 weight in a state_dict, which everyone can read.

A state_dict has the names of the model in high precision, and whoever reads a weight in it gets high precision: another
model that loads it, `save_pretrained`, safetensors, torch.distributed.checkpoint. Until someone asks for the memory it
is the codes and scales of the model, one byte per element, and a frozen model that loads it gets them to the bit.

    copies, pickles, rows       codes and scales
    writes                      quantized into the codes, as those to the parameter are; of a shard, values that its
                                scales hold exactly, for they are those of the whole weight
    data_ptr(), views           dequantize the weight once. Once these values were written to, it is the tensor of
                                them, which a frozen model quantizes again when it loads them, unless its scales hold
                                them exactly
    other ops                   on the dequantized values; of a shard on those of its rows
"""

from __future__ import annotations

import typing
from typing import Any

import torch
from torch import Tensor

from quaver.linear.frozen_weight import ALIASES, FrozenFloat8Weight, is_as_strided_of_all
from quaver.linear.weight_form import COLLECTIVES, COPIES, inference_mode_of, is_view
from quaver.recipes.formats import FORMATS
from quaver.recipes.scaling import BLOCK_LENGTHS, block_counts, dequantize
from quaver.torch_private.dispatch import OpOverload

aten = torch.ops.aten


class FrozenState(FrozenFloat8Weight):
    """A frozen weight, or a shard of one, in a state_dict; see the top of the file.

    Attributes:
        first: the row of the whole weight, or the matrix of a stack, that this begins with.
        count: how many rows, or matrices, the whole weight has.
        values_hp: the dequantized values, once someone asked for the memory.
    """

    first: int = 0
    count: int = 0
    values_hp: Tensor | None = None

    @classmethod
    def of(cls, weight: FrozenFloat8Weight, first: int = 0, count: int | None = None) -> FrozenState:
        """A state of the codes and scales of `weight`, in its memory; `first` and `count` of a shard see above."""
        return cls.from_state(*weight.state(), first, weight.shape[0] if count is None else count)

    @classmethod
    def from_state(cls, *state: Any) -> FrozenState:
        made = typing.cast(FrozenState, super().from_state(*state[:5]))
        made.first, made.count = state[5:]
        return made

    def state(self) -> tuple[Any, ...]:
        return *super().state(), self.first, self.count

    def like(self, *args: Any, **options: Any) -> FrozenState:
        made = typing.cast(FrozenState, super().like(*args, **options))
        made.first, made.count, made.values_hp = self.first, self.count, self.values_hp
        return made

    @property
    def has_codes(self) -> bool:
        """Whether codes and scales are what this holds: nobody asked for the memory, or wrote to it."""
        return self.values_hp is None or torch.equal(self.values_hp, self._dequantized())

    def scale_of_rows(self) -> Tensor:
        """The scale that each matrix of this, of all rows or of a shard's, is dequantized with."""
        scale, rows = self.dequant_scale, self.data_fp8.shape[0]
        if not self.is_part or scale.dim() == 0:
            return scale
        if self.data_fp8.dim() == 2 and scale.shape[0] != self.count:
            lengths = (
                each for each in BLOCK_LENGTHS if block_counts(self.count, self.shape[1], (each, each)) == scale.shape
            )
            scale = scale.repeat_interleave(next(lengths), 0)
        return scale[self.first : self.first + rows]

    def to_high_precision(self) -> Tensor:
        """The values in the weight's dtype; see the top of the file."""
        return self._dequantized() if self.values_hp is None else self.values_hp

    def _dequantized(self) -> Tensor:
        values = torch.empty_like(self.data_fp8, dtype=self.dtype)
        for to, codes, scale in self._by_matrix(values):
            to.copy_(dequantize(codes, scale, self.dtype))
        return values

    def _by_matrix(self, other: Tensor) -> Any:
        scale = self.scale_of_rows()
        if self.data_fp8.dim() == 2:
            return [(other, self.data_fp8, scale)]
        return zip(other, self.data_fp8, scale, strict=True)

    def codes_of(self, values: Tensor) -> Tensor | None:
        """The codes of `values`, of this shape, under the scales of this; None if they do not hold them exactly."""
        made = self.like(torch.empty_like(self.data_fp8))
        made.values_hp = None
        largest = FORMATS[self.data_fp8.dtype].max
        with torch.no_grad():
            for matrix, codes, scale in made._by_matrix(values):
                ones = torch.ones_like(codes)
                quotient = matrix.float() / dequantize(ones, scale)
                codes.copy_(quotient.clamp(-largest, largest).to(codes.dtype))
            return made.data_fp8 if torch.equal(made.to_high_precision(), values) else None

    def memory(self) -> Tensor:
        if self.values_hp is None:
            with inference_mode_of(self), torch.no_grad():
                self.values_hp = self.to_high_precision()
        return self.values_hp

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the codes, or of the values once their memory was asked for; it identifies the tensor."""
        return (self.data_fp8 if self.values_hp is None else self.values_hp).untyped_storage()

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.numel() * self.dtype.itemsize

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return super().__deepcopy__(memo) if self.has_codes else self.memory().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.has_codes else self.memory().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self.memory().numpy(force=force)

    def tolist(self) -> Any:
        return self.to_high_precision().tolist()

    def own_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0] is self:
            if func in ALIASES or is_as_strided_of_all(func, args) or _is_same_view(func, args):
                return self.like(aten.alias.default(self.data_fp8))
            if func is aten.copy_.default and self.values_hp is None and _into(self, args[1]):
                return self
            if func is aten.slice.Tensor and self.values_hp is None and (start := _first_of_rows(*args)) is not None:
                rows = self.like(func(self.data_fp8, *args[1:], **kwargs), part=True)
                rows.first = self.first + start
                return rows
            if func in COPIES and self.values_hp is not None and self.has_codes:
                return func(FrozenState.from_state(*self.state()), *args[1:], **kwargs)
        if func is aten._foreach_copy_.default or (func in COPIES and self.values_hp is None):
            return super().own_op(func, args, kwargs)
        return NotImplemented

    def op_values(self, func: OpOverload, is_written: bool) -> Tensor:
        writes_later = is_written and func.namespace in COLLECTIVES
        return self.memory() if is_view(func) or writes_later else self.to_high_precision()

    def after_write(self, func: OpOverload, args: tuple[Any, ...], values: Tensor) -> None:
        if func.namespace not in COLLECTIVES:
            _into(self, values)


def _into(to: FrozenState, source: Tensor) -> bool:
    """Quantize or copy `source` into the codes of `to`; True."""
    if to.copy_codes(source):
        return True
    source = source.to_high_precision() if isinstance(source, FrozenFloat8Weight) else source
    source = source.to(to.device, to.dtype).expand(to.shape)
    if not to.is_part:
        FrozenFloat8Weight.from_state(*to.state()[:5]).write(source)
        return True
    codes = to.codes_of(source)
    if codes is None:
        raise ValueError(
            "a shard of a frozen float8 weight has the scales of the whole weight, which do not hold these values; "
            "load them before fully_shard, or into a base that was frozen from the same weights"
        )
    to.data_fp8.copy_(codes)
    return True


def _is_same_view(func: OpOverload, args: tuple[Any, ...]) -> bool:
    return func is aten.view.default and tuple(args[1]) == tuple(args[0].shape)


def _first_of_rows(
    state: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> int | None:
    """The first row of a slice of rows that follow each other; None for another slice."""
    if dim != 0 or step != 1 or (end is not None and end < 0) or (start or 0) < 0:
        return None
    return min(start or 0, int(state.shape[0]))


torch.serialization.add_safe_globals([FrozenState])

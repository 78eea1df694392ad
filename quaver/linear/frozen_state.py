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

from quaver.kernels.operands import expect
from quaver.linear.frozen_weight import ALIASES, FrozenFloat8Weight, is_as_strided_of_all
from quaver.linear.weight_form import COLLECTIVES, COPIES, inference_mode_of, is_view
from quaver.recipes.formats import FORMATS
from quaver.recipes.scaling import dequantize
from quaver.torch_private.dispatch import OpOverload

aten = torch.ops.aten


class FrozenState(FrozenFloat8Weight):
    """A frozen weight, or a shard of one, in a state_dict; see the top of the file.

    Attributes:
        values_hp: the dequantized values, once someone asked for the memory.
    """

    values_hp: Tensor | None = None

    @property
    def has_codes(self) -> bool:
        """Whether codes and scales are what this holds: nobody asked for the memory, or wrote to it."""
        return self.values_hp is None or torch.equal(self.values_hp, self.dequantized())

    def to_high_precision(self) -> Tensor:
        """The values in the weight's dtype; see the top of the file."""
        return self.dequantized() if self.values_hp is None else self.values_hp

    def codes_of(self, values: Tensor) -> Tensor | None:
        """The codes of `values`, of this shape, under the scales of this; None if they do not hold them exactly."""
        made = self.like(torch.empty_like(self.data_fp8))
        largest = FORMATS[self.data_fp8.dtype].max
        with torch.no_grad():
            for matrix, own in made.matrices_with(values):
                units = dequantize(torch.ones_like(own.data), expect(own.dequant_scale), layout=own.layout)
                own.data.copy_((matrix.float() / units).clamp(-largest, largest).to(own.data.dtype))
            return made.data_fp8 if torch.equal(made.dequantized(), values) else None

    def memory(self) -> Tensor:
        if self.values_hp is None:
            with inference_mode_of(self), torch.no_grad():
                self.values_hp = self.dequantized()
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
        if func is aten._foreach_copy_.default:
            return super().own_op(func, args, kwargs)
        if args[0] is not self:
            return NotImplemented
        is_same_view = func is aten.view.default and tuple(args[1]) == tuple(self.shape)
        if func in ALIASES or is_as_strided_of_all(func, args) or is_same_view:
            alias = typing.cast(FrozenState, self.like(aten.alias.default(self.data_fp8)))
            alias.values_hp = self.values_hp
            return alias
        if func in COPIES and self.has_codes:
            return super().own_op(func, args, kwargs)
        if self.values_hp is None and func is aten.copy_.default:
            self._copy(args[1])
            return self
        if self.values_hp is None and func is aten.slice.Tensor and (start := _first_of_rows(*args)) is not None:
            rows = self.like(func(self.data_fp8, *args[1:], **kwargs), part=True)
            rows.first_row = self.first_row + start
            return rows
        return NotImplemented

    def op_values(self, func: OpOverload, is_written: bool) -> Tensor:
        writes_later = is_written and func.namespace in COLLECTIVES
        return self.memory() if is_view(func) or writes_later else self.to_high_precision()

    def after_write(self, func: OpOverload, args: tuple[Any, ...], values: Tensor) -> None:
        if func.namespace not in COLLECTIVES:
            self._copy(values)

    def _copy(self, source: Tensor) -> None:
        """Copy codes and scales, or quantize values. Raises ValueError for values that a shard cannot have."""
        if self.copy_codes(source):
            return
        source = source.to_high_precision() if isinstance(source, FrozenFloat8Weight) else source
        source = source.to(self.device, self.dtype).expand(self.shape)
        if not self.is_part:
            self.write(source)
            return
        codes = self.codes_of(source)
        if codes is None:
            raise ValueError(
                "a shard of a frozen float8 weight has the scales of the whole weight, which do not hold these values; "
                "load them before fully_shard, or into a base that was frozen from the same weights"
            )
        self.data_fp8.copy_(codes)


def _first_of_rows(
    state: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> int | None:
    """The first row of a slice of rows that follow each other; None for another slice."""
    if dim != 0 or step != 1 or (end is not None and end < 0) or (start or 0) < 0:
        return None
    return min(start or 0, int(state.shape[0]))


torch.serialization.add_safe_globals([FrozenState])

"""`FrozenState`: a frozen float8 weight in a state_dict, which reads as a high-precision tensor.

A state_dict has the names of the high-precision model, and its weights read as high precision for another model that
loads them, `save_pretrained`, safetensors and torch.distributed.checkpoint. Until their memory is accessed they share
the codes and scales of the model, one byte per element, and a frozen model loads them bit-exactly.

    copies, pickles, rows       have codes and scales
    writes                      are quantized into the codes, as writes to the parameter are. A shard has the scales of
                                the whole weight, so it accepts only values that these represent exactly.
    data_ptr(), views           dequantize the weight once. After a write to these values the tensor holds them instead
                                of the codes. A frozen model that loads them quantizes them again, unless its scales
                                represent them exactly.
    other ops                   run on the dequantized values; a shard dequantizes its own rows
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quaver.kernels.operands import require
from quaver.linear.frozen_weight import ALIAS_OPS, FrozenFloat8Weight, is_as_strided_of_all
from quaver.linear.weight_form import COLLECTIVE_NAMESPACES, COPY_OPS, is_view, match_inference_mode
from quaver.recipes.formats import FLOAT8_FORMATS
from quaver.recipes.scaling import dequantize
from quaver.torch_private.dispatch import OpOverload

aten = torch.ops.aten


class FrozenState(FrozenFloat8Weight):
    """A frozen weight, or a shard of one, in a state_dict; see the top of the file."""

    values_hp: Tensor | None = None
    """The dequantized values, after the first access to the memory."""

    @property
    def has_codes(self) -> bool:
        """Whether codes and scales hold the current values: `values_hp` is None, or equals the dequantized codes."""
        return self.values_hp is None or torch.equal(self.values_hp, self.dequantize_codes())

    def to_high_precision(self) -> Tensor:
        """Return the values in the weight's dtype; see the top of the file."""
        return self.dequantize_codes() if self.values_hp is None else self.values_hp

    def find_exact_codes(self, values: Tensor) -> Tensor | None:
        """Return codes of `values` with the scales of this tensor, or None if they are not exact.

        Raises:
            ValueError: they are not exact, and this is a shard, which must keep the scales of the whole weight.
        """
        quantized = self.with_codes(torch.empty_like(self.data_fp8))
        largest = FLOAT8_FORMATS[self.data_fp8.dtype].max
        with torch.no_grad():
            for matrix, operand in quantized.zip_matrices(values):
                units = dequantize(
                    torch.ones_like(operand.data),
                    require(operand.dequant_scale, "the dequant_scale"),
                    layout=operand.layout,
                )
                operand.data.copy_((matrix.float() / units).clamp(-largest, largest).to(operand.data.dtype))
            if torch.equal(quantized.dequantize_codes(), values):
                return quantized.data_fp8
        if self.is_part:
            raise ValueError(
                "these values do not fit the scales of the whole weight, which a shard must keep; load them before "
                "fully_shard, or into a base that was frozen from the same weights"
            )
        return None

    def get_memory(self) -> Tensor:
        if self.values_hp is None:
            with match_inference_mode(self), torch.no_grad():
                self.values_hp = self.dequantize_codes()
        return self.values_hp

    def untyped_storage(self) -> torch.UntypedStorage:
        """Return the storage that identifies the tensor: of `values_hp` if they were made, else of the codes."""
        return (self.data_fp8 if self.values_hp is None else self.values_hp).untyped_storage()

    def element_size(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.numel() * self.dtype.itemsize

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return super().__deepcopy__(memo) if self.has_codes else self.get_memory().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return super().__reduce_ex__(protocol) if self.has_codes else self.get_memory().__reduce_ex__(protocol)

    def numpy(self, *, force: bool = False) -> Any:
        return self.get_memory().numpy(force=force)

    def tolist(self) -> Any:
        return self.to_high_precision().tolist()

    def run_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten._foreach_copy_.default:
            return super().run_op(func, args, kwargs)
        if args[0] is not self:
            return NotImplemented
        is_same_view = func is aten.view.default and tuple(args[1]) == tuple(self.shape)
        if func in ALIAS_OPS or is_as_strided_of_all(func, args) or is_same_view:
            alias = self.with_codes(aten.alias.default(self.data_fp8))
            alias.values_hp = self.values_hp
            return alias
        if func in COPY_OPS and self.has_codes:
            return super().run_op(func, args, kwargs)
        if self.values_hp is None and func is aten.copy_.default:
            self._copy(args[1])
            return self
        if self.values_hp is None and func is aten.slice.Tensor and (start := _find_first_row(*args)) is not None:
            rows = self.with_codes(func(self.data_fp8, *args[1:], **kwargs), part=True)
            rows.first_row = self.first_row + start
            return rows
        return NotImplemented

    def get_values(self, func: OpOverload, is_written: bool) -> Tensor:
        writes_later = is_written and func.namespace in COLLECTIVE_NAMESPACES
        return self.get_memory() if is_view(func) or writes_later else self.to_high_precision()

    def handle_write(self, func: OpOverload, args: tuple[Any, ...], values: Tensor) -> None:
        if func.namespace not in COLLECTIVE_NAMESPACES:
            self._copy(values)

    def _copy(self, source: Tensor) -> None:
        """Copy codes and scales, or quantize values. Raises as `find_exact_codes`."""
        if self.copy_codes(source):
            return
        source = source.to_high_precision() if isinstance(source, FrozenFloat8Weight) else source
        source = source.to(self.device, self.dtype).expand(self.shape)
        codes = self.find_exact_codes(source) if self.is_part else None
        if codes is None:
            self.write(source)
        else:
            self.data_fp8.copy_(codes)


def _find_first_row(
    state: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> int | None:
    """Return the first row of a slice of adjacent rows, or None for another slice."""
    if dim != 0 or step != 1 or (end is not None and end < 0) or (start or 0) < 0:
        return None
    return min(start or 0, int(state.shape[0]))


torch.serialization.add_safe_globals([FrozenState])

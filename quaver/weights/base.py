"""What the weights in another form have in common: copies, pickles, `.data`, memory, and who sees a write.

    WrappedTensor    a tensor around a plain one in high precision (gathered.py, primary.py)
    WeightForm       a weight that is copied and pickled by its state, and presents memory that is not its own

[Note: writes] Two mechanisms notice that a weight was written to, and no other decides anything:

    dispatch           every op on the weight passes its `__torch_dispatch__`, the multi-tensor kernels of optimizers
                       included. A write drops what was remembered, or quantizes again, before the op returns.
    version counters   a write to the tensor inside, through a view or a state_dict, does not pass there. Where a
                       version counter shows one, a primary weight is quantized again, and for the others it is an
                       error: counters may differ from rank to rank, and a scope was promised that nothing changes.
                       They miss numpy buffers, `.data` and shared memory.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from quaver.torch_private.dispatch import skip_torch_function
from quaver.torch_private.tracing import current_tracing_context

aten = torch.ops.aten

COPIES = frozenset({aten.clone.default, aten._to_copy.default, aten._pin_memory.default, aten.empty_like.default})
"""Ops that give another weight of the same form."""


class WeightForm(Tensor):
    """A weight in another form; subclasses say what their state and their memory are."""

    __torch_function__ = skip_torch_function  # type: ignore[assignment]

    def state(self) -> tuple[Any, ...]:
        """What `from_state` makes an equal weight of."""
        raise NotImplementedError

    @classmethod
    def from_state(cls, *state: Any) -> Tensor:
        """A weight of this class, not a parameter."""
        raise NotImplementedError

    def memory(self) -> Tensor:
        """The plain tensor whose memory this one presents."""
        raise NotImplementedError

    def assign(self, new: Tensor) -> None:
        """What `weight.data = new` does. Raises RuntimeError where it cannot be done."""
        raise NotImplementedError

    @property
    def data(self) -> Tensor:
        """The same weight without history; for an assignment see `assign`."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        self.assign(new)

    # torch answers these by the storage of the subclass, which is empty.

    def data_ptr(self) -> int:
        return self.memory().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        # The compiler identifies tensors by their storage, and would alias this one with the tensor inside.
        if current_tracing_context() is not None:
            return super().untyped_storage()
        return self.memory().untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = rebuild(type(self), copy.deepcopy(self.state(), memo), self.requires_grad, is_parameter(self))
            copied.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return typing.cast(Tensor, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (type(self), self.state(), self.requires_grad, is_parameter(self))


def rebuild(cls: type[WeightForm], state: tuple[Any, ...], requires_grad: bool, as_parameter: bool) -> Tensor:
    """The weight that `state` was taken from; copies and pickles are made here."""
    weight = cls.from_state(*state)
    return nn.Parameter(weight, requires_grad) if as_parameter else weight.requires_grad_(requires_grad)


def is_parameter(weight: Tensor) -> bool:
    """Whether nn.Parameter took this tensor, of whatever class."""
    return hasattr(weight, "_is_param")


torch.serialization.add_safe_globals([rebuild])


class WrappedTensor(WeightForm):
    """A tensor around a plain one in high precision. Memory, storage and values that are asked of it are that one's.

    Attributes:
        wrapped: the plain tensor.
    """

    wrapped: Tensor

    @classmethod
    def around(cls, wrapped: Tensor) -> Tensor:
        """A tensor of this class without attributes, for `__new__`."""
        return Tensor._make_wrapper_subclass(
            cls,
            wrapped.shape,
            strides=wrapped.stride(),
            storage_offset=wrapped.storage_offset(),
            dtype=wrapped.dtype,
            layout=wrapped.layout,
            device=wrapped.device,
            requires_grad=False,
        )

    def plain(self) -> Tensor:
        """The plain tensor inside, differentiably."""
        plain: Tensor = _Plain.apply(self)
        return plain

    def memory(self) -> Tensor:
        return self.wrapped

    # torch refuses these for a subclass.

    def numpy(self, *, force: bool = False) -> Any:
        return self.plain().numpy(force=force)

    def tolist(self) -> Any:
        return self.wrapped.tolist()

    def __dlpack__(self, **options: Any) -> Any:
        return self.plain().__dlpack__(**options)


class _Plain(torch.autograd.Function):
    """The wrapped tensor; its gradient is the wrapper's."""

    @staticmethod
    def forward(ctx: Any, wrapper: WrappedTensor) -> Tensor:
        return wrapper.wrapped.detach().view_as(wrapper.wrapped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


W = TypeVar("W", bound=WrappedTensor)


def written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], cls: type[W]) -> Iterator[W]:
    """The tensors of `cls` that a call of an operator writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, cls):
                    yield item

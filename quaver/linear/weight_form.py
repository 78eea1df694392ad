"""Base classes of tensor subclasses that represent a high-precision tensor: dispatch of ops, copies, pickles, `.data`.

    TensorForm       a tensor in another form, and what ops do with it (tensor.py, weights)
    ReadOnly         values read from a form, which cannot be written to
    WeightForm       a weight that is copied and pickled by its state, and presents another tensor's memory
    WrapperWeight    a weight around a plain tensor in high precision (fsdp/scaled_shard.py, weights/primary_weight.py)

[Note: dispatch] All forms share `TensorForm.__torch_dispatch__`. The first form among the arguments may handle an op
itself (`run_op`). Other ops run on plain tensors instead of the forms, whether these are arguments, in lists, or
`out=`. Then `handle_write` is called on each form that was written to. Subclasses define the plain tensor, views and
writes. An op that would change the shape or the memory of a form raises.

A form is an inference tensor if the tensor inside is one, as torch's views are. PyTorch does not decompose composite
ops before dispatch under `torch.inference_mode`, nor for inference tensors. So the dispatch of a form decomposes
composite ops that may return a view, such as `to` and `reshape`.

Two mechanisms detect writes to a weight:

    dispatch           Every op on the weight, including the multi-tensor kernels of optimizers, passes its
                       `__torch_dispatch__`. A write clears what was cached, or quantizes again, before the op returns;
                       a write by a collective is handled before the next use of the weight.
    version counters   A write to the tensor inside, through a view or a state_dict, bypasses dispatch. If a version
                       counter shows one, a primary weight is quantized again. Other weights raise, because counters
                       may differ across ranks, and a scope promises that weights do not change. Counters miss numpy
                       buffers, `.data` and shared memory.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from quaver.torch_private.dispatch import OpOverload, decompose, has_kernel, skip_torch_function
from quaver.torch_private.tracing import current_tracing_context, is_called_by_fake_tensors

aten = torch.ops.aten

Wrapper = TypeVar("Wrapper", bound=Tensor)

COPY_OPS = frozenset({aten.clone.default, aten._to_copy.default, aten._pin_memory.default, aten.empty_like.default})
"""Ops that return another weight of the same form."""


class TensorForm(Tensor):
    """A tensor in another form; subclasses define what ops run on. See [Note: dispatch]."""

    __torch_function__ = skip_torch_function  # type: ignore[assignment]

    def run_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an op whose first form argument is this one.

        Returns NotImplemented for ops that run on plain tensors. Raises NotImplementedError for unsupported ops.
        """
        return NotImplemented

    def get_values(self, func: OpOverload, is_written: bool) -> Tensor:
        """Return the plain tensor of this shape and dtype that `func` reads, and writes to if `is_written`."""
        raise NotImplementedError

    def handle_write(self, func: OpOverload, args: tuple[Any, ...], values: Tensor) -> None:
        """Handle a write of `func` to `values`, from `get_values`. Ops of `COLLECTIVE_NAMESPACES` may write later."""

    def wrap_view(self, view: Tensor) -> Tensor:
        """Wrap a view of the values that an op returned. By default views stay plain tensors."""
        return view

    def wrap_copy(self, func: OpOverload, copied: Tensor) -> Tensor:
        """Wrap a copy of the values that an op of `COPY_OPS` returned. By default copies stay plain tensors."""
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_composite_view(func):
            return decompose(func, args, kwargs)
        forms = find_forms((args, kwargs))
        handled = forms[0].run_op(func, args, kwargs)
        if handled is not NotImplemented:
            return handled
        writes = {id(form): form for form in find_writes(func, args, kwargs)}
        if writes and torch.Tag.inplace_view in func.tags:
            form = next(iter(writes.values()))
            raise NotImplementedError(
                f"{func} would change the shape or the memory of a {type(form).__name__}; write values with copy_ "
                "under torch.no_grad(), or convert the model back first (convert_to_high_precision)"
            )
        values = {id(form): form.get_values(func, id(form) in writes) for form in forms}
        form_of_values = {id(values[key]): form for key, form in writes.items()}
        args_plain, kwargs_plain = tree_map_only(TensorForm, lambda form: values[id(form)], (args, kwargs))
        out_arguments = {
            arg.name: kwargs[arg.name] for arg in func._schema.arguments if arg.is_out and arg.name in kwargs
        }
        outputs = {id(form): torch.empty_like(values[id(form)]) for form in find_forms(out_arguments)}
        kwargs_plain |= tree_map_only(TensorForm, lambda form: outputs[id(form)], out_arguments)
        result = func(*args_plain, **kwargs_plain)
        for key, output in outputs.items():  # checked before the weight changes, since torch resizes an output
            if output.shape != values[key].shape:
                raise ValueError(f"{func}: expected out= of {list(output.shape)}, got {list(values[key].shape)}")
            values[key].copy_(output)
            form_of_values[id(output)] = writes[key]
        for key, form in writes.items():
            form.handle_write(func, args, values[key])
        if writes:
            return tree_map_only(Tensor, lambda tensor: form_of_values.get(id(tensor), tensor), result)
        if is_view(func):
            return tree_map_only(Tensor, forms[0].wrap_view, result)
        return forms[0].wrap_copy(func, result) if func in COPY_OPS else result


def match_inference_mode(tensor: Tensor) -> AbstractContextManager[object]:
    """Return the context in which new tensors are inference tensors if `tensor` is one."""
    is_inference = tensor.is_inference()
    return nullcontext() if is_inference is torch.is_inference_mode_enabled() else torch.inference_mode(is_inference)


def make_wrapper(
    cls: type[Wrapper], wrapped: Tensor, dtype: torch.dtype, size: tuple[int, int] | None = None
) -> Wrapper:
    """Make a tensor of `cls` with `dtype` and the shape, strides and device of `wrapped`, without attributes.

    `size`: the last two dims, if `wrapped` has others; the tensor is then contiguous.
    """
    shape, strides = wrapped.shape, wrapped.stride()
    if size is not None and shape[-2:] != size:
        shape = torch.Size([*shape[:-2], *size])
        strides = torch.empty(shape, device="meta").stride()
    with match_inference_mode(wrapped):
        return Tensor._make_wrapper_subclass(
            cls,
            shape,
            strides=strides,
            storage_offset=wrapped.storage_offset(),
            dtype=dtype,
            layout=wrapped.layout,
            device=wrapped.device,
            requires_grad=False,
        )


class ReadOnly(TensorForm):
    """Values read from a frozen weight. Writes raise, because they would not reach the weight."""

    wrapped: Tensor

    @classmethod
    def wrap(cls, values: Tensor) -> ReadOnly:
        """Make a read-only tensor of `values`."""
        read_only = make_wrapper(cls, values, values.dtype)
        read_only.wrapped = values
        return read_only

    def get_values(self, func: OpOverload, is_written: bool) -> Tensor:
        if is_written:
            raise NotImplementedError(
                f"{func}: a write to this view would not reach the frozen float8 weight; write to the weight itself"
            )
        return self.wrapped

    def wrap_view(self, view: Tensor) -> Tensor:
        return ReadOnly.wrap(view)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ReadOnly({self.wrapped})"


class WeightForm(TensorForm):
    """A weight in another form; subclasses define its state and its memory."""

    def get_state(self) -> tuple[Any, ...]:
        """Return the arguments from which `from_state` makes an equal weight."""
        raise NotImplementedError

    @classmethod
    def from_state(cls, *state: Any) -> Tensor:
        """Make a weight of this class that is not a parameter."""
        raise NotImplementedError

    def get_memory(self) -> Tensor:
        """Return the plain tensor whose memory this weight presents."""
        raise NotImplementedError

    def assign(self, new: Tensor) -> None:
        """Assign `new` to `weight.data`. Raises RuntimeError if that is impossible."""
        raise NotImplementedError

    @property
    def data(self) -> Tensor:
        """The weight without autograd history. Assignments call `assign`."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        self.assign(new)

    # torch would use the storage of the subclass, which is empty.

    def data_ptr(self) -> int:
        return self.get_memory().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        # The compiler identifies tensors by their storage, and would alias the weight with the tensor inside.
        if current_tracing_context() is not None or is_called_by_fake_tensors():
            return super().untyped_storage()
        return self.get_memory().untyped_storage()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            copied = rebuild(type(self), copy.deepcopy(self.get_state(), memo), self.requires_grad, is_parameter(self))
            copied.grad = copy.deepcopy(self.grad, memo)
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild, (type(self), self.get_state(), self.requires_grad, is_parameter(self))


def rebuild(cls: type[WeightForm], state: tuple[Any, ...], requires_grad: bool, as_parameter: bool) -> Tensor:
    """Rebuild a weight from what `get_state` returned. Copies and pickles are made here."""
    weight = cls.from_state(*state)
    return nn.Parameter(weight, requires_grad) if as_parameter else weight.requires_grad_(requires_grad)


def is_parameter(weight: Tensor) -> bool:
    """Return whether nn.Parameter made this tensor a parameter, whatever its class."""
    return hasattr(weight, "_is_param")


torch.serialization.add_safe_globals([rebuild])


class WrapperWeight(WeightForm):
    """A tensor around a plain one in high precision, whose memory, storage and values it presents."""

    wrapped: Tensor
    """The plain tensor."""

    @classmethod
    def wrap(cls, wrapped: Tensor) -> Self:
        """Make a tensor of this class without attributes, for `__new__`."""
        return make_wrapper(cls, wrapped, wrapped.dtype)

    def get_plain(self) -> Tensor:
        """Return the plain tensor inside, differentiably."""
        return _ToWrapped.apply(self)

    def get_memory(self) -> Tensor:
        return self.wrapped

    def get_values(self, func: OpOverload, is_written: bool) -> Tensor:
        return self.wrapped

    # torch refuses these for subclasses. Writes by another library that shares the memory could not be detected.

    def numpy(self, *, force: bool = False) -> Any:
        """Return a read-only array that shares the memory."""
        array = self.get_plain().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self.wrapped.tolist()

    def __dlpack__(self, **options: Any) -> Any:
        """Export a copy, unless the caller asks for the memory itself (`copy=False`)."""
        return self.get_plain().__dlpack__(**{**options, "copy": options.get("copy") is not False})


class _ToWrapped(torch.autograd.Function):
    """Return the wrapped tensor; its gradient becomes the wrapper's."""

    @staticmethod
    def forward(ctx: Any, wrapper: WrapperWeight) -> Tensor:
        return wrapper.wrapped.detach().view_as(wrapper.wrapped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def find_forms(tree: Any) -> list[TensorForm]:
    """Return the forms among the leaves of `tree`."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, TensorForm)]


COLLECTIVE_NAMESPACES = frozenset({"c10d", "_c10d_functional"})
"""Namespaces of communication ops, which may write after they return."""


def find_writes(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[TensorForm]:
    """Yield the forms that a call of an operator writes to."""
    # The schemas of torch.ops.c10d do not declare writes. An op other than send writes to all but the `input...`.
    is_c10d = func.namespace == "c10d" and func.name() != "c10d::send"
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_write or (is_c10d and not argument.name.startswith("input")):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from find_forms(value)


@functools.cache
def is_view(func: OpOverload) -> bool:
    """Return whether results are views of an argument; a write to one is a write to the argument."""
    aliases = (result.alias_info for result in func._schema.returns)
    return any(alias is not None and not alias.is_write for alias in aliases)


@functools.cache
def _is_composite_view(func: OpOverload) -> bool:
    """Return whether `func` is a composite op that may return a view, or the query that `nn.Module.to` makes."""
    is_query = func is aten._has_compatible_shallow_copy_type.default
    return (is_query or is_view(func)) and has_kernel(func, "CompositeImplicitAutograd")

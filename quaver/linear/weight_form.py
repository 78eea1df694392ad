"""Base classes of tensor subclasses that stand for a high-precision tensor: dispatch of ops, copies, pickles, `.data`.

    TensorForm       a tensor in another form than its values: what an op does with it (tensor.py, weights)
    ReadOnly         the values of one whose memory they are not
    WeightForm       a weight that is copied and pickled by its state, and presents memory that is not its own
    WrappedTensor    a weight around a plain tensor in high precision (fsdp/gathered.py, weights/primary.py)

[Note: dispatch] `TensorForm.__torch_dispatch__` is the only one. An op that the first form among its arguments answers
itself (`own_op`) is done. All others run on plain tensors in place of the forms, wherever these stand: among the
arguments, in lists, as `out=`. Then each form that was written to hears of it (`after_write`). The subclasses say what
a plain tensor, a view and a write are to them. An op that would change the shape or the memory of a form is refused.

[Note: inference mode] A form is an inference tensor where the tensor inside is one, as torch's views are. Composite ops
arrive whole under `torch.inference_mode`, and at inference tensors. Those that may return a view, as `to` and
`reshape`, run by the ops that they are made of, as elsewhere.

[Note: writes] Two mechanisms notice that a weight was written to, and no other decides anything:

    dispatch           every op on the weight passes its `__torch_dispatch__`, the multi-tensor kernels of optimizers
                       included. A write drops what was remembered, or quantizes again, before the op returns; one by a
                       collective before the weight is used next.
    version counters   a write to the tensor inside, through a view or a state_dict, does not pass there. Where a
                       version counter shows one, a primary weight is quantized again, and for the others it is an
                       error: counters may differ from rank to rank, and a scope was promised that nothing changes.
                       They miss numpy buffers, `.data` and shared memory.
"""

from __future__ import annotations

import copy
import functools
import typing
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from quaver.torch_private.dispatch import OpOverload, decompose, has_kernel, skip_torch_function
from quaver.torch_private.tracing import called_by_fake_tensors, current_tracing_context

aten = torch.ops.aten

COPIES = frozenset({aten.clone.default, aten._to_copy.default, aten._pin_memory.default, aten.empty_like.default})
"""Ops that give another weight of the same form."""


class TensorForm(Tensor):
    """A tensor in another form; subclasses say what an op runs on. See [Note: dispatch]."""

    __torch_function__ = skip_torch_function  # type: ignore[assignment]

    def own_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op that this form answers itself, as the first one among the arguments.

        NotImplemented for an op that runs on plain tensors. Raises NotImplementedError for one that it refuses.
        """
        return NotImplemented

    def op_values(self, func: OpOverload, is_written: bool) -> Tensor:
        """The plain tensor, of this shape and dtype, that `func` reads, and writes to if `is_written`."""
        raise NotImplementedError

    def after_write(self, func: OpOverload, args: tuple[Any, ...], values: Tensor) -> None:
        """`func` wrote to `values`, which `op_values` gave. A collective may do so later: see `COLLECTIVES`."""

    def view_of(self, view: Tensor) -> Tensor:
        """Wrap `view`, which an op made of the values, as this form does; by default it stays a plain tensor."""
        return view

    def copy_of(self, func: OpOverload, copied: Tensor) -> Tensor:
        """Wrap `copied`, which an op of `COPIES` made of the values; by default it stays a plain tensor."""
        return copied

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view_of_ops(func):
            return decompose(func, args, kwargs)
        forms = forms_in((args, kwargs))
        own = forms[0].own_op(func, args, kwargs)
        if own is not NotImplemented:
            return own
        writes = {id(form): form for form in written(func, args, kwargs)}
        if writes and torch.Tag.inplace_view in func.tags:
            form = next(iter(writes.values()))
            raise NotImplementedError(
                f"{func} would change the shape or the memory of a {type(form).__name__}; write values with copy_ "
                "under torch.no_grad(), or convert the model back first (convert_to_high_precision)"
            )
        values = {id(form): form.op_values(func, id(form) in writes) for form in forms}
        of_values = {id(values[each]): form for each, form in writes.items()}
        args_plain, kwargs_plain = tree_map_only(TensorForm, lambda form: values[id(form)], (args, kwargs))
        as_output = outputs_of(func, kwargs)
        outputs = {id(form): torch.empty_like(values[id(form)]) for form in forms_in(as_output)}
        kwargs_plain |= tree_map_only(TensorForm, lambda form: outputs[id(form)], as_output)
        result = func(*args_plain, **kwargs_plain)
        for each, output in outputs.items():  # checked before the weight changes, since torch resizes an output
            if output.shape != values[each].shape:
                raise ValueError(f"{func}: expected out= of {list(output.shape)}, got {list(values[each].shape)}")
            values[each].copy_(output)
            of_values[id(output)] = writes[each]
        for each, form in writes.items():
            form.after_write(func, args, values[each])
        if writes:
            return tree_map_only(Tensor, lambda tensor: of_values.get(id(tensor), tensor), result)
        if is_view(func):
            return tree_map_only(Tensor, forms[0].view_of, result)
        return forms[0].copy_of(func, result) if func in COPIES else result


def inference_mode_of(tensor: Tensor) -> AbstractContextManager[object]:
    """The context in which tensors are made as `tensor` was: inference tensors or not."""
    is_inference = tensor.is_inference()
    return nullcontext() if is_inference is torch.is_inference_mode_enabled() else torch.inference_mode(is_inference)


def make_wrapper(cls: type[Tensor], wrapped: Tensor, dtype: torch.dtype, size: tuple[int, int] | None = None) -> Tensor:
    """A tensor of `cls` without attributes, which has the shape, strides and device of `wrapped`, and `dtype`.

    `size`: of its last two dims, where it has others; it is contiguous then.
    """
    shape, strides = wrapped.shape, wrapped.stride()
    if size is not None and shape[-2:] != size:
        shape = torch.Size([*shape[:-2], *size])
        strides = torch.empty(shape, device="meta").stride()
    with inference_mode_of(wrapped):
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
    """Values that a frozen weight was read as. A write to them is refused, since the weight would not get it."""

    wrapped: Tensor

    @classmethod
    def of(cls, values: Tensor) -> ReadOnly:
        """`values` without a way to write to them."""
        made = typing.cast(ReadOnly, make_wrapper(cls, values, values.dtype))
        made.wrapped = values
        return made

    def op_values(self, func: OpOverload, is_written: bool) -> Tensor:
        if is_written:
            raise NotImplementedError(
                f"{func}: this is a view of a frozen float8 weight, which would not get what is written; write to the "
                "weight itself"
            )
        return self.wrapped

    def view_of(self, view: Tensor) -> Tensor:
        return ReadOnly.of(view)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"ReadOnly({self.wrapped})"


class WeightForm(TensorForm):
    """A weight in another form; subclasses say what their state and their memory are."""

    def state(self) -> tuple[Any, ...]:
        """The arguments from which `from_state` makes an equal weight."""
        raise NotImplementedError

    @classmethod
    def from_state(cls, *state: Any) -> Tensor:
        """A weight of this class, not a parameter."""
        raise NotImplementedError

    def memory(self) -> Tensor:
        """The plain tensor whose memory this one presents."""
        raise NotImplementedError

    def assign(self, new: Tensor) -> None:
        """Carry out `weight.data = new`. Raises RuntimeError where it cannot be done."""
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
        if current_tracing_context() is not None or called_by_fake_tensors():
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
        return make_wrapper(cls, wrapped, wrapped.dtype)

    def plain(self) -> Tensor:
        """The plain tensor inside, differentiably."""
        plain: Tensor = _Plain.apply(self)
        return plain

    def memory(self) -> Tensor:
        return self.wrapped

    def op_values(self, func: OpOverload, is_written: bool) -> Tensor:
        return self.wrapped

    # torch refuses these for a subclass. Nothing sees a write to memory that is shared with another library.

    def numpy(self, *, force: bool = False) -> Any:
        """An array that shares the memory and is read-only."""
        array = self.plain().numpy(force=force)
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self.wrapped.tolist()

    def __dlpack__(self, **options: Any) -> Any:
        """A copy, unless the caller asks for the memory itself (`copy=False`)."""
        return self.plain().__dlpack__(**{**options, "copy": options.get("copy") is not False})


class _Plain(torch.autograd.Function):
    """The wrapped tensor; its gradient is the wrapper's."""

    @staticmethod
    def forward(ctx: Any, wrapper: WrappedTensor) -> Tensor:
        return wrapper.wrapped.detach().view_as(wrapper.wrapped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def forms_in(tree: Any) -> list[TensorForm]:
    """The forms among the leaves of arguments."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, TensorForm)]


COLLECTIVES = frozenset({"c10d", "_c10d_functional"})
"""Namespaces of ops that communicate, and may write after they returned."""


def written(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[TensorForm]:
    """The forms that a call of an operator writes to."""
    # The schemas of torch.ops.c10d do not say what is written: all tensors but those that an op only sends.
    of_c10d = func.namespace == "c10d" and func.name() != "c10d::send"
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_write or (of_c10d and not argument.name.startswith("input")):
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            yield from forms_in(value)


def outputs_of(func: OpOverload, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The `out=` arguments of a call, by name."""
    names = [argument.name for argument in func._schema.arguments if argument.is_out]
    return {name: kwargs[name] for name in names if name in kwargs}


@functools.cache
def is_view(func: OpOverload) -> bool:
    """Whether results are views of an argument; a write to one is a write to the argument."""
    return any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)


@functools.cache
def _is_view_of_ops(func: OpOverload) -> bool:
    """Whether this is a composite op that may return a view, or asks what a view of a tensor would be."""
    is_query = func is aten._has_compatible_shallow_copy_type.default
    return (is_query or is_view(func)) and has_kernel(func, "CompositeImplicitAutograd")

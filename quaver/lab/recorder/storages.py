"""Follows the storages behind tensors: their allocation, resizes and release.

Tensors share storages (views, detached tensors), so the unit of memory is a storage, and each counts once.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from quaver.lab.recorder.callers import get_module_name
from quaver.torch_private.dispatch import is_fake_mode_on
from quaver.torch_private.memory import storage_key
from quaver.torch_private.replacing import replace_attribute
from quaver.torch_private.tracing import FakeTensor

_PLAIN_TYPES = (Tensor, torch.nn.Parameter, FakeTensor)
_LIFT_OPERATOR = torch.ops.aten.lift_fresh.default
"""The first operator on a tensor that torch.tensor created from Python numbers."""
_DISPATCH_MODULES = (__name__, "torch._compile", "torch._dynamo.eval_frame")
"""The Python modules of frames between an operator's call and its dispatch."""


class StorageTracker(TorchDispatchMode):
    """Follows the storages of all tensors that operators take and return while the mode is on.

    A storage is new if an operator returns it, and older than the mode if an operator takes it first. A weak reference
    reports its release. Tensor subclasses dispatch again on their parts, which are followed.

    The mode does not see compiled code, memory that a kernel allocates and frees inside one operator, and buffers of a
    collective's backend. Nor does it see the few bytes of a Python number that C++ wraps in a tensor.

    Subclasses override `on_storage_appeared`, `on_storage_resized` and `on_storage_released`, which get the storage's
    key. A subclass that follows compiled code overrides `ignore_compile_internals`, a method of TorchDispatchMode:
    without that Dynamo runs eager code while the mode is on.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sizes: dict[int, int] = {}
        self._references: dict[int, weakref.ref[UntypedStorage]] = {}
        self._ignored: dict[int, weakref.ref[UntypedStorage]] = {}  # buffers of a collective's backend
        self._exit_stack: ExitStack | None = None
        """Removes the patch of `resize_` when the mode ends; None while it is off."""
        self._has_fake_tensors = False  # whether storages on the meta device belong to fake tensors
        self._lock = threading.RLock()
        """Held while the records change: a thread of a collective's backend may release a storage at any time."""

    def on_storage_appeared(self, key: int, size_bytes: int, tensor: Tensor | None, operator: str | None) -> None:
        """Record a storage that is seen for the first time.

        Args:
            tensor: a tensor with this storage; None for a storage that is being resized.
            operator: the operator that returned it; None for a storage older than the mode.
        """

    def on_storage_resized(self, key: int, size_bytes: int, before_bytes: int) -> None:
        """Record that the size of a storage has changed."""

    def on_storage_released(self, key: int, size_bytes: int) -> None:
        """Record that a storage was released."""

    def on_operator_called(self, operator: Any, tensors: list[Tensor]) -> None:
        """Record an operator that will run on these tensors."""

    def follow(self, tensor: Tensor, operator: str | None = None) -> None:
        """Follow the storages of `tensor`, which `operator` returned. None stands for a tensor older than the mode."""
        for plain in iter_plain_parts(tensor):
            self._follow_storage(plain.untyped_storage(), plain, operator)

    def forget_all(self) -> None:
        """Stop following all storages."""
        with self._lock:
            self._references.clear()
            self._ignored.clear()
            self._sizes.clear()

    def __enter__(self) -> Any:
        if self._exit_stack is not None:
            raise RuntimeError(f"this {type(self).__name__} is on already; make another one")
        self._has_fake_tensors = is_fake_mode_on()
        with ExitStack() as exit_stack:
            exit_stack.enter_context(self._patch_resize())
            entered = super().__enter__()
            self._exit_stack = exit_stack.pop_all()
        return entered

    def __exit__(self, *error: Any) -> None:
        exit_stack, self._exit_stack = self._exit_stack, None
        with exit_stack or ExitStack():
            super().__exit__(*error)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(kind not in _PLAIN_TYPES for kind in types):  # a subclass dispatches again on its parts
            return NotImplemented
        kwargs = kwargs or {}
        arguments = [*_iter_tensors(args), *_iter_tensors(tuple(kwargs.values()))]
        for tensor in arguments:
            if not self._ignore_backend_buffer(tensor, func):
                self.follow(tensor, str(func) if func is _LIFT_OPERATOR else None)
        self.on_operator_called(func, arguments)
        result = func(*args, **kwargs)
        for tensor in _iter_tensors(result):
            self.follow(tensor, str(func))
        for tensor in arguments:  # aten.resize_ and out= variants may have changed their sizes
            self.follow(tensor)
        return result

    def _follow_storage(self, storage: UntypedStorage, tensor: Tensor | None, operator: str | None) -> None:
        key, size_bytes = storage_key(storage), storage.nbytes()
        if key in self._ignored:
            return
        with self._lock:
            before_bytes = self._sizes.get(key)
            self._sizes[key] = size_bytes
            if before_bytes is None:
                self._references[key] = weakref.ref(storage, partial(self._on_release, key))
                self.on_storage_appeared(key, size_bytes, tensor, operator)
            elif before_bytes != size_bytes:
                self.on_storage_resized(key, size_bytes, before_bytes)

    def _ignore_backend_buffer(self, tensor: Tensor, func: Any) -> bool:
        """Ignore a collective's buffer, which the mode first sees in `Work.wait`; return whether `tensor` is one."""
        if self._has_fake_tensors:  # torch's fake process group allocates none
            return False
        key = storage_key(tensor.untyped_storage()) if tensor.layout is torch.strided and not tensor.is_meta else None
        if key is None or key in self._sizes or key in self._ignored:
            return key in self._ignored
        if func.namespace != "aten" or not _is_called_by_torch_distributed():
            return False
        self._ignored[key] = weakref.ref(tensor.untyped_storage(), lambda _: self._ignored.pop(key, None))
        return True

    def _patch_resize(self) -> AbstractContextManager[Any]:
        """Follow `UntypedStorage.resize_` inside the block; FSDP2 frees and reallocates weights with it.

        It is not an operator, so neither a dispatch mode nor any hook of torch sees it. This can go when torch
        dispatches it. Nested trackers call each other's patch.
        """
        resize = UntypedStorage.resize_

        def resize_and_report(storage: UntypedStorage, size: int) -> UntypedStorage:
            before_bytes = storage.nbytes()
            resize(storage, size)
            self._on_resize(storage, before_bytes)
            return storage

        return replace_attribute(UntypedStorage, "resize_", resize_and_report)

    def _on_resize(self, storage: UntypedStorage, before_bytes: int) -> None:
        if storage.device.type == "meta" and not self._has_fake_tensors:
            return
        key = storage_key(storage)
        with self._lock:
            if key not in self._sizes:
                self._sizes[key] = before_bytes
                self._references[key] = weakref.ref(storage, partial(self._on_release, key))
                self.on_storage_appeared(key, before_bytes, None, None)
            self._follow_storage(storage, None, None)

    def _on_release(self, key: int, _: weakref.ref[UntypedStorage]) -> None:
        with self._lock:
            size_bytes = self._sizes.pop(key, None)
            if size_bytes is not None:
                del self._references[key]
                self.on_storage_released(key, size_bytes)


class TensorByteCounter(StorageTracker):
    """Counts the bytes of the storages that operators allocate while the mode is on, and their highest sum.

    A storage counts from the operator that returns it until its release, also after the mode. A storage older than the
    mode counts only by the bytes that it grows or shrinks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._counted: dict[int, int] = {}

    def on_storage_appeared(self, key: int, size_bytes: int, tensor: Tensor | None, operator: str | None) -> None:
        self._count(key, size_bytes if operator else 0)

    def on_storage_resized(self, key: int, size_bytes: int, before_bytes: int) -> None:
        self._count(key, size_bytes - before_bytes)

    def on_storage_released(self, key: int, size_bytes: int) -> None:
        self.live_bytes -= self._counted.pop(key)

    def _count(self, key: int, change_bytes: int) -> None:
        self._counted[key] = self._counted.get(key, 0) + change_bytes
        self.live_bytes += change_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


def iter_plain_parts(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors with a storage inside `tensor`: itself, or the parts of a wrapper subclass.

    Unlike the trainer's `list_plain_tensors`, this does not wait for collectives: a storage exists before its values.
    """
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            part = getattr(tensor, name)
            if isinstance(part, Tensor):
                yield from iter_plain_parts(part)
    elif tensor.layout is torch.strided and not tensor.is_meta:
        yield tensor


def _is_called_by_torch_distributed() -> bool:
    """Return whether torch.distributed called the operator that is being dispatched, as in `Work.wait`."""
    frame = sys._getframe(1)
    while frame is not None and get_module_name(frame).startswith(_DISPATCH_MODULES):
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None and get_module_name(frame).startswith("torch.distributed.")


def _iter_tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors in an operator's arguments or results, which nest in lists and tuples only."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, (list, tuple)):
        for value in values:
            yield from _iter_tensors(value)

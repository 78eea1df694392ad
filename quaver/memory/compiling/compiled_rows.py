"""Says in rows of a recording what compiled code does: in which module inside of it, and what its graph keeps.

It is for code that was compiled without kernels (compiled.py): compiled code of a run tells nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks

from quaver.memory.recording.modules import ModuleTracker, visible_modules
from quaver.memory.recording.recorder import Recorder
from quaver.memory.recording.storages import plain_parts

COMPILED_GRAPH = "compiled graph"
"""Who keeps what compiled code returns for its backward."""


class CompiledTracker(ModuleTracker):
    """Follows calls of compiled modules, too, from outside: hooks would be compiled in.

    Attributes:
        compiled: the names of the compiled modules.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.compiled: set[str] = set()
        self._inside = ""
        self._paths: dict[str, str] = {}

    def __enter__(self) -> CompiledTracker:
        super().__enter__()
        paths = {id(module): path for path, module in self.model.named_modules()}
        for name, module in visible_modules(self.model):
            if module._compiled_call_impl is not None:
                self._follow(name, module)
                self._paths[name] = paths[id(module)]
        self._modules |= {name: module for name, module in self.model.named_modules() if name}
        return self

    @property
    def current(self) -> str:
        """The module in which code runs now, also inside of compiled code; `OUTSIDE` for none."""
        outer = super().current
        path = self._paths.get(outer)
        if not self._inside or path is None:
            return outer
        name = f"{path}.{self._inside}" if path else self._inside
        return name if name in self._modules else outer

    @contextmanager
    def inside(self, module: str) -> Iterator[None]:
        """Inside the block, code of `module` runs, whose name is relative to the compiled module around it."""
        before, self._inside = self._inside, module
        try:
            yield
        finally:
            self._inside = before

    def _follow(self, name: str, module: nn.Module) -> None:
        compiled: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]

        def call(*args: Any, **kwargs: Any) -> Any:
            self.stack.append(name)
            self._mark()
            self.entered(name)
            output = None
            try:
                output = compiled(*args, **kwargs)
                return output
            finally:
                self.left(name, output)
                self.stack.pop()
                self._mark()

        self.compiled.add(name)
        module._compiled_call_impl = call
        self._handles.append(_Handle(partial(setattr, module, "_compiled_call_impl", compiled)))


class _Handle:
    """Undoes something, as the handle of a hook does."""

    def __init__(self, undo: Callable[[], None]) -> None:
        self.remove = undo


class CompiledRows:
    """Tells a recorder what compiled code does; see `quaver.memory.compiling.makers.Follower`."""

    def __init__(self, recorder: Recorder, tracker: CompiledTracker) -> None:
        self._recorder, self.inside = recorder, tracker.inside
        self._kept: dict[int, list[weakref.ref[UntypedStorage]]] = {}
        self._given_back: list[list[tuple[int, weakref.ref[UntypedStorage]]]] = []

    def kept(self, tensors: Sequence[Any]) -> None:
        """A compiled forward returns these for its backward."""
        for part in _parts(tensors):
            storage = part.untyped_storage()
            key = self._recorder.keep(part)
            others = [each for each in self._kept.get(key, []) if each() is storage]  # else the key has a new owner
            self._kept[key] = [*others, weakref.ref(storage)]

    def backward_begins(self, tensors: Sequence[Any]) -> None:
        """A compiled backward is given these, some of which a forward kept."""
        given = []
        for part in _parts(tensors):
            storage = part.untyped_storage()
            kept = [each for each in self._kept.get(storage._cdata, []) if each() is storage]
            if kept:
                given.append((storage._cdata, kept.pop()))
                self._kept[storage._cdata] = kept
        self._given_back.append(given)

    def backward_ends(self) -> None:
        """The compiled backward that began last has let go what it was given."""
        for key, storage in self._given_back.pop():
            if storage() is not None:
                self._recorder.release(key)


def _parts(tensors: Sequence[Any]) -> Iterator[Tensor]:
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            yield from plain_parts(tensor)


def not_compiled(hooks: AbstractContextManager[None]) -> AbstractContextManager[None]:
    """The same `saved_tensors_hooks`, left alone by torch.compile where they are called between compiled frames."""
    if not isinstance(hooks, saved_tensors_hooks):
        raise TypeError(f"expected saved_tensors_hooks, got {type(hooks).__name__}")
    hooks.pack_hook = torch.compiler.disable(hooks.pack_hook)
    hooks.unpack_hook = torch.compiler.disable(hooks.unpack_hook)
    return hooks


def name_keepers(report: dict[str, Any], compiled: set[str]) -> dict[str, Any]:
    """The report of a recording, with COMPILED_GRAPH as the keeper of what was saved in modules of these names."""
    rows = [
        {**row, "kept_by": COMPILED_GRAPH} if row["kept_by"] == "autograd" and row["saved_in"] in compiled else row
        for row in report["saved_for_backward"]
    ]
    return {**report, "saved_for_backward": rows}

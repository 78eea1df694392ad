"""Attributes the buffers of compiled code to modules inside it, and records the tensors that it saves for backward.

Only code that was compiled without kernels (compiled.py) reports its buffers. Compiled code of a real run does not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor, nn

from quaver.lab.recorder.modules import ModuleTracker, iter_visible_modules
from quaver.lab.recorder.recorder import Allocation, Recorder
from quaver.lab.recorder.storages import iter_plain_parts
from quaver.torch_private.dispatch import dispatch_modes


class CompiledTracker(ModuleTracker):
    """A ModuleTracker that also follows compiled modules. It wraps their compiled call, since Dynamo compiles hooks."""

    follows_compiled_code = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._inside = ""
        self._paths: dict[str, str] = {}
        self._saved: Counter[Allocation] = Counter()
        self._received: list[list[Allocation]] = []
        """The saved tensors that each running compiled backward has received, the innermost last."""

    def __enter__(self) -> CompiledTracker:
        super().__enter__()
        paths = {id(module): path for path, module in self.model.named_modules()}
        for name, module in iter_visible_modules(self.model):
            if module._compiled_call_impl is not None:
                self._follow(name, module)
                self._paths[name] = paths[id(module)]
        self._modules |= {name: module for name, module in self.model.named_modules() if name}
        return self

    @property
    def current(self) -> str:
        """The module in which code runs now, even inside compiled code; `OUTSIDE_MODULES` for none."""
        outer = super().current
        path = self._paths.get(outer)
        if not self._inside or path is None:
            return outer
        name = f"{path}.{self._inside}" if path else self._inside
        return name if name in self._modules else outer

    @contextmanager
    def enter_module(self, module: str) -> Iterator[None]:
        """Attribute the block to `module`, a name relative to the compiled module."""
        before, self._inside = self._inside, module
        try:
            yield
        finally:
            self._inside = before

    def record_saved(self, recorder: Recorder, tensors: Sequence[Any]) -> None:
        """Record the tensors that a compiled forward returns for its backward."""
        self._saved.update(recorder.record_saved(part) for part in _iter_parts(tensors))

    def begin_backward(self, recorder: Recorder, tensors: Sequence[Any]) -> None:
        """Record the tensors that a compiled backward receives. A forward saved some of them."""
        received = []
        for part in _iter_parts(tensors):
            allocation = recorder.find_allocation(part)
            if allocation is not None and self._saved[allocation]:
                self._saved[allocation] -= 1
                received.append(allocation)
        self._received.append(received)

    def end_backward(self, recorder: Recorder) -> None:
        """Record that the compiled backward that began last has dropped its arguments."""
        for allocation in self._received.pop():
            recorder.record_dropped(allocation)

    def _follow(self, name: str, module: nn.Module) -> None:
        compiled: Callable[..., Any] = module._compiled_call_impl  # type: ignore[assignment]

        def call(*args: Any, **kwargs: Any) -> Any:
            self.stack.append(name)
            self._mark()
            try:
                return compiled(*args, **kwargs)
            finally:
                self.stack.pop()
                self._mark()

        self.compiled.add(name)
        module._compiled_call_impl = call
        self._exit_stack.callback(setattr, module, "_compiled_call_impl", compiled)


class Recording(NamedTuple):
    """The recording to which compiled code reports its buffers."""

    recorder: Recorder
    tracker: CompiledTracker


def find_recording() -> Recording | None:
    """Return the innermost active recording that follows compiled code, or None."""
    recorders = [mode for mode in reversed(dispatch_modes()) if isinstance(mode, Recorder)]
    recordings = (
        Recording(recorder, recorder.modules) for recorder in recorders if isinstance(recorder.modules, CompiledTracker)
    )
    return next(recordings, None)


def _iter_parts(tensors: Sequence[Any]) -> Iterator[Tensor]:
    return (part for tensor in tensors if isinstance(tensor, Tensor) for part in iter_plain_parts(tensor))

"""Records the live tensor bytes of one step of training.

with record_timeline(model, optimizer) as timeline:
    train_step()
report = timeline.report()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from quaver.memory.compiling.compiled import are_kernels_left_out
from quaver.memory.compiling.compiled_rows import CompiledRows, CompiledTracker, name_keepers, not_compiled
from quaver.memory.compiling.makers import follow
from quaver.memory.recording.modules import ModuleTracker, is_compiled, visible_modules
from quaver.memory.recording.recorder import Allocation, Recorder
from quaver.memory.recording.replay import added_bytes, report_of
from quaver.memory.recording.saved import tell_what_is_saved
from quaver.phases import watch_phases

COMPILED = "compiled code: not attributed"


class Timeline:
    """What was recorded of one step.

    Attributes:
        exact: whether every operator was seen. In compiled code none is, unless its kernels are left out, and then only
            what stays between steps is known.
    """

    def __init__(self, recorder: Recorder, compiled: set[str], *, exact: bool) -> None:
        self._recorder, self._compiled = recorder, compiled
        self.exact = exact

    def allocation(self, event: int) -> Allocation | None:
        """What an event was about; None for event 0, the beginning."""
        return self._recorder.log[event - 1].allocation if event else None

    def added_bytes(self, event: int) -> int:
        """What is alive after an event and was not there when the recording began."""
        return added_bytes(self._recorder, event)

    def report(self) -> dict[str, Any]:
        """The record as a JSON-able dict; docs/profiling.md describes its keys."""
        return name_keepers(report_of(self._recorder, note="" if self.exact else COMPILED), self._compiled)


@contextmanager
def record_timeline(
    model: nn.Module, optimizer: Optimizer | None = None, *, kept_scales: Iterable[Tensor] = ()
) -> Iterator[Timeline]:
    """Record every tensor that is alive inside the block, on the thread that runs it.

    Args:
        model: whose parameters and buffers are named, and in whose modules the tensors are made.
        optimizer: whose state is named, and whose step is a phase.
        kept_scales: float8 state that stays from step to step.
    Raises:
        RuntimeError: another recording is open.
    """
    follows_compiled = are_kernels_left_out()
    exact = follows_compiled or not any(is_compiled(module) for _, module in visible_modules(model))
    with ExitStack() as stack:
        open_phases = stack.enter_context(watch_phases())
        tracker = CompiledTracker(model) if follows_compiled else ModuleTracker(model)
        stack.enter_context(tracker)
        recorder = Recorder(tracker, open_phases)
        _name_residents(recorder, model, optimizer, kept_scales)
        if optimizer is not None:
            _follow_optimizer(stack, recorder, model, optimizer)
        if exact:  # else compiled code would not be used, or be compiled again
            hooks = tell_what_is_saved(recorder)
            if isinstance(tracker, CompiledTracker):
                stack.enter_context(follow(CompiledRows(recorder, tracker)))
                hooks = not_compiled(hooks)
            stack.enter_context(hooks)
            stack.enter_context(recorder)
        try:
            compiled = tracker.compiled if isinstance(tracker, CompiledTracker) else set()
            yield Timeline(recorder, compiled, exact=exact)
        finally:
            _name_gradients_and_state(recorder, model, optimizer)
            recorder.end()


def _name_residents(
    recorder: Recorder, model: nn.Module, optimizer: Optimizer | None, kept_scales: Iterable[Tensor]
) -> None:
    for name, module in model.named_modules():
        own = (*module.named_parameters(name, recurse=False), *module.named_buffers(name, recurse=False))
        for full_name, tensor in own:
            recorder.name("parameters", [tensor], name, parameter=full_name)
    recorder.name("kept_scales", kept_scales)
    _name_gradients_and_state(recorder, model, optimizer)


def _name_gradients_and_state(recorder: Recorder, model: nn.Module, optimizer: Optimizer | None) -> None:
    owners: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        owners[parameter] = module = name.rpartition(".")[0]
        if parameter.grad is not None:
            recorder.name("gradients", [parameter.grad], module)
    for trained, state in () if optimizer is None else optimizer.state.items():
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        recorder.name("optimizer_state", tensors, owners.get(trained, ""))


def _follow_optimizer(stack: ExitStack, recorder: Recorder, model: nn.Module, optimizer: Optimizer) -> None:
    def before(*_: Any) -> None:
        _name_gradients_and_state(recorder, model, None)
        recorder.in_optimizer = True

    def after(*_: Any) -> None:
        recorder.in_optimizer = False
        _name_gradients_and_state(recorder, model, optimizer)

    stack.callback(optimizer.register_step_pre_hook(before).remove)
    stack.callback(optimizer.register_step_post_hook(after).remove)

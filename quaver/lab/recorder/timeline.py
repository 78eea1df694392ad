"""Records the live tensor bytes of one training step by category.

    with record_timeline(model, optimizer) as timeline:
        train_step()
    report = timeline.report()

The block must contain the whole step. The report attributes each tensor to a module, an operator and a phase.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from quaver.lab.recorder.modules import ModuleTracker, is_compiled, iter_visible_modules
from quaver.lab.recorder.recorder import Allocation, Recorder
from quaver.lab.recorder.saved import record_saved_tensors
from quaver.lab.recorder.timeline_report import count_added_bytes, make_report
from quaver.runtime.phases import track_phases

COMPILED_NOTE = "compiled code: not attributed"


class Timeline:
    """The recording of one step."""

    def __init__(self, recorder: Recorder, *, is_exact: bool) -> None:
        self._recorder = recorder
        self.is_exact = is_exact
        """False if compiled code ran, whose operators no dispatch mode sees. The report then covers only tensors that
        stay between steps."""

    def get_allocation(self, event: int) -> Allocation | None:
        """Return the allocation that an event changed; None for event 0, the beginning of the recording."""
        return self._recorder.log[event - 1].allocation if event else None

    def count_added_bytes(self, event: int) -> int:
        """Return the bytes alive after an event that were not alive at the beginning of the recording."""
        return count_added_bytes(self._recorder, event)

    def report(self) -> dict[str, Any]:
        """Return the recording as a dict for JSON; docs/profiling.md describes its keys."""
        return make_report(self._recorder, note="" if self.is_exact else COMPILED_NOTE)


@contextmanager
def record_timeline(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    persistent_scales: Iterable[Tensor] = (),
    tracker: ModuleTracker | None = None,
) -> Iterator[Timeline]:
    """Record every tensor that is alive inside the block, on the thread that runs it.

    Args:
        model: the model whose parameters and buffers are categorized, and to whose modules tensors are attributed.
        optimizer: the optimizer whose state is categorized, and whose step is a phase.
        persistent_scales: float8 scaling state that persists across steps.
        tracker: a tracker that follows compiled code (`quaver.lab.memory.compiling`); by default a ModuleTracker.
    Raises:
        RuntimeError: another recording is open.
    """
    tracker = tracker or ModuleTracker(model)
    has_compiled = any(is_compiled(module) for _, module in iter_visible_modules(model))
    is_exact = tracker.follows_compiled_code or not has_compiled
    with ExitStack() as stack:
        open_float8_phases = stack.enter_context(track_phases())
        stack.enter_context(tracker)
        recorder = Recorder(tracker, open_float8_phases)
        _categorize_residents(recorder, model, optimizer, persistent_scales)
        if optimizer is not None:
            _follow_optimizer(stack, recorder, model, optimizer)
        if is_exact:  # otherwise a dispatch mode or hooks would make torch.compile fall back to eager code or recompile
            stack.enter_context(record_saved_tensors(recorder))
            stack.enter_context(recorder)
        try:
            yield Timeline(recorder, is_exact=is_exact)
        finally:
            _categorize_gradients_and_state(recorder, model, optimizer)
            recorder.end()


def _categorize_residents(
    recorder: Recorder, model: nn.Module, optimizer: Optimizer | None, persistent_scales: Iterable[Tensor]
) -> None:
    for name, module in model.named_modules():
        tensors = (*module.named_parameters(name, recurse=False), *module.named_buffers(name, recurse=False))
        for full_name, tensor in tensors:
            recorder.categorize("parameters", [tensor], name, parameter=full_name)
    recorder.categorize("persistent_scales", persistent_scales)
    _categorize_gradients_and_state(recorder, model, optimizer)


def _categorize_gradients_and_state(recorder: Recorder, model: nn.Module, optimizer: Optimizer | None) -> None:
    owners: dict[Tensor, str] = {}
    for name, parameter in model.named_parameters():
        owners[parameter] = module = name.rpartition(".")[0]
        if parameter.grad is not None:
            recorder.categorize("gradients", [parameter.grad], module)
    for weight, state in () if optimizer is None else optimizer.state.items():
        tensors = [value for value in state.values() if isinstance(value, Tensor)]
        recorder.categorize("optimizer_state", tensors, owners.get(weight, ""))


def _follow_optimizer(stack: ExitStack, recorder: Recorder, model: nn.Module, optimizer: Optimizer) -> None:
    def begin_step(*_: Any) -> None:
        _categorize_gradients_and_state(recorder, model, None)
        recorder.in_optimizer = True

    def end_step(*_: Any) -> None:
        recorder.in_optimizer = False
        _categorize_gradients_and_state(recorder, model, optimizer)

    stack.callback(optimizer.register_step_pre_hook(begin_step).remove)
    stack.callback(optimizer.register_step_post_hook(end_step).remove)

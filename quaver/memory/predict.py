"""Predicts the memory of a step of training: the step runs with fake tensors, and is recorded as a real one would be.

    prediction = explain(model, (tokens,), loss=lambda logits: logits.float().mean(), optimizer=torch.optim.AdamW)
    prediction.peak_bytes

The code that runs is the code that trains, so that what it keeps, casts, frees and computes again is what it is; only
the numbers are missing, and with them the time and the memory. A prediction is one of a CPU, or, with quaver's own
casts, kernels and matmuls, of a GPU that multiplies float8 (quaver/memory/faking/gpu_like.py). What is compiled is
predicted as compiled code, whose kernels are left out (quaver/memory/compiling/compiled.py).

Counted is what tensors take. What an operator allocates and frees before it returns is not: it is another on every
device (Note: scratch, in quaver/recorder/allocator.py).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from quaver.memory.compiling.compiled import (
    are_kernels_left_out,
    has_compiled_code,
    nothing_compiled,
    recompile,
    warm_up,
)
from quaver.memory.compiling.compiled_rows import CompiledTracker
from quaver.memory.faking.fakes import Fakes, fake_copies, fake_copy, fake_tensors
from quaver.memory.faking.gloo_buffers import GlooBuffers
from quaver.memory.faking.integers import check_integers
from quaver.memory.faking.target import is_for_a_gpu, predicting_for
from quaver.recorder.recorder import CATEGORIES
from quaver.recorder.timeline import record_timeline

_CPU = torch.device("cpu")
"""Where fake tensors are, whatever they stand for (gpu_like.py)."""


@dataclass(frozen=True)
class Prediction:
    """What a step of training would take, in bytes."""

    report: dict[str, Any] = field(repr=False)
    """As `quaver.memory.Timeline.report` returns it; docs/profiling.md describes its keys."""
    kept_bytes: int
    """What the first forward leaves for its backward, beside what stays between steps."""
    module_of_peak: str
    """The module in which the peak is reached; empty for none."""
    operator_of_peak: str
    """The operator that reaches it."""
    reads: int
    """How many numbers the step read back; each was answered by 1 (Note: numbers that are read)."""
    notes: tuple[str, ...] = ()
    """What was assumed, for an estimate."""

    @property
    def peak_bytes(self) -> int:
        """The most that is alive at a time, with parameters and optimizer state."""
        return int(self.report["peak_bytes"])

    @property
    def resident_bytes(self) -> int:
        """What stays between steps: parameters, buffers, optimizer state, kept scales, and the step's inputs."""
        return sum(self.report["resident_bytes"].values())

    @property
    def step_peak_bytes(self) -> int:
        """The most that a step adds to what stays between steps."""
        return self.peak_bytes - self.resident_bytes

    @property
    def saved_bytes(self) -> int:
        """The most that is kept for the backward at a time."""
        return int(self.report["saved_bytes"])

    @property
    def at_peak(self) -> list[dict[str, Any]]:
        """What is alive at the peak: rows of category, module, operator, phase, shape, dtype; the largest first."""
        return list(self.report["at_peak"])

    @property
    def saved_for_backward(self) -> list[dict[str, Any]]:
        """What is kept for the backward when that is most; rows as above, and who keeps it."""
        return list(self.report["saved_for_backward"])

    @property
    def phase_of_peak(self) -> str:
        """The phase in which the peak is reached."""
        return next((name for name, begin, end in self.report["spans"] if begin < self._event <= end), "other")

    def by(self, *keys: str) -> dict[tuple[str, ...], int]:
        """Bytes at the peak by one or more columns of `at_peak`, such as "category" or "module"; the largest first."""
        sums: dict[tuple[str, ...], int] = {}
        for row in self.at_peak:
            key = tuple(str(row[each]) for each in keys)
            sums[key] = sums.get(key, 0) + row["bytes"]
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak by category, in the order of CATEGORIES; those that there are."""
        sums = self.by("category")
        return {name: sums[(name,)] for name in CATEGORIES if (name,) in sums}

    def to_dict(self, *, timeline: bool = False) -> dict[str, Any]:
        """A JSON-able dict; with `timeline`, the bytes of each category after each event."""
        left_out = () if timeline else ("timeline", "columns")
        return {
            "peak_bytes": self.peak_bytes,
            "phase_of_peak": self.phase_of_peak,
            "module_of_peak": self.module_of_peak,
            "operator_of_peak": self.operator_of_peak,
            "resident_bytes": self.resident_bytes,
            "step_peak_bytes": self.step_peak_bytes,
            "kept_bytes": self.kept_bytes,
            "by_category": self.by_category,
            "reads_answered_by_1": self.reads,
            "assumptions": list(self.notes),
            "report": {key: value for key, value in self.report.items() if key not in left_out},
        }

    @property
    def _event(self) -> int:
        return int(self.report["peak_event"])


def explain(
    model: nn.Module,
    inputs: tuple[Any, ...],
    *,
    loss: Callable[[Any], Tensor] | None = None,
    optimizer: Callable[[Iterator[nn.Parameter]], Optimizer] | None = None,
    autocast: torch.dtype | None = None,
    estimate: bool = False,
    device: str = "cpu",
) -> Prediction:
    """Predict a step of training `model`, the second one, so that the optimizer has its state.

    Args:
        model: on any device, the meta device included; it may be converted, checkpointed or compiled. It is copied,
            and not touched; nothing of its size is allocated. If it, or a module of it, is compiled, what was compiled
            before in this process is compiled again when it is called next.
        inputs: the arguments of its forward. Of tensors only shape, strides and dtype count.
        loss: from the model's output to a scalar; None for the sum of a tensor's elements in float32.
        optimizer: makes the optimizer of the parameters it is given, such as `torch.optim.AdamW`; None for none.
        autocast: the dtype of an autocast around the forward and the loss, if any.
        estimate: of what cannot be predicted without numbers assume the most that it can be, and say so in `notes`.
        device: what the step would run on: "cpu", or "cuda" for an NVIDIA GPU that multiplies float8.
    Raises:
        NotImplementedError: an operator cannot be predicted without numbers, or a size depends on one; the model is
            sharded already, or a part of it is wrapped by `torch.compile`.
        ValueError: the loss is not a scalar that depends on a parameter, or another device.
    """
    compiled = has_compiled_code(model)
    with predicting_for(device), fake_tensors(compiled=compiled, estimate=estimate) as fakes:
        fake = fake_copy(_plain(model), fakes, _CPU)
        if compiled:
            recompile(fake, model)
        arguments = fake_copies(inputs, fakes, _CPU)
        made = None if optimizer is None else optimizer(fake.parameters())

        def step() -> None:
            with torch.autocast(_CPU.type, dtype=autocast, enabled=autocast is not None):
                output = (loss or _sum)(fake(*arguments))
            _check_loss(output)
            output.backward()
            del output
            if made is not None:
                made.step()
            fake.zero_grad(set_to_none=True)
            forget_gradients(arguments)

        return predict_step(step, fake, made, fakes)


def predict_step(
    step: Callable[[], None],
    model: nn.Module,
    optimizer: Optimizer | None,
    fakes: Fakes,
    *,
    kept_scales: Sequence[Tensor] = (),
) -> Prediction:
    """Record the last of two calls of `step`, inside of `fake_tensors`, where `model` and `optimizer` were made.

    Where it compiles, of three or more: one that compiles nothing comes before.

    Args:
        kept_scales: float8 state that stays from step to step.

    Python's garbage collector stands still meanwhile: a reference cycle that holds tensors shows as what it is.
    """
    warm_up(step)
    fakes.reads = 0
    if fakes.assumptions is not None:
        fakes.assumptions.notes.clear()
    with nothing_compiled():
        backend = None if is_for_a_gpu() else GlooBuffers()
        recorded = record_step(step, model, optimizer, kept_scales=kept_scales, around=backend)
        reads, assumed = fakes.reads, [] if fakes.assumptions is None else list(fakes.assumptions.notes)
        return replace(recorded, reads=reads, notes=(*assumed, *check_integers(step, fakes)))


def record_step(
    step: Callable[[], None],
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    kept_scales: Sequence[Tensor] = (),
    around: AbstractContextManager[Any] | None = None,
) -> Prediction:
    """Record one call of `step`, whose tensors may be real ones, inside of `around`, which the recorder sees.

    Of compiled code, which the recorder does not see into, there is no peak.
    """
    tracker = CompiledTracker(model) if are_kernels_left_out() else None
    with (
        _no_garbage_collection(),
        record_timeline(model, optimizer, kept_scales=kept_scales, tracker=tracker) as timeline,
        around or nullcontext(),
    ):
        step()
    report = timeline.report()
    backward = next((begin for phase, begin, _ in report["spans"] if phase == "backward"), None)
    kept_bytes = 0 if backward is None else timeline.added_bytes(backward)
    at_peak = timeline.allocation(report["peak_event"])
    module, operator = ("", "") if at_peak is None else (at_peak.module, at_peak.operator or "")
    return Prediction(report, kept_bytes, module, operator, reads=0)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _plain(model: nn.Module) -> nn.Module:
    """`model` without the wrapper of torch.compile; what `nn.Module.compile` did is not copied anyway."""
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    for name, module in model.named_modules():
        if isinstance(module, OptimizedModule):
            raise NotImplementedError(f"expected no module wrapped by torch.compile, got {name}; use {name}.compile()")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"expected a model on one device, got {name} with {parameter.placements}; explain it before it is "
                "sharded, or ask `quaver memory --ranks N` about a run of the trainer"
            )
    return model


def _sum(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(f"expected a model that returns a tensor, got {type(output).__name__}; give explain a loss")
    return output.sum(dtype=torch.float32)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        got = f"{list(loss.shape)}, requires_grad={loss.requires_grad}" if isinstance(loss, Tensor) else type(loss)
        raise ValueError(f"expected a loss of one number that depends on a parameter, got {got}")


def forget_gradients(arguments: Any) -> None:
    """Let go of the gradients of the tensors in a nest of arguments."""
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, Tensor):
            tensor.grad = None

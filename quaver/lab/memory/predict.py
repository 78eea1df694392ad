"""Predicts the memory of a training step: the step runs with fake tensors and is recorded like a real one.

    prediction = explain(model, (tokens,), loss=lambda logits: logits.float().mean(), optimizer=torch.optim.AdamW)
    prediction.peak_bytes

The training code itself runs, so it saves, casts, frees and recomputes as in a real step; only values are missing. The
prediction is for a CPU, or for a GPU with float8 matmuls (quaver/lab/memory/faking/gpu.py). Compiled modules are
predicted as compiled code without its kernels (quaver/lab/memory/compiling/compiled.py).

Memory of tensors is counted. An operator's scratch, which depends on the device, is not (Note: scratch, in
quaver/lab/recorder/allocator.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from quaver.lab.memory.compiling.compiled import (
    are_kernels_left_out,
    has_compiled_code,
    nothing_compiled,
    recompile,
    until_nothing_compiles,
)
from quaver.lab.memory.compiling.compiled_rows import CompiledTracker
from quaver.lab.memory.faking.fakes import Fakes, check_integers, fake_copies, fake_copy, fake_tensors
from quaver.lab.memory.faking.gloo_buffers import GlooBuffers
from quaver.lab.memory.faking.gpu import is_for_a_gpu, predicting_for
from quaver.lab.recorder.allocator import no_garbage_collection
from quaver.lab.recorder.recorder import CATEGORIES
from quaver.lab.recorder.timeline import record_timeline
from quaver.torch_private.compiler import OptimizedModule


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of a training step, in bytes."""

    report: dict[str, Any] = field(repr=False)
    """`quaver.lab.memory.Timeline.report`; docs/profiling.md describes its keys."""
    saved_by_forward_bytes: int
    """Bytes that the first forward saves for its backward, on top of those that stay between steps."""
    module_of_peak: str
    """The module that reaches the peak; empty for none."""
    operator_of_peak: str
    """The operator that reaches it."""
    reads: int
    """The number of values that the step read; each was 1 ([Note: values that are read] in fakes.py)."""
    notes: tuple[str, ...] = ()
    """Assumptions of an estimate."""

    @property
    def peak_bytes(self) -> int:
        """The highest sum of live bytes, with parameters and optimizer state."""
        return int(self.report["peak_bytes"])

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay between steps: parameters, buffers, optimizer state, persistent scales, the step's inputs."""
        return sum(self.report["resident_bytes"].values())

    @property
    def step_peak_bytes(self) -> int:
        """The peak without what stays between steps."""
        return self.peak_bytes - self.resident_bytes

    @property
    def saved_bytes(self) -> int:
        """The highest sum of bytes saved for backward."""
        return int(self.report["saved_bytes"])

    @property
    def at_peak(self) -> list[dict[str, Any]]:
        """Tensors alive at the peak: rows of category, module, operator, phase, shape, dtype; the largest first."""
        return list(self.report["at_peak"])

    @property
    def saved_for_backward(self) -> list[dict[str, Any]]:
        """Tensors saved for backward when that is most: rows as above, with the mechanism that saves them."""
        return list(self.report["saved_for_backward"])

    @property
    def phase_of_peak(self) -> str:
        """The phase of the peak."""
        event = self.report["peak_event"]
        return next((name for name, begin, end in self.report["spans"] if begin < event <= end), "other")

    def by(self, *keys: str) -> dict[tuple[str, ...], int]:
        """Bytes at the peak by one or more columns of `at_peak`, such as "category" or "module"; the largest first."""
        sums: dict[tuple[str, ...], int] = {}
        for row in self.at_peak:
            key = tuple(str(row[each]) for each in keys)
            sums[key] = sums.get(key, 0) + row["bytes"]
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak by category, in the order of CATEGORIES, without empty ones."""
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
            "saved_by_forward_bytes": self.saved_by_forward_bytes,
            "by_category": self.by_category,
            "reads_answered_by_1": self.reads,
            "assumptions": list(self.notes),
            "report": {key: value for key, value in self.report.items() if key not in left_out},
        }


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
    """Predict a training step of `model`: the second, in which the optimizer has its state.

    Args:
        model: on any device, also meta; it may be converted, checkpointed or compiled. A copy is used, and nothing of
            its size is allocated. If a module of it is compiled, all code compiled earlier in this process is compiled
            again at its next call.
        inputs: the arguments of its forward. Of tensors only shape, strides and dtype matter.
        loss: maps the model's output to a scalar; None for the sum in float32.
        optimizer: makes an optimizer from parameters, such as `torch.optim.AdamW`; None for none.
        autocast: the dtype of an autocast around the forward and the loss, if any.
        estimate: assume the largest result of operators whose results depend on values, and say so in `notes`.
        device: the device of the step: "cpu", or "cuda" for an NVIDIA GPU with float8 matmuls.
    Raises:
        NotImplementedError: an operator's result, or a size, depends on values; the model is sharded, or a part of it
            is wrapped by `torch.compile`.
        ValueError: the loss is not a scalar that depends on a parameter, or the device is unknown.
    """
    compiled = has_compiled_code(model)
    with predicting_for(device), fake_tensors(compiled=compiled, estimate=estimate) as fakes:
        fake = fake_copy(_plain(model), fakes)
        if compiled:
            recompile(fake, model)
        arguments = fake_copies(inputs, fakes)
        made = None if optimizer is None else optimizer(fake.parameters())

        def step() -> None:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                output = (loss or _sum)(fake(*arguments))
            _check_loss(output)
            output.backward()
            del output
            if made is not None:
                made.step()
            fake.zero_grad(set_to_none=True)
            _forget_gradients(arguments)

        return predict_step(step, fake, made, fakes)


def predict_step(
    step: Callable[[], None],
    model: nn.Module,
    optimizer: Optimizer | None,
    fakes: Fakes,
    *,
    persistent_scales: Sequence[Tensor] = (),
    first_step: Callable[[], None] | None = None,
) -> Prediction:
    """Record the second step, inside `fake_tensors`, where `model` and `optimizer` were made.

    A later one is recorded while steps compile something: the compiler's own tensors are not the step's. Python's
    garbage collector is off during the recording, so that a reference cycle that holds tensors shows.

    Args:
        persistent_scales: float8 scaling state that persists across steps.
        first_step: a shorter step after which the same states exist; `step` by default.
    """
    backend = None if is_for_a_gpu() else GlooBuffers()

    def recorded() -> Prediction:
        fakes.reads = 0
        if fakes.assumptions is not None:
            fakes.assumptions.notes.clear()
        recorded = record_step(step, model, optimizer, persistent_scales=persistent_scales, around=backend)
        notes = () if fakes.assumptions is None else tuple(fakes.assumptions.notes)
        return replace(recorded, reads=fakes.reads, notes=notes)

    (first_step or step)()
    prediction = until_nothing_compiles(recorded)
    with nothing_compiled():
        return replace(prediction, notes=(*prediction.notes, *check_integers(step, fakes)))


def record_step(
    step: Callable[[], None],
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    persistent_scales: Sequence[Tensor] = (),
    around: AbstractContextManager[Any] | None = None,
) -> Prediction:
    """Record one call of `step`, with fake or real tensors, inside `around`, whose allocations are recorded.

    With real compiled code the report has no peak.
    """
    tracker = CompiledTracker(model) if are_kernels_left_out() else None
    with (
        no_garbage_collection(),
        record_timeline(model, optimizer, persistent_scales=persistent_scales, tracker=tracker) as timeline,
        around or nullcontext(),
    ):
        step()
    report = timeline.report()
    backward = next((begin for phase, begin, _ in report["spans"] if phase == "backward"), None)
    saved_bytes = 0 if backward is None else timeline.added_bytes(backward)
    at_peak = timeline.allocation(report["peak_event"])
    module, operator = ("", "") if at_peak is None else (at_peak.module, at_peak.operator or "")
    return Prediction(report, saved_bytes, module, operator, reads=0)


def _plain(model: nn.Module) -> nn.Module:
    """`model` without a wrapper of torch.compile."""
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


def _forget_gradients(arguments: Any) -> None:
    """Drop the gradients of the tensors in a nest of arguments."""
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, Tensor):
            tensor.grad = None

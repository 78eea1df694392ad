"""Predicts the memory of a training step: the step runs with fake tensors and is recorded like a real one.

    prediction = predict_step_memory(model, (tokens,), loss=lambda logits: logits.float().mean(), optimizer=AdamW)
    prediction.peak_bytes

The training code itself runs, so it saves, casts, frees and recomputes as in a real step. Only the values are missing.
The prediction is for a CPU or a GPU with float8 matmuls (quaver/lab/memory/devices/gpu.py). Compiled modules run as
compiled code without kernels (quaver/lab/memory/compiling/compiled.py).

The prediction counts the memory of tensors. It excludes an operator's scratch, which depends on the device: see
[Note: scratch] in quaver/lab/recorder/allocator.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from quaver.lab.memory.compiling.compiled import (
    has_compiled_code,
    refuse_to_compile,
    repeat_until_nothing_compiles,
)
from quaver.lab.memory.compiling.compiled_tracker import CompiledTracker
from quaver.lab.memory.devices.gloo_buffers import GlooBuffers
from quaver.lab.memory.faking.fakes import (
    FakeMode,
    check_sizes_ignore_integers,
    fake_tensors,
    make_fake_copies,
    make_fake_copy,
)
from quaver.lab.recorder.allocator import pause_garbage_collection
from quaver.lab.recorder.modules import ModuleTracker
from quaver.lab.recorder.recorder import CATEGORIES
from quaver.lab.recorder.timeline import record_timeline
from quaver.torch_private.compiler import OptimizedModule, compile_like


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of a training step, in bytes."""

    report: dict[str, Any] = field(repr=False)
    """`quaver.lab.memory.Timeline.report`; docs/profiling.md describes its keys."""
    saved_by_forward_bytes: int
    """Bytes that the first forward saves for its backward, on top of the resident bytes."""
    module_of_peak: str
    """The module that reaches the peak; empty for code outside of modules."""
    operator_of_peak: str
    """The operator that reaches the peak."""
    num_reads: int
    """The number of values that the step read. Each was 1 ([Note: values that are read] in fakes.py)."""
    notes: tuple[str, ...] = ()
    """The assumptions of an estimate."""

    @property
    def peak_bytes(self) -> int:
        """The highest sum of live bytes, parameters and optimizer state included."""
        return int(self.report["peak_bytes"])

    @property
    def resident_bytes(self) -> int:
        """Bytes that stay between steps: parameters, buffers, optimizer state, persistent scales, the step's inputs."""
        return sum(self.report["resident_bytes"].values())

    @property
    def step_peak_bytes(self) -> int:
        """The peak without the resident bytes."""
        return self.peak_bytes - self.resident_bytes

    @property
    def saved_bytes(self) -> int:
        """The highest sum of bytes saved for backward."""
        return int(self.report["saved_bytes"])

    @property
    def at_peak(self) -> list[dict[str, Any]]:
        """Tensors alive at the peak, the largest first: rows of category, module, operator, phase, shape and dtype."""
        return list(self.report["at_peak"])

    @property
    def saved_for_backward(self) -> list[dict[str, Any]]:
        """Tensors saved for backward when they take the most bytes: rows as above, with the saving mechanism."""
        return list(self.report["saved_for_backward"])

    @property
    def phase_of_peak(self) -> str:
        """The phase of the peak."""
        event = self.report["peak_event"]
        return next((name for name, start, end in self.report["spans"] if start < event <= end), "other")

    def sum_bytes_by(self, *keys: str) -> dict[tuple[str, ...], int]:
        """Return the bytes at the peak by columns of `at_peak`, such as "category" or "module", the largest first."""
        sums: dict[tuple[str, ...], int] = {}
        for row in self.at_peak:
            values = tuple(str(row[key]) for key in keys)
            sums[values] = sums.get(values, 0) + row["bytes"]
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    @property
    def by_category(self) -> dict[str, int]:
        """Bytes at the peak by category, in the order of CATEGORIES, without empty ones."""
        sums = self.sum_bytes_by("category")
        return {name: sums[(name,)] for name in CATEGORIES if (name,) in sums}

    def to_dict(self, *, timeline: bool = False) -> dict[str, Any]:
        """Return a dict for JSON. With `timeline` it includes the bytes of each category after each event."""
        excluded = () if timeline else ("timeline", "columns")
        return {
            "peak_bytes": self.peak_bytes,
            "phase_of_peak": self.phase_of_peak,
            "module_of_peak": self.module_of_peak,
            "operator_of_peak": self.operator_of_peak,
            "resident_bytes": self.resident_bytes,
            "step_peak_bytes": self.step_peak_bytes,
            "saved_by_forward_bytes": self.saved_by_forward_bytes,
            "by_category": self.by_category,
            "reads_answered_by_1": self.num_reads,
            "assumptions": list(self.notes),
            "report": {key: value for key, value in self.report.items() if key not in excluded},
        }


def predict_step_memory(
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
        model: a model on any device, including meta. It may be converted, checkpointed or compiled. A copy with fake
            tensors is used, so nothing of its size is allocated. If one of its modules is compiled, all code compiled
            earlier in this process is compiled again at its next call.
        inputs: the arguments of its forward. Only the shape, strides and dtype of tensors matter.
        loss: a function from the model's output to a scalar; None for the sum in float32.
        optimizer: a function from parameters to an optimizer, such as `torch.optim.AdamW`; None for no optimizer.
        autocast: the dtype of an autocast around the forward and the loss, if any.
        estimate: assume the largest result of operators whose results depend on values, and say so in `notes`.
        device: the device of the step: "cpu", or "cuda" for an NVIDIA GPU with float8 matmuls.
    Raises:
        NotImplementedError: an operator's result, or a size, depends on values; the model is sharded, or a part of it
            is wrapped by `torch.compile`.
        ValueError: the loss is not a scalar that depends on a parameter, the device is unknown, autocast does not cast
            to the dtype, `inputs` is a single tensor, or `optimizer` an optimizer.
    """
    if not isinstance(inputs, tuple | list):
        raise ValueError(f"expected inputs as a tuple of the forward's arguments, got {type(inputs).__name__}")
    if isinstance(optimizer, Optimizer):
        raise ValueError(
            f"expected a function from parameters to an optimizer, got one; give {type(optimizer).__name__}"
        )
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"expected an autocast to bfloat16 or float16, or None, got {autocast!r}")
    compiled = has_compiled_code(model)
    with fake_tensors(device, compiled=compiled, estimate=estimate) as fake_mode:
        fake = make_fake_copy(_unwrap(model), fake_mode)
        if compiled:
            compile_like(fake, model)
        arguments = make_fake_copies(inputs, fake_mode)
        fake_optimizer = None if optimizer is None else optimizer(fake.parameters())

        def run_step() -> None:
            with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
                output = (loss or _sum)(fake(*arguments))
            _check_loss(output)
            output.backward()
            del output
            if fake_optimizer is not None:
                fake_optimizer.step()
            fake.zero_grad(set_to_none=True)
            for tensor in tree_leaves(arguments):
                if isinstance(tensor, Tensor):
                    tensor.grad = None

        return record_fake_step(run_step, fake, fake_optimizer, fake_mode)


def record_fake_step(
    run_step: Callable[[], None],
    model: nn.Module,
    optimizer: Optimizer | None,
    fake_mode: FakeMode,
    *,
    persistent_scales: Sequence[Tensor] = (),
    run_first_step: Callable[[], None] | None = None,
) -> Prediction:
    """Record the second step, inside the `fake_tensors` block in which `model` and `optimizer` were constructed.

    A step that compiles something is recorded again, because the recording then has the compiler's tensors. Python's
    garbage collector is off during the recording, so that reference cycles keep their tensors alive.

    Args:
        persistent_scales: float8 scaling state that persists across steps.
        run_first_step: runs a shorter step that creates the same states; `run_step` by default.
    """
    gloo_buffers = GlooBuffers() if fake_mode.device == "cpu" else None

    def record() -> Prediction:
        fake_mode.num_reads = 0
        if fake_mode.assumptions is not None:
            fake_mode.assumptions.notes.clear()
        tracker = CompiledTracker(model) if fake_mode.runs_compiled_code else None
        prediction = record_step(
            run_step, model, optimizer, persistent_scales=persistent_scales, tracker=tracker, gloo_buffers=gloo_buffers
        )
        notes = () if fake_mode.assumptions is None else tuple(fake_mode.assumptions.notes)
        return replace(prediction, num_reads=fake_mode.num_reads, notes=notes)

    (run_first_step or run_step)()
    prediction = repeat_until_nothing_compiles(record)
    with refuse_to_compile() if fake_mode.runs_compiled_code else nullcontext():
        return replace(prediction, notes=(*prediction.notes, *check_sizes_ignore_integers(run_step, fake_mode)))


def record_step(
    run_step: Callable[[], None],
    model: nn.Module,
    optimizer: Optimizer | None,
    *,
    persistent_scales: Sequence[Tensor] = (),
    tracker: ModuleTracker | None = None,
    gloo_buffers: GlooBuffers | None = None,
) -> Prediction:
    """Record one call of `run_step` with fake or real tensors. With real compiled code the report has no peak.

    Args:
        tracker: as for `record_timeline`.
        gloo_buffers: allocates the buffers of Gloo, which are recorded too.
    """
    with (
        pause_garbage_collection(),
        record_timeline(model, optimizer, persistent_scales=persistent_scales, tracker=tracker) as timeline,
        gloo_buffers or nullcontext(),
    ):
        run_step()
    report = timeline.report()
    backward = next((start for phase, start, _ in report["spans"] if phase == "backward"), None)
    saved_bytes = 0 if backward is None else timeline.count_added_bytes(backward)
    at_peak = timeline.get_allocation(report["peak_event"])
    module, operator = ("", "") if at_peak is None else (at_peak.module, at_peak.operator or "")
    return Prediction(report, saved_bytes, module, operator, num_reads=0)


def _unwrap(model: nn.Module) -> nn.Module:
    """Remove a wrapper of torch.compile, and check that the modules inside can be predicted."""
    if isinstance(model, OptimizedModule):
        model = model._orig_mod
    for name, module in model.named_modules():
        if isinstance(module, OptimizedModule):
            raise NotImplementedError(f"expected no module wrapped by torch.compile, got {name}; use {name}.compile()")
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise NotImplementedError(
                f"expected a model on one device, got {name} with {parameter.placements}; predict it before it is "
                "sharded, or ask `quaver memory --ranks N` about a run of the trainer"
            )
    return model


def _sum(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise ValueError(f"expected a model that returns a tensor, got {type(output).__name__}; give a loss")
    return output.sum(dtype=torch.float32)


def _check_loss(loss: Any) -> None:
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        is_tensor = isinstance(loss, Tensor)
        described = f"{list(loss.shape)}, requires_grad={loss.requires_grad}" if is_tensor else type(loss)
        raise ValueError(f"expected a loss of one number that depends on a parameter, got {described}")

"""A transformer block in training: time, tokens per second and memory of a step, per recipe against bfloat16.

A step is forward, backward and fused AdamW of one block as `quaver train` builds it (quaver/bench/modules.py); nothing
keeps weights cast from step to step. Delayed scales are brought forward in each step. All precisions of a mode are in
memory at once and take turns.

Memory is that of one more step after the timed ones, by quaver/recorder/allocator.py: on a CPU every allocation and
release, exactly; on a GPU the allocator's own peak.

    resident   parameters, buffers, optimizer state
    peak       resident, and the most that the step adds to it: activations, gradients, temporaries
    tensors    the same without what an operation takes and gives back before it returns, such as a matmul library's
               packed operands; a GPU's allocator does not tell
    kept       what is alive between forward and backward beyond resident
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from quaver.bench.harness import Timing, time_alternating
from quaver.bench.modules import BFLOAT16, Batch, Step, build_subject, make_direction, make_sources
from quaver.bench.results import collecting, result
from quaver.recorder.allocator import Usage, measure_usage
from quaver.trainer.config import Model
from quaver.trainer.memory import storage_bytes

MODES = ("eager", "compiled")

_RESIDENT_BYTES = 16
"""Of a parameter: itself, its gradient, and AdamW's two moments, in float32."""


@dataclass(frozen=True)
class Row:
    """One precision in one mode. Ratios are to bfloat16 in the same mode."""

    mode: str
    library: str
    recipe: str
    timing: Timing
    tokens_per_s: float
    time_over_bfloat16: float
    resident_bytes: int
    peak_bytes: int
    tensor_peak_bytes: int | None
    kept_bytes: int
    peak_over_bfloat16: float


def check_fits(model: Model, precisions: int, device: torch.device) -> None:
    """Refuse blocks that are too many for a GPU, before the first is made.

    Raises:
        ValueError: their parameters, gradients and moments alone take more than its memory.
    """
    if device.type != "cuda":
        return
    attention = 2 * model.dim * (model.n_heads + model.n_kv_heads) * model.head_dim
    needed = precisions * _RESIDENT_BYTES * (attention + 3 * model.dim * model.hidden_dim)
    available = torch.cuda.get_device_properties(device).total_memory
    if needed > available:
        raise ValueError(
            f"{precisions} blocks with their gradients and optimizers take {needed / 2**30:.0f} GiB, and this GPU has "
            f"{available / 2**30:.0f}; name fewer --recipes, or give a --divisor"
        )


def bench_block(
    name: str,
    model: Model,
    batch: Batch,
    recipes: Sequence[str],
    modes: Sequence[str],
    *,
    device: torch.device,
    rounds: int,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the benchmark on a block of `model`, which is called `name`; returns what `results.result` makes of it."""
    precisions = [BFLOAT16, *(f"quaver {recipe}" for recipe in recipes)]
    with collecting() as collected:
        for mode in modes:
            report(f"{name}, {batch.tokens} tokens, {mode}")
            torch.compiler.reset()
            collected.rows += _rows_of(model, batch, precisions, mode, device, rounds)
    shape = {"sequences": batch.sequences, "seq_len": batch.seq_len, "tokens": batch.tokens}
    sizes = {each: getattr(model, each) for each in ("dim", "n_heads", "n_kv_heads", "hidden_dim")}
    return result("block", collected, device=device, model={"name": name, **sizes}, batch=shape)


def _rows_of(
    model: Model, batch: Batch, precisions: Sequence[str], mode: str, device: torch.device, rounds: int
) -> list[Row]:
    """Those of one mode, whose blocks live no longer than this call."""
    steps = _steps(model, batch, precisions, mode, device)
    timings = time_alternating(steps, device, rounds=rounds)
    memory = {precision: _measure(step, device) for precision, step in steps.items()}
    return [_row(mode, each, timings, memory, batch) for each in precisions]


def _steps(model: Model, batch: Batch, precisions: Sequence[str], mode: str, device: torch.device) -> dict[str, Step]:
    sources = make_sources("block", model, batch, device)
    direction = make_direction("block", model, batch, device)
    compiled = mode == "compiled"

    def step(precision: str) -> Step:
        subject = build_subject("block", model, precision, seq_len=batch.seq_len, device=device, compiled=compiled)
        return Step(subject, sources, direction)

    return {precision: step(precision) for precision in precisions}


@dataclass(frozen=True)
class _Memory:
    resident_bytes: int
    usage: Usage

    @property
    def peak_bytes(self) -> int:
        return self.resident_bytes + self.usage.peak_bytes

    @property
    def tensor_peak_bytes(self) -> int | None:
        added = self.usage.tensor_peak_bytes
        return None if added is None else self.resident_bytes + added


def _measure(step: Step, device: torch.device) -> _Memory:
    with measure_usage(device) as measured:
        step(measured.mark)
    states = chain.from_iterable(state.values() for state in step.optimizer.state.values())
    moments = (each for each in states if isinstance(each, Tensor))
    resident = storage_bytes(chain(step.subject.parameters(), step.subject.buffers(), moments))
    return _Memory(resident, measured.usage)


def _row(mode: str, precision: str, timings: dict[str, Timing], memory: dict[str, _Memory], batch: Batch) -> Row:
    library, _, recipe = precision.partition(" ")
    timing, ours, plain = timings[precision], memory[precision], memory[BFLOAT16]
    return Row(
        mode=mode,
        library=library,
        recipe=recipe,
        timing=timing,
        tokens_per_s=batch.tokens / (1e-6 * timing.median_us),
        time_over_bfloat16=timing.median_us / timings[BFLOAT16].median_us,
        resident_bytes=ours.resident_bytes,
        peak_bytes=ours.peak_bytes,
        tensor_peak_bytes=ours.tensor_peak_bytes,
        kept_bytes=ours.usage.kept_bytes,
        peak_over_bfloat16=ours.peak_bytes / plain.peak_bytes,
    )

"""A transformer block in training: time, tokens per second and memory of a step, per recipe against bfloat16.

A step is forward, backward and fused AdamW of one block as `quaver train` builds it (modules.py). Each step casts the
weights and updates delayed scales. All precisions of a mode are in memory at once and take turns. Memory is that of one
more step after the timed ones (quaver/recorder/allocator.py): on a CPU every allocation and release, exactly; on a GPU
the allocator's own peak.

    resident   parameters, buffers, optimizer state
    peak       resident, and the most that the step adds to it: activations, gradients, temporaries
    tensors    the same without scratch: what an operation allocates and frees before it returns, such as a matmul
               library's packed operands; unknown on a GPU
    kept       alive between forward and backward, beyond resident
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from typing import Any

import torch
from torch import Tensor

from quaver.bench.harness import time_alternating
from quaver.bench.modules import Batch, Step, build_subject, make_direction, make_sources, sizes_of
from quaver.bench.results import BFLOAT16, Row, Setup, contestant_rows, run_cases
from quaver.recorder.allocator import measure_usage
from quaver.trainer.config import Model
from quaver.trainer.memory import storage_bytes

_RESIDENT_BYTES = 16
"""Of a parameter: itself, its gradient, and AdamW's two moments, in float32."""


def check_fits(model: Model, precisions: int, device: torch.device) -> None:
    """Refuse more blocks than a GPU holds, before the first is built.

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
    setup: Setup, name: str, model: Model, batch: Batch, recipes: Sequence[str], modes: Sequence[str]
) -> dict[str, Any]:
    """Train a block of `model`, which is called `name`; returns `results.result` of a row per mode and precision."""

    def rows_of(_name: str, _tokens: str, mode: str) -> list[Row]:
        return _rows_of(setup, model, batch, [BFLOAT16, *(f"quaver {recipe}" for recipe in recipes)], mode)

    cases = product([name], [f"{batch.tokens} tokens"], modes)
    return run_cases("block", setup, cases, rows_of, **sizes_of(name, model, batch))


def _rows_of(setup: Setup, model: Model, batch: Batch, precisions: Sequence[str], mode: str) -> list[Row]:
    device = setup.device
    sources, direction = make_sources("block", model, batch, device), make_direction("block", model, batch, device)
    steps = {}
    for precision in precisions:
        subject = build_subject(
            "block", model, precision, seq_len=batch.seq_len, device=device, compiled=mode == "compiled"
        )
        steps[precision] = Step(subject, sources, direction)
    timings = time_alternating(steps, device, rounds=setup.rounds)
    memory = {precision: _measure(step, device) for precision, step in steps.items()}
    rows = []
    for precision, row in contestant_rows(timings).items():
        ours = memory[precision]
        per_s = batch.tokens / (1e-6 * timings[precision].median_us)
        ratio = ours["peak_bytes"] / memory[BFLOAT16]["peak_bytes"]
        rows.append({"mode": mode, **row, "tokens_per_s": per_s, **ours, "peak_over_bfloat16": ratio})
    return rows


def _measure(step: Step, device: torch.device) -> Row:
    with measure_usage(device) as measured:
        step(measured.mark)
    states = chain.from_iterable(state.values() for state in step.optimizer.state.values())
    moments = (each for each in states if isinstance(each, Tensor))
    resident = storage_bytes(chain(step.subject.parameters(), step.subject.buffers(), moments))
    usage = measured.usage
    tensor_peak = usage.tensor_peak_bytes
    return {
        "resident_bytes": resident,
        "peak_bytes": resident + usage.peak_bytes,
        "tensor_peak_bytes": None if tensor_peak is None else resident + tensor_peak,
        "kept_bytes": usage.saved_bytes,
    }

"""Where the time of a linear, a feed-forward or a block goes: a Chrome trace per precision, tables by group and name.

Profiled are forward and backward, without an optimizer, of the modules of modules.py, after a warm-up: bfloat16,
quaver's recipes, and torchao if installed. On a GPU a row's time is that of its kernels, copies and fills; on a CPU it
is the own time of operators and named ranges, and Python and autograd are the own time of `forward` and `backward`.
groups.py defines the groups. A profiler lengthens short operators: compare shares and counts here, and times in
`quaver bench`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch._inductor import config as inductor_config
from torch.profiler import record_function

from quaver.bench.groups import GROUPS, group_of_kernel, group_of_ranges
from quaver.bench.modules import Batch, Step, build_subject, make_direction, make_sources, sizes_of
from quaver.bench.results import Row, Setup, run_cases
from quaver.bench.trace import Kernel, Range, Trace, record_trace
from quaver.delayed import sync_float8_amax_and_scale_history
from quaver.trainer.config import Model

FORWARD, BACKWARD = "forward", "backward"

_WARMUP = 3


@dataclass(frozen=True)
class Work:
    """All work of one name in one direction: calls and microseconds of one forward and backward."""

    name: str
    group: str
    direction: str
    calls: float
    us: float
    share: float


def profile_module(
    setup: Setup,
    kind: str,
    name: str,
    model: Model,
    batch: Batch,
    precisions: Sequence[str],
    modes: Sequence[str],
    *,
    folder: Path,
) -> dict[str, Any]:
    """Profile a module of `model`, which is called `name`, in each mode and precision ("quaver RECIPE").

    Writes a trace of `setup.rounds` forwards and backwards for each into `folder`; returns `results.result` of their
    tables.

    Raises:
        RuntimeError: the profiler sees no work of a GPU.
    """

    def rows_of(_module: str, _tokens: str, mode: str, precision: str) -> list[Row]:
        path = folder / f"{kind}-{mode}-{precision.replace(' ', '-')}.json.gz"
        with inductor_config.patch("cpp.enable_kernel_profile", True):  # names a CPU's compiled loops
            call = _call(kind, model, batch, precision, mode, setup.device)
        trace = record_trace(lambda: [call() for _ in range(setup.rounds)], setup.device, path)
        return [_row(mode, precision, path, trace, setup.rounds, is_cuda=setup.device.type == "cuda")]

    cases = product([f"{kind} of {name}"], [f"{batch.tokens} tokens"], modes, precisions)
    return run_cases("profile", setup, cases, rows_of, kind=kind, **sizes_of(name, model, batch))


def _call(kind: str, model: Model, batch: Batch, precision: str, mode: str, device: torch.device) -> Callable[[], None]:
    """Forward and backward in named ranges, warmed up."""
    sources, direction = make_sources(kind, model, batch, device), make_direction(kind, model, batch, device)
    compiled = mode == "compiled"
    subject = build_subject(kind, model, precision, seq_len=batch.seq_len, device=device, compiled=compiled)
    step = Step(subject, sources, direction)

    def call() -> None:
        source = sources.next()
        with record_function(FORWARD):
            loss = step.forward(source)
        with record_function(BACKWARD):
            loss.backward()
        source.grad = None
        subject.zero_grad(set_to_none=True)

    for _ in range(_WARMUP):
        call()
        sync_float8_amax_and_scale_history(subject)
    return call


def _row(mode: str, precision: str, path: Path, trace: Trace, repeats: int, *, is_cuda: bool) -> Row:
    """The trace's file, the time of one forward and backward by group, and its work by name, the longest first."""
    if is_cuda:
        pieces = [_of_kernel(each) for each in trace.kernels]
    else:
        pieces = [piece for piece in map(_of_range, trace.ranges) if piece]
    if not pieces:
        raise RuntimeError(
            "the profiler saw no kernels of this GPU; it needs CUPTI (or roctracer) and the right to use it"
        )
    work = _added_up(pieces, repeats)
    group_us = {group: sum(each.us for each in work if each.group == group) for group in GROUPS}
    total = sum(group_us.values())
    library, _, recipe = precision.partition(" ")
    return {
        "mode": mode,
        "library": library,
        "recipe": recipe,
        "trace": path.name,
        "total_us": total,
        "group_us": group_us,
        "group_share": {group: us / total if total else 0.0 for group, us in group_us.items()},
        "work": [asdict(each) for each in work],
    }


_Piece = tuple[str, str, str, float]
"""Name, group, direction, microseconds."""


def _of_kernel(kernel: Kernel) -> _Piece:
    around = kernel.launched_in.names_outwards() if kernel.launched_in else []
    by_range = group_of_ranges(around)
    group = by_range if by_range != "other" else group_of_kernel(kernel.name)
    # Autograd runs a GPU's backward on its own thread, outside of the caller's range.
    return kernel.name, group, FORWARD if FORWARD in around else BACKWARD, kernel.us


def _of_range(each: Range) -> _Piece | None:
    """None outside of forward and backward."""
    around = each.names_outwards()
    direction = next((name for name in around if name in (FORWARD, BACKWARD)), None)
    return None if direction is None else (each.name, group_of_ranges(around), direction, each.self_us)


def _added_up(pieces: Sequence[_Piece], repeats: int) -> list[Work]:
    times: dict[tuple[str, str, str], list[float]] = {}
    for name, group, direction, us in pieces:
        times.setdefault((name, group, direction), []).append(us)
    total = sum(map(sum, times.values()))
    work = [
        Work(*key, len(each) / repeats, sum(each) / repeats, sum(each) / total if total else 0.0)
        for key, each in times.items()
    ]
    return sorted(work, key=lambda each: -each.us)

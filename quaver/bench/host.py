"""What a linear costs the host, forward and backward, at a size where nothing else costs anything.

    host time    median time until the host has queued all work, without waiting for the device. On a CPU the work is
                 in it, which at this size is little
    operations   calls that PyTorch dispatches below autograd, views included, in one eager forward and backward. The
                 casts of quaver's C extension and kernels in Triton are not among them. Compiled code makes calls of
                 its own, which are not counted
    kernels      kernels, copies and fills that one forward and backward launch on a GPU; a CPU launches none

The contestants are those of `quaver bench linear`: `nn.Linear`, each recipe, torchao where it is installed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.bench.harness import Timing, time_alternating
from quaver.bench.linear import linear_steps
from quaver.bench.results import collecting, result
from quaver.bench.shapes import Shape
from quaver.bench.trace import count_kernels


@dataclass(frozen=True)
class Row:
    """One contestant. `operations_by_name` says what `operations` are; both are None for compiled code."""

    shape: str
    mode: str
    library: str
    recipe: str
    timing: Timing
    time_over_bfloat16: float
    operations: int | None
    kernels: int | None
    operations_by_name: dict[str, int] | None


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_operations(call: Callable[[], object]) -> dict[str, int]:
    """How often one call of eager code dispatches each operation, the most frequent first."""
    with _Operations() as operations:
        call()
    return dict(operations.counts.most_common())


def bench_host(
    shape: Shape,
    recipes: list[str],
    modes: Sequence[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    with_torchao: bool,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the benchmark; returns what `results.result` makes of its rows."""
    with collecting() as collected:
        for mode in modes:
            report(f"{shape}, {mode}")
            torch.compiler.reset()
            steps = linear_steps(shape, recipes, mode, device, dtype, with_torchao)
            timings = time_alternating(steps, device, rounds=rounds, until_done=False)
            collected.rows += [_row(shape, mode, name, step, timings, device) for name, step in steps.items()]
    return result("host", collected, device=device, with_torchao=with_torchao, dtype=str(dtype))


def _row(
    shape: Shape,
    mode: str,
    name: str,
    step: Callable[[], None],
    timings: dict[str, Timing],
    device: torch.device,
) -> Row:
    library, _, recipe = name.partition(" ")
    operations = count_operations(step) if mode == "eager" else None
    return Row(
        shape=str(shape),
        mode=mode,
        library=library,
        recipe=recipe,
        timing=timings[name],
        time_over_bfloat16=timings[name].median_us / timings["bfloat16"].median_us,
        operations=None if operations is None else sum(operations.values()),
        kernels=count_kernels(step, device),
        operations_by_name=operations,
    )

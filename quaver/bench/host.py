"""The host time of a linear, forward and backward, at a size where the work itself takes next to nothing.

    host time    median time until the host has queued all work; on a CPU the work, little at this size, is included
    operations   calls that PyTorch dispatches below autograd in one eager forward and backward, views included; not
                 quaver's C extension, nor Triton kernels, nor calls inside compiled code
    kernels      kernels, copies and fills that one forward and backward launch on a GPU; a CPU launches none

The contestants are those of `quaver bench linear`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from quaver.bench.harness import time_alternating
from quaver.bench.linear import linear_steps
from quaver.bench.results import Row, Setup, contestant_rows, run_cases
from quaver.bench.shapes import Shape
from quaver.bench.trace import count_kernels


class _Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_operations(call: Callable[[], object]) -> dict[str, int]:
    """How often one eager call dispatches each operation, the most frequent first."""
    with _Operations() as operations:
        call()
    return dict(operations.counts.most_common())


def bench_host(setup: Setup, shape: Shape, recipes: Sequence[str], modes: Sequence[str]) -> dict[str, Any]:
    """Run the benchmark; returns `results.result` of a row for each mode and contestant.

    `operations` is the sum of `operations_by_name`; both are None in compiled code, `kernels` is None on a CPU.
    """

    def rows_of(shape: Shape, mode: str) -> list[Row]:
        steps = linear_steps(setup, shape, recipes, mode)
        timings = time_alternating(steps, setup.device, rounds=setup.rounds, until_done=False)
        made = []
        for name, row in contestant_rows(timings).items():
            operations = count_operations(steps[name]) if mode == "eager" else None
            counts = {
                "operations": None if operations is None else sum(operations.values()),
                "kernels": count_kernels(steps[name], setup.device),
                "operations_by_name": operations,
            }
            made.append({"shape": str(shape), "mode": mode, **row, **counts})
        return made

    return run_cases("host", setup, product([shape], modes), rows_of, dtype=str(setup.dtype))

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
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.bench.harness import time_alternating
from quaver.bench.linear import linear_steps
from quaver.bench.results import collecting, contestant_rows, result
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
    """Run the benchmark; returns `results.result` of a row for each mode and contestant.

    `operations` is the sum of `operations_by_name`; both are None in compiled code, `kernels` is None on a CPU.
    """
    with collecting() as collected:
        for mode in modes:
            report(f"{shape}, {mode}")
            torch.compiler.reset()
            steps = linear_steps(shape, recipes, mode, device, dtype, with_torchao)
            timings = time_alternating(steps, device, rounds=rounds, until_done=False)
            for name, row in contestant_rows(timings).items():
                operations = count_operations(steps[name]) if mode == "eager" else None
                counts = {
                    "operations": None if operations is None else sum(operations.values()),
                    "kernels": count_kernels(steps[name], device),
                    "operations_by_name": operations,
                }
                collected.rows.append({"shape": str(shape), "mode": mode, **row, **counts})
    return result("host", collected, device=device, with_torchao=with_torchao, dtype=str(dtype))

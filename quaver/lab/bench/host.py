"""The host time of a linear, forward and backward, so small that the work itself takes almost no time.

    host time    median time until the host has queued all work; on a CPU the work, little at this size, is included
    operations   calls that PyTorch dispatches below autograd in one eager forward and backward, views included; not
                 quaver's C extension, nor Triton kernels, nor calls inside compiled code
    kernels      kernels, copies and fills that one forward and backward launch on a GPU; a CPU launches none

`quaver bench linear` has the same contestants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.lab.bench.harness import time_alternating
from quaver.lab.bench.linear import LinearOptions
from quaver.lab.bench.options import Size
from quaver.lab.bench.results import Result, Row, make_contestant_rows
from quaver.lab.bench.shapes import Shape
from quaver.lab.settings.fields import setting
from quaver.runtime.devices import is_cuda_device, synchronize
from quaver.torch_private.profiler import DeviceType


@dataclass(frozen=True)
class HostBenchmark(LinearOptions):
    """Host time, operations and kernels of the forward and backward of a tiny linear."""

    size: Size = setting(16, "M, K and N of the linear.")

    case_fields = ("mode",)
    tables = (
        ("precision", "median", "spread", "time_over_bfloat16"),
        ("precision", "operations", "kernels"),
    )

    def measure(self) -> Result:
        """Return a row for each mode and contestant.

        `operations` is the sum of `operations_by_name`; both are None in compiled code, `kernels` is None on a CPU.
        """
        cases = product([Shape((self.size,) * 3)], self.mode_names)
        return self.run_cases(cases, self._make_rows, dtype=str(self.torch_dtype))

    def _make_rows(self, shape: Shape, mode: str) -> list[Row]:
        steps = self.make_steps(shape, mode)
        timings = time_alternating(steps, self.torch_device, rounds=self.rounds, until_done=False)
        rows = []
        for name, row in make_contestant_rows(timings).items():
            operations = count_operations(steps[name]) if mode == "eager" else None
            counts = {
                "operations": None if operations is None else sum(operations.values()),
                "kernels": count_kernels(steps[name], self.torch_device),
                "operations_by_name": operations,
            }
            rows.append({"shape": str(shape), "mode": mode, **row, **counts})
        return rows

    def format_note(self, result: Result) -> str:
        return f"{Shape((self.size,) * 3)}, dtype {self.dtype}"


class _OperationCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def count_operations(call: Callable[[], object]) -> dict[str, int]:
    """Count the operations that one eager call dispatches, the most frequent first."""
    with _OperationCounter() as operations:
        call()
    return dict(operations.counts.most_common())


def count_kernels(call: Callable[[], object], device: torch.device) -> int | None:
    """Count the kernels, copies and fills that one call launches; None on a CPU, and if the profiler sees none."""
    if not is_cuda_device(device):
        return None
    synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        synchronize(device)
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events()) or None

"""Numbers of a run: the JSON lines that record them and what is derived from step times."""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

WARMUP_STEPS = 3
"""Steps left out of every median: the first compiles and allocates, the second is measured for memory."""


class MetricsWriter:
    """Appends one JSON object per line, each in one flushed write: a stopped run leaves whole lines.

    Without a path nothing is kept, as on every rank but the first.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = (path or Path(os.devnull)).open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append `values`; ValueError for inf and NaN, which JSON lacks and which end a run before this."""
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._file.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def median_step_seconds(step_seconds: Sequence[float]) -> float:
    """Return the median of the times after the warm-up steps; of all of them where there are no more."""
    return statistics.median(step_seconds[WARMUP_STEPS:] or step_seconds)


def model_flops_utilization(flops_per_token: int, tokens_per_s: float, peak_flops_per_s: float) -> float:
    """Return the share of the device's bfloat16 matmul peak that the model's FLOPs use."""
    return flops_per_token * tokens_per_s / peak_flops_per_s

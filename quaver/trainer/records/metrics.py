"""Numbers of a run: the JSON lines that record them and what is derived from step times."""

import json
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quaver.devices import PeakFlops
from quaver.trainer.errors import OutputError

WARMUP_STEPS = 3
"""Steps left out of every median: the first compiles and allocates, the second is measured for memory."""


class MetricsWriter:
    """Appends one JSON object per line, each in one flushed write: a stopped run leaves whole lines.

    Without a path nothing is kept, as on every rank but the first.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = (path or Path(os.devnull)).open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append `values`; ValueError for inf and NaN, which JSON lacks and which end a run before this.

        Raises:
            OutputError: the file cannot be written.
        """
        line = json.dumps(values, allow_nan=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            raise OutputError(f"cannot write {self._file.name!r}: {error.strerror}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def rewind_metrics(path: Path, step: int) -> None:
    """Take the records after `step` out of a file of metrics, and a last line that was cut short."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if not line.endswith("\n"):
            break
        if json.loads(line)["step"] <= step:
            kept.append(line)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text("".join(kept), encoding="utf-8")
    partial.replace(path)


def median_step_seconds(step_seconds: Sequence[float]) -> float:
    """Return the median of the times after the warm-up steps; of all of them where there are no more."""
    return statistics.median(step_seconds[WARMUP_STEPS:] or step_seconds)


def utilization(flops_per_token: dict[str, int], tokens_per_s: float, peak: PeakFlops) -> dict[str, float | None]:
    """Return how well one device is used, in three measures.

    `tflops`: model TFLOP/s. `mfu`: their share of the bfloat16 peak, whatever they ran in, so that precisions compare.
    `mfu_by_precision`: the share of the step that the FLOPs would take at the peak of the precision that each ran in;
    None where one is not known.

    Args:
        flops_per_token: by precision, forward and backward.
        tokens_per_s: of this device.
    """
    flops_per_s = sum(flops_per_token.values()) * tokens_per_s
    seconds_per_token = peak.seconds(flops_per_token)
    return {
        "tflops": flops_per_s / 1e12,
        "mfu": flops_per_s / peak.flops_per_s,
        "mfu_by_precision": None if seconds_per_token is None else seconds_per_token * tokens_per_s,
    }

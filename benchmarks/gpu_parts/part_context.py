"""Shared by all parts: sizes, a timer with CUDA events and a cold cache, and the file with the rows of a part."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.record import describe_provenance, list_versions
from quaver.lab.bench.harness import Timing, find_cache_bytes
from quaver.lab.bench.shapes import make_model
from quaver.lab.settings import Model
from quaver.runtime.devices import synchronize

STATE_FIELDS = (
    *("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active"),
    *("clocks_event_reasons.sw_power_cap", "clocks_event_reasons.hw_thermal_slowdown"),
)
"""The fields that nvidia-smi is queried for."""
CYCLES_PER_S = 2e9
"""About the highest clock of an H100 or H200, 1.98 GHz. At a slower clock the kernel spins longer."""

Row = dict[str, Any]
Call = Callable[[], object]


@dataclass(frozen=True)
class PartContext:
    """The device, sizes and time of a part: Llama 3 8B's sizes on a GPU, or a sixteenth of its width on a CPU."""

    dry: bool
    seconds: float = 600.0
    """The time limit of the part, from `started`."""
    started: float = field(default_factory=time.monotonic)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.dry else "cuda")

    @property
    def tokens(self) -> int:
        return 64 if self.dry else 16384

    @property
    def seq_len(self) -> int:
        return 32 if self.dry else 8192

    @property
    def model(self) -> Model:
        return make_model("llama-8b", divisor=16 if self.dry else 1)

    @property
    def left_s(self) -> float:
        """Seconds of the part that are left; a dry run always has some."""
        return 600.0 if self.dry else self.started + self.seconds - time.monotonic()

    def randn(self, *sizes: int) -> Tensor:
        """Return Gaussian bfloat16 numbers: a GPU's clock depends on the data, and zeros would run faster."""
        return torch.randn(*sizes, device=self.device, dtype=torch.bfloat16)

    def time(
        self, contestants: dict[str, Call], rounds: int = 15, warmup: int = 3, *, with_host: bool = False
    ) -> dict[str, Timing]:
        """Time single calls between CUDA events, in turns, each after the cache was overwritten and read.

        A kernel that spins keeps the device busy while the host queues the call, which takes the host longer than the
        kernels of a cast take. The read leaves no line in the cache that the call would have to write back.

        Args:
            with_host: leave out the spinning kernel, so that the time includes a host that is slower than the device.
        """
        host_seconds: dict[str, float] = {}
        for name, function in contestants.items():
            for _ in range(1 if self.dry else warmup):
                synchronize(self.device)
                start = time.perf_counter()
                function()
                host_seconds[name] = 0.0 if with_host else time.perf_counter() - start
        samples: dict[str, list[float]] = {name: [] for name in contestants}
        names, cache = list(contestants), 4 * (find_cache_bytes(self.device) or 1 << 24)
        flush = torch.empty(1 << 16 if self.dry else cache, dtype=torch.uint8, device=self.device)
        for turn in range(1 if self.dry else rounds):
            first = turn % len(names) if names else 0
            for name in names[first:] + names[:first]:
                flush.zero_()
                flush.view(torch.int32).amax()
                self._spin(host_seconds[name])
                samples[name].append(self._sample(contestants[name]))
        return {name: Timing.from_seconds(seconds) for name, seconds in samples.items()}

    def _spin(self, host_s: float) -> None:
        """Keep the device busy for one and a half times as long as the host needs, at most for 20 ms."""
        if host_s and not self.dry:
            torch.cuda._sleep(int(min(1.5 * host_s, 0.02) * CYCLES_PER_S))

    def time_back_to_back(self, function: Call, seconds: float = 1.0) -> float:
        """Return the seconds of one of the calls that fill `seconds` in a row, at the clock of a busy card."""
        calls = 1 if self.dry else max(1, round(seconds / self._sample(function)))
        return self._sample(lambda: [function() for _ in range(calls)]) / calls

    def _sample(self, function: Call) -> float:
        if self.dry:
            start = time.perf_counter()
            function()
            return time.perf_counter() - start
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3

    def read_state(self) -> Row:
        """Return the clocks (MHz), power (W), temperature (degrees Celsius) and throttling that the card reports.

        It is empty on a CPU, and has an "error" if nvidia-smi fails.
        """
        if self.dry:
            return {}
        command = ["nvidia-smi", f"--query-gpu={','.join(STATE_FIELDS)}", "--format=csv,noheader,nounits", "--id=0"]
        try:
            output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout
        except (OSError, subprocess.SubprocessError) as error:
            return {"error": f"{type(error).__name__}: {error}"[:200]}
        return dict(zip(STATE_FIELDS, (value.strip() for value in output.split(",")), strict=False))


def make_timing_row(measured: Timing) -> Row:
    """Return a timing as part of a row, in microseconds."""
    return {name: round(value, 2) for name, value in asdict(measured).items()}


def record(rows: Iterable[Row], context: PartContext, path: Path, part: str) -> list[Row]:
    """Write each row to the file at once, and return all rows. The file says whether it is complete.

    Raises:
        KeyboardInterrupt: the part was interrupted; the file has the rows so far.
    """
    written: list[Row] = []
    more = list_versions("triton", "torchao")
    about = {
        "part": part,
        "dry": context.dry,
        "environment": describe_provenance("gpu_parts", context.device.type, **more),
    }
    about["state_before"] = context.read_state()

    def save(*, complete: bool) -> None:
        seconds = round(time.monotonic() - context.started, 1)
        path.write_text(
            json.dumps(about | {"complete": complete, "seconds": seconds, "rows": written}, indent=1) + "\n"
        )

    save(complete=False)
    for row in rows:
        written.append(row)
        print(format_row(row), flush=True)
        save(complete=False)
    about["state_after"] = context.read_state()
    save(complete=True)
    return written


def format_row(row: Row) -> str:
    """Return a row as one line, without lists and dicts other than timings."""
    shown: list[str] = []
    for name, value in row.items():
        if isinstance(value, dict) and "median_us" in value:
            shown.append(
                f"{value['median_us']:,.1f} us ({value['p10_us']:,.1f} .. {value['p90_us']:,.1f}, "
                f"least {value['min_us']:,.1f})"
            )
        elif isinstance(value, float):
            shown.append(f"{name} {value:.4g}")
        elif not isinstance(value, list | dict):
            shown.append(f"{value}" if name in ("what", "size") else f"{name} {value}")
    return ", ".join(shown)


def catch_failures(named: Iterable[tuple[Row, Callable[[], Iterator[Row]]]]) -> Iterator[Row]:
    """Yield the rows of each generator, preceded by its fields. A failure becomes a row with the error."""
    for about, rows in named:
        try:
            for row in rows():
                yield about | row
        except Exception as error:  # noqa: BLE001 - recorded in the row
            yield about | {"error": f"{type(error).__name__}: {error}"[:600]}

"""The options of `quaver memory`, besides the flags of the run that it predicts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from quaver.bench.results import writable
from quaver.recorder.byte_sizes import parse_bytes
from quaver.trainer.config.settings import AtLeast1, NotNegative, OneOf, Settings


@dataclass(frozen=True)
class Options(Settings):
    """Predict the memory of a run's training step on one rank, and say what is alive at its peak. The step runs with
    fake tensors: no GPU, no data and no memory are needed. The flags of quaver train are accepted too.
    """

    ranks: AtLeast1 = 1
    """Processes of the run; the first one is predicted."""
    device: Annotated[str, OneOf(("cuda", "cpu"))] | None = None
    """Device of the run: an NVIDIA GPU that multiplies float8 (cuda, the default) or a CPU."""
    vs: str | None = None
    """Compare with another run: "--float8.recipe_name rowwise", or "OTHER.toml --a.b c", as one word."""
    advise: bool = False
    """Predict the peak and the recomputation of other settings."""
    fit: str | None = None
    """Find the fastest setting whose peak is at most this, such as 80GiB."""
    time_on: str | None = None
    """GPU whose step time --advise and --fit model, such as H100 or B200."""
    measure: bool = False
    """Run real steps on this machine, and print them next to the prediction."""
    top: NotNegative = 12
    """Rows of the largest tensors, and of differences, to print."""
    output: str = "runs/memory.json"
    """File of the JSON."""
    html: str | None = None
    """File of a page: timeline, breakdown of the peak, tensors saved for backward."""
    png: str | None = None
    """File of a picture of the timeline."""

    def check(self) -> None:
        """Refuse options that exclude each other, and files that cannot be written."""
        if self.measure and self.device:
            raise ValueError("--measure measures on training.device, and predicts for it: expected no --device with it")
        if self.time_on is not None and not self.wants_advice:
            raise ValueError("--time-on models the time of what --advise or --fit tries: expected one of them")
        for flag in ("output", "html", "png"):
            path = getattr(self, flag)
            if path is not None:
                writable(Path(path), f"--{flag}")

    @property
    def fit_bytes(self) -> int | None:
        """--fit in bytes."""
        return None if self.fit is None else parse_bytes(self.fit, "--fit")

    @property
    def wants_advice(self) -> bool:
        """Whether other settings are tried."""
        return self.advise or self.fit_bytes is not None

    @property
    def other_words(self) -> list[str]:
        """The words of the other run."""
        return shlex.split(self.vs or "")

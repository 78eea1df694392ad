"""`quaver memory [CONFIG.toml] [options] [--section.field value ...]`."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from quaver.bench.results import save, writable
from quaver.cli.console import wide_console
from quaver.cli.errors import bad_input
from quaver.cli.memory.views import (
    advice_summary,
    advice_table,
    comparison_views,
    prediction_views,
    side_by_side_table,
)
from quaver.devices import resolve_device
from quaver.memory.faking.gpu import predicting_for
from quaver.memory.reports.compare import Comparison, compare
from quaver.memory.reports.html import write_html
from quaver.memory.runs.advise import Advice, advise
from quaver.memory.runs.measure import MeasuredMemory, measure_memory, side_by_side
from quaver.memory.runs.predict import RunMemory, predict_memory
from quaver.recorder.byte_sizes import parse_bytes
from quaver.recorder.draw import draw_timeline
from quaver.trainer.config import TrainConfig
from quaver.trainer.config.flags import split_options
from quaver.trainer.config.settings import AtLeast1, NotNegative, OneOf, Settings
from quaver.trainer.config_io import load_config, parse_arguments

_WIDTH = 170
"""Columns of the tables where the terminal has fewer: modules and lines of code are not broken."""


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
        if self.time_on is not None and not (self.advise or self.fit):
            raise ValueError("--time-on models the time of what --advise or --fit tries: expected one of them")
        if self.png is not None and not self.png.endswith(".png"):
            raise ValueError(f"--png must be a file whose name ends with .png, got {self.png!r}")
        files = {flag: path for flag in ("output", "html", "png") if (path := getattr(self, flag)) is not None}
        for flag, path in files.items():
            writable(Path(path), f"--{flag}")
            if list(files.values()).count(path) > 1 and path != os.devnull:
                raise ValueError(f"--{flag} must be a file that no other option names, got {path!r}")


@dataclass
class _Answer:
    """What was found."""

    memory: RunMemory
    other: RunMemory | None = None
    comparison: Comparison | None = None
    advice: Advice | None = None
    measured: MeasuredMemory | None = None


def run(argv: list[str]) -> int:
    """Print and write the predicted memory of a training step; 0, or 2 for bad input."""
    with bad_input():
        options, words = split_options(Options, argv, prog="quaver memory [CONFIG.toml]")
        config = load_config(*parse_arguments(words))
        trained_on = resolve_device(config.training.device).type if options.measure else "cuda"
        device = options.device or trained_on
        answer = _answer(options, words, config, device)
    memory, other, comparison = answer.memory, answer.other, answer.comparison
    views = [*prediction_views(memory, device, options.top)]
    if other is not None and comparison is not None:
        views += comparison_views(comparison, memory.prediction, other.prediction, options.top)
    if answer.advice is not None:
        views += [advice_table(answer.advice), *advice_summary(answer.advice)]
    if answer.measured is not None:
        views.append(side_by_side_table(side_by_side(memory, answer.measured)))
    console = wide_console(_WIDTH)
    for view in views:
        console.print(view, soft_wrap=isinstance(view, str))
    config_file = next((word for word in words if not word.startswith("--")), "defaults")
    title = f"{Path(config_file).stem} in {memory.name}, {options.ranks} rank{'s' * (options.ranks > 1)}"
    for file in _write(answer, options, title):
        print(f"saved {file}")
    return 0


def _answer(options: Options, words: list[str], config: TrainConfig, device: str) -> _Answer:
    fit_bytes = None if options.fit is None else parse_bytes(options.fit, "--fit")
    other_words = shlex.split(options.vs or "")
    if options.vs is not None:  # flags over the first run's words, or all words of the other run
        is_over = not other_words or other_words[0].startswith("--")
        other_config = load_config(*parse_arguments([*words, *other_words] if is_over else other_words))
    with predicting_for(device):
        _tell("predicting a step")
        answer = _Answer(predict_memory(config, options.ranks))
        if options.vs is not None:
            _tell("predicting a step of the other run")
            answer.other = predict_memory(other_config, options.ranks)
            predictions = answer.memory.prediction, answer.other.prediction
            answer.comparison = compare(*predictions, label_a="as given", label_b=" ".join(other_words))
        if options.advise or fit_bytes is not None:
            answer.advice = advise(config, options.ranks, fit_bytes=fit_bytes, device=options.time_on, progress=_tell)
    if options.measure:
        _tell("training to measure")
        answer.measured = measure_memory(config, options.ranks)
    return answer


def _tell(what: str) -> None:
    """Print progress to stderr."""
    print(f"... {what}", file=sys.stderr, flush=True)


def _write(answer: _Answer, options: Options, title: str) -> list[Path]:
    """Write what was asked for, and return the files."""
    parts = {name: getattr(answer, name) for name in ("other", "comparison", "advice", "measured")}
    more = {name: part.to_dict() for name, part in parts.items() if part is not None}
    files = [Path(options.output)]
    save(answer.memory.to_dict() | more, files[0])
    if options.html is not None:
        pages = {name: _whole(parts[name]) for name in ("other", "measured") if name in more}
        files.append(Path(options.html))
        write_html(files[-1], title=title, prediction=_whole(answer.memory), **(more | pages))
    if options.png is not None:
        files.append(Path(options.png))
        draw_timeline(answer.memory.prediction.report, files[-1], title=title)
    return files


def _whole(memory: RunMemory) -> dict[str, Any]:
    return {**memory.to_dict(), **memory.prediction.to_dict(timeline=True)}

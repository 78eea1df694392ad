"""`quaver memory [CONFIG.toml] [options] [--section.field value ...]`."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table

from quaver.bench.results import save
from quaver.cli.console import wide_console
from quaver.cli.errors import bad_input
from quaver.cli.memory.options import Options
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
from quaver.recorder.draw import draw_timeline
from quaver.trainer.config import TrainConfig
from quaver.trainer.config.flags import exit_after_help, split_flags
from quaver.trainer.config_io import load_config, parse_arguments

_WIDTH = 170
"""Columns of the tables where the terminal has fewer: modules and lines of code are not broken."""


@dataclass(frozen=True)
class _Answer:
    """What was found."""

    memory: RunMemory
    other: RunMemory | None = None
    comparison: Comparison | None = None
    advice: Advice | None = None
    measured: MeasuredMemory | None = None


def run(argv: list[str]) -> int:
    """Print and write the predicted memory of a training step; 0, or 2 for bad input."""
    exit_after_help(Options, argv, prog="quaver memory [CONFIG.toml]")
    with bad_input():
        values, words = split_flags(Options, argv)
        options = Options(**values)
        config = load_config(*parse_arguments(words))
        trained_on = resolve_device(config.training.device).type if options.measure else "cuda"
        device = options.device or trained_on
        answer = _answer(options, words, config, device)
    console = wide_console(_WIDTH)
    for view in _views(answer, device, options.top):
        console.print(view, soft_wrap=isinstance(view, str))
    config_file = next((word for word in words if not word.startswith("--")), "defaults")
    title = f"{Path(config_file).stem} in {answer.memory.name}, {options.ranks} rank{'s' * (options.ranks > 1)}"
    for file in _write(answer, options, title):
        print(f"saved {file}")
    return 0


def _answer(options: Options, words: list[str], config: TrainConfig, device: str) -> _Answer:
    other_config = None
    if options.vs is not None:  # flags over the first run's words, or all words of the other run
        given = options.other_words
        is_over = not given or given[0].startswith("--")
        other_config = load_config(*parse_arguments([*words, *given] if is_over else given))
    with predicting_for(device):
        _tell("predicting a step")
        memory = predict_memory(config, options.ranks)
        answer = _Answer(memory)
        if other_config is not None:
            _tell("predicting a step of the other run")
            other = predict_memory(other_config, options.ranks)
            label = " ".join(options.other_words)
            comparison = compare(memory.prediction, other.prediction, label_a="as given", label_b=label)
            answer = replace(answer, other=other, comparison=comparison)
        if options.wants_advice:
            advice = advise(config, options.ranks, fit_bytes=options.fit_bytes, device=options.time_on, progress=_tell)
            answer = replace(answer, advice=advice)
    if options.measure:
        _tell("training to measure")
        answer = replace(answer, measured=measure_memory(config, options.ranks))
    return answer


def _tell(what: str) -> None:
    """Print progress to stderr."""
    print(f"... {what}", file=sys.stderr, flush=True)


def _views(answer: _Answer, device: str, top: int) -> Iterator[str | Table]:
    yield from prediction_views(answer.memory, device, top)
    if answer.other is not None and answer.comparison is not None:
        yield from comparison_views(answer.comparison, answer.memory.prediction, answer.other.prediction, top)
    if answer.advice is not None:
        yield advice_table(answer.advice)
        yield from advice_summary(answer.advice)
    if answer.measured is not None:
        yield side_by_side_table(side_by_side(answer.memory, answer.measured))


def _write(answer: _Answer, options: Options, title: str) -> list[Path]:
    """Write what was asked for, and return the files."""
    parts = {name: getattr(answer, name) for name in ("other", "comparison", "advice", "measured")}
    more = {name: part.to_dict() for name, part in parts.items() if part is not None}
    files = [Path(options.output)]
    save(answer.memory.to_dict() | more, files[0])
    if options.html is not None:
        pages = {name: _whole(getattr(answer, name)) for name in ("other", "measured") if name in more}
        files.append(Path(options.html))
        write_html(files[-1], title=title, prediction=_whole(answer.memory), **(more | pages))
    if options.png is not None:
        files.append(Path(options.png))
        draw_timeline(answer.memory.prediction.report, files[-1], title=title)
    return files


def _whole(memory: RunMemory) -> dict[str, Any]:
    return {**memory.to_dict(), **memory.prediction.to_dict(timeline=True)}

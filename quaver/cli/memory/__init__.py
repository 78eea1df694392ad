"""`quaver memory [CONFIG.toml] [options] [--section.field value ...]`."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from quaver.bench.results import save
from quaver.cli.errors import bad_input
from quaver.cli.memory.advice import advice_summary, advice_table, side_by_side_table
from quaver.cli.memory.comparison import comparison_lines
from quaver.cli.memory.options import Options, parse
from quaver.cli.memory.views import Printer
from quaver.devices import resolve_device
from quaver.memory.faking.target import predicting_for
from quaver.memory.reports.compare import Comparison, compare
from quaver.memory.reports.html import write_html
from quaver.memory.runs.advise import Advice, advise
from quaver.memory.runs.measure import MeasuredMemory, measure_memory, side_by_side
from quaver.memory.runs.predict import RunMemory, predict_memory
from quaver.recorder.draw import draw_peak, draw_timeline
from quaver.trainer.config_io import load_config, parse_arguments

_WIDTH = 170
"""Columns of the tables where the terminal has fewer: modules and lines of code are not broken."""


@dataclass(frozen=True)
class _Answer:
    """The question and what was found."""

    options: Options
    words: list[str]
    device: str
    memory: RunMemory
    other: RunMemory | None
    comparison: Comparison | None
    advice: Advice | None
    measured: MeasuredMemory | None


def run(argv: list[str]) -> int:
    """Print and write the predicted memory of a training step; 0, or 2 for bad input."""
    with bad_input():
        options, words = parse(argv)
        answer = _answer(options, words)
    _print(answer)
    for file in _write(answer):
        print(f"saved {file}")
    return 0


def _answer(options: Options, words: list[str]) -> _Answer:
    config, other_config = load_config(*parse_arguments(words)), None
    if options.vs is not None:  # flags over the first run's words, or all words of the other run
        given = options.other_words
        is_over = not given or given[0].startswith("--")
        other_config = load_config(*parse_arguments([*words, *given] if is_over else given))
    device = options.device or (resolve_device(config.training.device).type if options.measure else "cuda")
    with predicting_for(device):
        _tell("predicting a step")
        memory = predict_memory(config, options.ranks)
        other = comparison = advice = None
        if other_config is not None:
            _tell("predicting a step of the other run")
            other = predict_memory(other_config, options.ranks)
            label = " ".join(options.other_words)
            comparison = compare(memory.prediction, other.prediction, label_a="as given", label_b=label)
        if options.wants_advice:
            advice = advise(config, options.ranks, fit_bytes=options.fit_bytes, device=options.time_on, progress=_tell)
    measured = None
    if options.measure:
        _tell("training to measure")
        measured = measure_memory(config, options.ranks)
    return _Answer(options, words, device, memory, other, comparison, advice, measured)


def _tell(what: str) -> None:
    """Print progress to stderr."""
    print(f"... {what}", file=sys.stderr, flush=True)


def _print(answer: _Answer) -> None:
    console = Console(width=max(_WIDTH, Console().width))
    printer = Printer(console, answer.options, answer.device)
    printer.run(answer.memory)
    if answer.other is not None and answer.comparison is not None:
        printer.difference(answer.memory, answer.other)
        for line in comparison_lines(answer.comparison, answer.options.top):
            printer.line(line)
    if answer.advice is not None:
        console.print(advice_table(answer.advice))
        for line in advice_summary(answer.advice):
            printer.line(line)
    if answer.measured is not None:
        console.print(side_by_side_table(side_by_side(answer.memory, answer.measured)))


def _write(answer: _Answer) -> list[Path]:
    """Write what was asked for, and return the files."""
    options, more = answer.options, _more(answer)
    files = [Path(options.output)]
    save(answer.memory.to_dict() | {name: value for name, value in more.items() if value is not None}, files[0])
    title = _title(answer)
    if options.html is not None:
        pages = {
            "other": None if answer.other is None else _whole(answer.other),
            "measured": None if answer.measured is None else _whole(answer.measured),
        }
        files.append(Path(options.html))
        write_html(files[-1], title=title, prediction=_whole(answer.memory), **{**more, **pages})
    if options.png is not None:
        timeline = Path(options.png)
        peak = timeline.with_name(f"{timeline.stem}-peak.png")
        draw_timeline(answer.memory.prediction.report, timeline, title=title)
        draw_peak(answer.memory.prediction.report, peak, title=title)
        files += [timeline, peak]
    return files


def _more(answer: _Answer) -> dict[str, Any]:
    """What there is besides the prediction, by the names that a page and the JSON have for it."""
    parts = {
        "other": answer.other,
        "comparison": answer.comparison,
        "advice": answer.advice,
        "measured": answer.measured,
    }
    return {name: None if part is None else part.to_dict() for name, part in parts.items()}


def _whole(memory: RunMemory) -> dict[str, Any]:
    return {**memory.to_dict(), **memory.prediction.to_dict(timeline=True)}


def _title(answer: _Answer) -> str:
    options, name = answer.options, answer.memory.name
    file = next((word for word in answer.words if not word.startswith("--")), "defaults")
    return f"{Path(file).stem} in {name}, {options.ranks} rank{'s' * (options.ranks > 1)}"

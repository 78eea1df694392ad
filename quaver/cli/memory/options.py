"""What `quaver memory` takes besides a run's own words, checked."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quaver.bench.results import writable
from quaver.cli.bench.options import Parser, natural, positive
from quaver.recorder.byte_sizes import parse_bytes


@dataclass(frozen=True)
class Options:
    """The words of a run, and what is asked about it."""

    words: list[str]
    """As `quaver train` takes them."""
    ranks: int
    device: str
    """cpu or cuda; empty for the one that is measured on."""
    vs: list[str] | None
    """The words of the other run."""
    advise: bool
    fit_bytes: int | None
    model_time_on: str | None
    measure: bool
    top: int
    output: Path
    html: Path | None
    png: Path | None


def parse(argv: list[str]) -> Options:
    """Parse the words after `quaver memory`.

    Raises:
        ValueError: a file that cannot be written, or options that exclude each other.
        SystemExit: with 2 and one line on stderr for anything else that is wrong; with 0 after --help.
    """
    given, words = _parser().parse_known_args(argv)
    fits = None if given.fit is None else parse_bytes(given.fit, "--fit")
    wants_advice = given.advise or fits is not None
    if given.measure and given.device:
        raise ValueError("--measure measures on training.device, and predicts for it: expected no --device beside it")
    if given.time_on is not None and not wants_advice:
        raise ValueError("--time_on models the time of what --advise or --fit tries: expected one of them")
    return Options(
        words=words,
        ranks=given.ranks,
        device=given.device or ("" if given.measure else "cuda"),
        vs=None if given.vs is None else shlex.split(given.vs),
        advise=wants_advice,
        fit_bytes=fits,
        model_time_on=given.time_on,
        measure=given.measure,
        top=given.top,
        output=writable(Path(given.output)),
        html=None if given.html is None else writable(Path(given.html), "--html"),
        png=None if given.png is None else writable(Path(given.png), "--png"),
    )


def _parser() -> Parser:
    parser = Parser(
        "quaver memory",
        usage="quaver memory [CONFIG.toml] [--section.field value ...] [options]",
        description="Predict the memory of a run's training step on one rank, and say what is alive at its peak. "
        "Needs no GPU, no data and no memory: the step runs with fake tensors.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Every flag of `quaver train` may be given; `quaver train --help` lists them.",
        allow_abbrev=False,
    )
    add: Callable[..., object] = parser.add_argument
    add("--ranks", type=positive, default=1, help="processes of the run; this is about the first")
    add(
        "--device",
        choices=("cuda", "cpu"),
        help="what the run will train on: an NVIDIA GPU that multiplies float8 (cuda, the default) or a CPU",
    )
    add(
        "--vs",
        metavar="WORDS",
        help='compare with another run: "--float8.recipe_name rowwise", or "OTHER.toml --a.b c", as one word',
    )
    add("--advise", action="store_true", help="predict what other settings would take, and compute again")
    add("--fit", metavar="SIZE", help="find the fastest setting whose peak is at most this, such as 80GiB")
    add("--time_on", metavar="GPU", help="the GPU whose time is modelled for --advise and --fit, such as H100 or B200")
    add("--measure", action="store_true", help="run real steps on this machine, and show them beside the prediction")
    add("--top", type=natural, default=12, help="rows of the largest tensors, and of differences, to print")
    add("--output", default="runs/memory.json", help="where the JSON goes")
    add("--html", metavar="FILE", help="write a page to look at: timeline, breakdown of the peak, what is kept")
    add("--png", metavar="FILE", help="write a picture of the timeline, and beside it one of the peak (-peak.png)")
    return parser

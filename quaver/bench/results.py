"""What every benchmark returns and writes: its name, the machine and versions, and rows."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch

from quaver.bench.harness import Timing
from quaver.bench.peer import torchao_version
from quaver.kernels.exact_mm import has_bfloat16_units
from quaver.trainer.run_folder import git_revision

BFLOAT16 = "bfloat16"
"""The contestant that all ratios are to."""

MODES = ("eager", "compiled")

Row = dict[str, Any]


@dataclass(frozen=True)
class Setup:
    """What every benchmark is told."""

    device: torch.device
    rounds: int
    """Samples of each contestant; of a profile, the forwards and backwards in one trace."""
    dtype: torch.dtype = torch.bfloat16
    """Of the operands before quantization."""
    with_torchao: bool = False
    report: Callable[[str], None] = lambda line: None
    """Gets a line about what is measured now."""


def run_cases(
    benchmark: str, setup: Setup, cases: Iterable[tuple[Any, ...]], rows_of: Callable[..., list[Row]], **about: Any
) -> dict[str, Any]:
    """Report and measure each case with `rows_of(*case)`; returns `result` of the rows of all.

    Ctrl-C ends the benchmark and keeps the rows of the finished cases; without any it ends the program.
    """
    rows: list[Row] = []
    is_complete = True
    try:
        for case in cases:
            setup.report(", ".join(map(str, case)))
            torch.compiler.reset()
            rows += rows_of(*case)
    except KeyboardInterrupt:
        if not rows:
            raise
        is_complete = False
    return result(benchmark, setup, rows, is_complete, **about)


def contestant_rows(timings: dict[str, Timing]) -> dict[str, Row]:
    """By contestant ("bfloat16", "quaver RECIPE"): library, recipe, timing and the ratio of medians to bfloat16's."""
    rows = {}
    for name, timing in timings.items():
        library, _, recipe = name.partition(" ")
        ratio = timing.median_us / timings[BFLOAT16].median_us
        rows[name] = {"library": library, "recipe": recipe, "timing": asdict(timing), "time_over_bfloat16": ratio}
    return rows


def result(benchmark: str, setup: Setup, rows: list[Row], is_complete: bool, **about: Any) -> dict[str, Any]:
    """{"benchmark", "environment", "complete", `about`, "rows"}, ready for JSON."""
    surroundings = environment(setup.device) | ({"torchao": torchao_version()} if setup.with_torchao else {})
    return {"benchmark": benchmark, "environment": surroundings, "complete": is_complete, **about, "rows": rows}


def title_of(result: dict[str, Any]) -> str:
    """The machine, versions and commit of a result, as the title of its table."""
    about = result["environment"]
    return f"{about['device']}, {about['threads']} threads, torch {about['torch']}, {about['commit']}"


def environment(device: torch.device) -> dict[str, Any]:
    """The provenance of a result: hardware, versions, commit, command, date."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else _cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **({"cuda": torch.version.cuda, "hip": torch.version.hip} if is_cuda else {}),
        "commit": _commit(),
        "command": "quaver " + shlex.join(sys.argv[1:]),
        "date": date.today().isoformat(),
    }


def _cpu_name() -> str:
    features = torch.backends.cpu.get_cpu_capability()
    units = " with AMX" if torch.cpu._is_amx_tile_supported() else ""
    if not has_bfloat16_units("cpu"):
        units = " without bfloat16 instructions"
    return f"{platform.machine()} CPU, {features}{units}"


def _commit() -> str:
    """The commit of quaver's checkout, with "+" where files differ from it."""
    revision = git_revision(Path(__file__).parent)
    return "unknown" if revision is None else revision["commit"][:7] + ("+" if revision["is_modified"] else "")


def writable(path: Path, option: str = "--output") -> Path:
    """Return `path` after checking that it can be written, so that a measurement is not lost at its end.

    Args:
        option: the setting that gave the path, for the error.
    Raises:
        ValueError: it cannot be written.
    """
    if path.is_dir():
        raise ValueError(f"{option}: expected a file to write, got the folder {path}")
    existed = path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ValueError(f"{option}: cannot write {path}: {error.strerror}") from error
    return path


def save(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON."""
    path.write_text(json.dumps(result, indent=2) + "\n")

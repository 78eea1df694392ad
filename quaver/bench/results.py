"""What every benchmark returns and writes: its name, the machine and versions, and rows."""

from __future__ import annotations

import json
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
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

Row = dict[str, Any]


@dataclass
class Collected:
    """The measured rows, and whether Ctrl-C left some out."""

    rows: list[Row] = field(default_factory=list)
    is_complete: bool = True


@contextmanager
def collecting() -> Iterator[Collected]:
    """Collect rows in the block. Ctrl-C ends the block and keeps the rows; without any rows it ends the program."""
    collected = Collected()
    try:
        yield collected
    except KeyboardInterrupt:
        if not collected.rows:
            raise
        collected.is_complete = False


def contestant_rows(timings: dict[str, Timing]) -> dict[str, Row]:
    """By contestant ("bfloat16", "quaver RECIPE"): library, recipe, timing and the ratio of medians to bfloat16's."""
    rows = {}
    for name, timing in timings.items():
        library, _, recipe = name.partition(" ")
        ratio = timing.median_us / timings[BFLOAT16].median_us
        rows[name] = {"library": library, "recipe": recipe, "timing": asdict(timing), "time_over_bfloat16": ratio}
    return rows


def result(
    benchmark: str, collected: Collected, *, device: torch.device, with_torchao: bool = False, **about: Any
) -> dict[str, Any]:
    """{"benchmark", "environment", "complete", `about`, "rows"}, ready for JSON."""
    surroundings = environment(device) | ({"torchao": torchao_version()} if with_torchao else {})
    head = {"benchmark": benchmark, "environment": surroundings, "complete": collected.is_complete}
    return {**head, **about, "rows": collected.rows}


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

"""What every benchmark returns and writes: its name, the machine and versions, and rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from quaver.bench.harness import environment
from quaver.bench.peer import torchao_version

Row = TypeVar("Row")


def result(
    benchmark: str, collected: Collected[Any], *, device: torch.device, with_torchao: bool = False, **about: Any
) -> dict[str, Any]:
    """{"benchmark", "environment", "complete", whatever else is given, "rows"}, ready for JSON."""
    surroundings = environment(device)
    if with_torchao:
        surroundings["torchao"] = torchao_version()
    rows = [asdict(row) for row in collected.rows]
    complete = collected.is_complete
    return {"benchmark": benchmark, "environment": surroundings, "complete": complete, **about, "rows": rows}


@dataclass
class Collected(Generic[Row]):
    """The rows that were measured, dataclasses, and whether that was all."""

    rows: list[Row] = field(default_factory=list)
    is_complete: bool = True


@contextmanager
def collecting() -> Iterator[Collected[Any]]:
    """Collect rows in the block. Ctrl-C ends it early and keeps them; without one it ends everything, as usual."""
    collected: Collected[Any] = Collected()
    try:
        yield collected
    except KeyboardInterrupt:
        if not collected.rows:
            raise
        collected.is_complete = False


def writable(path: Path, option: str = "--output") -> Path:
    """`path`, which can be written to: found out before a measurement, not after it.

    Args:
        option: where the path was given, for the error.
    Raises:
        ValueError: it cannot.
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

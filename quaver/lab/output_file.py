"""Files that commands write: whether one can be written, and results as JSON."""

import json
import os
from pathlib import Path
from typing import Any

from quaver.runtime.errors import InputError


def check_writable(path: Path, option: str = "--output") -> None:
    """Check that `path` can be written, so that a measurement is not lost at its end.

    The check changes nothing on the disk, so a command whose arguments are refused later has written nothing.

    Args:
        option: the setting that gave the path, for the error.
    Raises:
        InputError: it cannot be written.
    """
    if path.is_dir():
        raise InputError(f"{option} must be a file to write, got the folder {path}")
    target = Path(os.path.realpath(path))  # of a symlink, whether or not it exists
    nearest = next(existing for existing in (target, *target.parents) if existing.exists())
    is_below_a_file = nearest != target and not nearest.is_dir()
    if is_below_a_file or not os.access(nearest, os.W_OK):
        reason = "is not a folder" if is_below_a_file else "is not writable"
        raise InputError(f"{option}: cannot write {path}: {nearest} {reason}")


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")

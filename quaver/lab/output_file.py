"""Files that commands write: whether one can be written, and results as JSON."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from quaver.runtime.errors import InputError


def check_writable(path: Path, option: str = "--output") -> None:
    """Check that `path` can be written, so that a measurement is not lost at its end.

    The check leaves no file or folder, so a command whose arguments are refused later has written nothing.

    Args:
        option: the setting that gave the path, for the error.
    Raises:
        InputError: it cannot be written.
    """
    if path.is_dir():
        raise InputError(f"{option}: expected a file to write, got the folder {path}")
    existed, missing = path.exists(), [folder for folder in path.parents if not folder.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        if not existed:
            path.unlink()
    except OSError as error:
        raise InputError(f"{option}: cannot write {path}: {error.strerror}") from error
    finally:
        with suppress(OSError):  # the folder was not made, or another process writes there
            for folder in missing:  # the innermost first
                folder.rmdir()


def write_json(result: dict[str, Any], path: Path) -> None:
    """Write a result as JSON, and make its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")

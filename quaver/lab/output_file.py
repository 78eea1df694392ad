"""Files that commands write: checked before the work starts, and replaced as a whole at its end."""

import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from quaver.lab.runs.file_names import CONFIG_FILE, RUN_FILES
from quaver.runtime.errors import InputError, NotWrittenError
from quaver.runtime.files import MAX_NAME_BYTES, make_folder, replace_file

RECIPES_COMMENT = "# Written by quaver doctor"

_SIGNATURES_BY_KIND = {
    "JSON result": re.compile(rb'\{\s*"(environment|benchmark)"'),
    "HTML page": re.compile(rb"<!doctype html>"),
    "PNG picture": re.compile(rb"\x89PNG\r\n"),
    "TOML of recipes": re.compile(RECIPES_COMMENT.encode()),
}
"""How the files of each kind begin that a command may replace, so that a config or a text is not taken for one."""


class Output(NamedTuple):
    """A file that a command will write, the option that names it, and its kind.

    A file that exists is replaced only if its kind is a key of `_SIGNATURES_BY_KIND` and it begins so.
    """

    path: Path
    option: str = "--output"
    kind: str = "JSON result"


def check_outputs(*outputs: Output) -> None:
    """Check that a command can write its outputs, so that a measurement is not lost at its end, and loses no file.

    The check changes nothing on the disk, so a command whose arguments are refused later has written nothing.

    Raises:
        InputError: an output cannot be written, is a FIFO or a socket, or is named twice; or it would replace a file of
            a run, or a file that is no earlier output of its kind.
    """
    targets: set[Path] = set()
    for path, option, kind in outputs:
        _check_names(path, option)
        target = _resolve(path)
        if path.is_dir():
            raise InputError(f"{option} must be a file to write, got the folder {path}")
        if target.is_fifo() or target.is_socket():  # not a pipe that is open already, such as /dev/stdout
            raise InputError(f"{option} must be a file to write, got {path}, which waits for another process")
        if _is_device(path):
            _check_access(path, path, option)
            continue
        _check_folder(target.parent, path, option)
        if target in targets:
            raise InputError(f"{option} must be a file that no other option names, got {str(path)!r}")
        targets.add(target)
        if target.exists():
            _check_replaceable(target, option, kind)


def check_option_files(options: object, **kinds: str) -> None:
    """Check the outputs of a command that `options` name: a path or None, under the names of their `kinds`.

    Raises InputError.
    """
    paths = {name: getattr(options, name) for name in kinds}
    check_outputs(*(Output(Path(path), f"--{name}", kinds[name]) for name, path in paths.items() if path is not None))


def check_output_folder(path: Path, option: str) -> None:
    """Check that a command can write files into the folder `path`, or make it. Raises InputError."""
    _check_names(path, option)
    _check_folder(_resolve(path), path, option)


@contextmanager
def replace_output(path: Path, option: str = "--output") -> Iterator[Path]:
    """Make the folder of `path`, and yield the path where the block writes the file; see `replace_file`.

    A device such as /dev/null is written in place.

    Raises:
        NotWrittenError: an OSError of the block or of the replacement; the message names `option` and `path`.
    """
    try:
        if _is_device(path):
            yield path
            return
        make_folder(_resolve(path).parent)
        with replace_file(path) as partial:
            yield partial
    except OSError as error:
        raise NotWrittenError(f"{option}: cannot write {path}: {error.strerror or error}") from error


def write_result(result: dict[str, Any], path: Path) -> None:
    """Write the result of a command as JSON with `replace_output`."""
    with replace_output(path) as partial:
        partial.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _is_device(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _resolve(path: Path) -> Path:
    """Return the file behind `path`, which may be a symlink, whether or not it exists."""
    return Path(os.path.realpath(path))


def _check_names(path: Path, option: str) -> None:
    """Refuse names that no file system takes; one in a folder that is still to be made would fail after the work."""
    if any(len(os.fsencode(name)) > MAX_NAME_BYTES for name in path.parts):
        raise InputError(f"{option}: expected names of at most {MAX_NAME_BYTES} bytes, got {str(path)!r}")


def _check_folder(folder: Path, path: Path, option: str) -> None:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir():
        raise InputError(f"{option}: cannot write {path}: {existing} is not a folder")
    _check_access(existing, path, option)


def _check_access(existing: Path, path: Path, option: str) -> None:
    if not os.access(existing, os.W_OK):
        raise InputError(f"{option}: cannot write {path}: {existing} is not writable")


def _check_replaceable(target: Path, option: str, kind: str) -> None:
    if target.name in RUN_FILES and (target.parent / CONFIG_FILE).exists():
        raise InputError(f"{option}: {target} is a file of a run; give another file")
    if kind not in _SIGNATURES_BY_KIND:
        raise InputError(f"{option}: {str(target)!r} exists already; give another file or remove it")
    with target.open("rb") as file:
        first_bytes = file.read(64)
    if first_bytes and not _SIGNATURES_BY_KIND[kind].match(first_bytes):
        raise InputError(f"{option}: {target} exists and is no {kind} of quaver; give another file or remove it")

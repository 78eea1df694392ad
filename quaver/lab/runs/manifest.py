"""The manifest of a checkpoint: size and hash of each of its files, which show damage before a tensor is loaded.

A manifest shows accidents: flipped bits, and short, missing, extra or exchanged files. Against an attacker, who can
write a manifest too, `safe_dcp` protects.
"""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, StringConstraints, TypeAdapter
from xxhash import xxh3_128

from quaver.lab.json_file import STRICT, read_json
from quaver.lab.settings.fields import NotNegative
from quaver.runtime.errors import InputError
from quaver.runtime.files import make_file_threads

MANIFEST_FILE = "manifest.json"
MANIFEST_FORMAT = 1
CHECKPOINT_HINT = "choose another checkpoint"


@dataclass(frozen=True)
class FileDigest:
    """The size and hash of one file in the manifest."""

    bytes: NotNegative
    xxh3_128: Annotated[str, StringConstraints(pattern="^[0-9a-f]{32}$")]


@dataclass(frozen=True)
class Manifest:
    """The content of manifest.json: the digests of all other files, by path with `/` below the checkpoint."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    format: Literal[MANIFEST_FORMAT]  # type: ignore[valid-type]
    files: dict[str, FileDigest]


_MANIFEST_ADAPTER = TypeAdapter(Manifest)


def hash_files_of_rank(folder: Path, model: str, rank: int) -> dict[str, FileDigest]:
    """Return the digests of the files that DCP wrote for `rank`, by name below the checkpoint.

    Reading them is cheap right after the write, while they are in the page cache.
    """
    paths = list((folder / model).glob(f"__{rank}_*"))
    with make_file_threads() as threads:
        return dict(zip([_make_name(folder, path) for path in paths], threads.map(_hash_file, paths), strict=True))


def write_manifest(folder: Path, digests: dict[str, FileDigest]) -> None:
    """Write the manifest of `folder`; files that have no digest in `digests` are read."""
    unhashed = {name: path for name, path in _list_files(folder).items() if name not in digests}
    with make_file_threads() as threads:
        digests = {**digests, **dict(zip(unhashed, threads.map(_hash_file, unhashed.values()), strict=True))}
    content = asdict(Manifest(MANIFEST_FORMAT, dict(sorted(digests.items()))))
    (folder / MANIFEST_FILE).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def check_manifest(folder: Path, rank: int = 0, world_size: int = 1) -> None:
    """Compare the files of a checkpoint with its manifest; each of several ranks reads its share of them.

    Raises:
        OSError: a file cannot be read.
        InputError: a file differs, is missing, or is not in the manifest; the message names it.
    """
    expected = read_json(folder / MANIFEST_FILE, _MANIFEST_ADAPTER, CHECKPOINT_HINT).files
    files = _list_files(folder)
    for name in sorted(expected.keys() - files.keys()):
        raise InputError(f"{str(folder / name)!r} is missing; {CHECKPOINT_HINT}")
    for name in sorted(files.keys() - expected.keys()):
        raise InputError(f"{str(folder / name)!r} is not in {MANIFEST_FILE}: remove the file, or {CHECKPOINT_HINT}")
    for name, path in files.items():
        size = path.stat().st_size
        if size != expected[name].bytes:
            raise InputError(f"{str(path)!r} has {size} bytes, expected {expected[name].bytes}; {CHECKPOINT_HINT}")
    names = sorted(files)[rank::world_size]
    with make_file_threads() as threads:
        for name, digest in zip(names, threads.map(_hash_file, [files[name] for name in names]), strict=True):
            if digest != expected[name]:
                raise InputError(
                    f"{str(files[name])!r} is damaged: its xxh3_128 differs from {MANIFEST_FILE}; {CHECKPOINT_HINT}"
                )


def _list_files(folder: Path) -> dict[str, Path]:
    """Return the files below `folder` by name, without the manifest and hidden files at its top."""
    files = {}
    for path in folder.rglob("*"):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise InputError(f"{str(path)!r} must be a file or a folder of the checkpoint itself; {CHECKPOINT_HINT}")
        name = _make_name(folder, path)
        if path.is_file() and name != MANIFEST_FILE and not name.startswith("."):
            files[name] = path
    return files


def _make_name(folder: Path, path: Path) -> str:
    return path.relative_to(folder).as_posix()


def _hash_file(path: Path) -> FileDigest:
    with path.open("rb") as file:
        return FileDigest(os.fstat(file.fileno()).st_size, hashlib.file_digest(file, xxh3_128).hexdigest())

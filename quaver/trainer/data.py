"""Text as bytes: reads files, splits them into train and validation, deals out batches by seed and step."""

import hashlib
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quaver.trainer.config import Data, Training, Validation
from quaver.trainer.layout import Layout

VALIDATION_SHARE = 0.1
"""Share of the files (of the bytes, for a single file) that is kept for validation."""

STDLIB_SKIPPED = frozenset(
    {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo"}
    | {"pydoc_data", "encodings", "ensurepip"}
)
"""Folders of the standard library with nothing to learn from: tests, tables, tools, other packages."""

FILE_END = b"\0"
"""Stands after each file. Text never holds this byte, so no token beyond the 256 bytes is needed."""

ALONE = Layout()
"""One process, which takes every batch."""

Micro = tuple[Tensor, Tensor]
"""Tokens and the targets one place ahead: two int64 tensors [B, T]."""


@dataclass(frozen=True)
class TextData:
    """Two splits of uint8 tokens, and where they came from.

    `train` and `validation` are 1-d uint8 tensors; `origin` is JSON-able and goes into the run folder.
    """

    train: Tensor
    validation: Tensor
    origin: dict[str, Any] = field(repr=False)

    def step_batches(self, training: Training, step: int, layout: Layout = ALONE) -> list[Micro]:
        """Return this rank's micro-batches of optimizer step `step`, fixed by seed, step and batch shape.

        The m-th of data-parallel rank r of n is the one that a single process would compute as number m * n + r.
        """
        rng = np.random.default_rng([training.seed, step])
        starts = rng.integers(0, len(self.train) - training.seq_len, size=training.step_batch_size)
        return list(_micro_batches(self.train, starts, training, layout))

    def validation_batches(self, training: Training, validation: Validation, layout: Layout = ALONE) -> list[Micro]:
        """Return this rank's fixed validation batches: windows spread evenly over the validation split.

        Where their number does not divide by the data-parallel ranks, each takes all of them.
        """
        count = validation.steps * training.local_batch_size
        starts = np.linspace(0, len(self.validation) - training.seq_len - 1, count).astype(np.int64)
        divides = validation.steps % layout.data_parallel_degree == 0
        return list(_micro_batches(self.validation, starts, training, layout if divides else ALONE))


def load_text(data: Data, training: Training) -> TextData:
    """Read `data.path` and split it.

    A folder is split by file, a single file by its last tenth; both are the same on every machine that has
    the same files. Files that are not UTF-8 text are left out and counted in `origin["skipped_files"]`.

    Raises:
        FileNotFoundError: if the path does not exist.
        ValueError: if there is no text, or a split is not longer than one sequence.
    """
    files, skipped = _read_files(data.path)
    if not files:
        raise ValueError(f"data.path {data.path!r} holds no text; give a text file or a folder with some")
    train, validation = _split(files)
    for split, content in (("train", train), ("validation", validation)):
        if len(content) <= training.seq_len:
            raise ValueError(
                f"the {split} split of data.path {data.path!r} has {len(content)} bytes, but one sequence "
                f"needs training.seq_len + 1 = {training.seq_len + 1}; give more text or a smaller "
                "training.seq_len"
            )
    origin = {
        "path": data.path,
        "sha256": _digest(files),
        "files": len(files),
        "skipped_files": skipped,
        "train_bytes": len(train),
        "validation_bytes": len(validation),
    }
    if data.path == "stdlib":
        origin["python"] = sys.version.split()[0]
    return TextData(_tokens(train), _tokens(validation), origin)


def _read_files(path: str) -> tuple[dict[str, bytes], int]:
    """Return the text files below `path` by relative name, sorted, and how many others were skipped."""
    root = Path(sysconfig.get_paths()["stdlib"]) if path == "stdlib" else Path(path).expanduser()
    if not root.exists():
        raise FileNotFoundError(f"data.path {path!r} does not exist; give stdlib, a text file or a folder")
    if root.is_file():
        found = {root.name: root}
    else:
        found = {file.relative_to(root).as_posix(): file for file in root.rglob("*") if file.is_file()}
    wanted = _is_library_source if path == "stdlib" else _is_visible
    contents = {name: found[name].read_bytes() for name in sorted(found) if wanted(name)}
    texts = {name: content for name, content in contents.items() if content and _is_text(content)}
    return texts, len(contents) - len(texts)


def _is_library_source(name: str) -> bool:
    # _sysconfigdata holds paths of the machine that built Python.
    *folders, last = name.split("/")
    return last.endswith(".py") and not last.startswith("_sysconfigdata") and STDLIB_SKIPPED.isdisjoint(folders)


def _is_visible(name: str) -> bool:
    return not any(part.startswith(".") for part in name.split("/")[:-1])


def _is_text(content: bytes) -> bool:
    if FILE_END in content:
        return False
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _split(files: dict[str, bytes]) -> tuple[bytes, bytes]:
    if len(files) == 1:
        (content,) = files.values()
        cut = len(content) - int(len(content) * VALIDATION_SHARE)
        return content[:cut], content[cut:]
    by_hash = sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest())
    held_out = set(by_hash[: max(1, round(len(files) * VALIDATION_SHARE))])
    train = b"".join(files[name] + FILE_END for name in files if name not in held_out)
    return train, b"".join(files[name] + FILE_END for name in files if name in held_out)


def _digest(files: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in files.items():
        digest.update(f"{name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _tokens(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, dtype=np.uint8).copy())


def _micro_batches(
    tokens: Tensor, starts: "np.ndarray[Any, np.dtype[np.int64]]", training: Training, layout: Layout
) -> Iterator[Micro]:
    windows = torch.from_numpy(starts)[:, None] + torch.arange(training.seq_len + 1)
    every = windows.split(training.local_batch_size)
    for rows in every[layout.data_parallel_rank :: layout.data_parallel_degree]:
        sequences = tokens[rows].long()
        yield sequences[:, :-1], sequences[:, 1:]

"""The weights of a Hugging Face folder: model.safetensors, or shards of it and an index. One tensor at a time."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from quaver.trainer.huggingface.names import listed

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""The dtypes of weights that are read: what safetensors calls them, and torch."""


@dataclass(frozen=True)
class HFWeights:
    """The tensors of a folder by name: the file, the shape, and the dtype (as safetensors names it) of each."""

    files: dict[str, Path]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    @classmethod
    def open(cls, folder: Path) -> "HFWeights":
        """Read the headers of all files.

        Raises:
            FileNotFoundError: there is no safetensors file, or the index names one that is missing.
            ValueError: a file is damaged, or the index and the files differ.
        """
        weights = cls({}, {}, {})
        index = _index(folder)
        for path in sorted(set(index.values())) if index else [_single_file(folder)]:
            weights._add(path)
        if index is not None and index != weights.files:
            raise ValueError(f"{str(folder / INDEX)!r} and the files it names differ: {_difference(index, weights)}")
        return weights

    def tensor(self, name: str) -> Tensor:
        """Return one tensor as it is stored; its memory may be the file's."""
        with _opened(self.files[name]) as file:
            return file.get_tensor(name)

    def _add(self, path: Path) -> None:
        with _opened(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                if name in self.files:
                    raise ValueError(f"{name} is in {self.files[name].name!r} and in {path.name!r}; remove one file")
                part = file.get_slice(name)
                self.files[name] = path
                self.shapes[name] = tuple(part.get_shape())
                self.dtypes[name] = part.get_dtype()


@contextmanager
def _opened(path: Path) -> Iterator[Any]:

    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{str(path)!r} is damaged: {error}; download it again") from error


def _index(folder: Path) -> dict[str, Path] | None:
    """The file of each tensor as the index tells it; None where one file has all."""
    path = folder / INDEX
    if (folder / SINGLE).is_file() or not path.is_file():
        return None
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): folder / file for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} has no weight_map from tensors to files; download it again") from error
    for file in sorted(set(files.values())):
        if file.parent != folder or not file.is_file():
            raise FileNotFoundError(f"{str(path)!r} names {str(file)!r}, which is not there; download it again")
    if not files:
        raise ValueError(f"{str(path)!r} names no tensors; download it again")
    return files


def _single_file(folder: Path) -> Path:
    if (folder / SINGLE).is_file():
        return folder / SINGLE
    found = sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:3] or sorted(folder.glob("*.bin"))[:3]) or "neither"
        raise FileNotFoundError(
            f"{str(folder)!r} must have {SINGLE}, or shards and {INDEX}, got {names}; download all files of the model, "
            "or save it with save_pretrained, which writes safetensors"
        )
    return found[0]


def _difference(index: dict[str, Path], weights: HFWeights) -> str:
    differing = sorted(name for name in {*index, *weights.files} if index.get(name) != weights.files.get(name))
    return listed(differing)


def plan_shards(sizes: dict[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Cut the tensors of `sizes` (bytes by name), in order, into shards of at most so many bytes.

    A tensor that is larger by itself is a shard by itself.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def shard_names(count: int) -> list[str]:
    """The files of a model in `count` shards, as transformers calls them."""
    return (
        [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)] if count > 1 else [SINGLE]
    )


def write_shard(tensors: dict[str, Tensor], path: Path) -> None:
    """Write contiguous CPU tensors. Raises OSError where that fails."""

    path.touch()
    mode = path.stat().st_mode  # what the user's umask says; safetensors makes files that only their owner can read
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # its only cause here is the disk
        raise OSError(f"cannot write {str(path)!r}: {error}") from error
    path.chmod(mode)


def write_index(shards: list[list[str]], sizes: dict[str, int], folder: Path) -> None:
    """Write the index of a model in several files."""
    files = zip(shards, shard_names(len(shards)), strict=True)
    weight_map = {name: file for names, file in files for name in names}
    index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls `name`."""
    return getattr(torch, name)

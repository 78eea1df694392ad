"""Reads the safetensors files of a Hugging Face folder on access, checks their index, and writes such files."""

import json
import math
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from quaver.runtime.errors import InputError, NotWrittenError
from quaver.runtime.module_names import join_names

SAFETENSORS = ".safetensors"
SINGLE_FILE = "model.safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
INDEX_FILE = f"model{INDEX_SUFFIX}"
CONFIG_JSON = "config.json"


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a JSON object.
    """
    try:
        return parse_json_object(repr(str(path)), path.read_bytes())
    except ValueError as error:
        raise InputError(f"{error}; download it again") from error


def parse_json_object(name: str, text: bytes | str) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises ValueError, naming `name`, for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name}: expected a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise InputError(f"{name}: expected a JSON object, got a {type(value).__name__}")
    return value


def read_config(folder: Path) -> dict[str, Any]:
    """Return the config.json of `folder`.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: it is not a JSON object.
    """
    path = folder / CONFIG_JSON
    if not path.is_file():
        raise FileNotFoundError(
            f"{str(folder)!r} has no {CONFIG_JSON}; give the folder of a Hugging Face model, with *.safetensors, or "
            "one file"
        )
    return read_json_object(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` to `path`, indented. Raises ValueError if JSON cannot hold it."""
    path.write_text(encode_json(path.name, value), encoding="utf-8")


def encode_config(config: Mapping[str, Any]) -> str:
    """Return the text of a config.json. An inf or a NaN becomes an object, as transformers writes and reads it.

    Raises:
        ValueError: JSON cannot hold a value.
    """
    try:
        return encode_json("config", _replace_special_floats(config))
    except RecursionError as error:
        raise InputError(f"config: expected what JSON holds, got {error}") from error


def encode_json(name: str, value: Any) -> str:
    """Return `value` as indented JSON. Raises ValueError, naming the argument `name`, if JSON cannot hold it."""
    try:
        return json.dumps(value, indent=2, allow_nan=False) + "\n"
    except (TypeError, RecursionError, ValueError) as error:
        raise InputError(f"{name}: expected what JSON holds, got {error}") from error


def _replace_special_floats(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, Mapping):
        return {key: _replace_special_floats(item) for key, item in value.items()}
    return [_replace_special_floats(item) for item in value] if isinstance(value, list | tuple) else value


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a Hugging Face folder, or of one file, by name; a tensor is read on access.

    Raises (in the constructor):
        FileNotFoundError: there is no safetensors file, or the index names one that is not in the folder.
        ValueError: a file is damaged, the index and the files differ, or `folder` is one of several files of a model.
    """

    path: Path
    """The folder or the file."""
    metadata: list[dict[str, str]]
    """The strings in the header of each file."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        index = _read_index(folder)
        files = sorted(set(index.values())) if index else [_find_single_file(folder)]
        self._opened = {file: _open_file(file) for file in files}
        stored = [(name, file) for file, opened in self._opened.items() for name in opened.keys()]  # noqa: SIM118
        self._file = dict(stored)
        self.metadata = [opened.metadata() or {} for opened in self._opened.values()]
        check_names(self._file, folder)
        if index is not None and index != self._file:
            differing = sorted(name for name in {*index, *self._file} if index.get(name) != self._file.get(name))
            raise InputError(f"{str(folder / INDEX_FILE)!r} and the files it names differ: {join_names(differing)}")
        if len(stored) != len(self._file):
            duplicates = sorted(name for name, file in stored if self._file[name] != file)
            raise InputError(f"{str(folder)!r} has tensors in two files: {join_names(duplicates)}; download it again")

    @property
    def files(self) -> list[Path]:
        """The files, in the order of their names."""
        return list(self._opened)

    def __getitem__(self, name: str) -> Tensor:
        return self._opened[self._file[name]].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file  # Mapping's method would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)

    def get_shape(self, name: str) -> list[int]:
        """Return the shape of a tensor, from the header of its file."""
        return list(self._opened[self._file[name]].get_slice(name).get_shape())

    def get_dtype(self, name: str) -> str:
        """Return the dtype of a tensor as the header of its file names it: F8_E4M3, BF16, F32 and so on."""
        return str(self._opened[self._file[name]].get_slice(name).get_dtype())


def _read_index(folder: Path) -> dict[str, Path] | None:
    """Return the file of each tensor from the index, or None if one file has all tensors."""
    path = folder / INDEX_FILE
    if (folder / SINGLE_FILE).is_file() or not path.is_file():
        return None
    try:
        files = {name: folder / file for name, file in read_json_object(path)["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{str(path)!r} has no weight_map from tensors to files; download it again") from error
    check_names(files, path)
    for file in sorted(set(files.values())):
        if file.parent != folder or not file.is_file():  # a name with .. would read outside of the folder
            raise FileNotFoundError(f"{str(path)!r} names {str(file)!r}, which is not there; download it again")
    if not files:
        raise InputError(f"{str(path)!r} names no tensors; download it again")
    return files


def check_names(names: Iterable[str], path: Path) -> None:
    """Raise ValueError if a name in the file or folder `path` has line breaks or control characters.

    Names come from an untrusted file and appear in error messages and module names.
    """
    for name in names:
        if not name.isprintable():
            raise InputError(f"{str(path)!r} has the name {name!r}, which is not printable; download it again")


def _find_single_file(folder: Path) -> Path:
    """Return `folder` if it is a file, else its model.safetensors, else its only safetensors file."""
    if folder.is_file():
        _check_file(folder)
        return folder
    if (folder / SINGLE_FILE).is_file():
        return folder / SINGLE_FILE
    files = sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        names = ", ".join(path.name for path in files[:3] or sorted(folder.glob("*.bin"))[:3]) or "neither"
        raise FileNotFoundError(
            f"{str(folder)!r}: expected {SINGLE_FILE}, or shards and {INDEX_FILE}, got {names}; download all files of "
            "the model, or save it with save_pretrained, which writes safetensors"
        )
    return files[0]


def _check_file(file: Path) -> None:
    """Raise ValueError for a file of another kind, or one that shares an index with other files."""
    if file.suffix != SAFETENSORS:
        raise InputError(f"{str(file)!r}: expected a folder or a {SAFETENSORS} file")
    for index in file.parent.glob(f"*{INDEX_SUFFIX}"):
        weight_map = read_json_object(index).get("weight_map")
        files = list(weight_map.values()) if isinstance(weight_map, dict) else []
        if file.name in files and any(other_file != file.name for other_file in files):
            raise InputError(f"{str(file)!r} is one of the files of {index.name}; give their folder")


def _open_file(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open  # optional: the rest of this file works without it

    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise InputError(f"{str(file)!r} is damaged: {error}; download it again") from error


def check_positive_integer(argument: str, number: object) -> None:
    """Raise ValueError unless `number`, the value of `argument`, is an int of 1 or more."""
    if type(number) is not int or number < 1:
        raise ValueError(f"{argument}: expected an integer, 1 or more, got {number!r}")


class SafetensorsWriter:
    """Writes tensors into files of at most `max_shard_bytes`, or of one larger tensor, and an index.

    One file at a time is in memory. With `max_shard_bytes=None` it writes one file. A file gets the `metadata` of the
    time when it is written.
    """

    def __init__(self, folder: Path, max_shard_bytes: int | None) -> None:
        self._folder, self._max_shard_bytes = folder, sys.maxsize if max_shard_bytes is None else max_shard_bytes
        self.metadata = {"format": "pt"}
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._written: list[list[str]] = []
        self.total_bytes = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor on any device. Writes the pending file if it has no room. Raises NotWrittenError."""
        if self._pending_bytes and self._pending_bytes + tensor.nbytes > self._max_shard_bytes:
            self._flush()
        self._pending[name] = tensor.detach().cpu().contiguous()
        self._pending_bytes += tensor.nbytes
        self.total_bytes += tensor.nbytes

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        file = self._folder / f"{len(self._written)}.partial"
        try:
            file.touch()
            mode = file.stat().st_mode
            save_file(self._pending, file, metadata=self.metadata)
            file.chmod(mode)  # safetensors writes a temporary file that only its owner may read
        except (SafetensorError, OSError) as error:
            raise NotWrittenError(f"cannot write the weights: {error}") from error
        self._written.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def close(self) -> None:
        """Write the last file, name the files as transformers does, and write an index if there are several."""
        self._flush()
        count = len(self._written)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._written):
            file = SINGLE_FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self._folder / f"{number}.partial").rename(self._folder / file)
            weight_map |= dict.fromkeys(names, file)
        if count > 1:
            write_json(
                self._folder / INDEX_FILE, {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
            )


def write_model(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any],
    files: Iterable[Path],
    max_shard_bytes: int,
) -> None:
    """Write `tensors` (see `SafetensorsWriter`) and config.json into `folder`, and copy files such as a tokenizer's."""
    text = encode_config(config)
    writer = SafetensorsWriter(folder, max_shard_bytes)
    for name, tensor in tensors:
        writer.add(name, tensor)
    writer.close()
    (folder / CONFIG_JSON).write_text(text, encoding="utf-8")
    copy_files(files, folder)


def copy_files(files: Iterable[Path], folder: Path) -> None:
    """Copy `files` into `folder`. They replace files of the same names: call `check_copied_files` first."""
    for file in files:
        shutil.copyfile(file, folder / file.name)

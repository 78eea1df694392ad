"""Reads a torch.distributed.checkpoint (DCP) folder without running code that is in it.

DCP pickles `.metadata` and every value that is not a tensor, and unpickles both without restriction, so that a file can
call any function. `CheckpointReader` unpickles `.metadata` to plain values, and to records in place of DCP's classes:
no class is imported, nothing is called, and no opcode is run that DCP does not write. So a stranger's checkpoint cannot
run code, crash the interpreter, or allocate more than about 100 bytes for each byte of `.metadata`. Names, sizes and
paths are checked before DCP gets them. `CheckpointPlanner` loads tensors alone, which DCP reads with weights_only=True.

DCP has no setting for this in torch 2.13. A public reader with one would replace this file.
"""

import io
import itertools
import math
import pickle
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem

from quaver.runtime.errors import describe_error
from quaver.torch_private.distributed_checkpoint import StorageInfo

METADATA_FILE = ".metadata"

_MAX_CUT_DIMS = 4
"""The most dims along which chunks cut a tensor: a chunk has 2 to that power corners. DCP cuts one for each axis of a
mesh."""

_MAX_DIMS = 16
"""The most dims of a tensor."""

_MIN_CHUNK_BYTES = 8
"""Fewer bytes than a pickled chunk has. Tensors with more chunks name one list of chunks many times."""

_DCP_PREFIX = "torch.distributed.checkpoint."
_KNOWN_NAMES = {
    *(f"{_DCP_PREFIX}metadata.{name}" for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *(f"{_DCP_PREFIX}metadata.{name}StorageMetadata" for name in ("Tensor", "Bytes", "Chunk")),
    *(
        f"{_DCP_PREFIX}metadata._MEM_FORMAT_ENCODING",
        f"{_DCP_PREFIX}filesystem._StorageInfo",
        "torch.serialization._get_layout",
    ),
    *(f"pathlib.{name}" for name in ("PosixPath", "WindowsPath")),
    *(f"pathlib._local.{name}" for name in ("PosixPath", "WindowsPath")),
    "torch.Size",
    "builtins.getattr",
}
"""The names in a `.metadata` that are not dtypes. Python before 3.11.4 pickles a member of an enum as a `getattr`."""

_OPCODES = b"".join(
    getattr(pickle, name)
    for line in (
        "PROTO FRAME STOP MARK MEMOIZE BINGET LONG_BINGET STACK_GLOBAL NONE NEWTRUE NEWFALSE",
        "SHORT_BINUNICODE BINUNICODE BININT BININT1 BININT2 LONG1 EMPTY_LIST APPEND APPENDS EMPTY_DICT",
        "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3",
    )
    for name in line.split()
)
"""Opcodes that DCP writes and that need no check. Some of pickle's other opcodes allocate as much memory as a length
in the file says."""


class CheckpointReader(FileSystemReader):
    """The reader of one model of a checkpoint. Its path is a folder of the local file system."""

    _checked_metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the checked metadata, without the planner's data and the paths on the machine that saved.

        The file is read once, so that load() gets the metadata that was checked.

        Raises:
            OSError: a file is missing.
            ValueError: `.metadata` is damaged, or has a name that no checkpoint has; the message names the file.
        """
        if self._checked_metadata is not None:
            return self._checked_metadata
        path = Path(self.path) / METADATA_FILE
        if path.is_symlink() or not path.is_file():
            raise FileNotFoundError(f"there is no file {METADATA_FILE}")
        try:
            content = path.read_bytes()
            metadata = _convert_metadata(_Unpickler(io.BytesIO(content)).load(), len(content) // _MIN_CHUNK_BYTES)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
            raise ValueError(f"{METADATA_FILE} is damaged: {describe_error(error)}") from None
        self._check_files(metadata)
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        self._checked_metadata = metadata
        return metadata

    def _check_files(self, metadata: Metadata) -> None:
        """Check that each file is in the folder, and at least as long as the metadata says."""
        sizes: dict[str, int] = {}
        for info in metadata.storage_data.values():
            name = info.relative_path
            if name not in sizes:
                path = Path(self.path) / name
                if Path(name).name != name or path.is_symlink():
                    raise ValueError(f"{METADATA_FILE} names the file {name!r}, which is outside of the checkpoint")
                if not path.is_file():
                    raise FileNotFoundError(f"{name!r} is missing")
                sizes[name] = path.stat().st_size
            if info.offset + info.length > sizes[name]:
                raise ValueError(f"{name!r} has {sizes[name]} bytes, expected {info.offset + info.length} or more")


class CheckpointPlanner(DefaultLoadPlanner):
    """Loads tensors. DCP would unpickle any other value, and put it in the place of a tensor of that name."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Raise ValueError: a value that is not a tensor."""
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")


def check_readable(checkpoint: Path, names: Sequence[str]) -> None:
    """Check that the metadata of each model can be read, and that its files are long enough for it."""
    for name in names:
        CheckpointReader(checkpoint / name).read_metadata()


class _Name(str):
    """A name of `_KNOWN_NAMES`. It stands for the class or function, which is not imported."""


@dataclass(eq=False)
class _PickledObject:
    """An object of DCP: the name of its class, and the state that the pickle gives it."""

    name: str
    state: Any = field(default_factory=dict)


class _Unpickler(pickle._Unpickler):
    """Makes a `_PickledObject` for each object.

    It extends pickle's Python class, whose table of opcodes can be changed; the one in C allocates a memo of any size
    that a file names. Table and stack are undocumented; the tests of hostile files show whether they have changed.
    """

    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def find_class(self, module: str, name: str) -> Any:
        dtype = getattr(torch, name, None) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        qualified_name = f"{module}.{name}"
        if qualified_name not in _KNOWN_NAMES:
            raise ValueError(f"it names {qualified_name[:80]!r}, which no checkpoint has")
        return _Name(name)

    def _refuse(self) -> None:
        raise ValueError("it has an opcode that no checkpoint has")

    def _make_object(self) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, _Name):
            raise ValueError("it calls a value")
        self.stack.append(arguments[0] if name == "Size" else _PickledObject(name))

    def _build(self) -> None:
        state = self.stack.pop()
        if not isinstance(self.stack[-1], _PickledObject):
            raise ValueError("it gives a state to a value")
        self.stack[-1].state = state

    def _set_items(self) -> None:
        self._update_dict(self.pop_mark())

    def _set_item(self) -> None:
        self._update_dict([self.stack.pop(-2), self.stack.pop()])

    def _update_dict(self, items: list[Any]) -> None:
        # a deeply nested tuple would overflow the stack of its hash function
        if not all(isinstance(key, str | _PickledObject) for key in items[::2]):
            raise ValueError("a key is not a name")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch: ClassVar[dict[int, Callable[[Any], None]]] = dict.fromkeys(range(256), _refuse)
    dispatch |= {code: pickle._Unpickler.dispatch[code] for code in _OPCODES}
    dispatch |= {pickle.NEWOBJ[0]: _make_object, pickle.REDUCE[0]: _make_object, pickle.BUILD[0]: _build}
    dispatch |= {pickle.SETITEM[0]: _set_item, pickle.SETITEMS[0]: _set_items}


def _convert_metadata(pickled: Any, max_chunks: int) -> Metadata:
    """Convert the interpreted pickle to DCP's metadata. Raises any exception if the structure is different."""
    state = _get_state(pickled, "Metadata")
    entries = [entry.state for entry in state["state_dict_metadata"].values()]
    if sum(len(entry["chunks"]) for entry in entries if "chunks" in entry) > max_chunks:
        raise ValueError("its tensors share their parts")
    tensors = {
        _check_text(name): _convert_storage(_check_text(name), value)
        for name, value in state["state_dict_metadata"].items()
    }
    storage_data = {}
    for key, value in state["storage_data"].items():
        key_state, info = _get_state(key, "MetadataIndex"), _get_state(value, "_StorageInfo")
        if info.get("transform_descriptors"):
            raise ValueError("a tensor is compressed or encrypted")
        offset = key_state.get("offset")
        index = MetadataIndex(_check_text(key_state["fqn"]), None if offset is None else _convert_shape(offset))
        file_offset, length = _convert_shape((info["offset"], info["length"]))
        storage_data[index] = StorageInfo(_check_text(info["relative_path"]), file_offset, length)
    for name, tensor in tensors.items():
        offsets = [chunk.offsets for chunk in tensor.chunks] if isinstance(tensor, TensorStorageMetadata) else [None]
        if not all(MetadataIndex(name, offset) in storage_data for offset in offsets):
            raise ValueError(f"a part of {name} has no place in a file")
    return Metadata(tensors, storage_data=storage_data)


def _convert_storage(name: str, pickled: Any) -> STORAGE_TYPES:
    if isinstance(pickled, _PickledObject) and pickled.name == "BytesStorageMetadata":
        return BytesStorageMetadata()
    state = _get_state(pickled, "TensorStorageMetadata")
    (dtype, *_), size = _get_state(state["properties"], "TensorProperties"), _convert_shape(state["size"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name} has no dtype")
    chunks = []
    for part in state["chunks"]:
        chunk = _get_state(part, "ChunkStorageMetadata")
        chunks.append(ChunkStorageMetadata(_convert_shape(chunk["offsets"]), _convert_shape(chunk["sizes"])))
    if not _is_exact_cover(chunks, size):  # load() would leave the rest uninitialized
        raise ValueError(f"the parts of {name} do not make a tensor of {list(size)}, each element once")
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, chunks)


def _is_exact_cover(chunks: list[ChunkStorageMetadata], size: torch.Size) -> bool:
    """Return whether chunks cover a tensor without a hole or an overlap.

    Equal chunks, which several ranks wrote, count once. A box is a sum of orthants with alternating signs, one at each
    corner, and orthants at different points are linearly independent. So boxes tile a larger box if and only if their
    signed corners add up to its signed corners.
    """
    boxes = {(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks if math.prod(chunk.sizes)}
    if any(len(offset) != len(size) or len(lengths) != len(size) for offset, lengths in boxes):
        return False
    if not math.prod(size):
        return not boxes
    cut_dims = [
        dim
        for dim in range(len(size))
        if any((offset[dim], lengths[dim]) != (0, size[dim]) for offset, lengths in boxes)
    ]
    if len(cut_dims) > _MAX_CUT_DIMS:
        return False
    corners: Counter[tuple[int, ...]] = Counter()
    tensor = tuple(0 for _ in size), tuple(size)
    for sign, (offset, lengths) in [(-1, tensor), *((1, box) for box in boxes)]:
        ends = [((offset[dim], 1), (offset[dim] + lengths[dim], -1)) for dim in cut_dims]
        for corner in itertools.product(*ends):
            point = tuple(coordinate for coordinate, _ in corner)
            corners[point] += sign * math.prod(corner_sign for _, corner_sign in corner)
    return not any(corners.values())


def _get_state(pickled: Any, name: str) -> Any:
    if not isinstance(pickled, _PickledObject) or pickled.name != name:
        raise ValueError(f"it has another object in place of a {name}")
    return pickled.state


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a name is not a string")
    return value


def _convert_shape(value: Any) -> torch.Size:
    is_shape = isinstance(value, tuple) and len(value) <= _MAX_DIMS
    if not is_shape or not all(type(size) is int and 0 <= size < 2**63 for size in value):
        raise ValueError(f"a size or an offset is not of at most {_MAX_DIMS} non-negative integers")
    return torch.Size(value)

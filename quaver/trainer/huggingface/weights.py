"""The weights of a Llama in Hugging Face's safetensors files: finding, checking and copying them.

Names are equal in both. torch's HuggingFaceStorageReader and HuggingFaceStorageWriter read and write the tensors; the
reader takes every *.safetensors of a folder, so the index, and that the files are whole, is checked here.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from quaver.export.files import INDEX, SINGLE, check_header, check_index, read_index, single_file
from quaver.trainer.checkpoint import ignore_single_process_warning, load_state, read_metadata, reason
from quaver.trainer.config import Model
from quaver.trainer.errors import CheckpointError, OutputError
from quaver.trainer.model import Llama

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""The two that may be tied."""


def meta_state(model: Model, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the model's state dict without storage; a tied weight has both its names."""
    with torch.device("meta"):
        return Llama(model).to(dtype).state_dict()


def file_state(model: Model, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return what a Hugging Face file has of `meta_state`: a tied weight once, as the embedding."""
    state = meta_state(model, dtype)
    if model.tie_word_embeddings:
        del state[HEAD]
    return state


def open_safetensors(folder: Path) -> HuggingFaceStorageReader:
    """Return a reader of the model in `folder`, after reading the headers of its files.

    Raises:
        FileNotFoundError: there is no safetensors file, or the index names one that is missing.
        ValueError: a file is damaged, or the index and the files differ.
        CheckpointError: torch cannot read the headers.
    """
    index = read_index(folder)
    files = sorted(set(index.values())) if index else [single_file(folder)]
    for file in files:
        check_header(file)
    reader = HuggingFaceStorageReader(str(folder))
    reader.fs = _Files(files)
    metadata = read_metadata(reader)
    tensors: dict[str, Any] = metadata.state_dict_metadata
    for name, tensor in tensors.items():
        if [chunk.sizes for chunk in tensor.chunks] != [tensor.size]:  # load() would leave the rest uninitialized
            raise ValueError(f"{name} must be whole in one file, got {len(tensor.chunks)} parts; download it again")
    check_index(folder, index, {item.fqn: Path(info.relative_path) for item, info in metadata.storage_data.items()})
    return reader


def read_tensor(reader: FileSystemReader, name: str, like: Tensor) -> Tensor:
    """Return a stored tensor in the shape and dtype of `like`. Raises CheckpointError."""
    tensor = torch.empty_like(like, device="cpu")
    load_state({name: tensor}, reader)
    return tensor


def copy_weights(
    reader: FileSystemReader, writer: FileSystemWriter, state: dict[str, Any], stored: dict[str, str]
) -> None:
    """Write what `state` describes. Memory holds one file of the result; of safetensors, its serialized bytes too.

    Args:
        state: meta tensors in the shape and dtype of the result; values are rounded to nearest even.
        stored: the names of these tensors in `reader`, by their flattened names in `state`.
    Raises:
        CheckpointError: a tensor cannot be read.
        OutputError: a file cannot be written.
    """
    ignore_single_process_warning()
    try:
        save(state, storage_writer=writer, planner=_Copy(reader, stored))
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if isinstance(cause, CheckpointError) or not isinstance(cause, Exception):  # that is Ctrl-C
            raise cause from None
        raise OutputError(f"cannot write the weights to {str(writer.path)!r}: {reason(error)}") from error


def write_safetensors(
    reader: FileSystemReader, folder: Path, state: dict[str, Tensor], stored: dict[str, str], max_bytes: int
) -> None:
    """`copy_weights` into files of at most `max_bytes`, or one tensor, with the names that transformers expects."""
    files = number_files({name: tensor.nbytes for name, tensor in state.items()}, max_bytes)
    copy_weights(reader, HuggingFaceStorageWriter(str(folder), files), state, stored)
    if max(files.values()) == 1:
        (folder / "model-00001-of-00001.safetensors").rename(folder / SINGLE)
        (folder / INDEX).unlink()


def number_files(sizes: dict[str, int], max_bytes: int) -> dict[str, int]:
    """Return the number, from 1, of the file of each tensor of `sizes` (bytes by name), which are cut in order.

    A file holds at most `max_bytes`, or one tensor.
    """
    numbers: dict[str, int] = {}
    number, filled = 1, 0
    for name, size in sizes.items():
        if filled and filled + size > max_bytes:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += size
    return numbers


class _Files(FileSystem):
    """Lists the files of the model alone: a folder may have other *.safetensors."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files

    def ls(self, path: object) -> list[str]:
        return [str(file) for file in self._files]


class _Copy(DefaultSavePlanner):
    """Loads each tensor when the writer asks for it, so that memory never holds the whole model."""

    def __init__(self, reader: FileSystemReader, stored: dict[str, str]) -> None:
        super().__init__()
        self._reader, self._stored = reader, stored

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        like = self.lookup_object(write_item.index)
        return read_tensor(self._reader, self._stored[write_item.index.fqn], like)

"""Reads the weights of a checkpoint by their names in Hugging Face's files, and writes a checkpoint from such weights.

The names are equal, except for experts: files have a matrix per expert, a checkpoint has one 3-D weight for all
(quaver/export/checkpoint_names.py). quaver/export/files.py reads and writes safetensors files.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict_saver import save

from quaver.export.checkpoint_names import CheckpointNames, make_checkpoint_names
from quaver.lab.model.llama import make_meta_llama
from quaver.lab.runs.dcp import describe_innermost_cause, ignore_single_process_warning, load_state, read_metadata
from quaver.lab.runs.safe_dcp import CheckpointReader
from quaver.lab.settings import Model
from quaver.runtime.errors import NotWrittenError

EMBEDDING_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"
"""The two weights that may be tied."""


def make_meta_state(model: Model, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the model's state dict without storage. A tied weight has both names."""
    return make_meta_llama(model).to(dtype).state_dict()


def make_stored_state(model: Model) -> dict[str, Tensor]:
    """Return `make_meta_state` as a checkpoint stores it: a tied weight once, as the embedding."""
    state = make_meta_state(model)
    if model.tie_word_embeddings:
        del state[HEAD_NAME]
    return state


def make_file_state(model: Model) -> dict[str, Tensor]:
    """Return `make_stored_state` as Hugging Face's files store it, with a matrix per expert."""
    names = _make_checkpoint_names(model)
    return {
        part: view
        for name, tensor in make_stored_state(model).items()
        for part, view in names.split_tensor(name, tensor).items()
    }


def make_empty_shared_experts(model: Model) -> dict[str, Tensor]:
    """Return shared experts of width 0, which GLM-4.5's files need for a mixture without shared experts."""
    if not model.n_experts or model.n_shared_experts:
        return {}
    prefixes = [f"model.layers.{layer}.mlp.shared_experts" for layer in range(model.n_layers)]
    shapes = {"gate_proj": (0, model.dim), "up_proj": (0, model.dim), "down_proj": (model.dim, 0)}
    return {f"{prefix}.{name}.weight": torch.empty(shape) for prefix in prefixes for name, shape in shapes.items()}


def _make_checkpoint_names(model: Model) -> CheckpointNames:
    return make_checkpoint_names(make_meta_llama(model))


class CheckpointWeights(Mapping[str, Tensor]):
    """The weights of a model of a checkpoint, in their stored dtypes. A weight is read when it is accessed.

    Reading raises CheckpointError if the files are damaged.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        """Take `folder`, the model's folder in a checkpoint that `open_checkpoint_model` has checked."""
        self._reader = CheckpointReader(folder)
        stored: dict[str, Any] = read_metadata(self._reader).state_dict_metadata
        self._meta = {
            name: tensor.to(stored[f"model.{name}"].properties.dtype)
            for name, tensor in make_stored_state(model).items()
        }
        self._names = _make_checkpoint_names(model)
        self._owners = {part: name for name in self._meta for part in self._names.get_stored_names(name)}
        """Maps the name of a tensor in the files to the tensor of the checkpoint that contains it."""
        self._last: tuple[str, dict[str, Tensor]] = "", {}

    def read_stored(self, name: str) -> Tensor:
        """Return a tensor by its name in the checkpoint, which has all experts of a layer in one tensor."""
        tensor = torch.empty_like(self._meta[name], device="cpu")
        load_state({f"model.{name}": tensor}, self._reader)
        return tensor

    def __getitem__(self, name: str) -> Tensor:
        owner = self._owners[name]
        if self._last[0] != owner:  # the experts of a layer follow each other
            self._last = owner, self._names.split_tensor(owner, self.read_stored(owner))
        return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._owners)

    def __len__(self) -> int:
        return len(self._owners)


def write_weights(weights: Mapping[str, Tensor], folder: Path, model: Model, dtype: torch.dtype) -> None:
    """Write `weights`, rounded to nearest even, as the model of a checkpoint. Memory holds one tensor at a time.

    Raises NotWrittenError.
    """
    # A file for each tensor: torch holds all tensors of a file until it is written. write_new_folder syncs.
    writer = FileSystemWriter(folder, single_file_per_rank=False, sync_files=False)
    try:
        with ignore_single_process_warning():
            save({"model": make_meta_state(model, dtype)}, storage_writer=writer, planner=_LazyPlanner(weights, model))
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, Exception):  # Ctrl-C
            raise cause from None
        raise NotWrittenError(
            f"cannot write the weights to {str(folder)!r}: {describe_innermost_cause(error)}"
        ) from error


class _LazyPlanner(DefaultSavePlanner):
    """Reads a tensor when the writer asks for it, so that memory never holds the whole model."""

    def __init__(self, weights: Mapping[str, Tensor], model: Model) -> None:
        super().__init__()
        self._weights, self._tied, self._names = weights, model.tie_word_embeddings, _make_checkpoint_names(model)

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        target = self.lookup_object(write_item.index)
        name = write_item.index.fqn.removeprefix("model.")
        stored = EMBEDDING_NAME if self._tied and name == HEAD_NAME else name
        if stored in self._names.stacks:
            return self._names.read_stack(stored, target.shape, target.dtype, self._weights.__getitem__)
        return self._weights[stored].to(target.dtype)

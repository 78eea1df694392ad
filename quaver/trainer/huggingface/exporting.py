"""A checkpoint becomes a folder that `transformers.AutoModelForCausalLM.from_pretrained` loads.

torch.distributed.checkpoint puts together what any number of ranks wrote. One file of the result is in memory at a
time.
"""

import json
import shutil
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from quaver.recorder.byte_sizes import bytes_of
from quaver.trainer.checkpoints.folder import read_metadata, read_record
from quaver.trainer.checkpoints.new_folder import check_new, new_folder
from quaver.trainer.checkpoints.single_process import first_line, single_process
from quaver.trainer.config import Model
from quaver.trainer.config_io import build_config
from quaver.trainer.errors import CheckpointError
from quaver.trainer.huggingface.config import KEPT, hf_config
from quaver.trainer.huggingface.files import (
    plan_shards,
    shard_names,
    torch_dtype,
    write_index,
    write_shard,
)
from quaver.trainer.huggingface.names import file_shapes, listed

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Export:
    """One model of a checkpoint that was checked."""

    weights: Path
    model: Model
    record: dict[str, Any]

    @property
    def kept(self) -> dict[str, Any]:
        """Token ids and the longest context: those of the imported model, or those that the run was trained with."""
        if "huggingface" in self.record:
            return {name: self.record["huggingface"][name] for name in KEPT if name in self.record["huggingface"]}
        scaling = self.model.rope_scaling
        longest = self.record["config"]["training"]["seq_len"]
        if scaling:
            longest = max(longest, int(scaling.factor * scaling.original_max_position))
        return {"eos_token_id": self.record["data"]["eos_id"], "max_position_embeddings": longest}


def open_checkpoint(checkpoint: Path, name: str | None = None) -> Export:
    """Read a checkpoint's record and the list of its tensors, and check that it has the model `name` (the first).

    Raises:
        OSError: it is no checkpoint, or cannot be read.
        ValueError: it has no such model, or tensors are missing or have other shapes than its config says.
        CheckpointError: its files are damaged.
    """
    record = read_record(checkpoint)
    names = record["models"]
    if name is not None and name not in names:
        raise ValueError(f"--model must be one of {', '.join(names)}, the models of {str(checkpoint)!r}, got {name!r}")
    model = _model(record, checkpoint)
    path = checkpoint / (name or names[0])
    _check_weights(read_metadata(path), model, path)
    return Export(path, model, record)


def export_hf(
    checkpoint: Path,
    out: Path,
    *,
    name: str | None = None,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5 * 1000**3,
    tokenizer: Path | None = None,
) -> Export:
    """Write the model `name` of `checkpoint`, or its first, as the new folder `out`.

    Args:
        dtype: float32 or bfloat16; of the written weights, rounded to nearest even.
        max_shard_bytes: a file holds at most so much, or one tensor; memory, a stored tensor more.
        tokenizer: a folder whose tokenizer files are copied.
    Raises:
        FileExistsError: `out` exists.
        OSError, ValueError, CheckpointError: as `open_checkpoint`; OSError where `out` cannot be written, too.
    """
    check_new(out)
    copied = tokenizer_files(tokenizer) if tokenizer else []
    found = open_checkpoint(checkpoint, name)
    with new_folder(out) as partial:
        _write_weights(found, partial, torch_dtype(dtype), max_shard_bytes)
        config = hf_config(found.model, dtype=dtype, kept=found.kept)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in copied:
            shutil.copyfile(file, partial / file.name)
    return found


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer in `folder`. Raises FileNotFoundError where there are none."""
    found = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    if not found:
        raise FileNotFoundError(f"--tokenizer {str(folder)!r} has no file of a tokenizer, as {TOKENIZER_FILES[0]}")
    return found


def parse_size(text: str) -> int:
    """Return the bytes of a size as `5GB`, `500MB` or `2GiB`. Raises ValueError for anything else, and for none."""
    size = bytes_of(text)
    if size < 1:
        raise ValueError(f"--max-shard-size must be a size as 5GB, 500MB or 2GiB, got {text!r}")
    return size


def _model(record: dict[str, Any], checkpoint: Path) -> Model:
    settings = record.get("config", {}).get("model", {})
    unknown = sorted(settings.keys() - {each.name for each in fields(Model)})
    if unknown or not settings:
        what = (
            f"the model settings {listed(unknown)}, which this version of quaver does not know" if unknown else "none"
        )
        raise ValueError(f"{str(checkpoint)!r} must tell the settings of its model, got {what}")
    return build_config({"model": settings}).model


def _check_weights(metadata: Metadata, model: Model, path: Path) -> None:
    stored = {
        key.removeprefix("model."): tuple(value.size)
        for key, value in metadata.state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata) and key.startswith("model.")
    }
    misfits = [
        f"{name} {list(shape)} ({list(stored[name]) if name in stored else 'missing'})"
        for name, shape in file_shapes(model).items()
        if stored.get(name) != shape
    ]
    if misfits:
        raise ValueError(f"{str(path)!r} does not have the tensors that its config calls for: {listed(misfits)}")


def _write_weights(found: Export, folder: Path, dtype: torch.dtype, max_shard_bytes: int) -> None:
    shapes = file_shapes(found.model)
    sizes = {name: torch.Size(shape).numel() * dtype.itemsize for name, shape in shapes.items()}
    shards = plan_shards(sizes, max_shard_bytes)
    for names, file in zip(shards, shard_names(len(shards)), strict=True):
        tensors = {name: torch.empty(shapes[name], dtype=dtype) for name in names}
        _load(tensors, found.weights)
        write_shard(tensors, folder / file)
    if len(shards) > 1:
        write_index(shards, sizes, folder)


def _load(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Fill `tensors`; torch converts what is stored to their dtype."""
    try:
        with single_process():
            load({"model": tensors}, storage_reader=FileSystemReader(path), no_dist=True)
    except (OSError, ValueError, RuntimeError, EOFError) as error:
        raise CheckpointError(f"cannot load {str(path)!r}: {first_line(error)}; choose another checkpoint") from error

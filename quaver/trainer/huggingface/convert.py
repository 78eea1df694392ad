"""Imports a Hugging Face folder as a checkpoint for `checkpoint.initial_load_path`, and exports a checkpoint.

An import writes
    OUT/checkpoint.json     as in a run's checkpoint, of step 0; its config is the [model] section alone
    OUT/model/              a torch.distributed.checkpoint folder with the keys model.<name>
    OUT/model.toml          the [model] section, for quaver train
An export writes what `transformers.AutoModelForCausalLM.from_pretrained` loads. torch.distributed.checkpoint assembles
what any number of ranks wrote.
"""

import json
import re
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tomli_w
import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from quaver.export.bundle import tokenizer_files
from quaver.export.files import listed, read_config
from quaver.export.folders import check_new, new_folder
from quaver.trainer.checkpoint import read_metadata
from quaver.trainer.checkpoint_folder import (
    FORMAT,
    Progress,
    check_checkpoint,
    read_record,
    write_record,
)
from quaver.trainer.config import Model
from quaver.trainer.config_io import build_config
from quaver.trainer.huggingface.config import KEPT, hf_config, model_from_hf
from quaver.trainer.huggingface.weights import (
    EMBEDDING,
    HEAD,
    copy_weights,
    file_state,
    meta_state,
    open_safetensors,
    read_tensor,
    write_safetensors,
)
from quaver.trainer.run_folder import provenance
from quaver.trainer.safe_dcp import CheckpointReader

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of weights that are imported."""

_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers that old versions of transformers saved; they follow from the config."""


@dataclass(frozen=True)
class Export:
    """One model of a checkpoint that was checked."""

    weights: Path
    model: Model
    record: dict[str, Any]


def import_hf(folder: Path, out: Path, dtype: str = "float32") -> Model:
    """Write the Hugging Face model in `folder` as the new checkpoint `out`; memory holds one tensor at a time.

    Args:
        dtype: float32 or bfloat16; of the stored weights.
    Raises:
        FileExistsError: `out` exists.
        OSError: a file is missing or cannot be read, or `out` cannot be made.
        ValueError, CheckpointError: the files are damaged or do not fit.
        NotImplementedError: quaver's Llama does not support the model.
        OutputError: the weights cannot be written.
    """
    check_new(out)
    config = read_config(folder)
    model = model_from_hf(config)
    reader = open_safetensors(folder)
    _check_tensors(reader, model, folder)
    stored = {f"model.{name}": name for name in meta_state(model)}
    if model.tie_word_embeddings:
        stored[f"model.{HEAD}"] = EMBEDDING
    record = {
        "format": FORMAT,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "models": ["model"],
        "world_size": 1,
        "progress": asdict(Progress()),
        "config": {"model": asdict(model)},
        "provenance": provenance(torch.device("cpu")),
        "huggingface": {"folder": str(folder.resolve()), "dtype": dtype, **_kept(config)},
    }
    with new_folder(out) as partial:
        # A file for each tensor: torch holds all tensors of a file until it is written. new_folder syncs.
        writer = FileSystemWriter(partial / "model", single_file_per_rank=False, sync_files=False)
        copy_weights(reader, writer, {"model": meta_state(model, getattr(torch, dtype))}, stored)
        toml = "# Written by quaver convert hf-to-quaver.\n" + tomli_w.dumps({"model": asdict(model)})
        (partial / "model.toml").write_text(toml, encoding="utf-8")
        write_record(partial, record)
    return model


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
        max_shard_bytes: a file holds at most so much, or one tensor; memory holds it twice.
        tokenizer: a folder with tokenizer files to copy.
    Raises:
        FileExistsError: `out` exists.
        OSError: this is not a checkpoint, `tokenizer` has no tokenizer, or `out` cannot be made.
        ValueError: the checkpoint has no such model, or tensors are missing or have other shapes than its config says.
        CheckpointError: its files are damaged.
        OutputError: the weights cannot be written.
    """
    check_new(out)
    copied = tokenizer_files(tokenizer) if tokenizer else []
    found = open_checkpoint(checkpoint, name)
    state = file_state(found.model, getattr(torch, dtype))
    stored = {each: f"model.{each}" for each in state}
    config = hf_config(found.model, dtype=dtype, kept=kept_of_run(found))
    with new_folder(out) as partial:
        reader = CheckpointReader(found.weights)
        write_safetensors(reader, partial, state, stored, max_shard_bytes)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in copied:
            shutil.copyfile(file, partial / file.name)
    return found


def _check_tensors(reader: FileSystemReader, model: Model, folder: Path) -> None:
    stored: dict[str, Any] = read_metadata(reader).state_dict_metadata
    known = meta_state(model)
    unexpected = sorted(name for name in stored if name not in known and not _DERIVED.fullmatch(name))
    if unexpected:
        raise ValueError(f"{str(folder)!r} has tensors that a Llama does not have: {listed(unexpected)}")
    expected = file_state(model)
    if HEAD in stored:
        expected[HEAD] = known[HEAD]
    _check_shapes(reader, expected)
    for name in expected:
        dtype = stored[name].properties.dtype
        if dtype not in _DTYPES:
            raise NotImplementedError(f"{name} must be float32, bfloat16 or float16, got {dtype}; dequantize the model")
    if model.tie_word_embeddings and HEAD in stored:
        head, embedding = (read_tensor(reader, name, known[name]) for name in (HEAD, EMBEDDING))
        if not torch.equal(head, embedding):
            raise ValueError(
                f"config.json says tie_word_embeddings, but {HEAD} and {EMBEDDING} differ; say false there to keep both"
            )


def _check_shapes(reader: FileSystemReader, expected: dict[str, Tensor], prefix: str = "") -> None:
    stored = {
        key: list(value.size)
        for key, value in read_metadata(reader).state_dict_metadata.items()
        if isinstance(value, TensorStorageMetadata)
    }
    wrong = [
        f"{name} must be {list(tensor.shape)}, is {stored.get(prefix + name, 'missing')}"
        for name, tensor in expected.items()
        if stored.get(prefix + name) != list(tensor.shape)
    ]
    if wrong:
        raise ValueError(f"{str(reader.path)!r} does not have the tensors that its config requires: {listed(wrong)}")


def open_checkpoint(checkpoint: Path, name: str | None) -> Export:
    """Read the record of a checkpoint and the list of its tensors, and check that they are those of its config."""
    record = read_record(checkpoint)
    check_checkpoint(checkpoint, record)
    names = record["models"]
    if name is not None and name not in names:
        raise ValueError(f"--model must be one of {', '.join(names)}, the models of {str(checkpoint)!r}, got {name!r}")
    settings = record.get("config", {}).get("model", {})
    unknown = sorted(settings.keys() - asdict(Model()).keys())
    if unknown:
        raise ValueError(f"{str(checkpoint)!r} has model settings that this version does not know: {listed(unknown)}")
    found = Export(checkpoint / (name or names[0]), build_config({"model": settings}).model, record)
    _check_shapes(CheckpointReader(found.weights), file_state(found.model), "model.")
    return found


def _kept(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in KEPT if name in config}


def kept_of_run(found: Export) -> dict[str, Any]:
    """Return token ids and the longest context: those of the imported model, or those of the run's training."""
    if "huggingface" in found.record:
        return _kept(found.record["huggingface"])
    scaling = found.model.rope_scaling
    longest = found.record["config"]["training"]["seq_len"]
    if scaling:
        longest = max(longest, int(scaling.factor * scaling.original_max_position))
    return {"eos_token_id": found.record["data"]["eos_id"], "max_position_embeddings": longest}

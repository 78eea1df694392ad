"""Imports a Hugging Face folder as a checkpoint for `checkpoint.initial_load_path`, and exports a checkpoint.

An import writes
    TARGET/checkpoint.json  as in a run's checkpoint, of step 0; its config is the [model] section alone
    TARGET/model/           a torch.distributed.checkpoint folder with the keys model.<name>
    TARGET/model.toml       the [model] section, for quaver train
An export writes what `transformers.AutoModelForCausalLM.from_pretrained` loads. torch.distributed.checkpoint assembles
what any number of ranks wrote.
"""

import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from quaver.export.checkpoint_names import FLOAT32_LEAF
from quaver.export.companion_files import list_tokenizer_files
from quaver.export.files import StoredTensors, read_config, write_model
from quaver.lab.huggingface.config import USAGE_KEYS, make_hf_config, read_hf_config
from quaver.lab.huggingface.weights import (
    EMBEDDING_NAME,
    HEAD_NAME,
    CheckpointWeights,
    make_empty_shared_experts,
    make_file_state,
    make_meta_state,
    make_stored_state,
    write_weights,
)
from quaver.lab.runs.checkpoint_folder import (
    RECORD_FILE,
    RECORD_FORMAT,
    RunProgress,
    find_checkpoint,
    read_record,
    write_record,
)
from quaver.lab.runs.dcp import read_metadata
from quaver.lab.runs.manifest import check_manifest
from quaver.lab.runs.provenance import collect_provenance
from quaver.lab.runs.safe_dcp import CheckpointReader
from quaver.lab.settings import Model
from quaver.lab.settings.fields import Settings
from quaver.lab.settings.float8 import make_file_name
from quaver.runtime.errors import InputError, reraise_as_input_error
from quaver.runtime.files import check_is_new, write_new_folder
from quaver.runtime.module_names import join_names

Section = TypeVar("Section", bound=Settings)

_IMPORTED_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
"""The supported dtypes of imported weights, by their names in a safetensors file."""

_DERIVED_BUFFER_NAME = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers that old versions of transformers saved; they follow from the config."""


@dataclass(frozen=True)
class SavedModel:
    """One model of a checkpoint on disk, which `open_checkpoint_model` has checked."""

    weights_path: Path
    """The model's folder in the checkpoint."""
    model: Model
    """The [model] section of its settings."""
    record: dict[str, Any]

    def open_weights(self) -> CheckpointWeights:
        """Return the weights by their names in Hugging Face's files."""
        return CheckpointWeights(self.weights_path, self.model)


def import_hf(folder: Path, target: Path, dtype: str = "float32") -> Model:
    """Write the Hugging Face model in `folder` as the new checkpoint `target`; memory holds one tensor at a time.

    Args:
        dtype: the dtype of the stored weights, float32 or bfloat16.
    Raises:
        FileExistsError: `target` exists.
        OSError: a file is missing or cannot be read, or `target` cannot be made.
        InputError: the files are damaged or do not fit the config.
        NotImplementedError: quaver's Llama does not support the model.
        NotWrittenError: the weights cannot be written.
    """
    check_is_new(target)
    config = read_config(folder)
    model = read_hf_config(config)
    weights = StoredTensors(folder)
    _check_tensors(weights, model, folder)
    record = {
        "format": RECORD_FORMAT,
        "saved_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "models": ["model"],
        "world_size": 1,
        "progress": asdict(RunProgress()),
        "config": {"model": asdict(model)},
        "provenance": collect_provenance(torch.device("cpu")),
        "huggingface": {"folder": str(folder.resolve()), "dtype": dtype, **_select_usage_settings(config)},
    }
    with write_new_folder(target) as partial:
        write_weights(weights, partial / "model", model, getattr(torch, dtype))
        toml = "# Written by quaver convert hf-to-quaver.\n" + tomli_w.dumps({"model": asdict(model)})
        (partial / "model.toml").write_text(toml, encoding="utf-8")
        write_record(partial, record)
    return model


def export_hf(
    checkpoint: Path,
    target: Path,
    *,
    name: str | None = None,
    dtype: str = "bfloat16",
    max_shard_bytes: int = 5 * 1000**3,
    tokenizer: Path | None = None,
) -> SavedModel:
    """Write the model `name` of `checkpoint`, or its first model, as the new folder `target`.

    Args:
        checkpoint: a checkpoint, or a run, whose last checkpoint is taken.
        dtype: the dtype of the written weights, float32 or bfloat16; they are rounded to nearest even.
        max_shard_bytes: the largest size of a file that has more than one tensor. Memory holds one file.
        tokenizer: a folder with tokenizer files to copy.
    Raises:
        FileExistsError: `target` exists.
        OSError: `checkpoint` is not a checkpoint, `tokenizer` has no tokenizer, or `target` cannot be made.
        InputError: the checkpoint has no such model, or tensors are missing or have other shapes than its config says.
        CheckpointError: its files are damaged.
        NotWrittenError: the weights cannot be written.
    """
    check_is_new(target)
    tokenizer_files = list_tokenizer_files(tokenizer) if tokenizer else []
    saved = open_checkpoint_model(find_checkpoint(checkpoint) or checkpoint, name)
    config = make_hf_config(saved.model, dtype=dtype, usage=read_usage_settings(saved))
    with write_new_folder(target) as partial:
        rounded = (
            (key, tensor if key.endswith(FLOAT32_LEAF) else tensor.to(getattr(torch, dtype)))
            for key, tensor in chain(saved.open_weights().items(), make_empty_shared_experts(saved.model).items())
        )
        write_model(partial, rounded, config, tokenizer_files, max_shard_bytes)
    return saved


def _check_tensors(stored: StoredTensors, model: Model, folder: Path) -> None:
    expected = make_file_state(model)
    known = expected | {HEAD_NAME: make_meta_state(model)[HEAD_NAME]} | make_empty_shared_experts(model)
    unexpected = sorted(name for name in stored if name not in known and not _DERIVED_BUFFER_NAME.fullmatch(name))
    if unexpected:
        raise InputError(f"{str(folder)!r} has tensors that a Llama does not have: {join_names(unexpected)}")
    if HEAD_NAME in stored:
        expected[HEAD_NAME] = known[HEAD_NAME]
    _check_shapes({name: stored.get_shape(name) for name in stored}, expected, folder)
    for name in expected:
        if stored.get_dtype(name) not in _IMPORTED_DTYPES:
            dtypes = "float32, bfloat16 or float16"
            raise NotImplementedError(f"{name} must be {dtypes}, got {stored.get_dtype(name)}; dequantize the model")
    if model.tie_word_embeddings and HEAD_NAME in stored and not torch.equal(stored[HEAD_NAME], stored[EMBEDDING_NAME]):
        raise InputError(
            f"config.json says tie_word_embeddings, but {HEAD_NAME} and {EMBEDDING_NAME} differ; say false there to "
            "keep both"
        )


def _check_shapes(stored: Mapping[str, list[int]], expected: Mapping[str, Tensor], folder: Path) -> None:
    wrong = [
        f"{name} must be {list(tensor.shape)}, is {stored.get(name, 'missing')}"
        for name, tensor in expected.items()
        if stored.get(name) != list(tensor.shape)
    ]
    if wrong:
        raise InputError(f"{str(folder)!r} does not have the tensors that its config requires: {join_names(wrong)}")


def open_checkpoint_model(checkpoint: Path, name: str | None) -> SavedModel:
    """Read the record of a checkpoint and the list of its tensors, and compare the tensors with its config."""
    record = read_record(checkpoint)
    check_manifest(checkpoint)
    names, name = record["models"], make_file_name(name) if name else name
    if name is not None and name not in names:
        raise InputError(f"--model must be one of {', '.join(names)}, the models of {str(checkpoint)!r}, got {name!r}")
    saved = SavedModel(checkpoint / (name or names[0]), make_section(Model, record, checkpoint), record)
    stored = read_metadata(CheckpointReader(saved.weights_path)).state_dict_metadata
    shapes = {
        name.removeprefix("model."): list(tensor.size)
        for name, tensor in stored.items()
        if isinstance(tensor, TensorStorageMetadata)
    }
    _check_shapes(shapes, make_stored_state(saved.model), saved.weights_path)
    return saved


def make_section(section: type[Section], record: dict[str, Any], checkpoint: Path) -> Section:
    """Return a section of the settings of a checkpoint, or its defaults for a converted one, which has no run.

    Raises InputError if this version does not know a setting, or refuses its value.
    """
    settings = record["config"].get(section.section, {})
    unknown = sorted(settings.keys() - {field.name for field in fields(section)})
    if unknown:
        raise InputError(
            f"{str(checkpoint)!r} has {section.section} settings that this version does not know: {join_names(unknown)}"
        )
    with reraise_as_input_error(f"{str(checkpoint / RECORD_FILE)!r} is damaged: config."):
        return section(**settings)


def _select_usage_settings(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in USAGE_KEYS if name in config}


def read_usage_settings(saved: SavedModel) -> dict[str, Any]:
    """Return the token ids and the longest context, of the imported model or of the run's training."""
    if "huggingface" in saved.record:
        return _select_usage_settings(saved.record["huggingface"])
    scaling = saved.model.rope_scaling
    longest = saved.record["config"]["training"]["seq_len"]
    if scaling:
        longest = max(longest, int(scaling.factor * scaling.original_max_position))
    return {"eos_token_id": saved.record["data"]["eos_id"], "max_position_embeddings": longest}

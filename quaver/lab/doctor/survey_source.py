"""The model of a run or of a Hugging Face folder, and one batch for it, for `quaver doctor --model`."""

import functools
import typing
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quaver.conversion.convert import ModuleFilter
from quaver.conversion.roles import ROUTER_NAMES
from quaver.export.files import read_config
from quaver.lab.data import Batch, load_data
from quaver.lab.huggingface.config import read_hf_config
from quaver.lab.huggingface.convert import open_checkpoint_model
from quaver.lab.huggingface.export_source import open_huggingface_source
from quaver.lab.huggingface.float8 import make_run_source
from quaver.lab.model.float8 import make_filter
from quaver.lab.model.llama import Llama
from quaver.lab.model.loss import compute_next_token_loss
from quaver.lab.runs.checkpoint_folder import find_checkpoint
from quaver.lab.settings import Data, Model, TrainConfig
from quaver.lab.settings.config_file import build_config
from quaver.lab.terminal.counts import format_count
from quaver.lab.trainer.trained_model import make_autocast
from quaver.runtime.errors import InputError


@dataclass(frozen=True)
class SurveyedModel:
    """A model in high precision, and how it runs."""

    model: nn.Module
    config: TrainConfig
    """The config of the run. For a Hugging Face folder the defaults, with its [model] if quaver trains that model."""
    data: str
    """The source of the batch, as text."""
    forward_backward: Callable[[], None]
    can_train: bool
    """Whether `config` is a whole run for `quaver train`."""

    def is_skipped(self, name: str) -> bool:
        """Return whether a linear or experts stay in high precision regardless of their numerics."""
        if any(part in name for part in self.config.float8.filter_fqns) or name.rpartition(".")[2] in ROUTER_NAMES:
            return True
        return self._run_filter is not None and not self._run_filter(self.model.get_submodule(name), name)

    @functools.cached_property
    def _run_filter(self) -> ModuleFilter | None:
        """The filter of a run's conversion; None for a model of transformers."""
        if not isinstance(self.model, Llama):
            return None
        tokens = self.config.training.local_batch_size * self.config.training.seq_len
        return make_filter(self.model, self.config.float8, tokens=tokens, device=torch.device("cpu"))


def open_surveyed_model(path: Path, *, data: str | None, sequences: int, seq_len: int | None) -> SurveyedModel:
    """Open a run, one of its checkpoints, or a Hugging Face folder.

    Args:
        data: a value for data.path; None for the run's data, or the sources of Python's library.
        sequences: the number of sequences in the batch.
        seq_len: their length; None for the run's.
    Raises:
        OSError, InputError, NotImplementedError: `path` is something else or damaged, or the data does not fit.
    """
    if not path.is_dir():
        raise FileNotFoundError(
            f"--model must be a run or a Hugging Face folder, got {str(path)!r}, which is not a directory"
        )
    checkpoint = find_checkpoint(path)
    open_path = _open_huggingface if checkpoint is None else _open_run
    return open_path(checkpoint or path, data, sequences, seq_len)


def _open_run(checkpoint: Path, data: str | None, sequences: int, seq_len: int | None) -> SurveyedModel:
    saved = open_checkpoint_model(checkpoint, None)
    sections = saved.record["config"]
    if "training" not in sections:
        raise InputError(f"{str(checkpoint)!r} is a converted model without a run; give its Hugging Face folder")
    config = build_config(sections)
    model = make_run_source(checkpoint, recipe="tensorwise").make_hp_model()
    typing.cast(Llama, model).model.residual_dtype = getattr(torch, config.training.residual_stream_dtype)
    return _attach_batch(model, config, _replace_batch_settings(config, data, sequences, seq_len), can_train=True)


def _open_huggingface(folder: Path, data: str | None, sequences: int, seq_len: int | None) -> SurveyedModel:
    model: Any = open_huggingface_source(folder, recipe="tensorwise").make_hp_model()
    try:
        shape, can_train = read_hf_config(read_config(folder)), True
    except NotImplementedError:  # quaver's trainer does not support the architecture
        shape, can_train = Model(vocab_size=model.get_input_embeddings().weight.shape[0]), False
    data_settings = Data(tokenizer=str(folder)) if (folder / "tokenizer.json").is_file() else Data()
    config = replace(TrainConfig(), model=shape, data=data_settings)
    return _attach_batch(model, config, _replace_batch_settings(config, data, sequences, seq_len), can_train=can_train)


def _replace_batch_settings(config: TrainConfig, data: str | None, sequences: int, seq_len: int | None) -> TrainConfig:
    training = replace(
        config.training, local_batch_size=sequences, global_batch_size=-1, seq_len=seq_len or config.training.seq_len
    )
    return replace(config, training=training, data=replace(config.data, path=data or config.data.path))


def _attach_batch(
    model: nn.Module, config: TrainConfig, batch_config: TrainConfig, *, can_train: bool
) -> SurveyedModel:
    training = batch_config.training
    (batch,) = load_data(batch_config).make_step_batches(training, 0)
    model.train()

    def forward_backward() -> None:
        with make_autocast(training, torch.device("cpu")):
            _compute_loss(model, batch).backward()

    sequences, tokens = format_count(training.local_batch_size, "sequence"), format_count(training.seq_len, "token")
    source = f"{sequences} of {tokens} of {batch_config.data.path}"
    return SurveyedModel(model, config, source, forward_backward, can_train)


def _compute_loss(model: nn.Module, batch: Batch) -> Any:
    if isinstance(model, Llama):
        return compute_next_token_loss(model(batch.tokens, batch.documents), batch.targets)
    return compute_next_token_loss(model(input_ids=batch.tokens).logits, batch.targets)

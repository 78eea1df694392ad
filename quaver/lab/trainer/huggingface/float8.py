"""Checkpoints of `quaver train` as sources of a float8 export: the linears that the run converted, and its weights."""

from __future__ import annotations

import typing
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from quaver import FilterDecision, convert_to_float8_training, float8_scaling_state
from quaver.export.source import DEFAULT_FILTER, ExportSource, skip_names
from quaver.lab.runs.checkpoint import load_state, read_metadata
from quaver.lab.runs.safe_dcp import CheckpointReader
from quaver.lab.settings import Float8, Parallelism, Training
from quaver.lab.settings.fields import Settings
from quaver.lab.trainer.float8 import convert_chosen
from quaver.lab.trainer.huggingface.config import hf_config
from quaver.lab.trainer.huggingface.convert import CheckedModel, kept_of_run, open_checkpoint
from quaver.lab.trainer.huggingface.weights import stored_state, without_width
from quaver.lab.trainer.model import Llama
from quaver.runtime.names import listed

S = TypeVar("S", bound=Settings)


def run_source(
    checkpoint: Path, *, name: str | None = None, recipe: str | None = None, filter_fqns: Sequence[str] = DEFAULT_FILTER
) -> ExportSource:
    """The model `name` of a checkpoint, or its first.

    Its linears are converted as the run converted them. A model that the run did not convert needs a `recipe`, which
    converts all linears but those of `filter_fqns`; for the others a recipe replaces that of the run.

    Raises:
        OSError, ValueError, CheckpointError: as `export_hf`; or the model was trained in high precision and there is no
            recipe.
    """
    found = open_checkpoint(checkpoint, name)
    config, converted = _section(found, Float8), _converted(found)
    if recipe is None and not converted:
        raise ValueError(
            f"the model {found.weights.name!r} was trained in high precision: give the recipe whose codes to export, "
            "for example --recipe rowwise"
        )
    if converted and tuple(filter_fqns) != DEFAULT_FILTER:
        raise ValueError(
            f"--filter-fqns must be its default, {list(DEFAULT_FILTER)}, for a float8 run, which chose its linears; "
            f"got {list(filter_fqns)}"
        )
    with torch.device("meta"):
        model = Llama(found.model)
    decide = partial(_as_in_the_run, converted) if converted else skip_names(filter_fqns)
    if recipe is None:
        convert_chosen(model, config, decide)
    else:
        convert_to_float8_training(model, config=recipe, module_filter_fn=decide)
    if recipe is None:
        _load_scales(model, CheckpointReader(found.weights))
    progress = found.record["progress"]

    def high_precision_model() -> nn.Module:
        loaded, tensors = Llama(found.model), found.tensors()
        state = {name: tensors.whole(name) for name in stored_state(found.model)}
        loaded.load_state_dict(state, strict=False)  # a tied weight is stored once
        return loaded

    return ExportSource(
        model=model,
        weights=ChainMap(without_width(found.model), typing.cast(Any, found.tensors())),
        config=hf_config(found.model, dtype="bfloat16", kept=kept_of_run(found)),
        high_precision_model=high_precision_model,
        about={"source": f"{checkpoint.name}/{found.weights.name} of quaver train", "step": progress["step"]},
        rounded_from=_forward_dtype(found, config),
    )


def _section(found: CheckedModel, kind: type[S]) -> S:
    """A section of the run's settings; the defaults for a converted checkpoint, which has no run."""
    settings = found.record["config"].get(kind.section, {})
    unknown = sorted(settings.keys() - {each.name for each in fields(kind)})
    if unknown:
        raise ValueError(f"this version does not know the {kind.section} settings of the checkpoint: {listed(unknown)}")
    return kind(**settings)


def _converted(found: CheckedModel) -> dict[str, FilterDecision]:
    """By linear, what the run decided and why; empty for a model that it did not convert."""
    report = found.record.get("conversion_report")
    if not report or found.weights.name in ("bfloat16", "float32", "float16"):
        return {}
    return {layer["name"]: FilterDecision(layer["converted"], layer["reason"]) for layer in report["layers"]}


def _as_in_the_run(converted: dict[str, FilterDecision], module: nn.Module, name: str) -> FilterDecision:
    return converted[name if name in converted else f"{name}.down_proj"]  # that of experts


def _load_scales(model: nn.Module, reader: CheckpointReader) -> None:
    """Load the persistent scales that the checkpoint has; the export names one that it misses."""
    scaling = float8_scaling_state(model)
    saved = read_metadata(reader).state_dict_metadata
    state = {name: tensor for name, tensor in scaling.state_dict().items() if f"float8.{name}" in saved}
    if state:
        load_state({"float8": state}, reader)
        scaling.load_state_dict(state)


def _forward_dtype(found: CheckedModel, config: Float8) -> torch.dtype | None:
    """Dtype in which FSDP2 gathered weights; see [Note: precision under FSDP2] in parallelize.py. None: their own."""
    tensor_parallel = _section(found, Parallelism).tensor_parallel_degree
    if found.record["world_size"] == tensor_parallel or config.enable_fsdp_float8_all_gather:
        return None
    dtype: torch.dtype = getattr(torch, _section(found, Training).mixed_precision_param)
    return dtype

"""Makes a checkpoint of `quaver train` the source of a float8 export, with the run's conversion and weights."""

from __future__ import annotations

import typing
from collections import ChainMap
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quaver import FilterDecision, convert_to_float8_training, float8_scaling_state
from quaver.export.converted_view import DEFAULT_FILTER, make_name_filter
from quaver.lab.huggingface.config import make_hf_config
from quaver.lab.huggingface.convert import SavedModel, make_section, open_checkpoint_model, read_usage_settings
from quaver.lab.huggingface.export_source import ExportSource
from quaver.lab.huggingface.weights import make_empty_shared_experts, make_stored_state
from quaver.lab.model.float8 import convert_filtered
from quaver.lab.model.llama import Llama, make_meta_llama
from quaver.lab.runs.checkpoint_folder import RECORD_FILE
from quaver.lab.runs.dcp import load_state, read_metadata
from quaver.lab.runs.manifest import CHECKPOINT_HINT
from quaver.lab.runs.model_state import set_scales
from quaver.lab.runs.safe_dcp import CheckpointReader
from quaver.lab.settings import Float8, Parallelism, Training
from quaver.runtime.errors import InputError


def make_run_source(
    checkpoint: Path, *, name: str | None = None, recipe: str | None = None, filter_fqns: Sequence[str] = DEFAULT_FILTER
) -> ExportSource:
    """Return the model `name` of a checkpoint, or its first model, as the source of an export.

    Its linears are converted as the run converted them; `recipe` replaces the run's recipe. A model that was trained in
    high precision needs a `recipe`: its linears are converted to it, except those that `filter_fqns` names.

    Raises:
        OSError, InputError, CheckpointError: for the reasons of `export_hf`, or if a recipe is needed and missing.
    """
    saved = open_checkpoint_model(checkpoint, name)
    config = make_section(Float8, saved.record, checkpoint)
    decisions = _list_decisions(saved, config)
    if recipe is None and not decisions:
        raise InputError(
            f"the model {saved.weights_path.name!r} was trained in high precision: give the recipe whose codes to "
            "export, for example --recipe rowwise"
        )
    if decisions and tuple(filter_fqns) != DEFAULT_FILTER:
        raise InputError(
            f"--filter-fqns must be its default, {list(DEFAULT_FILTER)}, for a float8 run, which chose its linears; "
            f"got {list(filter_fqns)}"
        )
    model = make_meta_llama(saved.model)
    decide = partial(_decide_as_run, decisions) if decisions else make_name_filter(filter_fqns)
    if recipe is None:
        convert_filtered(model, _without_all_gather(config), decide)
        _load_scales(model, CheckpointReader(saved.weights_path))
    else:
        convert_to_float8_training(model, config=recipe, module_filter_fn=decide)
    progress = saved.record["progress"]

    def make_hp_model() -> nn.Module:
        hp_model, tensors = Llama(saved.model), saved.open_weights()
        state = {name: tensors.read_stored(name) for name in make_stored_state(saved.model)}
        hp_model.load_state_dict(state, strict=False)  # a tied weight is stored once
        return hp_model

    return ExportSource(
        model=model,
        weights=ChainMap(make_empty_shared_experts(saved.model), typing.cast(Any, saved.open_weights())),
        config=make_hf_config(saved.model, dtype="bfloat16", usage=read_usage_settings(saved)),
        make_hp_model=make_hp_model,
        origin={"source": f"{checkpoint.name}/{saved.weights_path.name} of quaver train", "step": progress["step"]},
        forward_dtype=_choose_forward_dtype(saved, config),
    )


def _without_all_gather(config: Float8) -> Float8:
    """Return `config` without what concerns sharded weights only: an export reads whole ones."""
    return replace(
        config,
        enable_fsdp_float8_all_gather=False,
        precompute_float8_dynamic_scale_for_fsdp=False,
        cast_weights_once=False,
    )


def _list_decisions(saved: SavedModel, config: Float8) -> dict[str, FilterDecision]:
    """Return the run's decision about each linear; empty for a model that it did not convert."""
    is_float8 = config.enable_float8_linear and saved.weights_path.name not in ("bfloat16", "float32", "float16")
    if "huggingface" in saved.record or not is_float8:
        return {}
    report = saved.record.get("conversion_report")
    if report is None:
        raise InputError(
            f"{str(saved.weights_path.parent / RECORD_FILE)!r} is damaged: conversion_report is missing; "
            f"{CHECKPOINT_HINT}"
        )
    return {
        layer["name"]: FilterDecision(convert=layer["converted"], reason=layer["reason"]) for layer in report["layers"]
    }


def _decide_as_run(decisions: dict[str, FilterDecision], module: nn.Module, name: str) -> FilterDecision:
    listed = name if name in decisions else f"{name}.down_proj"  # experts are listed by weight
    if listed not in decisions:
        raise InputError(f"the conversion_report of the checkpoint does not list {name}; {CHECKPOINT_HINT}")
    return decisions[listed]


def _load_scales(model: nn.Module, reader: CheckpointReader) -> None:
    """Load the persistent scales that the checkpoint has. The export raises an error for a missing scale."""
    scaling = float8_scaling_state(model)
    stored_keys = read_metadata(reader).state_dict_metadata
    state = {name: tensor for name, tensor in scaling.state_dict().items() if f"float8.{name}" in stored_keys}
    if state:
        load_state({"float8": state}, reader)
        set_scales(scaling, state, Path(reader.path))


def _choose_forward_dtype(saved: SavedModel, config: Float8) -> torch.dtype | None:
    """Return the dtype in which FSDP2 gathered weights, or None if it did not change the dtype.

    See [Note: precision under FSDP2] in quaver/lab/model/parallelize.py.
    """
    checkpoint = saved.weights_path.parent
    tensor_parallel = make_section(Parallelism, saved.record, checkpoint).tensor_parallel_degree
    if saved.record["world_size"] == tensor_parallel or config.enable_fsdp_float8_all_gather:
        return None
    return getattr(torch, make_section(Training, saved.record, checkpoint).mixed_precision_param)

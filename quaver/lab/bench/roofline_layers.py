"""The linears of a model for the roofline: their shapes and counts, and which are float8 or share an input."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quaver.conversion.report import LayerReport
from quaver.lab.bench.shapes import LLAMA3_MODELS
from quaver.lab.model.float8 import convert_model
from quaver.lab.model.llama import SPLIT_DIMS, count_training_flops_per_token, make_meta_llama
from quaver.lab.settings import Float8, Model
from quaver.lab.settings.config_file import load_config
from quaver.recipes.config import SHARED_INPUTS
from quaver.runtime.errors import InputError

_SEQ_LEN = 8192
"""The sequences of Llama 3's training (arXiv 2407.21783, section 3.2)."""


@dataclass(frozen=True)
class LinearGroup:
    """`count` linears of `k` inputs and `n` outputs on one GPU; `input_readers` of them share an input's casts."""

    name: str
    k: int
    n: int
    count: int
    in_float8: bool
    input_readers: int


@dataclass(frozen=True)
class ExpertGroup(LinearGroup):
    """`count` stacks of routed experts' matrices. A rank has `experts` of a stack; `top_k` experts take each token."""

    experts: int
    top_k: int


@dataclass(frozen=True)
class ModelLayers:
    """All linears of a model, and their share of its training FLOPs; the rest is attention."""

    name: str
    layers: tuple[LinearGroup, ...]
    linear_flops_share: float


def list_model_layers(name: str) -> ModelLayers:
    """Return the linears of one of LLAMA3_MODELS, all in float8 except the output projection.

    Raises:
        InputError: an unknown name, with the choices.
    """
    if name not in LLAMA3_MODELS:
        raise InputError(
            f"--model {name}: expected one of {', '.join(LLAMA3_MODELS)}; --config reads any Llama from a TOML file"
        )
    return _list_layers(name, LLAMA3_MODELS[name], Float8(), seq_len=_SEQ_LEN)


def list_config_layers(path: Path) -> ModelLayers:
    """Return the linears of the model that `quaver train` would build from a TOML file, on one rank.

    The filters of the file's [float8] section choose the float8 linears. The file's recipe is ignored, and so is the
    automatic filter, whose estimate is this prediction. Tensor parallelism splits the linears as in the run, and expert
    parallelism the experts.

    Raises:
        InputError, OSError: a missing or invalid file.
    """
    config = load_config(path)
    split, expert_ranks = config.parallelism.tensor_parallel_degree, config.parallelism.expert_parallel_degree
    return _list_layers(
        path.stem,
        config.model,
        config.float8,
        seq_len=config.training.seq_len,
        split=split,
        experts=config.model.n_experts // expert_ranks,
    )


def _list_layers(
    run_name: str, model_settings: Model, float8: Float8, *, seq_len: int, split: int = 1, experts: int = 0
) -> ModelLayers:
    model = make_meta_llama(model_settings)
    filters = {field: getattr(float8, field) for field in ("filter_fqns", "skip_first_layers", "skip_last_layers")}
    linears = convert_model(model, Float8(**filters), tokens=seq_len, device=torch.device("cpu")).layers
    readers = Counter(_find_input(linear) for linear in linears)
    groups: Counter[LinearGroup] = Counter()
    for linear in linears:
        k, n = linear.in_features, linear.out_features
        if ".experts." in linear.name:
            name = linear.name[linear.name.index("experts.") :]
            groups[ExpertGroup(name, k, n, 0, linear.converted, 1, experts, model_settings.top_k)] += 1
            continue
        leaf = linear.name.removesuffix(".weight").rpartition(".")[2]
        k, n = (k // split, n) if SPLIT_DIMS.get(leaf) == 1 else (k, n // split)
        groups[LinearGroup(leaf, k, n, 0, linear.converted, readers[_find_input(linear)])] += 1
    layers = tuple(replace(group, count=count) for group, count in groups.items())
    flops = sum(linear.flops_per_token for linear in linears)
    return ModelLayers(run_name, layers, flops / count_training_flops_per_token(model_settings, seq_len))


def _find_input(linear: LayerReport) -> tuple[str, object]:
    """Return a key for the tensor that a linear reads. Linears that share an input have equal keys."""
    parent, _, leaf = linear.name.rpartition(".")
    return parent, next((names for names in SHARED_INPUTS if leaf in names), leaf)

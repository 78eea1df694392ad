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
    name: str, shape: Model, float8: Float8, *, seq_len: int, split: int = 1, experts: int = 0
) -> ModelLayers:
    model = make_meta_llama(shape)
    filters = {field: getattr(float8, field) for field in ("filter_fqns", "skip_first_layers", "skip_last_layers")}
    linears = convert_model(model, Float8(**filters), tokens=seq_len, device=torch.device("cpu")).layers
    readers = Counter(_find_input(linear) for linear in linears)
    counts = Counter(
        _make_expert_layer(linear, experts, shape.top_k)
        if _is_expert_stack(linear)
        else _make_layer(linear, readers[_find_input(linear)], split)
        for linear in linears
    )
    layers = tuple(replace(layer, count=count) for layer, count in counts.items())
    flops = sum(linear.flops_per_token for linear in linears)
    return ModelLayers(name, layers, flops / count_training_flops_per_token(shape, seq_len))


def _make_layer(linear: LayerReport, readers: int, split: int) -> LinearGroup:
    leaf = linear.name.removesuffix(".weight").rpartition(".")[2]
    k, n = linear.in_features, linear.out_features
    k, n = (k // split, n) if SPLIT_DIMS.get(leaf) == 1 else (k, n // split)
    return LinearGroup(leaf, k, n, 0, linear.converted, readers)


def _is_expert_stack(linear: LayerReport) -> bool:
    return ".experts." in linear.name


def _make_expert_layer(stack: LayerReport, experts: int, top_k: int) -> ExpertGroup:
    name = stack.name[stack.name.index("experts.") :]
    return ExpertGroup(name, stack.in_features, stack.out_features, 0, stack.converted, 1, experts, top_k)


def _find_input(linear: LayerReport) -> tuple[str, object]:
    """Return a key for the tensor that a linear reads. Linears that share an input have equal keys."""
    parent, _, leaf = linear.name.rpartition(".")
    return parent, next((names for names in SHARED_INPUTS if leaf in names), leaf)

"""The linears of whole models as a roofline needs them: how many there are of each, which are in float8, who shares."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quaver.config import SHARED_INPUTS
from quaver.convert import LayerReport
from quaver.trainer.config import Float8, Model, TrainConfig
from quaver.trainer.config_io import load_config
from quaver.trainer.float8 import convert_model
from quaver.trainer.model import Llama, training_flops_per_token

MODELS = {
    "llama-8b": Model(vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, hidden_dim=14336),
    "llama-70b": Model(vocab_size=128256, dim=8192, n_layers=80, n_heads=64, n_kv_heads=8, hidden_dim=28672),
}
"""Llama 3, as published."""

_SEQ_LEN = 8192
_ROWWISE_PARALLEL = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Layer:
    """Linears that are alike: `k` inputs and `n` outputs on one GPU, `count` of them in the model.

    `input_readers` of them and their siblings read one input, and share its casts.
    """

    name: str
    k: int
    n: int
    count: int
    in_float8: bool
    input_readers: int


@dataclass(frozen=True)
class ModelLayers:
    """All linears of a model, and their share of its training FLOPs at a sequence length (the rest is attention)."""

    name: str
    layers: tuple[Layer, ...]
    linear_flops_share: float


def layers_of_model(name: str) -> ModelLayers:
    """The linears of a model that is known by name, all in float8 but the output projection.

    Raises:
        ValueError: an unknown name, with the choices.
    """
    if name not in MODELS:
        raise ValueError(
            f"--model {name}: expected one of {', '.join(MODELS)}; --config reads any Llama from a TOML file"
        )
    return _layers(name, MODELS[name], Float8(), seq_len=_SEQ_LEN)


def layers_of_config(path: Path) -> ModelLayers:
    """The linears of the model that `quaver train` would make of a TOML file, on one rank.

    In float8 are those that the file's [float8] section converts; its recipe and its automatic filter are not asked,
    since other recipes are predicted too, and what the filter estimates is what the prediction says. Tensor
    parallelism splits the linears as it does in the run.

    Raises:
        ValueError, OSError: a file that is missing or wrong.
    """
    config: TrainConfig = load_config(path)
    split = config.parallelism.tensor_parallel_degree
    return _layers(path.stem, config.model, config.float8, seq_len=config.training.seq_len, split=split)


def _layers(name: str, shape: Model, float8: Float8, *, seq_len: int, split: int = 1) -> ModelLayers:
    with torch.device("meta"):
        model = Llama(shape)
    which = Float8(
        filter_fqns=float8.filter_fqns,
        skip_first_layers=float8.skip_first_layers,
        skip_last_layers=float8.skip_last_layers,
    )
    linears = convert_model(model, which, tokens=seq_len, device=torch.device("cpu")).layers
    readers = Counter(_input_of(linear) for linear in linears)
    counts = Counter(_layer(linear, readers[_input_of(linear)], split) for linear in linears)
    layers = tuple(replace(layer, count=count) for layer, count in counts.items())
    flops = sum(linear.flops_per_token for linear in linears)
    return ModelLayers(name, layers, flops / training_flops_per_token(shape, seq_len))


def _layer(linear: LayerReport, readers: int, split: int) -> Layer:
    leaf = linear.name.rpartition(".")[2]
    k, n = linear.in_features, linear.out_features
    k, n = (k // split, n) if leaf in _ROWWISE_PARALLEL else (k, n // split)
    return Layer(leaf, k, n, 0, linear.converted, readers)


def _input_of(linear: LayerReport) -> tuple[str, object]:
    """What stands for the tensor that a linear reads: one for siblings that share it."""
    parent, _, leaf = linear.name.rpartition(".")
    return parent, next((names for names in SHARED_INPUTS if leaf in names), leaf)

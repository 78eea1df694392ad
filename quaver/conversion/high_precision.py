"""`set_high_precision_matmuls`: changes between steps which matmuls of a converted model run in high precision.

    set_high_precision_matmuls(model, ["output"])                                   # the forward, from now on
    set_high_precision_matmuls(model, lambda name: ["grad_weight"] if "layers.31." in name else [])
    set_high_precision_matmuls(model, [])                                           # back to the recipe

Each module gets a new config, whose casts decide what is quantized, saved for backward and sent. If a matmul reads the
input or the weight in high precision, tensor parallelism and FSDP2 all-gather it in high precision. Modules with the
same config share the new one, and equal configs are the same object, so compiled code is compiled once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any

from torch import nn

from quaver.experts.module_weight import iter_module_weights
from quaver.fsdp.all_gather_weight import is_all_gather_weight
from quaver.linear.float8_module import Float8Module
from quaver.linear.tensor import Float8Tensor
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.linear_casts import MATMULS
from quaver.runtime.errors import check_is_module
from quaver.runtime.warnings import warn_user
from quaver.torch_private.fsdp import forget_unsharded

_shared_configs: dict[tuple[Float8LinearConfig, tuple[str, ...], tuple[str, ...]], Float8LinearConfig] = {}
"""The shared configs, by the config without `high_precision_matmuls`, the names of its fields without derived ones,
which equality ignores, and these matmuls: at most 8 for each config."""


def set_high_precision_matmuls(model: nn.Module, matmuls: Iterable[str] | Callable[[str], Iterable[str]]) -> None:
    """Run exactly these matmuls of the float8 linears and experts of `model` in high precision from now on.

    Call it between steps, outside of `cast_weights_once`, with equal arguments on every rank. The next float8
    all-gather, and the next eager forward under tensor parallelism, compare them. Modules whose matmuls do not change
    are left alone. Persistent scales stay: a tensor that is not cast records no amax. A model without float8 modules
    gives a UserWarning, unless `matmuls` is empty.

    Args:
        model: a converted model, wrapped or not; eager or compiled; under tensor, expert and data parallelism. With
            FSDP2's float8 all-gather, weights that a matmul reads in high precision are gathered in high precision.
        matmuls: some of "output", "grad_input" and "grad_weight", or a function from the name of a linear or experts to
            these. [] for none.
    Raises:
        ValueError: a matmul is unknown; `matmuls` is a string or not iterable; a weight stored in float8 (frozen,
            primary) would be read in high precision. The model is then unchanged.
    """
    check_is_module(model, argument="model")
    common = () if callable(matmuls) else _list_matmuls(matmuls)
    configs: dict[Float8Module, Float8LinearConfig] = {}
    float8 = dict(iter_float8_modules(model))
    if (callable(matmuls) or common) and not float8:
        warn_user("set_high_precision_matmuls changed nothing: the model has no float8 linear or experts; convert it")
    for name, module in float8.items():
        names = _list_matmuls(matmuls(name)) if callable(matmuls) else common
        config = _make_config(module.float8_config, names)
        if config is not module.float8_config:
            module.check_config(config)
            _check_stored(name, module, config)
            configs[module] = config
    gathered = {
        module
        for module, config in configs.items()
        if module.all_gather_state is not None
        and config.casts.weight.is_float8 != module.float8_config.casts.weight.is_float8
    }
    if gathered:
        forget_unsharded(model, gathered)
    for module, config in configs.items():
        module.float8_config = config


def iter_float8_modules(model: nn.Module) -> Iterator[tuple[str, Float8Module]]:
    """Yield the float8 linears and experts, by name."""
    for name, module in model.named_modules():
        if isinstance(module, Float8Module):
            yield name, module


def _list_matmuls(matmuls: Any) -> tuple[str, ...]:
    if isinstance(matmuls, str):
        raise ValueError(f"matmuls: expected a list of names, got the string {matmuls!r}; give [{matmuls!r}]")
    names = tuple(matmuls) if isinstance(matmuls, Iterable) else None
    if names is None or not all(name in tuple(MATMULS) for name in names):
        raise ValueError(f"matmuls: expected names of {', '.join(MATMULS)}, got {matmuls if names is None else names}")
    return names


def _make_config(config: Float8LinearConfig, matmuls: tuple[str, ...]) -> Float8LinearConfig:
    if set(matmuls) == set(config.high_precision_matmuls):  # the fast path of every step without a change
        return config
    changed = replace(config, high_precision_matmuls=matmuls)
    plain = replace(config, high_precision_matmuls=())
    field_names = tuple(field.name for field in fields(plain))
    if not config.high_precision_matmuls:
        _shared_configs.setdefault((plain, field_names, ()), config)
    return _shared_configs.setdefault((plain, field_names, changed.high_precision_matmuls), changed)


def _check_stored(name: str, module: Float8Module, config: Float8LinearConfig) -> None:
    if config.casts.weight == module.float8_config.casts.weight:
        return
    for weight in iter_module_weights(module):
        if isinstance(weight.local_tensor, Float8Tensor) and not is_all_gather_weight(weight):
            raise ValueError(
                f"high_precision_matmuls: the weight of {name} is stored in float8, so output and grad_input cannot "
                "read it in high precision; leave that layer out"
            )

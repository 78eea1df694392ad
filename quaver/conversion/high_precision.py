"""Which matmuls of a converted model run in high precision, changed between steps: by direction, and by layer.

    set_high_precision_matmuls(model, ["output"])                                   # the forward, from now on
    set_high_precision_matmuls(model, lambda name: ["grad_weight"] if "layers.31." in name else [])
    set_high_precision_matmuls(model, [])                                           # as the recipe has it

Each module gets another config, whose casts say what is quantized, saved and sent: an input that tensor parallelism
all-gathers, and a weight that FSDP2 does, travel in high precision where a matmul reads them so. Modules of one config
share the new one, and a config that comes again is the same object, so that compiled code is compiled once for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import weights_of_module
from quaver.fsdp.gathered import is_all_gather_weight
from quaver.linear.module import Float8Linear
from quaver.linear.tensor import Float8Tensor
from quaver.recipes.config import Float8LinearConfig
from quaver.torch_private.fsdp import forget_unsharded

_CONFIGS: dict[tuple[Float8LinearConfig, tuple[str, ...]], Float8LinearConfig] = {}
"""By the config without `high_precision_matmuls`, and these."""


def set_high_precision_matmuls(model: nn.Module, matmuls: Collection[str] | Callable[[str], Collection[str]]) -> None:
    """Run these matmuls of the float8 linears and experts of `model` in high precision from now on, and no others.

    Call it between steps, on every rank alike, outside of `cast_weights_once`. It does nothing where nothing changes.
    Persistent scales stay: what is not cast records no amax.

    Args:
        model: a converted model, wrapped or not; eager, compiled, under tensor, expert and data parallelism, also
            where FSDP2 all-gathers weights in float8: it sends those in high precision that a matmul reads so.
        matmuls: of "output", "grad_input" and "grad_weight"; or by the name of a linear or experts. [] for none.
    Raises:
        ValueError: an unknown matmul; a weight that is stored in float8 (frozen, primary) and would be read in high
            precision. The model is as it was.
    """
    configs: dict[Float8Linear | Float8Experts, Float8LinearConfig] = {}
    for name, module in float8_modules(model):
        config = _config_with(config_of(module), tuple(matmuls(name) if callable(matmuls) else matmuls))
        if config is not config_of(module):
            _check_stored(name, module, config)
            configs[module] = config
    gathered = {
        module
        for module, config in configs.items()
        if module.gathering is not None and config.casts.weight.is_float8 != config_of(module).casts.weight.is_float8
    }
    if gathered:
        forget_unsharded(model, gathered)
    for module, config in configs.items():
        if isinstance(module, Float8Linear):
            module.config = config
        else:
            module.float8_config = config
    for each in model.modules() if configs else ():
        for of_module in (getattr(each, "sharding", None), *each._forward_pre_hooks.values()):
            follow: Any = getattr(of_module, "follow_config", None)  # of tensor parallelism
            if follow is not None:
                follow()


def float8_modules(model: nn.Module) -> Iterator[tuple[str, Float8Linear | Float8Experts]]:
    """The float8 linears and experts, by name."""
    return ((name, each) for name, each in model.named_modules() if isinstance(each, Float8Linear | Float8Experts))


def config_of(module: Float8Linear | Float8Experts) -> Float8LinearConfig:
    """The config of a float8 linear or of experts."""
    return module.config if isinstance(module, Float8Linear) else module.float8_config


def _config_with(config: Float8LinearConfig, matmuls: tuple[str, ...]) -> Float8LinearConfig:
    if set(matmuls) == set(config.high_precision_matmuls):  # without a new config: steps of a phase ask this
        return config
    found = replace(config, high_precision_matmuls=matmuls)
    plain = replace(config, high_precision_matmuls=())
    if not config.high_precision_matmuls:
        _CONFIGS.setdefault((plain, ()), config)
    return _CONFIGS.setdefault((plain, found.high_precision_matmuls), found)


def _check_stored(name: str, module: Float8Linear | Float8Experts, config: Float8LinearConfig) -> None:
    if config.casts.weight == config_of(module).casts.weight:
        return
    for weight in weights_of_module(module):
        if isinstance(weight.local, Float8Tensor) and not is_all_gather_weight(weight):
            raise ValueError(
                f"high_precision_matmuls: the weight of {name} is stored in float8, so output and grad_input cannot "
                "read it in high precision; leave that layer out"
            )

"""Converts torchao's configs without importing torchao, holds its `LinearMMConfig`, and hides its import's logs."""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, NamedTuple

import torch


def convert_from_torchao(value: Any, expected: type[Any]) -> Any:
    """Convert torchao's class of the same name to `expected`, an enum or a config; other values are returned unchanged.

    A field that `expected` lacks is dropped if it has torchao's default. Such fields are
    `force_recompute_fp8_weight_in_bwd`, which has no effect in 0.18, and options of later versions that are off.

    Raises:
        ValueError: `expected` lacks the enum member.
        TypeError: `expected` lacks an option that is not at its default.
    """
    for cls in type(value).__mro__:
        if (cls.__module__, cls.__name__) == ("torchao.float8.config", expected.__name__):
            if issubclass(expected, enum.Enum):
                return expected(value.value)
            supported = {option.name for option in fields(expected) if option.repr}  # without aliases
            options = {option.name: getattr(value, option.name) for option in fields(cls)}
            dropped = {option.name for option in fields(cls) if options[option.name] == option.default} - supported
            return expected(**{name: option for name, option in options.items() if name not in dropped})
    return value


def convert_op_config(value: Any, get_config: Callable[[str], Any]) -> Any:
    """Convert torchao's `Float8TrainingOpConfig` or `MXFP8TrainingOpConfig`; None for other values.

    Experts get the casts of linears. torchao's grouped matmuls are rowwise under `Float8TrainingOpConfig` whatever the
    `float8_linear_recipe` is. `pad_token_groups_for_grouped_mm` is ignored: padding changes no result, and quaver needs
    none. `MXFP8TrainingOpConfig` casts weights in blocks of 1 x 32 for each of their matmuls, as in torchao; the recipe
    `mxfp8` has one cast in blocks of 32 x 32 for both.

    Args:
        value: any object.
        get_config: returns the config of a recipe's name.
    Raises:
        ValueError: an option that no config of quaver supports.
    """
    name = next(
        (cls.__name__ for cls in type(value).__mro__ if cls.__module__ == "torchao.prototype.moe_training.config"), ""
    )
    if name not in ("Float8TrainingOpConfig", "MXFP8TrainingOpConfig"):
        return None
    if value.out_dtype not in (None, torch.bfloat16):
        raise ValueError(f"{name}.out_dtype: expected torch.bfloat16, results have the input's, got {value.out_dtype}")
    if name == "Float8TrainingOpConfig":
        if value.float8_dtype is not torch.float8_e4m3fn:
            raise ValueError(f"{name}.float8_dtype: expected torch.float8_e4m3fn, got {value.float8_dtype}")
        return get_config(value.float8_linear_recipe)
    if value.kernel_preference.name not in ("AUTO", "EMULATED"):
        raise ValueError(f"{name}.kernel_preference: expected AUTO or EMULATED, got {value.kernel_preference.name}")
    base = get_config("mxfp8_with_gw_hp" if value.wgrad_with_hp else "mxfp8")
    modes = type(base.cast_config_input.scale_calculation_mode)
    if value.scale_calculation_mode.value not in {mode.value for mode in modes}:
        names = " or ".join(mode.name for mode in modes)
        raise ValueError(f"{name}.scale_calculation_mode: expected {names}, got {value.scale_calculation_mode.name}")
    along = replace(base.cast_config_input, scale_calculation_mode=modes(value.scale_calculation_mode.value))
    casts = {"cast_config_input": along, "cast_config_weight": along, "cast_config_grad_output": along}
    return replace(base, **casts, emulate=value.kernel_preference.name == "EMULATED")


class ScaledMMConfig(NamedTuple):
    """How one matmul runs; `fp8_output` is always False."""

    emulate: bool
    use_fast_accum: bool
    fp8_output: bool
    pad_inner_dim: bool


class LinearMMConfig(NamedTuple):
    """How the three matmuls of a linear run."""

    output: ScaledMMConfig
    grad_input: ScaledMMConfig
    grad_weight: ScaledMMConfig


def is_torchao_tensor(weight: object) -> bool:
    """Return whether a weight is a tensor subclass of torchao."""
    return type(weight).__module__.partition(".")[0] == "torchao"


def explain_inference_only(weight: object) -> str:
    """Return why a linear with this weight cannot train in float8, or "" for a weight that is not torchao's."""
    if not is_torchao_tensor(weight):
        return ""
    return f"its weight is torchao's {type(weight).__name__}, which is quantized for inference"


@contextmanager
def hide_torchao_import_logs() -> Iterator[None]:
    """Hide what torchao 0.18 logs when it is imported: kernels that do not load, and the registration of its enums.

    quaver uses neither. This can go when torchao logs them no more.
    """

    def is_shown(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return not message.startswith("Failed to load ") and "is an Enum subclass" not in message

    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    for logger in loggers:
        logger.addFilter(is_shown)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(is_shown)

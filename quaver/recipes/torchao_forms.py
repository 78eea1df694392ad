"""torchao's configs, taken by value without importing torchao, and its form of how a linear's matmuls run."""

from __future__ import annotations

import enum
from dataclasses import fields
from typing import Any, NamedTuple


def from_torchao(value: Any, expected: type[Any]) -> Any:
    """quaver's counterpart of torchao's enum member or config called as `expected`; `value` where it is none.

    A field that `expected` does not have is left out where it has torchao's default: torchao's
    `force_recompute_fp8_weight_in_bwd`, which has no effect in 0.18, and an option of a later torchao that is off.

    Raises:
        ValueError: a member that `expected` does not have.
        TypeError: an option that `expected` does not have, and that is on.
    """
    for cls in type(value).__mro__:
        if (cls.__module__, cls.__name__) == ("torchao.float8.config", expected.__name__):
            if issubclass(expected, enum.Enum):
                return expected(value.value)
            own = {option.name for option in fields(expected)}
            given = {option.name: getattr(value, option.name) for option in fields(cls)}
            left_out = {option.name for option in fields(cls) if given[option.name] == option.default} - own
            return expected(**{name: option for name, option in given.items() if name not in left_out})
    return value


class ScaledMMConfig(NamedTuple):
    """How one matmul runs; its output is never float8."""

    emulate: bool
    use_fast_accum: bool
    fp8_output: bool
    pad_inner_dim: bool


class LinearMMConfig(NamedTuple):
    """How the three matmuls of a linear run."""

    output: ScaledMMConfig
    grad_input: ScaledMMConfig
    grad_weight: ScaledMMConfig


def is_torchaos(weight: object) -> bool:
    """Whether a weight is a tensor subclass of torchao."""
    return type(weight).__module__.partition(".")[0] == "torchao"


def why_inference_only(weight: object) -> str:
    """Why a linear with this weight is not in float8 training; "" unless the weight is a tensor of torchao."""
    kind = type(weight).__name__
    return f"its weight is a {kind} of torchao, which multiplies it for inference" if is_torchaos(weight) else ""

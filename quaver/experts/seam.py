"""Experts that multiply through a method `_grouped_mm`, as torchtitan's: the method in float8, whatever its arguments.

    torchtitan                               _grouped_mm(self, *, ...)
    GroupedExperts, 0.3                      A [T, K], B_t [E, K, N], offs [E]
    GroupedExperts, later                    the same with weight_EOI [E, N, K] for B_t
    GroupedLinear                            input_RI [T, K], weight_EOI [E, N, K], offsets_E [E]

The arguments have moved, so they are found by their names in the signature; one that is not known is refused.
"""

from __future__ import annotations

import inspect
import typing
from typing import Any

from torch import Tensor, nn

from quaver.experts.base import Float8Grouped
from quaver.experts.grouped_mm import DYNAMIC_ONLY, float8_grouped_mm
from quaver.linear.class_change import float8_class
from quaver.linear.last_run import LastRun
from quaver.recipes.config import Float8LinearConfig

_TOKENS, _ENDS = ("A", "input_RI"), ("offs", "offsets_E")
_WEIGHTS = {"B_t": False, "weight_EOI": True}
"""Whether the weight is [E, N, K], which the matmul reads transposed."""


class Float8GroupedMM(Float8Grouped):
    """A module whose `_grouped_mm` runs in float8."""

    _arguments: tuple[str, str, str]
    """The names of the tokens, the weight and the ends in the signature of `_grouped_mm`."""

    def _grouped_mm(self, **operands: Any) -> Tensor:
        tokens, weight, ends = self._arguments
        b_t = operands[weight].transpose(-2, -1) if _WEIGHTS[weight] else operands[weight]
        self.note_run(operands[tokens].device)
        return float8_grouped_mm(operands[tokens], b_t, operands[ends], config=self.float8_config)


def arguments_of(experts: type[nn.Module]) -> tuple[str, str, str]:
    """The names of the tokens, the weight and the ends in the signature of `experts._grouped_mm`.

    Raises:
        ValueError: it has others.
    """
    method = getattr(experts, "_grouped_mm", None)
    names = [] if method is None else list(inspect.signature(method).parameters)[1:]
    found = [[name for name in names if name in known] for known in (_TOKENS, _WEIGHTS, _ENDS)]
    if len(names) != 3 or any(len(each) != 1 for each in found):
        raise ValueError(
            f"{experts.__qualname__}._grouped_mm: expected the arguments {' or '.join(_TOKENS)}, "
            f"{' or '.join(_WEIGHTS)} and {' or '.join(_ENDS)}, got {', '.join(names) or 'no such method'}; this "
            "version of quaver does not know these experts, leave them in high precision"
        )
    return found[0][0], found[1][0], found[2][0]


def to_float8_grouped_mm(module: nn.Module, config: Float8LinearConfig) -> Float8GroupedMM:
    """Turn `module` itself into one whose `_grouped_mm` runs in float8: same object, parameters and attributes.

    Raises:
        ValueError: unknown arguments, or a config with delayed or static scaling.
    """
    converted_from = type(module)
    arguments = arguments_of(converted_from)
    if config.has_persistent_scales:
        raise ValueError(DYNAMIC_ONLY)
    module.__class__ = float8_class(converted_from, Float8GroupedMM)
    experts = typing.cast(Float8GroupedMM, module)
    experts.float8_config, experts._converted_from, experts._arguments = config, converted_from, arguments
    experts._last_run = LastRun()
    return experts


def to_plain_grouped_mm(module: Float8GroupedMM) -> nn.Module:
    """Turn `module` back into what it was converted from."""
    module.__class__ = module._converted_from  # type: ignore[assignment]
    for name in ("float8_config", "_converted_from", "_arguments", "_last_run"):
        delattr(module, name)
    return module

"""Experts that multiply in a method `_grouped_mm`, such as torchtitan's: runs the method in float8.

    torchtitan                               _grouped_mm(self, *, ...)
    GroupedExperts, 0.3                      A [T, K], B_t [E, K, N], offs [E]
    GroupedExperts, later                    the same with weight_EOI [E, N, K] for B_t
    GroupedLinear                            input_RI [T, K], weight_EOI [E, N, K], offsets_E [E]

The arguments differ across versions, so they are matched by name. Unknown names raise.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from quaver.experts.function import explain_config_obstacle, float8_grouped_mm
from quaver.experts.grouped_module import Float8GroupedModule
from quaver.linear.class_change import get_class_parts
from quaver.linear.float8_module import change_to_float8
from quaver.linear.last_run import record_run
from quaver.recipes.config import Float8LinearConfig

_TOKENS, _ENDS = ("A", "input_RI"), ("offs", "offsets_E")
_IS_TRANSPOSED = {"B_t": False, "weight_EOI": True}
"""Names of weights, and whether they are [E, N, K], which the matmul reads transposed."""


class Float8GroupedMM(Float8GroupedModule):
    """A module whose `_grouped_mm` runs in float8."""

    _float8_attributes = (*Float8GroupedModule._float8_attributes, "_arguments")
    _arguments: tuple[str, str, str]
    """The names of the tokens, the weight and the ends in the signature of `_grouped_mm`."""

    def _grouped_mm(self, **operands: Any) -> Tensor:
        tokens, weight, ends = self._arguments
        b_t = operands[weight].transpose(-2, -1) if _IS_TRANSPOSED[weight] else operands[weight]
        record_run(self, operands[tokens].device)
        return float8_grouped_mm(operands[tokens], b_t, operands[ends], config=self.float8_config)


def match_arguments(experts: type[nn.Module]) -> tuple[str, str, str]:
    """Return the names of the tokens, the weight and the ends in the signature of `experts._grouped_mm`.

    Raises:
        ValueError: the signature has other names.
    """
    method = getattr(experts, "_grouped_mm", None)
    names = [] if method is None else list(inspect.signature(method).parameters)[1:]
    matches = [[name for name in names if name in known] for known in (_TOKENS, _IS_TRANSPOSED, _ENDS)]
    if len(names) != 3 or any(len(match) != 1 for match in matches):
        raise ValueError(
            f"{experts.__qualname__}._grouped_mm: expected the arguments {' or '.join(_TOKENS)}, "
            f"{' or '.join(_IS_TRANSPOSED)} and {' or '.join(_ENDS)}, got {', '.join(names) or 'no such method'}; this "
            "version of quaver does not support these experts; leave them in high precision"
        )
    return matches[0][0], matches[1][0], matches[2][0]


def to_float8_grouped_mm(module: nn.Module, config: Float8LinearConfig) -> Float8GroupedMM:
    """Convert `module` in place, so that its `_grouped_mm` runs in float8. Parameters and attributes stay.

    Raises:
        ValueError: unknown arguments of `_grouped_mm`, or a config that `float8_grouped_mm` refuses.
    """
    arguments = match_arguments(get_class_parts(module).original)
    if obstacle := explain_config_obstacle(config):
        raise ValueError(obstacle)
    experts = change_to_float8(module, Float8GroupedMM, config)
    experts._arguments = arguments
    return experts

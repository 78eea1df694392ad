"""A weight that `cast_weights_once` has quantized, as a linear reads it."""

from __future__ import annotations

from torch import Tensor

from quaver.config import Float8LinearConfig
from quaver.quantize import Quantizer
from quaver.scaling import PersistentScale
from quaver.torch_private.versions import version_of


class PreparedWeight:
    """The operands of a weight while the scope is open, and a check that it does not change."""

    def __init__(self, weight: Tensor, config: Float8LinearConfig, scale: PersistentScale | None) -> None:
        self.operands = Quantizer(config.casts.weight, weight.dtype, scale)(weight, row=True, column=True)
        self._weight = weight
        self._version = version_of(weight)

    def check(self, weight: Tensor) -> None:
        """Raise RuntimeError if `weight` is not the tensor that was quantized, or was written to since."""
        if weight is not self._weight:
            raise changed_inside_scope(weight, "replaced")
        if version_of(weight) != self._version:
            raise changed_inside_scope(weight, "changed")


def changed_inside_scope(weight: Tensor, how: str) -> RuntimeError:
    """The error for a weight that was `how`: "changed" or "replaced"."""
    return RuntimeError(
        f"a weight of shape {list(weight.shape)} was {how} inside cast_weights_once; "
        "leave the scope before you change weights"
    )

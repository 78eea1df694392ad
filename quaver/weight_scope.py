"""`cast_weights_once`: quantize each float8 weight once for all microbatches of one optimizer step.

Outside the scope a Float8Linear quantizes the live weight at each use, because version counters do not see every way to
change a weight (`.data`, a kernel that writes in place, an optimizer that bypasses them). Inside, the caller promises
not to change the weights, and a change that torch can see is an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from quaver.config import Float8LinearConfig
from quaver.linear import Float8Linear
from quaver.quantize import WEIGHT, Quantizer, cast_pair
from quaver.scaling import PersistentScale


class PreparedWeight:
    """A weight quantized by `cast_weights_once` while its scope is open, and a check that it does not change."""

    def __init__(self, weight: Tensor, config: Float8LinearConfig, scale: PersistentScale | None) -> None:
        casts = cast_pair(config, WEIGHT, weight.dtype)
        self.operands = Quantizer(casts, scale)(weight, last=True, first=True)
        self._weight = weight
        self._version = weight._version

    def check(self, weight: Tensor) -> None:
        """Raise RuntimeError if `weight` is not the tensor that was quantized, or was written to since."""
        if weight is not self._weight or weight._version != self._version:
            what = "replaced" if weight is not self._weight else "changed"
            raise RuntimeError(
                f"a weight of shape {list(weight.shape)} was {what} inside cast_weights_once; "
                "leave the scope before you change weights"
            )


@contextmanager
def cast_weights_once(model: nn.Module) -> Iterator[None]:
    """Quantize the weight of every Float8Linear under `model` now, for both of its matmuls, until the exit.

    Put it around the microbatches (forward and backward) of one optimizer step, eager or compiled, and leave it before
    the optimizer steps. The codes take one byte per element and layout while the scope is open. A model without
    Float8Linear is left alone, and so is a linear whose weight is not a plain parameter of its own shape: one that
    FSDP or tensor parallelism has sharded, or that FSDP2 all-gathers in float8.

    Raises:
        RuntimeError: the scope is already open for one of the modules, or a weight was changed or replaced inside it
            (found at the next eager use of the module, and at the exit).
    """
    modules = [module for module in model.modules() if isinstance(module, Float8Linear) and _is_whole(module)]
    if any(module._prepared_weight is not None for module in modules):
        raise RuntimeError("cast_weights_once is already open for this model; leave it before entering again")
    try:
        for module in modules:
            scale = module.persistent_scales(module.weight.device).weight
            with torch.no_grad():
                module._prepared_weight = PreparedWeight(module.weight, module.config, scale)
        yield
        for module in modules:
            if module._prepared_weight is not None:
                module._prepared_weight.check(module.weight)
    finally:
        for module in modules:
            module._prepared_weight = None


def _is_whole(linear: Float8Linear) -> bool:
    weight = linear.weight
    return type(weight) in (nn.Parameter, FakeTensor) and weight.shape == (linear.out_features, linear.in_features)

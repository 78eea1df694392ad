"""`ModuleWeight`: a weight of a float8 module, with its name and its module.

Float8Linear      `weight` [N, K]
Float8Experts     its 3-D weights (experts/module.py), each of E matrices that are scaled separately
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from quaver.experts.function import quantize_weight
from quaver.experts.module import Float8Experts, get_expert_weights, is_transposed
from quaver.kernels.operands import Operands
from quaver.linear.module import Float8Linear
from quaver.linear.protocols import CastOnceOperands
from quaver.linear.quantize import Quantizer
from quaver.linear.scale_state import LinearScaleSlots
from quaver.recipes.config import Float8LinearConfig
from quaver.torch_private.dtensor import get_local_tensor


class ModuleWeight(NamedTuple):
    """A weight of a Float8Linear or a Float8Experts, looked up by name because the parameter may be replaced."""

    module: Float8Linear | Float8Experts
    name: str = "weight"

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.module, self.name)

    @property
    def local_tensor(self) -> Tensor:
        """The weight, or this rank's shard."""
        return get_local_tensor(self.parameter)

    @property
    def config(self) -> Float8LinearConfig:
        return self.module.float8_config

    @property
    def scale_slots(self) -> LinearScaleSlots | None:
        """The persistent scales of a linear, if its config has any; experts are scaled dynamically."""
        return self.module.scale_slots if isinstance(self.module, Float8Linear) else None

    @property
    def is_transposed(self) -> bool:
        """Whether it is the weight of experts, stored [E, K, N]."""
        return isinstance(self.module, Float8Experts) and is_transposed(self.module)

    @property
    def is_whole(self) -> bool:
        """Whether the parameter has the shape of the whole weight; FSDP1 leaves a flat part."""
        module, shape = self.module, self.parameter.shape
        if isinstance(module, Float8Linear):
            return shape == (module.out_features, module.in_features)
        return len(shape) == 3

    def quantize(self) -> Operands:
        """Quantize the whole weight for both of its matmuls."""
        weight = self.parameter.detach()
        if isinstance(self.module, Float8Experts):
            return quantize_weight(weight.contiguous(), self.config, self.is_transposed, row=True, column=True)
        scale = None if self.scale_slots is None else self.scale_slots.begin_weight_cast_and_get_scale(weight.device)
        return Quantizer(self.config.casts.weight, weight.dtype, scale)(weight, row=True, column=True)

    @property
    def cast_once(self) -> CastOnceOperands | None:
        """The operands that the module multiplies by while a `cast_weights_once` is open, else None."""
        return self.module.cast_once_weights.get(self.name)


def iter_module_weights(module: nn.Module) -> Iterator[ModuleWeight]:
    """Yield the weights of a Float8Linear, unless its weight was deleted, or of a Float8Experts."""
    if isinstance(module, Float8Linear):
        if getattr(module, "weight", None) is not None:
            yield ModuleWeight(module)
    elif isinstance(module, Float8Experts):
        yield from (ModuleWeight(module, name) for name in get_expert_weights(module))


def iter_model_weights(model: nn.Module) -> Iterator[tuple[str, ModuleWeight]]:
    """Yield the weights of all float8 modules of `model`, named by their linear, or by experts and weight."""
    for name, module in model.named_modules():
        for weight in iter_module_weights(module):
            yield name if isinstance(module, Float8Linear) else f"{name}.{weight.name}".lstrip("."), weight

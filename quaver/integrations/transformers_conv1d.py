"""GPT-2's linears: transformers' `Conv1D`, whose weight is [in, out], as an nn.Linear that the conversion takes.

In memory the weight becomes [out, in], as that of every linear, so casts, FSDP2, optimizers and PEFT see an nn.Linear;
state dicts keep the Conv1D's [in, out]. The parameter stays the same object. `convert_to_high_precision` makes the
module a Conv1D again.
"""

from __future__ import annotations

import typing
from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quaver.linear.frozen_weight import FrozenFloat8Weight


class Conv1DLinear(nn.Linear):
    """A `Conv1D` as an nn.Linear, with the state dict of the Conv1D."""

    state_dict_is_transposed = True
    """For exports: a state dict holds the weight as [in, out]."""

    def state_dict(self, *args: Any, prefix: str = "", **options: Any) -> Any:
        """The state_dict of the Conv1D: after the hooks, of which one unwraps a weight that FSDP2 gathers in float8."""
        made = super().state_dict(*args, prefix=prefix, **options)
        weight = made[f"{prefix}weight"]
        if type(weight) is FrozenFloat8Weight:  # with keep_vars
            weight = weight.to_high_precision()
        made[f"{prefix}weight"] = weight.t()
        return made

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        name = f"{prefix}weight"
        weight = state_dict.get(name)
        is_of_module = isinstance(weight, FrozenFloat8Weight)  # what a frozen module has made of a tensor of the file
        if isinstance(weight, Tensor) and weight.dim() == 2 and not is_of_module:
            state_dict = {**state_dict, name: weight.t().contiguous()}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def to_original(self) -> None:
        """Make it the Conv1D that it was. Called by `convert_to_high_precision`."""
        _transpose(typing.cast(nn.Parameter, self.weight))
        del self.in_features, self.out_features
        self.__class__ = Conv1D  # type: ignore[assignment]


def conv1ds(model: nn.Module) -> list[nn.Module]:
    """The Conv1Ds that can become linears: PEFT has not wrapped them, and no other library holds their weight."""
    wrapped = {getattr(module, "base_layer", None) for module in model.modules()}
    found = [module for module in model.modules() if type(module) is Conv1D and "forward" not in vars(module)]
    return [each for each in found if each not in wrapped and type(each.weight) is nn.Parameter and each.weight.numel()]


def to_linears(modules: list[nn.Module]) -> list[Conv1DLinear]:
    """Make each Conv1D a `Conv1DLinear`, in place."""
    for module in modules:
        _transpose(typing.cast(nn.Parameter, module.weight))
        module.in_features, module.out_features = module.nx, module.nf
        module.__class__ = Conv1DLinear
    return typing.cast(list[Conv1DLinear], modules)


def _transpose(weight: nn.Parameter) -> None:
    weight.data = weight.data.t().contiguous()
    if weight.grad is not None:
        weight.grad = None if weight.grad.shape == weight.shape else weight.grad.t().contiguous()

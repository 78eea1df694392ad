"""Makes transformers' `Conv1D`, GPT-2's linear with a weight [in, out], an nn.Linear that the conversion accepts.

In memory the weight becomes [out, in], so casts, FSDP2, optimizers and PEFT see an nn.Linear. State dicts keep the
Conv1D's [in, out]. The parameter stays the same object. `convert_to_high_precision` makes the module a Conv1D again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from quaver.linear.class_change import SubstituteModule, change_class, get_class_parts
from quaver.linear.frozen_weight import FrozenFloat8Weight


class Conv1DLinear(SubstituteModule, nn.Linear):
    """A `Conv1D` as an nn.Linear, with the state dict of the Conv1D."""

    state_dict_is_transposed = True
    """Tells exports that a state dict holds the weight as [in, out]."""

    def state_dict(self, *args: Any, prefix: str = "", **options: Any) -> Any:
        """Return the state_dict of the Conv1D. Transposes after the hooks: one unwraps float8 all-gather weights."""
        state = super().state_dict(*args, prefix=prefix, **options)
        weight = state[f"{prefix}weight"]
        if type(weight) is FrozenFloat8Weight:  # with keep_vars
            weight = weight.to_high_precision()
        state[f"{prefix}weight"] = weight.t()
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        name = f"{prefix}weight"
        weight = state_dict.get(name)
        is_frozen = isinstance(weight, FrozenFloat8Weight)  # already converted by a frozen module
        if isinstance(weight, Tensor) and weight.dim() == 2 and not is_frozen:
            state_dict = {**state_dict, name: weight.t().contiguous()}
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def to_original(self) -> None:
        """Make this module a Conv1D again."""
        _transpose(self.weight)
        del self.in_features, self.out_features
        change_class(self, original=Conv1D)


def find_conv1ds(model: nn.Module) -> list[nn.Module]:
    """Return the Conv1Ds that PEFT did not wrap and whose weight is a plain parameter."""
    wrapped = {getattr(module, "base_layer", None) for module in model.modules()}
    plain = [
        module
        for module in model.modules()
        if get_class_parts(module).original is Conv1D and "forward" not in vars(module)
    ]
    return [conv for conv in plain if conv not in wrapped and type(conv.weight) is nn.Parameter and conv.weight.numel()]


def to_linears(modules: list[nn.Module]) -> list[Conv1DLinear]:
    """Make each Conv1D a `Conv1DLinear`, in place."""
    linears: list[Any] = [*modules]
    for linear in linears:
        _transpose(linear.weight)
        linear.in_features, linear.out_features = linear.nx, linear.nf
        change_class(linear, original=Conv1DLinear)
    return linears


def _transpose(weight: Tensor) -> None:
    weight.data = weight.data.t().contiguous()
    if weight.grad is not None:
        weight.grad = None if weight.grad.shape == weight.shape else weight.grad.t().contiguous()

"""Makes weights `Float8AllGatherWeight`s, and undoes it. State dicts have plain tensors: hooks wrap and unwrap them."""

from __future__ import annotations

import typing
from typing import Any

from torch import Tensor, nn

from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import ModuleWeight, iter_module_weights
from quaver.fsdp.all_gather_weight import Float8AllGatherWeight, hide_fsdp_hooks
from quaver.fsdp.scaled_shard import ScaledShardState
from quaver.fsdp.weight_group import AllGatherState, NamedWeights, WeightGroup
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.module import Float8Linear
from quaver.linear.tensor import Float8Tensor
from quaver.torch_private.dtensor import get_local_tensor, is_dtensor, set_local_tensor


def make_all_gather_weights(named_weights: NamedWeights) -> None:
    """Have FSDP2 all-gather all weights of these modules in float8.

    Each weight becomes a `Float8AllGatherWeight` over the same storage. It is a new parameter, so construct optimizers
    after this call.
    """
    hide_fsdp_hooks()
    weight_group = WeightGroup(named_weights)
    for module in dict.fromkeys(weight.module for _, weight in named_weights):
        for weight in iter_module_weights(module):
            _wrap(weight)
            if weight.scale_slots is not None:
                weight.scale_slots.conversion_slots.ranks_read_is_known = True
        hooks = (
            module.register_state_dict_post_hook(_unwrap_in_state_dict),
            module.register_load_state_dict_post_hook(_wrap_after_load),
        )
        module.all_gather_state = AllGatherState(weight_group, hooks)


def restore_plain_weights(module: Float8Linear | Float8Experts) -> None:
    """Undo `make_all_gather_weights` for one module, and dequantize a frozen weight.

    Raises:
        RuntimeError: `fully_shard` has sharded the weight.
    """
    for weight in iter_module_weights(module):
        parameter: Tensor = weight.parameter
        if isinstance(parameter, FrozenFloat8Weight):
            setattr(module, weight.name, nn.Parameter(parameter.to_high_precision(), requires_grad=False))
        if is_dtensor(parameter) and isinstance(weight.local_tensor, Float8AllGatherWeight):
            raise RuntimeError(
                "a weight that fully_shard all-gathers in float8 cannot be converted back; convert before"
            )
        if isinstance(parameter, Float8AllGatherWeight):
            setattr(module, weight.name, nn.Parameter(parameter.wrapped, requires_grad=parameter.requires_grad))
    if module.all_gather_state is not None:
        for hook in module.all_gather_state.hooks:
            hook.remove()
        module.all_gather_state = None


def _wrap(weight: ModuleWeight) -> None:
    parameter, local = weight.parameter, weight.local_tensor
    if isinstance(local, Float8AllGatherWeight):
        return
    wrapped = Float8AllGatherWeight(local.detach(), ScaledShardState(weight.name))
    if is_dtensor(parameter):
        set_local_tensor(parameter, wrapped)
    else:
        setattr(weight.module, weight.name, nn.Parameter(wrapped, requires_grad=parameter.requires_grad))


def _wrap_after_load(module: nn.Module, incompatible_keys: object) -> None:
    """Wrap the plain tensors that `load_state_dict(assign=True)` assigned."""
    for weight in iter_module_weights(module):
        if not isinstance(weight.parameter, Float8Tensor):
            _wrap(weight)


def _unwrap_in_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """Replace the weights in a state dict by plain tensors that share their memory."""
    for weight in iter_module_weights(module):
        value = state_dict.get(prefix + weight.name)
        if isinstance(value, nn.Parameter):  # keep_vars=True returns the parameters themselves
            continue
        if isinstance(value, Float8AllGatherWeight):
            state_dict[prefix + weight.name] = typing.cast(Float8AllGatherWeight, weight.local_tensor).wrapped.detach()
        elif is_dtensor(value) and isinstance(get_local_tensor(value), Float8AllGatherWeight):
            # Detached from the weight itself, because writes to an alias would not move its version counter. The
            # DTensor stays, since it shares its counter with the parameter.
            set_local_tensor(value, typing.cast(Float8AllGatherWeight, weight.local_tensor).wrapped.detach())

"""Gives the weights of linears to FSDP2's float8 all-gather (fsdp.py), and takes them back.

State dicts hold plain tensors all the while.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

from torch import nn
from torch.distributed.tensor import DTensor

from quaver.distributed.fsdp import Float8AllGatherWeight, Gathering, NamedLinears, Siblings, local_weight
from quaver.linear import Float8Linear
from quaver.tensor import Float8Tensor


def make_gatherable(named_linears: NamedLinears) -> None:
    """Have FSDP2 gather the weights of these linears in float8; called by the conversion.

    Each weight becomes a `Float8AllGatherWeight` around the same storage: a new parameter, so make optimizers after it.
    """
    siblings = Siblings(named_linears)
    for _, linear in named_linears:
        _wrap(linear)
        if linear.scaling is not None:
            linear.scaling.host_decides()
        hooks = (
            linear.register_state_dict_post_hook(_plain_in_state_dict),
            linear.register_load_state_dict_post_hook(_wrap_after_load),
        )
        linear.gathering = Gathering(siblings, hooks)


def make_plain(linear: Float8Linear) -> None:
    """Undo `make_gatherable` for one linear. Raises RuntimeError once `fully_shard` has taken the weight."""
    weight = linear.weight
    if isinstance(weight, DTensor) and isinstance(weight._local_tensor, Float8AllGatherWeight):
        raise RuntimeError("a weight that fully_shard gathers in float8 cannot be converted back; convert before it")
    if isinstance(weight, Float8AllGatherWeight):
        linear.weight = nn.Parameter(weight.wrapped, requires_grad=weight.requires_grad)
    if linear.gathering is not None:
        for hook in cast(Gathering, linear.gathering).hooks:
            hook.remove()
        linear.gathering = None


@contextmanager
def keep_gatherable(linear: Float8Linear) -> Iterator[None]:
    """Show the plain weight inside the block, which may shard it, and wrap what it leaves."""
    weight = linear.weight
    if not isinstance(weight, Float8AllGatherWeight):
        yield
        return
    linear.weight = nn.Parameter(weight.wrapped, requires_grad=weight.requires_grad)
    yield
    _wrap(linear)


def _wrap(linear: Float8Linear) -> None:
    weight = linear.weight
    if isinstance(weight, DTensor):
        if not isinstance(weight._local_tensor, Float8AllGatherWeight):
            weight._local_tensor = Float8AllGatherWeight(weight._local_tensor)
    elif not isinstance(weight, Float8AllGatherWeight):
        linear.weight = nn.Parameter(Float8AllGatherWeight(weight.detach()), requires_grad=weight.requires_grad)


def _wrap_after_load(linear: nn.Module, incompatible_keys: object) -> None:
    """`load_state_dict(assign=True)` brings plain tensors."""
    if isinstance(linear, Float8Linear) and not isinstance(linear.weight, Float8Tensor):
        _wrap(linear)


def _plain_in_state_dict(linear: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: object) -> None:
    """State dicts hold plain tensors, which share the memory of the weight."""
    weight = state_dict.get(prefix + "weight")
    if not isinstance(linear, Float8Linear) or isinstance(weight, nn.Parameter):  # keep_vars asks for the parameters
        return
    if isinstance(weight, Float8AllGatherWeight):
        state_dict[prefix + "weight"] = local_weight(linear).wrapped.detach()
    elif isinstance(weight, DTensor) and isinstance(weight._local_tensor, Float8AllGatherWeight):
        state_dict[prefix + "weight"] = DTensor.from_local(
            # of the weight itself: an alias of it would not move its version counter
            local_weight(linear).wrapped.detach(),
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,
            stride=weight.stride(),
        )

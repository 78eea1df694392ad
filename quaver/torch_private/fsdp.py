"""The insides of FSDP2.

- `COLLECTIVES_MODULE`: torch.distributed.fsdp._fully_shard._fsdp_collectives, whose functions allocate the buffers of
  all-gathers and reduce-scatters. Its name stands in their Python frames. No replacement.
- `has_run`: `FSDPState._is_root`, None until the first forward or `unshard`, in which FSDP2 reads how each parameter is
  gathered. No replacement.
- `param_dtype(module)`: FSDPState._mp_policy, whose `param_dtype` the forward reads. No replacement.
- `forget_unsharded()`: lets FSDP2 allocate anew what it gathers a parameter into, which it does once. No replacement.
- `fsdp_module_class()`: public, without the import of torch.distributed.fsdp ([Note: import time] in dtensor.py).
- `sharded_elements`: the sizes of the groups of parameters. No replacement.
- `hide_from_policies()`: replaces methods of FSDPState and FSDPParamGroup. Goes when FSDP2 hides itself from selective
  checkpoints, which https://github.com/pytorch/pytorch/pull/196862 proposes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from quaver.torch_private.policies import without_policies

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

COLLECTIVES_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_collectives"


def fsdp_module_class() -> type[FSDPModule] | None:
    """FSDPModule, None where no module is one because nothing imported torch.distributed.fsdp."""
    module = getattr(torch.distributed, "fsdp", None)
    return None if module is None else module.FSDPModule


def has_run(module: nn.Module) -> bool:
    """Whether FSDP2 has gathered parameters in `module` already."""
    sharded = fsdp_module_class()
    if sharded is None:
        return False
    states = [each._get_fsdp_state() for each in module.modules() if isinstance(each, sharded)]
    return any(state._is_root is not None for state in states)


def param_dtype(module: FSDPModule) -> torch.dtype | None:
    """The dtype in which a unit of FSDP2 gathers its parameters; None for their own."""
    return module._get_fsdp_state()._mp_policy.param_dtype


def sharded_elements(module: FSDPModule) -> Iterator[tuple[int, int]]:
    """Of each group of `module`: the elements of trained parameters on a rank, padded, and the sharding ranks."""
    state: Any = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        trained = [each for each in group.fsdp_params if each.sharded_param.requires_grad] if group else []
        if trained:
            ranks = getattr(group.mesh_info, "shard_mesh_size", 1)
            yield sum(each.padded_sharded_param_size.numel() for each in trained), ranks


def forget_unsharded(model: nn.Module, modules: Container[nn.Module]) -> None:
    """Let FSDP2 gather the parameters of `modules` in `model` into new memory, of other sizes; reshards them before."""
    sharded = fsdp_module_class()
    if sharded is None:
        return
    for each in model.modules():
        if not isinstance(each, sharded):
            continue
        state: Any = each._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # torch before 2.13 has one
        for parameter in [parameter for group in groups if group is not None for parameter in group.fsdp_params]:
            if parameter._module_info.module in modules and hasattr(parameter, "_unsharded_param"):
                each.reshard()
                parameter.all_gather_outputs, parameter._unsharded_inner_tensors = [], []
                del parameter._unsharded_param


_hides: list[bool] = []
"""Holds an element once FSDP2's hooks are hidden."""


def hide_from_policies() -> None:
    """Let the policies of selective checkpoints not see what FSDP2's hooks run, in this process from now on.

    Where a module inside a checkpointed region is a group of FSDP2, its hooks gather the weights in the forward, and in
    the recomputation again, or differently, or not. A policy finds a saved result by the number of calls of an operator
    before it, so every later result was another call's (pytorch/torchtitan#3427): a wrong gradient, or an error about
    an operator that was "not found in storage". A float8 all-gather computes amaxes there, which policies save.

    Does nothing where nothing imported torch.distributed.fsdp yet.
    """
    if _hides or fsdp_module_class() is None:
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

    def hidden(method: Callable[..., Any]) -> Any:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with without_policies():
                return method(*args, **kwargs)

        return run

    _hides.append(True)
    state: Any = _fsdp_state.FSDPState
    group: Any = _fsdp_param_group.FSDPParamGroup
    for name in ("pre_forward", "post_forward", "unshard", "wait_for_unshard"):
        setattr(group, name, hidden(getattr(group, name)))
    state._root_pre_forward = hidden(state._root_pre_forward)
    group._prefetch_unshard = staticmethod(hidden(group._prefetch_unshard))

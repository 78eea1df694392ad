"""Internals of FSDP2 and DDP.

- `COLLECTIVES_MODULE`: torch.distributed.fsdp._fully_shard._fsdp_collectives, whose functions allocate the buffers of
  all-gathers and reduce-scatters; its name identifies their Python frames. No replacement.
- `has_fsdp_run`: `FSDPState._is_root`, None until the first forward or `unshard`, when FSDP2 reads how to gather each
  parameter. No replacement.
- `get_param_dtype(module)`: FSDPState._mp_policy, whose `param_dtype` the forward reads. No replacement.
- `forget_unsharded()`: makes FSDP2 allocate the gathered parameters again, which it does only once. No replacement.
- `find_fsdp_module_class()`: public API, without the import of torch.distributed.fsdp; see [Note: import time] in
  dtensor.py.
- `list_reductions`: the sizes and dtypes of parameter groups. No replacement.
- `_list_param_groups(module)`: FSDPState._fsdp_param_groups. No replacement.
- `has_custom_reduce_scatter(module)`: FSDPParamGroup._reduce_scatter_comm. No replacement.
- `has_comm_hook(model)`: DistributedDataParallel._comm_hooks. No replacement.
- `hide_fsdp_ops_from_checkpoint_policies()`: wraps methods of FSDPState and FSDPParamGroup, and marks the wrappers with
  `_HIDES_OPS`. Remove when FSDP2 hides its hooks from selective checkpoints, as
  https://github.com/pytorch/pytorch/pull/196862 proposes.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Container, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from quaver.torch_private.policies import without_policies

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

COLLECTIVES_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_collectives"


def has_comm_hook(model: nn.parallel.DistributedDataParallel) -> bool:
    """Return whether `register_comm_hook` was called, which DDP accepts once."""
    return bool(model._comm_hooks)


def find_fsdp_module_class() -> type[FSDPModule] | None:
    """Return FSDPModule, or None if torch.distributed.fsdp was not imported, so that no module has this class."""
    module = getattr(torch.distributed, "fsdp", None)
    return None if module is None else module.FSDPModule


def has_fsdp_run(module: nn.Module) -> bool:
    """Return whether FSDP2 has already gathered parameters in `module`."""
    fsdp_class = find_fsdp_module_class()
    if fsdp_class is None:
        return False
    states = [submodule._get_fsdp_state() for submodule in module.modules() if isinstance(submodule, fsdp_class)]
    return any(state._is_root is not None for state in states)


def get_param_dtype(module: FSDPModule) -> torch.dtype | None:
    """Return the dtype in which an FSDP2 module gathers its parameters; None for the dtype that they have."""
    return module._get_fsdp_state()._mp_policy.param_dtype


def list_reductions(module: FSDPModule) -> Iterator[tuple[int, ProcessGroup | None, torch.dtype]]:
    """Yield the trained elements per rank, with padding, the ranks that have shards and the dtype of each reduction."""
    policy = module._get_fsdp_state()._mp_policy
    dtype = policy.reduce_dtype or policy.param_dtype
    for group in _list_param_groups(module):
        trained = [param for param in group.fsdp_params if param.sharded_param.requires_grad] if group else []
        if trained:
            shard_group = getattr(group.mesh_info, "shard_process_group", None)
            elements = sum(param.padded_sharded_param_size.numel() for param in trained)
            yield elements, shard_group, dtype or trained[0].sharded_param.dtype


def has_custom_reduce_scatter(module: FSDPModule) -> bool:
    """Return whether `set_custom_reduce_scatter`, or an allocator of communication buffers, was set."""
    groups = filter(None, _list_param_groups(module))
    return any(type(group._reduce_scatter_comm).__name__ != "DefaultReduceScatter" for group in groups)


def _list_param_groups(module: FSDPModule) -> list[Any]:
    state: Any = module._get_fsdp_state()
    groups: list[Any] | None = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if groups is None else groups  # torch before 2.13 has one


def forget_unsharded(model: nn.Module, modules: Container[nn.Module]) -> None:
    """Reshard the parameters of `modules` in `model`, and make FSDP2 gather them into new memory of other sizes."""
    fsdp_class = find_fsdp_module_class()
    if fsdp_class is None:
        return
    for submodule in model.modules():
        if not isinstance(submodule, fsdp_class):
            continue
        groups = filter(None, _list_param_groups(submodule))
        for parameter in [parameter for group in groups for parameter in group.fsdp_params]:
            if parameter._module_info.module in modules and hasattr(parameter, "_unsharded_param"):
                submodule.reshard()
                parameter.all_gather_outputs, parameter._unsharded_inner_tensors = [], []
                del parameter._unsharded_param


_HIDES_OPS = "_quaver_hides_ops"
"""The attribute of a hook whose ops are hidden. `functools.wraps` gives it to wrappers by other libraries, too."""


def hide_fsdp_ops_from_checkpoint_policies() -> None:
    """Hide the ops in FSDP2's hooks from the policies of selective checkpoints, in this process from now on.

    If FSDP2 shards a module inside a checkpointed region, its hooks gather the weights in the forward. In the
    recomputation they may gather again, gather differently, or not gather. A policy identifies a saved result by the
    number of earlier calls of its operator. Later results would be mixed up (pytorch/torchtitan#3427). The effect is a
    wrong gradient or the error "not found in storage". Policies save the amaxes of a float8 all-gather.

    The wrappers change nothing else, also for models without float8, and call what another library put there before. A
    later call wraps only hooks that another library replaced. Does nothing if torch.distributed.fsdp was not imported.
    """
    if find_fsdp_module_class() is None:
        return
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group, _fsdp_state

    def hide(method: Callable[..., Any]) -> Any:
        @functools.wraps(method)
        def run(*args: Any, **kwargs: Any) -> Any:
            with without_policies():
                return method(*args, **kwargs)

        setattr(run, _HIDES_OPS, True)
        return run

    state: Any = _fsdp_state.FSDPState
    group: Any = _fsdp_param_group.FSDPParamGroup
    names = ("pre_forward", "post_forward", "unshard", "wait_for_unshard", "_prefetch_unshard")
    for owner, name in ((state, "_root_pre_forward"), *((group, name) for name in names)):
        hook = getattr(owner, name)
        if not hasattr(hook, _HIDES_OPS):
            setattr(owner, name, staticmethod(hide(hook)) if name == "_prefetch_unshard" else hide(hook))
            logging.getLogger(__name__).info(
                "wrapped %s.%s, to hide its ops from selective checkpoints", owner.__name__, name
            )

"""The insides of FSDP2.

- `COLLECTIVES_MODULE`: torch.distributed.fsdp._fully_shard._fsdp_collectives, whose functions allocate the buffers of
  all-gathers and reduce-scatters. Its name stands in their Python frames. No replacement.
- `has_run`: `FSDPState._is_root`, None until the first forward or `unshard`, in which FSDP2 reads how each parameter is
  gathered. No replacement.
"""

from torch import nn
from torch.distributed.fsdp import FSDPModule

COLLECTIVES_MODULE = "torch.distributed.fsdp._fully_shard._fsdp_collectives"


def has_run(module: nn.Module) -> bool:
    """Whether FSDP2 has gathered parameters in `module` already."""
    states = [each._get_fsdp_state() for each in module.modules() if isinstance(each, FSDPModule)]
    return any(state._is_root is not None for state in states)

"""The insides of FSDP2.

- `COLLECTIVES_MODULE`: torch.distributed.fsdp._fully_shard._fsdp_collectives, whose functions allocate the buffers of
  all-gathers and reduce-scatters. Its name stands in their Python frames. No replacement.
- `has_run`: `FSDPState._is_root`, None until the first forward or `unshard`, in which FSDP2 reads how each parameter is
  gathered. No replacement.
- `fsdp_module_class()`: public, without the import of torch.distributed.fsdp ([Note: import time] in dtensor.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

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

"""Functional collectives, which torch.compile traces, and the groups of collectives.

- `all_reduce`, `all_gather_single`, `reduce_scatter_single`, `all_to_all_single`, `wait_tensor` and
  `AsyncCollectiveTensor` of torch.distributed._functional_collectives. No replacement.
- `REDUCE_SCATTER`: the operator of `reduce_scatter_single`, for policies of checkpointing. No replacement.
- `find_process_group(name)`: torch.distributed.distributed_c10d._resolve_process_group; the operators of functional
  collectives take the name of a group. No replacement.

Before torch 2.13, two functions are called `all_gather_tensor` and `reduce_scatter_tensor`, for which 2.13 warns at
each call. Remove the old names when torch 2.13 is the oldest.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed._functional_collectives as functional
from torch.distributed import ProcessGroup, distributed_c10d

AsyncCollectiveTensor = functional.AsyncCollectiveTensor
all_reduce = functional.all_reduce
all_to_all_single = functional.all_to_all_single
wait_tensor = functional.wait_tensor
all_gather_single = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
reduce_scatter_single = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default


def find_process_group(name: str) -> ProcessGroup:
    """Return the process group called `name`."""
    resolve: Any = distributed_c10d.__dict__["_resolve_process_group"]
    return resolve(name)

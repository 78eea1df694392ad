"""Functional collectives, which torch.compile traces.

- `all_reduce`, `all_gather_single`, `reduce_scatter_single`, `all_to_all_single`, `wait_tensor` and
  `AsyncCollectiveTensor` of torch.distributed._functional_collectives. No replacement.

Before torch 2.13 two of them are `all_gather_tensor` and `reduce_scatter_tensor`; 2.13 warns of these at each call. The
old names go with torch 2.12.
"""

from __future__ import annotations

import torch.distributed._functional_collectives as functional

AsyncCollectiveTensor = functional.AsyncCollectiveTensor
all_reduce = functional.all_reduce
all_to_all_single = functional.all_to_all_single
wait_tensor = functional.wait_tensor
all_gather_single = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
reduce_scatter_single = getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor

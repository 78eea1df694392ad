"""Float8 across ranks: weights and gradients of data parallelism, tensor and sequence parallelism, expert parallelism.

The styles for `parallelize_module` are imported on first access, since their base classes are in
torch.distributed.tensor ([Note: import time] in torch_private/dtensor.py).
"""

import importlib
from typing import TYPE_CHECKING, Any

from quaver.fsdp.gradients import reduce_gradients_in_float8
from quaver.fsdp.weight_group import precompute_float8_dynamic_scale_for_fsdp

if TYPE_CHECKING:
    from quaver.parallel.expert_parallel import Float8ExpertParallel
    from quaver.parallel.tensor_parallel import (
        Float8ColwiseParallel,
        Float8RowwiseParallel,
        PrepareFloat8ModuleInput,
    )

__all__ = [
    "Float8ColwiseParallel",
    "Float8ExpertParallel",
    "Float8RowwiseParallel",
    "PrepareFloat8ModuleInput",
    "precompute_float8_dynamic_scale_for_fsdp",
    "reduce_gradients_in_float8",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    file = "expert_parallel" if name == "Float8ExpertParallel" else "tensor_parallel"
    return getattr(importlib.import_module(f"quaver.parallel.{file}"), name)

"""Float8 across ranks: all-gather of weights under FSDP2, tensor and sequence parallelism, expert parallelism."""

from quaver.distributed.expert_parallel import Float8ExpertParallel
from quaver.distributed.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
from quaver.distributed.weight_scales import precompute_float8_dynamic_scale_for_fsdp

__all__ = [
    "Float8ColwiseParallel",
    "Float8ExpertParallel",
    "Float8RowwiseParallel",
    "PrepareFloat8ModuleInput",
    "precompute_float8_dynamic_scale_for_fsdp",
]

"""`torchao.float8.fsdp_utils`: one weight class serves every scaling type."""

from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from quaver.fsdp.all_gather_weight import Float8AllGatherWeight as WeightWithDynamicFloat8CastTensor

WeightWithDelayedFloat8CastTensor = WeightWithDynamicFloat8CastTensor
WeightWithStaticFloat8CastTensor = WeightWithDynamicFloat8CastTensor

__all__ = [
    "WeightWithDelayedFloat8CastTensor",
    "WeightWithDynamicFloat8CastTensor",
    "WeightWithStaticFloat8CastTensor",
    "precompute_float8_dynamic_scale_for_fsdp",
]

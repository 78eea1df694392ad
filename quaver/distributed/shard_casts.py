"""Casts of a shard of a weight into what FSDP gathers: codes as uint8, padded to the length that every rank sends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.casts import Scales
from quaver.distributed.weight_scales import Shard
from quaver.kernels.cast import cast_with_persistent_scale, cast_with_scale, record
from quaver.scaling import PersistentScale, to_dequant_scale


def cast_shard(shard: Shard, quant_scale: Tensor, float8_dtype: torch.dtype) -> Tensor:
    """The codes of a shard; `quant_scale` is that of the whole weight, (), [N, 1] or [1, K]."""
    local = shard.local
    if local.numel() == 0:
        return _padded(local.new_zeros(local.shape, dtype=torch.uint8), shard)
    scale = shard.part(quant_scale).to(local.device)
    return _padded(cast_with_scale(local, scale, float8_dtype).view(torch.uint8), shard)


def cast_shard_with_kept_scale(
    shard: Shard, kept: PersistentScale, float8_dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Scales]:
    """The codes of a shard with a scale that every rank knows, so that nothing is exchanged; and that scale."""
    local = shard.local
    if local.numel() == 0:
        quant = kept.quant_scale.clone()
        return _padded(local.new_zeros(local.shape, dtype=torch.uint8), shard), Scales(quant, to_dequant_scale(quant))
    near = kept
    if local.device != kept.quant_scale.device:  # offloaded: cast where the shard lies
        seen = local.new_zeros(2, dtype=torch.float32)
        near = kept._replace(quant_scale=kept.quant_scale.to(local.device), amax_buffer=seen)
    codes, quant, dequant = cast_with_persistent_scale(local, near, float8_dtype, power_of_2)
    if near is not kept and near.amax_buffer is not None:
        record(kept, near.amax_buffer.to(kept.quant_scale.device))
    return _padded(codes.view(torch.uint8), shard), Scales(quant.to(shard.device), dequant.to(shard.device))


def _padded(codes: Tensor, shard: Shard) -> Tensor:
    missing = -(-shard.size[shard.dim] // shard.fsdp_group.size()) - codes.shape[shard.dim]
    return F.pad(codes, (0, 0, 0, missing)) if missing else codes  # FSDP pads dim 0 only

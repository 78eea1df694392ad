"""`FrozenAllGather`: FSDP2's all-gather of a frozen weight; it sends codes only ([Note: parts] in frozen_weight.py)."""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from quaver.kernels.operands import Operand
from quaver.linear.tensor import Float8Tensor
from quaver.runtime.float8_collectives import pad_rows
from quaver.torch_private.dtensor import get_local_tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import MixedPrecisionPolicy


class FrozenAllGather(Float8Tensor):
    """The hooks that FSDP2 calls on a shard of a frozen weight."""

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], tuple[Operand, torch.Size]]:
        """Return the codes of this shard as one uint8 tensor, padded to the largest shard."""
        codes = pad_rows(self.data_fp8.view(torch.uint8), -(-outer_size[0] // mesh.size()))
        return (codes,), (Operand(self.data_fp8, self.dequant_scale, self.layouts[0]), outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: tuple[Operand, torch.Size],
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Make the unsharded weight in the memory that FSDP2 all-gathered into."""
        shard, size = metadata
        operand = shard._replace(data=all_gather_outputs[0].view(-1)[: size.numel()].view(size).view(shard.data.dtype))
        if out is None:
            return self.from_operands(operand, operand, param_dtype), ()
        typing.cast(FrozenAllGather, get_local_tensor(out)).set_operands(operand, operand)
        return None

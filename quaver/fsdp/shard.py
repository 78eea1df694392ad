"""Where one rank's shard lies in the weight that FSDP2 all-gathers.

[Note: shapes] FSDP2 shards a weight [N, K] along dim 0 (or 1). Tensor parallelism may have sharded it before; N and K
are then those of the tensor-parallel part, which is what FSDP2 all-gathers. Of experts, [E, R, C], it shards whole
experts (dim 0) or the rows of each (dim 1); expert parallelism may have split the experts before, and E is then the
number of those here.

[Note: equal groups] Weights on equal meshes may hold several process groups of the same ranks. PyTorch caches what it
infers about DTensors by their meshes, and meshes of the same ranks are equal, so that a weight can come with the groups
of an equal mesh that was made before. Hence groups are told apart by their ranks.
"""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from quaver.experts.groups import scale_rows
from quaver.recipes.scale_layout import ScaleLayout
from quaver.torch_private.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import Shard as PlacementShard

Ranks = tuple[int, ...]
"""The global ranks of a process group, in its order; () for none."""


class Shard(NamedTuple):
    """One rank's shard, and where it lies in the weight that FSDP2 all-gathers."""

    local: Tensor
    """[n, k], plain; n may be 0. Of experts [e, r, C]."""
    size: tuple[int, ...]
    """[N, K]; see [Note: shapes]. Of experts [E, R, C]."""
    dim: int
    """The dim that FSDP2 shards."""
    offset: int
    """Where the shard begins along it."""
    fsdp_group: ProcessGroup
    tp_group: ProcessGroup | None
    tp_dim: int | None
    """The dim that tensor parallelism sharded before."""
    device: torch.device
    """The device of the groups' collectives; an offloaded shard lies elsewhere."""
    ranks: tuple[Ranks, Ranks]
    """The global ranks of `fsdp_group` and of `tp_group`."""

    def part(self, of_whole: Tensor) -> Tensor:
        """This shard's part of scales [N, 1] or [1, K] of the whole weight, or the one scale ()."""
        if of_whole.dim() == 0 or of_whole.shape[self.dim] == 1 != self.size[self.dim]:
            return of_whole
        return of_whole.narrow(self.dim, self.offset, self.local.shape[self.dim])

    def part_of_blocks(self, of_whole: Tensor, layout: ScaleLayout) -> tuple[Tensor, ScaleLayout]:
        """This shard's part of the scales of blocks, and its layout: 1 along the dim that may be cut."""
        length, n = layout[self.dim], self.local.shape[self.dim]
        first, last = self.offset // length, -(-(self.offset + n) // length)
        scale = of_whole.narrow(self.dim, first, last - first) if n else of_whole.narrow(self.dim, 0, 0)
        scale = scale.repeat_interleave(length, self.dim).narrow(self.dim, self.offset - first * length if n else 0, n)
        return scale, layout._replace(**{layout._fields[self.dim]: 1})

    def scale_rows(self, layout: ScaleLayout) -> Tensor:
        """For each row of a shard of experts, the row of its scale among the scales of the whole weight, int64."""
        experts, rows, _ = self.size
        whole = scale_rows(None, experts, experts * rows, layout.rows, self.local.device).view(experts, rows)
        return whole.narrow(self.dim, self.offset, self.local.shape[self.dim]).flatten()


def shard_of(weight: Tensor, local: Tensor) -> Shard:
    """Where the shard `local` of a weight lies while FSDP2 holds the weight sharded.

    FSDP2 shards over one mesh axis; tensor parallelism, if any, over the axis after it.
    """
    if not is_dtensor(weight):
        raise RuntimeError(f"expected a sharded weight, got {type(weight).__name__}; reshard the model first")
    mesh, placements = weight.device_mesh, weight.placements
    axes = [axis for axis, placement in enumerate(placements) if hasattr(placement, "dim")]  # Shard or _StridedShard
    if len(axes) not in (1, 2):
        raise NotImplementedError(
            f"expected a weight that FSDP2 shards over one mesh axis, and tensor parallelism over at most one more; "
            f"got {placements} on {mesh}"
        )
    dims = [typing.cast("PlacementShard", placements[axis]).dim for axis in axes]
    size = list(weight.shape)
    are_experts = len(size) == 3
    if are_experts and (dims[0] == 2 or dims[1:] not in ([], [0])):
        raise NotImplementedError(
            "expected weights of experts that FSDP2 shards along dim 0 or 1, and expert parallelism alone before; got "
            f"{placements} on {mesh}; turn enable_fsdp_float8_all_gather off"
        )
    tp_group = tp_dim = None
    if len(axes) == 2:
        offset, chunk = _chunk(size[dims[1]], mesh, axes[1])
        size[dims[1]] = min(chunk, size[dims[1]] - offset)
    if len(axes) == 2 and not are_experts:
        tp_group, tp_dim = mesh.get_group(axes[1]), dims[1]
    offset, _ = _chunk(size[dims[0]], mesh, axes[0])
    device = torch.device(mesh.device_type)
    fsdp_group = mesh.get_group(axes[0])
    ranks = _ranks(fsdp_group), _ranks(tp_group)
    return Shard(local, tuple(size), dims[0], offset, fsdp_group, tp_group, tp_dim, device, ranks)


def _ranks(group: ProcessGroup | None) -> Ranks:
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def _chunk(length: int, mesh: DeviceMesh, axis: int) -> tuple[int, int]:
    """Where this rank's chunk of `length` begins, and how long chunks are; as torch.chunk, the last may be short."""
    chunk = -(-length // mesh.size(axis))
    return min(mesh.get_local_rank(axis) * chunk, length), chunk

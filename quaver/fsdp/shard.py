"""`LocatedShard`: one rank's shard, and its place in the weight that FSDP2 all-gathers.

[Note: shapes] FSDP2 shards a weight [N, K] along dim 0 or 1. If tensor parallelism sharded it first, [N, K] is the
shape of the tensor-parallel shard, which FSDP2 all-gathers. Weights of experts [E, R, C] are sharded by whole experts
(dim 0) or by the rows of each expert (dim 1). If expert parallelism split the experts first, E counts the local ones.

[Note: equal groups] Weights on equal meshes may hold different process groups of the same ranks. PyTorch caches DTensor
specs by mesh, and meshes with the same ranks compare equal, so a weight can come with the groups of an equal mesh that
was created earlier. So groups are compared by their ranks.
"""

from __future__ import annotations

import typing
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from quaver.experts.groups import find_scale_rows
from quaver.recipes.scale_layout import ALL, ScaleLayout
from quaver.runtime.devices import add_device_index
from quaver.torch_private.dtensor import is_dtensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor import Shard as PlacementShard

RankNumbers = tuple[int, ...]
"""The global ranks of a process group, in its order; () for none."""


class LocatedShard(NamedTuple):
    """One rank's shard, and where it lies in the weight that FSDP2 all-gathers."""

    local: Tensor
    """The plain tensor: [n, k], or [e, r, C] for experts. It may be empty."""
    whole_shape: tuple[int, ...]
    """The shape of the whole weight: [N, K], or [E, R, C] for experts; see [Note: shapes]."""
    dim: int
    """The dim that FSDP2 shards."""
    offset: int
    """The index along `dim` of the shard's first row (or column)."""
    fsdp_group: ProcessGroup
    tp_group: ProcessGroup | None
    tp_dim: int | None
    """The dim that tensor parallelism sharded."""
    device: torch.device
    """The device of the groups' collectives; an offloaded `local` is elsewhere."""
    group_ranks: tuple[RankNumbers, RankNumbers]
    """The global ranks of `fsdp_group` and of `tp_group`."""

    def narrow_scales(self, whole_scales: Tensor, layout: ScaleLayout) -> Tensor:
        """Return this shard's part of the whole weight's scales, (), [N, 1] or [1, K] by `layout`."""
        if layout[self.dim] == ALL:
            return whole_scales
        return whole_scales.narrow(self.dim, self.offset, self.local.shape[self.dim])

    @property
    def offsets(self) -> tuple[int, int]:
        """The row and the column of a matrix's shard in the whole weight."""
        return (self.offset, 0) if self.dim == 0 else (0, self.offset)

    def find_scale_rows(self, layout: ScaleLayout) -> Tensor:
        """Return the index of each row of a shard of experts among the whole weight's rows of scales, int64."""
        experts, rows, _ = self.whole_shape
        scale_rows = find_scale_rows(None, experts, experts * rows, layout.rows, self.local.device).view(experts, rows)
        return scale_rows.narrow(self.dim, self.offset, self.local.shape[self.dim]).flatten()


def locate_shard(weight: Tensor, local: Tensor) -> LocatedShard:
    """Locate `local`, this rank's shard of a DTensor that FSDP2 holds sharded.

    FSDP2 shards over one mesh axis, and tensor parallelism over the axis after it.
    """
    if not is_dtensor(weight):
        raise RuntimeError(f"expected a sharded weight, got {type(weight).__name__}; reshard the model first")
    mesh, placements = weight.device_mesh, weight.placements
    axes = list_shard_axes(weight)
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
            "expected weights of experts that FSDP2 shards along dim 0 or 1 and that only expert parallelism sharded "
            f"before; got {placements} on {mesh}; turn enable_fsdp_float8_all_gather off"
        )
    tp_group = tp_dim = None
    if len(axes) == 2:
        offset, chunk = _locate_chunk(size[dims[1]], mesh, axes[1])
        size[dims[1]] = min(chunk, size[dims[1]] - offset)
    if len(axes) == 2 and not are_experts:
        tp_group, tp_dim = mesh.get_group(axes[1]), dims[1]
    offset, _ = _locate_chunk(size[dims[0]], mesh, axes[0])
    device = find_mesh_device(mesh)
    fsdp_group = mesh.get_group(axes[0])
    ranks = _list_ranks(fsdp_group), _list_ranks(tp_group)
    return LocatedShard(local, tuple(size), dims[0], offset, fsdp_group, tp_group, tp_dim, device, ranks)


def list_shard_axes(weight: DTensor) -> list[int]:
    """Return the mesh axes along which `weight` is sharded, in the order of the mesh."""
    return [axis for axis, placement in enumerate(weight.placements) if hasattr(placement, "dim")]  # or _StridedShard


def find_mesh_device(mesh: DeviceMesh) -> torch.device:
    """Return the device of this rank's collectives over `mesh`."""
    return add_device_index(torch.device(mesh.device_type))


def _list_ranks(group: ProcessGroup | None) -> RankNumbers:
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def _locate_chunk(length: int, mesh: DeviceMesh, axis: int) -> tuple[int, int]:
    """Return the offset of this rank's chunk of `length`, and the chunks' length. The last one may be shorter."""
    chunk = -(-length // mesh.size(axis))
    return min(mesh.get_local_rank(axis) * chunk, length), chunk

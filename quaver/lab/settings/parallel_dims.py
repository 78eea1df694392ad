"""The degrees of parallelism of a run, checked against the number of processes and the batch."""

from dataclasses import dataclass, replace
from math import prod

from quaver.lab.settings import TrainConfig, Training, require
from quaver.runtime.errors import InputError

DEGREE_SETTINGS = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")


@dataclass(frozen=True)
class ParallelDims:
    """The mesh of a run, `replicate` x `shard` x `tensor` ranks, the last dim varying fastest; and this rank in it."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    rank: int = 0
    expert: int = 1
    """The number of neighboring ranks in a shard group that split the experts."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.replicate * self.shard * self.tensor

    @property
    def data_parallel_degree(self) -> int:
        """The number of groups of ranks with different data."""
        return self.replicate * self.shard

    @property
    def data_parallel_rank(self) -> int:
        """This rank's group; the tensor parallel ranks of a group have the same data."""
        return self.rank // self.tensor

    def count_micro_batches(self, training: Training) -> int:
        """Return the microbatches of one step on each rank; `global_batch_size` must be resolved."""
        return training.step_batch_size // (training.local_batch_size * self.data_parallel_degree)

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the device mesh by dim name. Dims of size 1 are left out, except dp_shard under HSDP."""
        dims = {"dp_replicate": self.replicate, "dp_shard": self.shard, "tp": self.tensor}
        needed = {"dp_shard"} if self.replicate > 1 else set()
        return {name: size for name, size in dims.items() if size > 1 or name in needed}

    def __str__(self) -> str:
        dims = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        split = f"; experts split over {self.expert}" if self.expert > 1 else ""
        return f"{self.world_size}{': ' + dims if dims else ''}{split}"


def resolve_parallel_dims(
    config: TrainConfig, *, rank: int = 0, world_size: int = 1
) -> tuple[TrainConfig, ParallelDims]:
    """Return `config` with its global batch size resolved, and its parallel dims on `world_size` ranks.

    Every rank must pass the same config. The results differ in `ParallelDims.rank` only.

    Raises:
        InputError: the degrees do not multiply to `world_size`, expert parallel ranks or the batch do not divide, or a
            setting of a collective is set that these ranks do not have.
    """
    dims = _make_parallel_dims(config, rank, world_size)
    training, groups = config.training, dims.data_parallel_degree
    smallest = training.local_batch_size * groups
    require(
        training.global_batch_size == -1 or training.global_batch_size % smallest == 0,
        "training.global_batch_size",
        f"-1 or a multiple of training.local_batch_size = {training.local_batch_size} on {groups} data-parallel ranks",
        training.global_batch_size,
    )
    require(
        dims.shard > 1 or not config.float8.enable_fsdp_float8_all_gather,
        "float8.enable_fsdp_float8_all_gather",
        "false where no weight is sharded (a data_parallel_shard_degree of 1)",
        True,
        "shard over 2 or more ranks: torchrun --nproc-per-node 2 -m quaver train ...",
    )
    require(
        dims.replicate > 1 or training.reduce != "last_all_reduce",
        "training.reduce",
        "every or last without replicas (a data_parallel_replicate_degree of 1)",
        training.reduce,
    )
    require(
        dims.shard > 1 or not config.comm.float8_gradients,
        "comm.float8_gradients",
        "false where no gradient is reduce-scattered (a data_parallel_shard_degree of 1)",
        True,
    )
    require(
        groups > 1 or config.parallelism.fsdp_reshard_after_forward == "default",
        "parallelism.fsdp_reshard_after_forward",
        "default where FSDP2 gathers no weight (one data-parallel rank)",
        config.parallelism.fsdp_reshard_after_forward,
    )
    batch = smallest if training.global_batch_size == -1 else training.global_batch_size
    return replace(config, training=replace(training, global_batch_size=batch)), dims


def _make_parallel_dims(config: TrainConfig, rank: int, world_size: int) -> ParallelDims:
    replicate, shard, tensor = (getattr(config.parallelism, name) for name in DEGREE_SETTINGS)
    if shard == -1 and world_size % (replicate * tensor) == 0:
        shard = world_size // (replicate * tensor)
    degrees = (replicate, shard, tensor)
    if prod(degrees) == world_size:
        expert = config.parallelism.expert_parallel_degree
        expected = f"a divisor of the {shard} ranks over which FSDP2 shards"
        require(shard % expert == 0, "parallelism.expert_parallel_degree", expected, expert)
        return ParallelDims(*degrees, rank, expert)
    product = " * ".join(map(str, degrees)) if shard != -1 else f"a multiple of {replicate} * {tensor}"
    names = [f"parallelism.{name}" for name in DEGREE_SETTINGS]
    raise InputError(
        f"{' * '.join(names)} must be the number of processes = {world_size}, "
        f"got {product}; change a degree, or start torchrun with another --nproc-per-node"
    )

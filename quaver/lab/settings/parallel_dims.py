"""The degrees of parallelism of a run, checked against the number of processes and the batch."""

from dataclasses import dataclass, replace
from math import prod

from quaver.lab.settings import Parallelism, TrainConfig, Training, require
from quaver.runtime.errors import InputError

DEGREE_SETTINGS = ("data_parallel_replicate_degree", "data_parallel_shard_degree", "tensor_parallel_degree")


@dataclass(frozen=True)
class ParallelDims:
    """The mesh of a run, `dp_replicate` x `dp_shard` x `tp` ranks, the last varying fastest; and this rank in it."""

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    rank: int = 0
    ep: int = 1
    """The number of neighboring ranks in a shard group that split the experts."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_parallel_degree(self) -> int:
        """The number of groups of ranks with different data."""
        return self.dp_replicate * self.dp_shard

    @property
    def data_parallel_rank(self) -> int:
        """This rank's group; the tensor parallel ranks of a group have the same data."""
        return self.rank // self.tp

    def count_micro_batches(self, training: Training) -> int:
        """Return the microbatches of one step on each rank; `global_batch_size` must be resolved."""
        return training.step_batch_size // (training.local_batch_size * self.data_parallel_degree)

    @property
    def mesh(self) -> dict[str, int]:
        """The sizes of the device mesh by dim name. Dims of size 1 are left out, except dp_shard under HSDP."""
        dims = {"dp_replicate": self.dp_replicate, "dp_shard": self.dp_shard, "tp": self.tp}
        needed = {"dp_shard"} if self.dp_replicate > 1 else set()
        return {name: size for name, size in dims.items() if size > 1 or name in needed}

    def apply_to(self, parallelism: Parallelism) -> Parallelism:
        """Return `parallelism` with these degrees."""
        return replace(
            parallelism,
            data_parallel_replicate_degree=self.dp_replicate,
            data_parallel_shard_degree=self.dp_shard,
            tensor_parallel_degree=self.tp,
            expert_parallel_degree=self.ep,
        )

    def __str__(self) -> str:
        dims = " x ".join(f"{name} {size}" for name, size in self.mesh.items())
        split = f"; experts split over {self.ep}" if self.ep > 1 else ""
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
        dims.dp_shard > 1 or not config.float8.enable_fsdp_float8_all_gather,
        "float8.enable_fsdp_float8_all_gather",
        "false where no weight is sharded (a data_parallel_shard_degree of 1)",
        True,
        "shard over 2 or more ranks: torchrun --nproc-per-node 2 -m quaver train ...",
    )
    require(
        dims.dp_replicate > 1 or training.reduce != "last_all_reduce",
        "training.reduce",
        "every or last without replicas (a data_parallel_replicate_degree of 1)",
        training.reduce,
    )
    require(
        dims.dp_shard > 1 or not config.comm.float8_gradients,
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
    dp_replicate, dp_shard, tp = (getattr(config.parallelism, name) for name in DEGREE_SETTINGS)
    if dp_shard == -1 and world_size % (dp_replicate * tp) == 0:
        dp_shard = world_size // (dp_replicate * tp)
    degrees = (dp_replicate, dp_shard, tp)
    if prod(degrees) == world_size:
        ep = config.parallelism.expert_parallel_degree
        expected = f"a divisor of the {dp_shard} ranks over which FSDP2 shards"
        require(dp_shard % ep == 0, "parallelism.expert_parallel_degree", expected, ep)
        return ParallelDims(*degrees, rank, ep)
    product = " * ".join(map(str, degrees)) if dp_shard != -1 else f"a multiple of {dp_replicate} * {tp}"
    names = [f"parallelism.{name}" for name in DEGREE_SETTINGS]
    raise InputError(
        f"{' * '.join(names)} must be the number of processes = {world_size}, "
        f"got {product}; change a degree, or start torchrun with another --nproc-per-node"
    )

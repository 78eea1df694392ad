"""[parallelism] and [comm]: how ranks share the work."""

from dataclasses import dataclass

from quaver.trainer.config.require import require, require_positive

RESHARD_POLICIES = ("default", "always", "never")


@dataclass(frozen=True)
class Parallelism:
    """How the ranks that torchrun starts share the work; the product of the degrees is their number."""

    data_parallel_replicate_degree: int = 1
    """Groups of ranks that hold a whole copy of the weights each (HSDP)."""
    data_parallel_shard_degree: int = -1
    """Ranks over which FSDP2 shards each copy; -1 means all that the other two degrees leave."""
    tensor_parallel_degree: int = 1
    """Ranks that share each linear and, between linears, the sequence."""
    fsdp_reshard_after_forward: str = "default"
    """When FSDP2 frees gathered weights after the forward: default (all but those that backward needs first), always
    or never."""

    def __post_init__(self) -> None:
        require_positive("parallelism", self, "data_parallel_replicate_degree", "tensor_parallel_degree")
        shard = self.data_parallel_shard_degree
        require(shard == -1 or shard >= 1, "parallelism.data_parallel_shard_degree", "-1 or at least 1", shard)
        require(
            self.fsdp_reshard_after_forward in RESHARD_POLICIES,
            "parallelism.fsdp_reshard_after_forward",
            f"one of {', '.join(RESHARD_POLICIES)}",
            self.fsdp_reshard_after_forward,
        )


@dataclass(frozen=True)
class Comm:
    """Communication between ranks."""

    train_timeout_seconds: int = 300
    """Seconds that ranks wait for each other before the run ends with an error."""
    watchdog_seconds: int = 120
    """Seconds after which a step counts as stuck: every rank that waits writes the stacks of its threads to
    stacks-rank<n>.txt in the run folder, and goes on waiting; 0 never. The first step, which may compile, has ten times
    as long."""

    def __post_init__(self) -> None:
        require_positive("comm", self, "train_timeout_seconds")
        require(self.watchdog_seconds >= 0, "comm.watchdog_seconds", "not negative", self.watchdog_seconds)

"""[parallelism] and [comm]: how ranks share the work."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le

from quaver.trainer.config.settings import AtLeast1, OneOf, Settings

MOST_SECONDS = 10**7
"""Four months; timers of the system overflow at much more."""

RESHARD_POLICIES = ("default", "always", "never")


@dataclass(frozen=True)
class Parallelism(Settings, section="parallelism"):
    """How the ranks of torchrun share the work; the product of the degrees is their number."""

    data_parallel_replicate_degree: AtLeast1 = 1
    """Groups of ranks that each hold a whole copy of the weights (HSDP)."""
    data_parallel_shard_degree: int = -1
    """Ranks over which FSDP2 shards each copy; -1 for all that remain."""
    tensor_parallel_degree: AtLeast1 = 1
    """Ranks that share each linear and, between linears, the sequence."""
    fsdp_reshard_after_forward: Annotated[str, OneOf(RESHARD_POLICIES)] = "default"
    """When FSDP2 frees gathered weights after the forward; default: all but the first that backward needs."""

    def check(self) -> None:
        """Refuse a shard degree that is no number of ranks."""
        shard = self.data_parallel_shard_degree
        self.require(shard == -1 or shard >= 1, "data_parallel_shard_degree", "-1 or at least 1")


@dataclass(frozen=True)
class Comm(Settings, section="comm"):
    """Communication between ranks."""

    train_timeout_seconds: Annotated[int, Ge(1), Le(MOST_SECONDS)] = 300
    """Seconds after which a collective that waits ends the run with an error."""
    watchdog_seconds: Annotated[int, Ge(0), Le(MOST_SECONDS)] = 120
    """Seconds after which every rank of a stuck step writes its stacks to stacks-rank<n>.txt in the run folder; 0
    never. The first step has ten times as long."""

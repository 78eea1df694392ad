"""Counts the collectives of a run's training step and their bytes, without ranks, devices or memory.

As for the memory of a run (predict_run.py), the trainer's own code trains a step with fake tensors, as the first of the
ranks. Each collective is counted by the mesh dims that it spans. Compilation does not change collectives, so the step
runs as eager code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quaver.lab.memory.faking.fakes import fake_tensors
from quaver.lab.memory.train_step.predict_run import fake_run
from quaver.lab.model.plain_tensors import list_plain_tensors
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.linear.tensor import Float8Tensor
from quaver.roofline.sent_bytes import count_sent_bytes
from quaver.torch_private.functional_collectives import find_process_group

COLLECTIVE_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
_Key = tuple[tuple[int, ...], str, str]
"""The ranks of a group, and the kind and the dtype of a collective."""


@dataclass(frozen=True, order=True)
class EqualCollectives:
    """The collectives of one step that have the same kind, dtype and mesh dims."""

    mesh_dims: str
    """The mesh dims that they span, such as "tp". "ep" means neighbors on "dp_shard" that split experts."""
    kind: str
    dtype: str
    ranks: int
    """The number of ranks in one group."""
    stride: int
    """The difference between adjacent ranks of a group."""
    count: int
    """How many the rank starts in the step."""
    tensor_bytes: int
    """Bytes of the tensors that a rank gathers, reduces, scatters or exchanges. An all-gather counts its result."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that each rank sends in a ring algorithm, or in an all-to-all of equal parts."""
        return int(count_sent_bytes(self.kind, self.tensor_bytes, self.ranks))


class CollectiveSum(NamedTuple):
    """How many collectives a rank starts, and the bytes that it sends in them."""

    num_collectives: int
    sent_bytes: int


@dataclass(frozen=True)
class StepTraffic:
    """The collectives of one rank in a training step, and the bytes of a checkpoint of the run."""

    dims: ParallelDims
    name: str
    """The recipe, or the high-precision dtype."""
    parameters: int
    micro_batches: int
    collectives: tuple[EqualCollectives, ...]
    checkpoint_bytes: int
    """Bytes of all ranks' parameters and optimizer states, each once."""

    @property
    def sums(self) -> dict[str, CollectiveSum]:
        """The sum of the collectives across each set of mesh dims."""
        sums: dict[str, CollectiveSum] = {}
        for collective in self.collectives:
            count, sent_bytes = sums.get(collective.mesh_dims, (0, 0))
            sums[collective.mesh_dims] = CollectiveSum(count + collective.count, sent_bytes + collective.sent_bytes)
        return sums

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON."""
        rows = [{**vars(collective), "sent_bytes": collective.sent_bytes} for collective in self.collectives]
        run = {"trained_in": self.name, "parameters": self.parameters, "mesh": self.dims.mesh}
        run |= {"ranks": self.dims.world_size, "micro_batches": self.micro_batches}
        return {**run, "collectives": rows, "checkpoint_bytes": self.checkpoint_bytes}


def predict_traffic(config: TrainConfig, ranks: int, device: str = "cpu") -> StepTraffic:
    """Count the collectives of the second training step of the first of `ranks` processes on "cpu" or "cuda" devices.

    Raises:
        InputError, OSError: the run itself would refuse its model or its ranks.
        NotImplementedError: something cannot be predicted, or the step starts a collective that is not in
            COLLECTIVE_KINDS.
    """
    config = replace(config, training=replace(config.training, compile=False))
    with fake_run(config, ranks, fake_tensors(device)) as run:
        run.train_step()  # FSDP2 and the optimizer create their state
        with TrafficCounter() as counter:
            run.train_step()
        collectives = counter.list_collectives(run.dims)
        state = (leaf for values in run.trained.optimizer.state.values() for leaf in tree_leaves(values))
        checkpoint_bytes = sum(map(_count_whole_bytes, (*run.trained.model.parameters(), *state)))
    return StepTraffic(run.dims, run.trained.name, run.parameters, run.micro_batches, collectives, checkpoint_bytes)


class TrafficCounter(TorchDispatchMode):
    """Counts the collectives that this rank starts while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[_Key] = Counter()
        self._bytes: Counter[_Key] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(tensor_type, DTensor | Float8Tensor) for tensor_type in types):
            return NotImplemented  # the ops on the tensors inside are dispatched here again
        result = func(*args, **(kwargs or {}))
        namespace, name = func.name().split("::")
        if "c10d" in namespace and name != "wait_tensor":
            kind = _find_kind(name)
            written, read = (args[0], args[1:2]) if namespace == "c10d" else (result, args[0])
            counts_result = kind in ("all_gather", "all_to_all", "all_reduce")  # an all-reduce in c10d is in place
            tensors = _list_tensors(written if counts_result else read)
            key = _find_ranks((*args, *(kwargs or {}).values())), kind, str(tensors[0].dtype).removeprefix("torch.")
            self._counts[key] += 1
            self._bytes[key] += sum(tensor.nbytes for tensor in tensors)
        return result

    def list_collectives(self, dims: ParallelDims) -> tuple[EqualCollectives, ...]:
        """Return the counted collectives, sorted by mesh dims."""
        rows = []
        for key, count in self._counts.items():
            ranks, kind, dtype = key
            stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
            rows.append(
                EqualCollectives(name_mesh_dims(ranks, dims), kind, dtype, len(ranks), stride, count, self._bytes[key])
            )
        return tuple(sorted(rows))


def name_mesh_dims(ranks: Iterable[int], dims: ParallelDims) -> str:
    """Return the dims of the mesh of `dims` in which `ranks` differ."""
    tp, dp_shard = dims.tp, dims.dp_shard
    coordinates = [(rank // (tp * dp_shard), rank // tp % dp_shard, rank % tp) for rank in ranks]
    along = dict(zip(("dp_replicate", "dp_shard", "tp"), zip(*coordinates, strict=True), strict=True))
    varying = [name for name, indices in along.items() if len(set(indices)) > 1]
    if varying == ["dp_shard"] and len(coordinates) < dp_shard:
        return "ep" if coordinates[1][1] - coordinates[0][1] == 1 else "dp_shard / ep"
    return " x ".join(varying) or "none"


def _find_kind(operator: str) -> str:
    """Return the kind of a collective. Raises NotImplementedError for one whose bytes are not counted."""
    plain = operator.replace("_", "")
    kind = next((kind for kind in COLLECTIVE_KINDS if plain.startswith(kind.replace("_", ""))), None)
    if kind is None:
        raise NotImplementedError(f"expected collectives that are {', '.join(COLLECTIVE_KINDS)}, got {operator}")
    return kind


def _list_tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _find_ranks(arguments: Iterable[Any]) -> tuple[int, ...]:
    """Return the ranks of a collective's group.

    In c10d the group is the first object among the arguments. In functional collectives the last string is its name.
    """
    name = ""
    for argument in arguments:
        if isinstance(argument, torch.ScriptObject):
            return tuple(dist.get_process_group_ranks(dist.ProcessGroup.unbox(argument)))
        if isinstance(argument, str):
            name = argument
    return tuple(dist.get_process_group_ranks(find_process_group(name)))


def _count_whole_bytes(value: Any) -> int:
    if isinstance(value, DTensor):
        return value.nbytes
    return sum(tensor.nbytes for tensor in list_plain_tensors(value)) if isinstance(value, Tensor) else 0

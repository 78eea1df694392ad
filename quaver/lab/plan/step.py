"""The tasks of one training step of one rank, computing and sending, in FSDP2's order.

    forward of block i     waits for its all-gather, copies the weights out, computes; the all-gather of block i + 1
                           began when the weights of block i were copied out, and overlaps with it
    backward of block i    likewise, from the last block to the first; its gradients are copied in and reduce-scattered
                           during the backward of block i - 1, and then all-reduced over replicas
    copying in             waits for the previous reduce-scatter: FSDP2 keeps one buffer
    tensor parallel        collectives run between the matmuls of a block, and compute waits for them; for asynchronous
                           collectives it waits for their first part only
    at the end             the norm of gradients, clipping and the optimizer, the amaxes of weights that are gathered
                           in float8

extrapolate.py and search.py add the step's share of a checkpoint, which depends on the time of the whole step.

(torch/distributed/fsdp/_fully_shard: _fsdp_param_group.py, _fsdp_collectives.py.)
"""

from __future__ import annotations

from typing import NamedTuple

from quaver.conversion.roles import LM_HEAD
from quaver.fsdp.gradients import BLOCK_ELEMENTS
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.compute_time import (
    BlockTimes,
    count_dense_parameters,
    count_expert_parameters,
    count_held_parameters,
    list_linears,
    time_block,
    time_embedding,
    time_head,
)
from quaver.lab.plan.exchanges import Exchange, list_block_exchanges, list_end_exchanges, list_scale_exchanges
from quaver.lab.plan.planned_run import EXPERTS, PlannedRun
from quaver.lab.plan.simulate import COMPUTE, SimulatedStep
from quaver.roofline.block import PerPass
from quaver.roofline.matmul import predict_move_seconds
from quaver.roofline.sent_bytes import count_sent_bytes

WEIGHT_BYTES = 2
"""Weights are gathered in bfloat16, in which their gradients are computed."""
GRADIENT_BYTES = 4
"""Gradients are reduced in float32."""
_CODE_BYTES = 1 + 4 / BLOCK_ELEMENTS
"""Bytes of a gradient that is sent as a float8 code, with its part of a block's scale."""
_CAST_BYTES = 6 * GRADIENT_BYTES
"""Bytes that a float8 reduction moves per gradient in addition to the copy. The cast reads twice; codes are written,
copied and read; decoded values are written, read, and added to a sum that is read and written."""


class ParameterGroup(NamedTuple):
    """Parameters that FSDP2 gathers together, as one tensor and expert parallel rank has them."""

    name: str
    parameters: int
    gathered_bytes: float
    shard: int
    """The number of ranks that hold shards."""
    stride: int
    """The difference between adjacent ones of these ranks."""


def list_block_groups(run: PlannedRun) -> list[ParameterGroup]:
    """Return the FSDP2 groups of one block: its parameters, and separately experts that are split over ranks."""
    stride, shard = run.tensor, run.shard * run.context  # FSDP2 shards over context parallel ranks too
    dense, experts = count_dense_parameters(run), count_expert_parameters(run)
    float8_parameters = 0.0
    for name, (inputs, outputs) in list_linears(run.model).items():
        float8_parameters += run.get_float8_share(name) * inputs * outputs / run.tensor
    dense_bytes = _count_gathered_bytes(run, dense, float8_parameters)
    expert_bytes = _count_gathered_bytes(run, experts, run.get_float8_share(EXPERTS) * experts)
    if run.expert == 1:
        return [ParameterGroup("block", dense + experts, dense_bytes + expert_bytes, shard, stride)]
    return [
        ParameterGroup("block", dense, dense_bytes, shard, stride),
        ParameterGroup("experts", experts, expert_bytes, shard // run.expert, stride * run.expert),
    ]


def _count_gathered_bytes(run: PlannedRun, parameters: float, float8_parameters: float) -> float:
    """Return the bytes of gathered parameters; `float8_parameters` is how many of them belong to float8 layers.

    Two sets of codes take as many bytes as bfloat16.
    """
    return WEIGHT_BYTES * parameters - (float8_parameters if run.float8_all_gather and run.has_one_cast else 0)


def list_overlapped_kinds(run: PlannedRun) -> frozenset[str]:
    """Return the kinds of a block's exchanges that overlap with its compute."""
    tensor = {"all_gather", "reduce_scatter"} if run.framework.async_tensor else set()
    if run.framework.casts_gathered and run.recipe is not None:  # casts wait for the whole tensor
        tensor -= {"all_gather"}
    return frozenset(tensor | ({"all_to_all"} if run.framework.async_expert else set()))


def add_block(
    step: SimulatedStep,
    name: str,
    seconds: float,
    exchanges: list[Exchange],
    cluster: Cluster,
    overlapped: frozenset[str],
    kind: str,
) -> None:
    """Add the compute of a block in two halves, attention and the feed-forward, each between its exchanges.

    A half waits for its amaxes and its input, and its output is scattered afterwards. Exchanges of `overlapped` kinds
    are split into as many parts as there are ranks; only the first incoming and the last outgoing part do not overlap.

    Args:
        kind: the kind of the compute, forward or backward.
    """
    if not exchanges:
        step.add(name, COMPUTE, seconds, kind=kind)
        return

    def send(exchange: Exchange, share: float, after: list[int | None]) -> int:
        number = share * exchange.number / 2
        return _add_exchange(step, f"{name}: {exchange.kind}", exchange, cluster, after, number)

    def get_exposed_share(exchange: Exchange) -> float:
        return 1 / exchange.ranks if exchange.kind in overlapped else 1.0

    incoming = [exchange for exchange in exchanges if exchange.kind != "reduce_scatter"]
    outgoing = [exchange for exchange in exchanges if exchange.kind == "reduce_scatter"]
    waits: list[int | None] = []
    for _ in range(2):
        overlapping: list[int | None] = []
        for exchange in incoming:
            waits = [send(exchange, get_exposed_share(exchange), waits)]
            if exchange.kind in overlapped:
                overlapping.append(send(exchange, 1 - get_exposed_share(exchange), waits))
        begun = step.add(name, COMPUTE, seconds / 4, waits, kind)
        for exchange in outgoing:
            if exchange.kind in overlapped:
                send(exchange, 1 - get_exposed_share(exchange), [begun])
        waits = [step.add(name, COMPUTE, seconds / 4, overlapping, kind)]
        for exchange in outgoing:
            waits = [send(exchange, get_exposed_share(exchange), waits)]
    step.add(f"{name}: end", COMPUTE, 0.0, waits, kind)


def _add_exchange(
    step: SimulatedStep, name: str, exchange: Exchange, cluster: Cluster, after: list[int | None], number: float = 1
) -> int:
    """Add `number` collectives of an exchange as one task, and return the task's number."""
    kind, tensor_bytes, _, ranks, stride = exchange
    seconds = number * cluster.time_collective(kind, tensor_bytes, ranks, stride)
    sent = number * count_sent_bytes(kind, tensor_bytes, ranks)
    return step.add(name, cluster.find_link(ranks, stride), seconds, after, kind, sent)


class Costs(NamedTuple):
    """The compute seconds of one rank for one micro-batch, by compute_time.py, a ledger or a measurement."""

    block: BlockTimes
    head: PerPass
    embedding: PerPass

    @classmethod
    def from_formulas(cls, run: PlannedRun, cluster: Cluster) -> Costs:
        """Compute the costs by the formulas of compute_time.py."""
        return cls(time_block(run, cluster), time_head(run, cluster), time_embedding(run, cluster))


def build_step(run: PlannedRun, cluster: Cluster, costs: Costs | None = None) -> SimulatedStep:
    """Return the tasks of the first rank's step, without checkpoints.

    Args:
        costs: the costs of a micro-batch, by default from the formulas of compute_time.py.
    """
    builder = _StepBuilder(run, cluster, costs or Costs.from_formulas(run, cluster))
    for number in range(run.micro_batches):
        builder.add_micro_batch(number)
    builder.add_end()
    return builder.step


class _StepBuilder:
    def __init__(self, run: PlannedRun, cluster: Cluster, costs: Costs) -> None:
        self.step = SimulatedStep()
        self._run, self._cluster, self._costs = run, cluster, costs
        self._groups = list_block_groups(run)
        self._exchanges = {back: list_block_exchanges(run, backward=back) for back in (False, True)}
        model = run.model
        rows = model.vocab_size * model.dim // run.tensor
        shard = run.shard * run.context
        self._root = ParameterGroup("embedding", rows, rows * run.residual_bytes, shard, run.tensor)
        head_bytes = _count_gathered_bytes(run, rows, run.get_float8_share(LM_HEAD) * rows)
        tied = model.tie_word_embeddings  # the projection is in the embedding's group
        self._head = [] if tied else [ParameterGroup(LM_HEAD, rows, head_bytes, shard, run.tensor)]
        self._gathers = self._reduces = self._all_reduces = True
        self._split_embedding, self._split_head = list_end_exchanges(run)
        self._scattered: int | None = None
        """The last reduce-scatter. The next copy into its buffer waits for it."""
        self._copied: int | None = None
        """The last copy of gathered weights. The next all-gather writes into the buffer that it read."""

    def add_micro_batch(self, micro_batch: int) -> None:
        """Add forward and backward of all blocks."""
        run, blocks = self._run, self._run.model.n_layers
        prefix = f"micro-batch {micro_batch + 1}: " if run.micro_batches > 1 else ""
        is_last = micro_batch == run.micro_batches - 1
        self._gathers = micro_batch == 0 or (run.reduce, run.reshard_after_forward) != ("last", "never")
        self._reduces, self._all_reduces = is_last or run.reduce != "last", is_last or run.reduce == "every"
        times, head, embedding = self._costs
        self._gather_and_copy_out([self._root], f"{prefix}forward of the embedding")
        self._compute(f"{prefix}forward of the embedding", embedding.forward, "forward")
        self._exchange_at_end(f"{prefix}forward of the embedding", self._split_embedding[False], "forward")
        for number in range(blocks):
            self._gather_and_copy_out(self._groups, f"{prefix}forward of block {number}")
            self._add_block(f"{prefix}forward of block {number}", times.forward, backward=False)
        self._gather_and_copy_out(self._head, f"{prefix}forward of {LM_HEAD}")
        self._exchange_at_end(f"{prefix}forward of {LM_HEAD}", self._split_head[False], "forward")
        self._compute(f"{prefix}forward of {LM_HEAD} and the loss", head.forward, "forward")
        if run.reshard_after_forward != "never":
            if run.reshard_after_forward == "always":
                self._gather_and_copy_out([self._root], f"{prefix}backward of the embedding")
            self._gather_and_copy_out(self._head, f"{prefix}backward of {LM_HEAD}")
        prefetched = self._gather_again(f"{prefix}backward of block {blocks - 1}")
        self._compute(f"{prefix}backward of {LM_HEAD} and the loss", head.backward, "backward")
        self._exchange_at_end(f"{prefix}backward of {LM_HEAD}", self._split_head[True], "backward")
        self._reduce(self._head, f"{prefix}backward of {LM_HEAD}")
        for number in reversed(range(blocks)):
            name = f"{prefix}backward of block {number}"
            self._copy_out(self._groups, name, prefetched)
            if number:
                prefetched = self._gather_again(f"{prefix}backward of block {number - 1}")
            again = times.recomputed if is_checkpointed(run, number) else 0.0
            self._add_block(name, times.backward + again, backward=True)
            self._reduce(self._groups, name)
        self._exchange_at_end(f"{prefix}backward of the embedding", self._split_embedding[True], "backward")
        self._compute(f"{prefix}backward of the embedding", embedding.backward, "backward")
        self._reduce([self._root], f"{prefix}backward of the embedding")

    def add_end(self) -> None:
        """Add the norm of the gradients, the optimizer, and the scales of weights that are gathered as codes."""
        run, cluster = self._run, self._cluster
        parameters = count_held_parameters(run)
        norm = self._compute(
            "norm of gradients", predict_move_seconds(4 * parameters, cluster.spec), "optimizer", [self._scattered]
        )
        if run.ranks > 1:
            norm = self._send("all-reduce of the norm", Exchange("all_reduce", 4, 1, run.ranks, 1), [norm])
        # Clipping reads and writes gradients; AdamW reads a parameter, its gradient and states, and writes all but one.
        moved = 2 * run.parameter_bytes + 3 * run.parameter_bytes + 2 * run.state_bytes
        self._compute(
            "clipping and the optimizer", predict_move_seconds(moved * parameters, cluster.spec), "optimizer", [norm]
        )
        if run.float8_all_gather and run.shard > 1:
            self._compute(
                "amaxes of weights", predict_move_seconds(run.parameter_bytes * parameters, cluster.spec), "optimizer"
            )
        for exchange in list_scale_exchanges(run):
            self._send("all-reduce of amaxes", exchange, [self.step.find_last(COMPUTE)])

    def _compute(self, name: str, seconds: float, kind: str, after: list[int | None] | None = None) -> int:
        return self.step.add(name, COMPUTE, seconds, after or [], kind)

    def _send(self, name: str, exchange: Exchange, after: list[int | None]) -> int:
        return _add_exchange(self.step, name, exchange, self._cluster, after)

    def _add_block(self, name: str, seconds: float, *, backward: bool) -> None:
        kind = "backward" if backward else "forward"
        overlapped = list_overlapped_kinds(self._run)
        add_block(self.step, name, seconds, self._exchanges[backward], self._cluster, overlapped, kind)

    def _exchange_at_end(self, name: str, exchanges: list[Exchange], kind: str) -> None:
        """Add exchanges of the embedding or the output projection, and an empty task of `kind` that waits for them."""
        last: int | None = self.step.find_last(COMPUTE)
        for exchange in exchanges:
            last = self._send(f"{name}: {exchange.kind}", exchange, [last])
        if exchanges:
            self._compute(name, 0.0, kind, [last])

    def _gather(self, groups: list[ParameterGroup], name: str) -> list[int | None]:
        """Add all-gathers, which begin when the previously gathered weights are copied out."""
        if not self._gathers or not groups or groups[0].shard == 1:
            return []
        gathers: list[int | None] = []
        for group in groups:
            gather = Exchange("all_gather", group.gathered_bytes, 1, group.shard, group.stride)
            gathers.append(self._send(f"{name}: all-gather", gather, [self._copied]))
        return gathers

    def _gather_again(self, name: str) -> list[int | None]:
        """Add the all-gathers of a block for its backward, unless its weights stayed gathered."""
        return [] if self._run.reshard_after_forward == "never" else self._gather(self._groups, name)

    def _gather_and_copy_out(self, groups: list[ParameterGroup], name: str) -> None:
        self._copy_out(groups, name, self._gather(groups, name))

    def _copy_out(self, groups: list[ParameterGroup], name: str, gathers: list[int | None]) -> None:
        if not gathers:
            return
        seconds = predict_move_seconds(2 * sum(group.gathered_bytes for group in groups), self._cluster.spec)
        self._copied = self.step.add(f"{name}: copy out", COMPUTE, seconds, gathers, "copies")

    def _reduce(self, groups: list[ParameterGroup], name: str) -> None:
        """Copy gradients in, reduce-scatter them, and all-reduce them over the replicas."""
        run, cluster = self._run, self._cluster
        if run.shard * run.context * run.replicate == 1 or not groups:
            return
        parameters = sum(group.parameters for group in groups)
        moved = WEIGHT_BYTES + GRADIENT_BYTES  # read and written
        moved += _CAST_BYTES if run.float8_gradients and self._reduces else 0
        copy_s = predict_move_seconds(moved * parameters, cluster.spec)
        copied = self.step.add(f"{name}: copy in", COMPUTE, copy_s, [self._scattered], "copies")
        if not self._reduces:  # the copy adds to the gradients of earlier micro-batches
            return
        for group in groups:
            after = copied
            if group.shard > 1:
                kind, size = ("all_to_all", _CODE_BYTES) if run.float8_gradients else ("reduce_scatter", GRADIENT_BYTES)
                scatter = Exchange(kind, size * group.parameters, 1, group.shard, group.stride)
                self._scattered = after = self._send(f"{name}: reduce-scatter", scatter, [copied])
            if run.replicate > 1 and self._all_reduces:
                part = GRADIENT_BYTES * group.parameters / group.shard
                reduce = Exchange("all_reduce", part, 1, run.replicate, group.stride * group.shard)
                self._scattered = self._send(f"{name}: all-reduce", reduce, [after])


def is_checkpointed(run: PlannedRun, block: int) -> bool:
    """Return whether a block is checkpointed. Checkpointed blocks are spread evenly."""
    many, blocks = run.checkpointed_blocks, run.model.n_layers
    return (block + 1) * many // blocks > block * many // blocks

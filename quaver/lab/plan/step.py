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
from quaver.lab.plan.collectives import (
    ModeledCollective,
    list_block_collectives,
    list_embedding_collectives,
    list_head_collectives,
    list_scale_collectives,
)
from quaver.lab.plan.compute_time import (
    BlockTimes,
    count_dense_parameters,
    count_expert_parameters,
    count_held_parameters,
    list_linear_sizes,
    predict_block_times,
    predict_embedding_times,
    predict_head_times,
)
from quaver.lab.plan.planned_run import EXPERTS, PlannedRun
from quaver.lab.plan.simulate import COMPUTE, Dependencies, TaskList
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
    ranks: int
    """The number of ranks that hold shards."""
    stride: int
    """The difference between adjacent ones of these ranks."""


def list_block_groups(run: PlannedRun) -> list[ParameterGroup]:
    """Return the FSDP2 groups of one block: its parameters, and separately experts that are split over ranks."""
    stride, ranks = run.tp, run.dp_shard * run.cp  # FSDP2 shards over context parallel ranks too
    dense, experts = count_dense_parameters(run), count_expert_parameters(run)
    float8_parameters = 0.0
    for name, (inputs, outputs) in list_linear_sizes(run.model).items():
        float8_parameters += run.get_float8_share(name) * inputs * outputs / run.tp
    dense_bytes = _count_gathered_bytes(run, dense, float8_parameters)
    expert_bytes = _count_gathered_bytes(run, experts, run.get_float8_share(EXPERTS) * experts)
    if run.ep == 1:
        return [ParameterGroup("block", dense + experts, dense_bytes + expert_bytes, ranks, stride)]
    return [
        ParameterGroup("block", dense, dense_bytes, ranks, stride),
        ParameterGroup("experts", experts, expert_bytes, ranks // run.ep, stride * run.ep),
    ]


def _count_gathered_bytes(run: PlannedRun, parameters: float, float8_parameters: float) -> float:
    """Return the bytes of gathered parameters; `float8_parameters` is how many of them belong to float8 layers.

    Two sets of codes take as many bytes as bfloat16.
    """
    return WEIGHT_BYTES * parameters - (float8_parameters if run.float8_all_gather and run.reuses_weight_codes else 0)


def _list_outside_groups(run: PlannedRun) -> tuple[list[ParameterGroup], list[ParameterGroup]]:
    """Return the groups of the embedding, which is FSDP2's root, and of the output projection unless it is tied."""
    rows, ranks = run.model.vocab_size * run.model.dim // run.tp, run.dp_shard * run.cp
    root = ParameterGroup("embedding", rows, rows * run.residual_bytes, ranks, run.tp)
    head_bytes = _count_gathered_bytes(run, rows, run.get_float8_share(LM_HEAD) * rows)
    head = ParameterGroup(LM_HEAD, rows, head_bytes, ranks, run.tp)
    return [root], [] if run.model.tie_word_embeddings else [head]


def list_overlapped_kinds(run: PlannedRun) -> frozenset[str]:
    """Return the kinds of a block's collectives that overlap with its compute."""
    kinds = {"all_gather", "reduce_scatter"} if run.framework.async_tensor else set()
    if run.framework.casts_gathered and run.recipe is not None:  # casts wait for the whole tensor
        kinds -= {"all_gather"}
    return frozenset(kinds | ({"all_to_all"} if run.framework.async_expert else set()))


def add_block(
    tasks: TaskList,
    name: str,
    seconds: float,
    *,
    kind: str,
    collectives: list[ModeledCollective],
    overlapped: frozenset[str],
    cluster: Cluster,
) -> None:
    """Add the compute of a block in two halves, attention and the feed-forward, each between its collectives.

    A half waits for its amaxes and its input, and its output is scattered afterwards. Exchanges of `overlapped` kinds
    are split into as many parts as there are ranks; only the first incoming and the last outgoing part do not overlap.

    Args:
        kind: the kind of the compute, forward or backward.
    """
    if not collectives:
        tasks.add(name, COMPUTE, seconds, kind=kind)
        return

    def send(collective: ModeledCollective, share: float, dependencies: Dependencies) -> int:
        sent = collective._replace(repeats=share * collective.repeats / 2)
        return _add_collective(tasks, f"{name}: {sent.kind}", sent, cluster, dependencies)

    def get_exposed_share(collective: ModeledCollective) -> float:
        return 1 / collective.ranks if collective.kind in overlapped else 1.0

    incoming = [collective for collective in collectives if collective.kind != "reduce_scatter"]
    outgoing = [collective for collective in collectives if collective.kind == "reduce_scatter"]
    dependencies: Dependencies = ()
    for _ in ("attention", "feed-forward"):
        overlapping: list[int] = []
        for collective in incoming:
            dependencies = [send(collective, get_exposed_share(collective), dependencies)]
            if collective.kind in overlapped:
                overlapping.append(send(collective, 1 - get_exposed_share(collective), dependencies))
        first_part = tasks.add(name, COMPUTE, seconds / 4, dependencies, kind)
        for collective in outgoing:
            if collective.kind in overlapped:
                send(collective, 1 - get_exposed_share(collective), [first_part])
        dependencies = [tasks.add(name, COMPUTE, seconds / 4, overlapping, kind)]
        for collective in outgoing:
            dependencies = [send(collective, get_exposed_share(collective), dependencies)]
    tasks.add(f"{name}: end", COMPUTE, 0.0, dependencies, kind)


def _add_collective(
    tasks: TaskList,
    name: str,
    collective: ModeledCollective,
    cluster: Cluster,
    dependencies: Dependencies,
) -> int:
    """Add a collective with all its repeats as one task, and return the task's id."""
    kind, tensor_bytes, ranks, stride, repeats = collective
    seconds = repeats * cluster.predict_collective_seconds(kind, tensor_bytes, ranks, stride)
    sent_bytes = repeats * count_sent_bytes(kind, tensor_bytes, ranks)
    return tasks.add(name, cluster.find_link(ranks, stride), seconds, dependencies, kind, sent_bytes)


class ComputeTimes(NamedTuple):
    """The compute seconds of one rank for one microbatch, by compute_time.py, a ledger or a measurement."""

    block: BlockTimes
    head: PerPass
    embedding: PerPass

    @classmethod
    def from_formulas(cls, run: PlannedRun, cluster: Cluster) -> ComputeTimes:
        """Predict them by the formulas of compute_time.py."""
        return cls(
            predict_block_times(run, cluster), predict_head_times(run, cluster), predict_embedding_times(run, cluster)
        )


def build_tasks(run: PlannedRun, cluster: Cluster, compute_times: ComputeTimes | None = None) -> TaskList:
    """Return the tasks of the first rank's step, without checkpoints.

    Args:
        compute_times: of a microbatch, by default from the formulas of compute_time.py.
    """
    builder = _TaskBuilder(run, cluster, compute_times or ComputeTimes.from_formulas(run, cluster))
    for index in range(run.micro_batches):
        builder.add_micro_batch(index)
    builder.add_optimizer_step()
    return builder.tasks


class _TaskBuilder:
    def __init__(self, run: PlannedRun, cluster: Cluster, compute_times: ComputeTimes) -> None:
        self.tasks = TaskList()
        self._run, self._cluster, self._compute_times = run, cluster, compute_times
        self._block_groups = list_block_groups(run)
        self._root_groups, self._head_groups = _list_outside_groups(run)
        self._block_collectives = {
            backward: list_block_collectives(run, backward=backward) for backward in (False, True)
        }
        self._micro_batch = 0
        self._last_reduction: int | None = None
        """The last reduce-scatter or all-reduce of gradients. The next copy into its buffer waits for it."""
        self._last_copy: int | None = None
        """The last copy of gathered weights. The next all-gather writes into the buffer that it read."""

    def add_micro_batch(self, index: int) -> None:
        """Add the forward and backward of all blocks, the embedding and the output projection."""
        self._micro_batch = index
        prefix = f"microbatch {index + 1}: " if self._run.micro_batches > 1 else ""
        self._add_forward(f"{prefix}forward of")
        self._add_backward(f"{prefix}backward of")

    def _add_forward(self, prefix: str) -> None:
        run, (block_times, head, embedding) = self._run, self._compute_times
        name = f"{prefix} the embedding"
        self._gather_and_copy_out(self._root_groups, name)
        self._compute(name, embedding.forward, "forward")
        self._add_collectives_and_wait(name, list_embedding_collectives(run, backward=False), "forward")
        for index in range(run.model.n_layers):
            name = f"{prefix} block {index}"
            self._gather_and_copy_out(self._block_groups, name)
            self._add_block(name, block_times.forward, backward=False)
        name = f"{prefix} {LM_HEAD} and the loss"
        self._gather_and_copy_out(self._head_groups, name)
        self._add_collectives_and_wait(name, list_head_collectives(run, backward=False), "forward")
        self._compute(name, head.forward, "forward")

    def _add_backward(self, prefix: str) -> None:
        """Add the backward of all modules, with the all-gather of each block before the backward of the block above."""
        run, (block_times, head, embedding) = self._run, self._compute_times
        head_name, embedding_name = f"{prefix} {LM_HEAD} and the loss", f"{prefix} the embedding"
        block_names = [f"{prefix} block {index}" for index in range(run.model.n_layers)]
        if run.reshard_after_forward == "always":
            self._gather_and_copy_out(self._root_groups, embedding_name)
        if run.reshard_after_forward != "never":
            self._gather_and_copy_out(self._head_groups, head_name)
        gathered_again = [] if run.reshard_after_forward == "never" else self._block_groups
        prefetched = self._gather(gathered_again, block_names[-1])
        self._compute(head_name, head.backward, "backward")
        self._add_collectives_and_wait(head_name, list_head_collectives(run, backward=True), "backward")
        self._reduce(self._head_groups, head_name)
        for index, name in reversed(list(enumerate(block_names))):
            self._copy_out(self._block_groups, name, prefetched)
            if index:
                prefetched = self._gather(gathered_again, block_names[index - 1])
            recomputed = block_times.recomputed if is_checkpointed(run, index) else 0.0
            self._add_block(name, block_times.backward + recomputed, backward=True)
            self._reduce(self._block_groups, name)
        self._add_collectives_and_wait(embedding_name, list_embedding_collectives(run, backward=True), "backward")
        self._compute(embedding_name, embedding.backward, "backward")
        self._reduce(self._root_groups, embedding_name)

    def add_optimizer_step(self) -> None:
        """Add the norm of the gradients, the optimizer, and the scales of weights that are gathered in float8."""
        run, cluster = self._run, self._cluster
        parameters = count_held_parameters(run)
        norm_s = predict_move_seconds(4 * parameters, cluster.spec)
        norm = self._compute("norm of gradients", norm_s, "optimizer", [self._last_reduction])
        if run.world_size > 1:
            norm = self._send("all-reduce of the norm", ModeledCollective("all_reduce", 4, run.world_size), [norm])
        # Clipping reads and writes gradients; AdamW reads a parameter, its gradient and states, and writes all but one.
        moved = (2 + 3) * run.parameter_bytes + 2 * run.state_bytes
        optimizer_s = predict_move_seconds(moved * parameters, cluster.spec)
        self._compute("clipping and the optimizer", optimizer_s, "optimizer", [norm])
        if run.float8_all_gather and run.dp_shard > 1:
            amaxes_s = predict_move_seconds(run.parameter_bytes * parameters, cluster.spec)
            self._compute("amaxes of weights", amaxes_s, "optimizer")
        for collective in list_scale_collectives(run):
            self._send("all-reduce of amaxes", collective, [self.tasks.find_last(COMPUTE)])

    def _compute(self, name: str, seconds: float, kind: str, dependencies: Dependencies = ()) -> int:
        return self.tasks.add(name, COMPUTE, seconds, dependencies, kind)

    def _send(self, name: str, collective: ModeledCollective, dependencies: Dependencies) -> int:
        return _add_collective(self.tasks, name, collective, self._cluster, dependencies)

    def _add_block(self, name: str, seconds: float, *, backward: bool) -> None:
        add_block(
            self.tasks,
            name,
            seconds,
            kind="backward" if backward else "forward",
            collectives=self._block_collectives[backward],
            overlapped=list_overlapped_kinds(self._run),
            cluster=self._cluster,
        )

    def _add_collectives_and_wait(self, name: str, collectives: list[ModeledCollective], kind: str) -> None:
        """Add collectives of the embedding or the head, and an empty task of `kind` that waits for them."""
        last: int | None = self.tasks.find_last(COMPUTE)
        for collective in collectives:
            last = self._send(f"{name}: {collective.kind}", collective, [last])
        if collectives:
            self._compute(name, 0.0, kind, [last])

    def _gather(self, groups: list[ParameterGroup], name: str) -> list[int]:
        """Add all-gathers, which begin when the previously gathered weights are copied out."""
        run = self._run
        stays_gathered = self._micro_batch > 0 and (run.reduce, run.reshard_after_forward) == ("last", "never")
        if stays_gathered or not groups or groups[0].ranks == 1:
            return []
        gathers: list[int] = []
        for group in groups:
            gather = ModeledCollective("all_gather", group.gathered_bytes, group.ranks, group.stride)
            gathers.append(self._send(f"{name}: all-gather", gather, [self._last_copy]))
        return gathers

    def _gather_and_copy_out(self, groups: list[ParameterGroup], name: str) -> None:
        self._copy_out(groups, name, self._gather(groups, name))

    def _copy_out(self, groups: list[ParameterGroup], name: str, gathers: list[int]) -> None:
        if not gathers:
            return
        seconds = predict_move_seconds(2 * sum(group.gathered_bytes for group in groups), self._cluster.spec)
        self._last_copy = self.tasks.add(f"{name}: copy out", COMPUTE, seconds, gathers, "copies")

    def _reduce(self, groups: list[ParameterGroup], name: str) -> None:
        """Copy gradients in, reduce-scatter them, and all-reduce them over the replicas."""
        run, cluster = self._run, self._cluster
        if run.dp_shard * run.cp * run.dp_replicate == 1 or not groups:
            return
        is_last = self._micro_batch == run.micro_batches - 1
        reduces, all_reduces = is_last or run.reduce != "last", is_last or run.reduce == "every"
        parameters = sum(group.parameters for group in groups)
        moved = WEIGHT_BYTES + GRADIENT_BYTES  # read and written
        moved += _CAST_BYTES if run.float8_gradients and reduces else 0
        copy_s = predict_move_seconds(moved * parameters, cluster.spec)
        copied = self.tasks.add(f"{name}: copy in", COMPUTE, copy_s, [self._last_reduction], "copies")
        if not reduces:  # the copy adds to the gradients of earlier microbatches
            return
        for group in groups:
            reduced = copied
            if group.ranks > 1:
                kind, size = ("all_to_all", _CODE_BYTES) if run.float8_gradients else ("reduce_scatter", GRADIENT_BYTES)
                scatter = ModeledCollective(kind, size * group.parameters, group.ranks, group.stride)
                self._last_reduction = reduced = self._send(f"{name}: reduce-scatter", scatter, [copied])
            if run.dp_replicate > 1 and all_reduces:
                part = GRADIENT_BYTES * group.parameters / group.ranks
                reduce = ModeledCollective("all_reduce", part, run.dp_replicate, group.stride * group.ranks)
                self._last_reduction = self._send(f"{name}: all-reduce", reduce, [reduced])


def is_checkpointed(run: PlannedRun, block: int) -> bool:
    """Return whether a block is checkpointed. Checkpointed blocks are spread evenly."""
    checkpointed, blocks = run.checkpointed_blocks, run.model.n_layers
    return (block + 1) * checkpointed // blocks > block * checkpointed // blocks

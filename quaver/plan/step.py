"""The tasks of one training step of one rank: what it computes and sends, in FSDP2's order.

    forward of block i     waits for its all-gather, copies the weights out, computes; the all-gather of block i + 1
                           began when the weights of block i were copied out, and runs behind it
    backward of block i    likewise, from the last block to the first; its gradients are copied in and reduce-scattered
                           behind the backward of block i - 1, and replicas all-reduce them after
    copying in             waits for the reduce-scatter before: FSDP2 keeps one buffer
    tensor parallel        collectives stand between the matmuls of a block, and compute waits for them; asynchronous
                           ones for their first part only
    at the end             the norm of gradients, the clipping, the optimizer, the scales of weights

(torch/distributed/fsdp/_fully_shard: _fsdp_param_group.py, _fsdp_collectives.py.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from quaver.plan.cluster import Cluster
from quaver.plan.compute import (
    block_times,
    dense_parameters,
    embedding_times,
    expert_parameters,
    head_times,
    moved_s,
)
from quaver.plan.run import HEAD, Run
from quaver.plan.simulate import COMPUTE, Step

GRADIENT_BYTES = 4
"""Gradients are reduced in float32."""


class Exchange(NamedTuple):
    """Collectives of tensor, context or expert parallel ranks in one direction of a block."""

    kind: str
    tensor_bytes: float
    number: float
    ranks: int
    stride: int


class _Group(NamedTuple):
    """Parameters that FSDP2 gathers together, of one tensor parallel rank."""

    name: str
    parameters: int
    gathered_bytes: float
    shard: int
    stride: int


def block_groups(run: Run) -> list[_Group]:
    """The gathers of one block: its own parameters, and split experts on their own mesh."""
    stride = run.tensor * run.context
    dense, experts = dense_parameters(run), expert_parameters(run)
    in_codes = run.float8_gather and run.has_one_cast
    if run.expert == 1:
        gathered = (dense * (1 if in_codes else 2)) + 2 * experts
        return [_Group("block", dense + experts, gathered, run.shard, stride)]
    return [
        _Group("block", dense, dense * (1 if in_codes else 2), run.shard, stride),
        _Group("experts", experts, 2 * experts, run.shard // run.expert, stride * run.expert),
    ]


def exchanges_of_block(run: Run, *, backward: bool) -> list[Exchange]:
    """What ranks exchange inside one block and micro-batch, besides FSDP2; recomputation included in the backward.

    tests/unit/plan/test_step.py holds these to what `quaver memory --links` counts.
    """
    return [*_tensor_parallel(run, backward), *_context_parallel(run, backward), *_expert_parallel(run, backward)]


def _tensor_parallel(run: Run, backward: bool) -> Iterator[Exchange]:
    if run.tensor == 1:
        return
    activation, group = run.tokens * run.model.dim, (run.tensor, 1)
    again = {"none": 0, "op": 1, "full": 1}[run.checkpointing] if backward else 0
    gathers = 2 + 2 * again
    scatters = 2 + (1 if backward and run.checkpointing == "full" else 0)
    one_layout, codes, amaxes = _in_codes(run)
    small = amaxes[1] + again * amaxes[0] if backward else amaxes[0]
    if small:
        yield Exchange("all_reduce", 4, small, *group)
    if codes:
        yield Exchange("all_gather", activation, gathers * (1 if one_layout else 2), *group)
    else:
        yield Exchange("all_gather", 2 * activation, gathers, *group)
    yield Exchange("reduce_scatter", 2 * activation, scatters, *group)


def _in_codes(run: Run) -> tuple[bool, bool, tuple[int, int]]:
    """Whether one layout is gathered, whether as codes, and the all-reduces of amaxes forward and backward.

    A rank agrees on a scale that reduces a dim that is split: of dynamic tensor-wise scales four inputs, seven weights
    unless FSDP2 gathers their codes, and seven gradients; of row-wise ones those along the split dim.
    """
    if run.recipe is None:
        return True, False, (0, 0)
    name = run.recipe.value
    if name.startswith("rowwise_with_gw_hp"):
        return True, False, (4, 12)
    if name.startswith("rowwise"):
        return False, True, (6, 12)
    if name.startswith(("delayed", "static")):
        return True, True, (0, 0)
    if name.startswith("tensorwise"):
        return True, True, (4 if run.float8_gather else 11, 7)
    return False, True, (0, 0)


def _context_parallel(run: Run, backward: bool) -> Iterator[Exchange]:
    """Keys and values of all parts of the sequence; their gradients are scattered back."""
    if run.context == 1:
        return
    keys = 2 * run.model.n_kv_heads * run.model.head_dim * run.tokens * run.context * 2 / run.tensor
    yield Exchange("all_gather", keys, 1, run.context, run.tensor)
    if backward:
        yield Exchange("reduce_scatter", keys, 1, run.context, run.tensor)


def _expert_parallel(run: Run, backward: bool) -> Iterator[Exchange]:
    """Tokens go to the ranks of their experts and come back; so do their gradients."""
    if run.expert == 1:
        return
    tokens = 2 * run.tokens * run.model.top_k * run.model.dim
    again = 1 if backward and run.checkpointing != "none" else 0
    yield Exchange("all_to_all", tokens, 2 + again, run.expert, run.tensor * run.context)


def block_tasks(run: Run, cluster: Cluster, seconds: float, *, backward: bool) -> Step:
    """The tasks of one block alone, with what its ranks exchange."""
    step = Step()
    add_block(step, "block", seconds, exchanges_of_block(run, backward=backward), cluster, run.async_tensor)
    return step


def add_block(
    step: Step, name: str, seconds: float, exchanges: list[Exchange], cluster: Cluster, asynchronous: bool
) -> None:
    """Add the compute of a block in two halves, attention and the feed-forward, each between its exchanges.

    A half waits for its amaxes and its input, and its output is scattered after it. Asynchronous exchanges overlap
    with the half but for the first part of the gather and the last part of the scatter, one of as many as there are
    ranks.
    """
    if not exchanges:
        step.add(name, COMPUTE, seconds, kind=_direction(name))
        return
    waits: list[int | None] = []
    kind = _direction(name)
    for _ in range(2):
        before = [each for each in exchanges if each.kind != "reduce_scatter"]
        overlapped: list[int | None] = []
        for each in before:
            took = cluster.seconds(each.kind, each.tensor_bytes, each.ranks, each.stride) * each.number / 2
            link = cluster.link(each.ranks, each.stride)
            first = took / each.ranks if asynchronous and each.kind == "all_gather" else took
            waits = [step.add(f"{name}: {each.kind}", link, first, waits, each.kind)]
            if first < took:
                overlapped.append(step.add(f"{name}: {each.kind}", link, took - first, waits, each.kind))
        begun = step.add(name, COMPUTE, seconds / 4, waits, kind)
        scattered = [each for each in exchanges if each.kind == "reduce_scatter"]
        if asynchronous:
            for each in scattered:
                took = cluster.seconds(each.kind, each.tensor_bytes, each.ranks, each.stride) * each.number / 2
                rest = took * (1 - 1 / each.ranks)
                step.add(f"{name}: {each.kind}", cluster.link(each.ranks, each.stride), rest, [begun], each.kind)
        done = step.add(name, COMPUTE, seconds / 4, overlapped, kind)
        waits = [done]
        for each in scattered:
            took = cluster.seconds(each.kind, each.tensor_bytes, each.ranks, each.stride) * each.number / 2
            last = took / each.ranks if asynchronous else took
            waits = [step.add(f"{name}: {each.kind}", cluster.link(each.ranks, each.stride), last, waits, each.kind)]
    step.add(f"{name}: end", COMPUTE, 0.0, waits, kind)


def _direction(name: str) -> str:
    return "backward" if "backward" in name else "forward"


def exchanges_at_the_ends(run: Run) -> tuple[dict[bool, list[Exchange]], dict[bool, list[Exchange]]]:
    """What tensor parallel ranks exchange at the embedding and at the output projection: forward, and backward (True).

    The embedding is split by words: its output is scattered by sequence, its gradient gathered, in the residual
    stream's dtype. The projection gathers its input, and each rank gets all logits, unless the loss is split.
    """
    if run.tensor == 1:
        return {False: [], True: []}, {False: [], True: []}
    group, hidden = (1, run.tensor, 1), run.tokens * run.model.dim
    stream = run.residual_bytes * hidden
    embedding = {
        False: [Exchange("reduce_scatter", stream, *group)],
        True: [Exchange("all_gather", stream, *group)],
    }
    logits = [] if run.splits_loss else [Exchange("all_gather", 2 * run.tokens * run.model.vocab_size, *group)]
    head = {
        False: [Exchange("all_gather", 2 * hidden, *group), *logits],
        True: [Exchange("reduce_scatter", 2 * hidden, *group)],
    }
    return embedding, head


def training_step(run: Run, cluster: Cluster) -> Step:
    """The tasks of a step of the first rank; of a run without pipeline stages.

    Raises:
        ValueError: the run has pipeline stages; see pipeline.py.
    """
    if run.pipeline > 1:
        raise ValueError(f"expected a run without pipeline stages, got {run.pipeline}")
    builder = _Builder(run, cluster)
    for number in range(run.micro_batches):
        builder.micro_batch(f"micro-batch {number + 1}: " if run.micro_batches > 1 else "")
    builder.end()
    return builder.step


class _Builder:
    def __init__(self, run: Run, cluster: Cluster) -> None:
        self.step = Step()
        self._run, self._cluster = run, cluster
        self._times = block_times(run, cluster)
        self._groups = block_groups(run)
        self._exchanges = {back: exchanges_of_block(run, backward=back) for back in (False, True)}
        model = run.model
        rows = model.vocab_size * model.dim // run.tensor
        stride = run.tensor * run.context
        self._root = _Group("embedding", rows, rows * run.residual_bytes, run.shard, stride)
        self._head = _Group(HEAD, rows, 2 * rows, run.shard, stride)
        self._split_embedding, self._split_head = exchanges_at_the_ends(run)
        self._scattered: int | None = None
        """The last reduce-scatter, for which the next copy into its buffer waits."""
        self._copied: int | None = None
        """The last copy of gathered weights: the next all-gather writes into the buffer that it read."""

    def micro_batch(self, prefix: str) -> None:
        """Forward and backward of all blocks; `prefix` of the tasks' names."""
        run, blocks = self._run, self._run.model.n_layers
        embedding, head = embedding_times(run, self._cluster), head_times(run, self._cluster)
        self._gathered([self._root], f"{prefix}forward of the embedding")
        self._compute(f"{prefix}forward of the embedding", embedding.forward, "forward")
        self._at_the_ends(f"{prefix}forward of the embedding", self._split_embedding[False])
        for number in range(blocks):
            self._gathered(self._groups, f"{prefix}forward of block {number}")
            self._block(f"{prefix}forward of block {number}", self._times.forward, backward=False)
        self._gathered([self._head], f"{prefix}forward of {HEAD}")
        self._at_the_ends(f"{prefix}forward of {HEAD}", self._split_head[False])
        self._compute(f"{prefix}forward of {HEAD} and the loss", head.forward, "forward")
        if run.reshards != "never":
            if run.reshards == "always":
                self._gathered([self._root], f"{prefix}backward of the embedding")
            self._gathered([self._head], f"{prefix}backward of {HEAD}")
        prefetched = self._gather_again(f"{prefix}backward of block {blocks - 1}")
        self._compute(f"{prefix}backward of {HEAD} and the loss", head.backward, "backward")
        self._at_the_ends(f"{prefix}backward of {HEAD}", self._split_head[True])
        self._reduced([self._head], f"{prefix}backward of {HEAD}")
        for number in reversed(range(blocks)):
            name = f"{prefix}backward of block {number}"
            self._copy_out(self._groups, name, prefetched)
            if number:
                prefetched = self._gather_again(f"{prefix}backward of block {number - 1}")
            again = self._times.recomputed if number < run.checkpointed_blocks else 0.0
            self._block(name, self._times.backward + again, backward=True)
            self._reduced(self._groups, name)
        self._at_the_ends(f"{prefix}backward of the embedding", self._split_embedding[True])
        self._compute(f"{prefix}backward of the embedding", embedding.backward, "backward")
        self._reduced([self._root], f"{prefix}backward of the embedding")

    def end(self) -> None:
        """The norm of the gradients, the optimizer, and the scales of weights that are gathered as codes."""
        run, cluster = self._run, self._cluster
        parameters = held_parameters(run)
        norm = self._compute("norm of gradients", moved_s(4 * parameters, cluster), "optimizer", [self._scattered])
        if run.ranks > 1:
            seconds = cluster.seconds("all_reduce", 4, run.ranks)
            norm = self.step.add("all-reduce of the norm", cluster.link(run.ranks, 1), seconds, [norm], "all_reduce")
        # Clipping reads and writes gradients; AdamW reads a parameter, its gradient and states, and writes all but one.
        moved = 2 * run.parameter_bytes + 3 * run.parameter_bytes + 2 * run.state_bytes
        self._compute("clipping and the optimizer", moved_s(moved * parameters, cluster), "optimizer", [norm])
        if run.float8_gather and run.shard > 1:
            amax = self._compute("amaxes of weights", moved_s(run.parameter_bytes * parameters, cluster), "optimizer")
            seconds = cluster.seconds("all_reduce", 4 * 7 * run.model.n_layers, run.ranks)
            self.step.add("all-reduce of amaxes", cluster.link(run.ranks, 1), seconds, [amax], "all_reduce")

    # ---- computing ---------------------------------------------------------------------------------------------------

    def _compute(self, name: str, seconds: float, kind: str, after: list[int | None] | None = None) -> int:
        return self.step.add(name, COMPUTE, seconds, after or [], kind)

    def _block(self, name: str, seconds: float, *, backward: bool) -> None:
        add_block(self.step, name, seconds, self._exchanges[backward], self._cluster, self._run.async_tensor)

    def _at_the_ends(self, name: str, exchanges: list[Exchange]) -> None:
        """Exchanges of the embedding or the output projection, for which compute waits."""
        last: int | None = self.step.last_of(COMPUTE)
        for each in exchanges:
            seconds = self._cluster.seconds(each.kind, each.tensor_bytes, each.ranks, each.stride)
            link = self._cluster.link(each.ranks, each.stride)
            last = self.step.add(f"{name}: {each.kind}", link, seconds, [last], each.kind)
        if exchanges:
            self._compute(name, 0.0, _direction(name), [last])

    # ---- FSDP2 -------------------------------------------------------------------------------------------------------

    def _gather(self, groups: list[_Group], name: str) -> list[int | None]:
        """All-gathers, which begin when the weights gathered before were copied out."""
        if self._run.shard == 1:
            return []
        found: list[int | None] = []
        for group in groups:
            seconds = self._cluster.seconds("all_gather", group.gathered_bytes, group.shard, group.stride)
            link = self._cluster.link(group.shard, group.stride)
            found.append(self.step.add(f"{name}: all-gather", link, seconds, [self._copied], "all_gather"))
        return found

    def _gather_again(self, name: str) -> list[int | None]:
        """The gather of a block for its backward, unless its weights stayed."""
        return [] if self._run.reshards == "never" else self._gather(self._groups, name)

    def _gathered(self, groups: list[_Group], name: str) -> None:
        self._copy_out(groups, name, self._gather(groups, name))

    def _copy_out(self, groups: list[_Group], name: str, gathers: list[int | None]) -> None:
        if not gathers:
            return
        seconds = moved_s(2 * sum(group.gathered_bytes for group in groups), self._cluster)
        self._copied = self.step.add(f"{name}: copy out", COMPUTE, seconds, gathers, "copies")

    def _reduced(self, groups: list[_Group], name: str) -> None:
        """Copy gradients in, reduce-scatter them, and all-reduce them over the replicas."""
        run, cluster = self._run, self._cluster
        if run.shard * run.replicate == 1:
            return
        parameters = sum(group.parameters for group in groups)
        copied = self.step.add(
            f"{name}: copy in", COMPUTE, moved_s(6 * parameters, cluster), [self._scattered], "copies"
        )
        for group in groups:
            after = copied
            if group.shard > 1:
                seconds = cluster.seconds(
                    "reduce_scatter", GRADIENT_BYTES * group.parameters, group.shard, group.stride
                )
                link = cluster.link(group.shard, group.stride)
                after = self.step.add(f"{name}: reduce-scatter", link, seconds, [copied], "reduce_scatter")
                self._scattered = after
            if run.replicate > 1:
                stride = group.stride * group.shard
                part = GRADIENT_BYTES * group.parameters / group.shard
                seconds = cluster.seconds("all_reduce", part, run.replicate, stride)
                link = cluster.link(run.replicate, stride)
                self._scattered = self.step.add(f"{name}: all-reduce", link, seconds, [after], "all_reduce")


def held_parameters(run: Run) -> float:
    """The parameters of which one rank holds the optimizer's states."""
    model = run.model
    dense = dense_parameters(run) * model.n_layers + 2 * model.vocab_size * model.dim / run.tensor
    experts = expert_parameters(run) * model.n_layers * run.expert
    return (dense + experts) / run.shard

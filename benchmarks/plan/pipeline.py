"""The tasks of a published run's step with pipeline stages: 1F1B, interleaved if a stage has several model parts.

The trainer has no pipeline stages. Every stage is simulated. A stage gathers its weights once and reduces their
gradients once, after its last backward. Inside a block the tasks are those of quaver/lab/plan/step.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from quaver.lab.plan.cluster import LINK_SHARE, NCCL_PROTOCOLS, NETWORK_SHARE, Cluster
from quaver.lab.plan.collectives import list_block_collectives, list_embedding_collectives, list_head_collectives
from quaver.lab.plan.compute_time import (
    count_held_parameters,
    predict_block_times,
    predict_embedding_times,
    predict_head_times,
)
from quaver.lab.plan.planned_run import PlannedRun
from quaver.lab.plan.simulate import COMPUTE, Task, TaskList, simulate
from quaver.lab.plan.step import GRADIENT_BYTES, add_block, list_block_groups, list_overlapped_kinds
from quaver.roofline.matmul import predict_move_seconds

Key = tuple[str, int, int, int]
"""The kind of a task, the stage, the part of the model on that stage, and the microbatch."""


class _StageTask(NamedTuple):
    """A task of one stage, with the keys of the tasks for which it waits."""

    stream: str
    seconds: float
    after: list[Key]
    kind: str


class Turn(NamedTuple):
    """The forward or backward of one microbatch through one part of a stage."""

    is_backward: bool
    part: int
    micro_batch: int


@dataclass(frozen=True)
class PipelinedRun(PlannedRun):
    """A run with pipeline stages, whose ranks vary slowest."""

    pipeline: int = 1
    virtual: int = 1
    """The number of parts of the model on each stage."""

    @property
    def world_size(self) -> int:
        """The number of GPUs."""
        return super().world_size * self.pipeline


def order_turns(stages: int, parts: int, micro_batches: int, stage: int) -> list[Turn]:
    """Return the turns of a stage in order.

    Raises:
        ValueError: with interleaved stages, the microbatches are not a multiple of the stages.
    """
    if parts > 1 and micro_batches % stages:
        raise ValueError(f"expected a multiple of {stages} microbatches for interleaved stages, got {micro_batches}")
    total = micro_batches * parts
    ahead = (stages - stage - 1) * 2 + (parts - 1) * stages if parts > 1 else stages - stage - 1
    ahead = min(ahead, total)

    def make_turn(number: int, *, is_backward: bool) -> Turn:
        group, place = divmod(number, stages * parts)
        part = place // stages if parts > 1 else 0
        micro_batch = group * stages + place % stages if parts > 1 else number
        return Turn(is_backward, parts - 1 - part if is_backward else part, micro_batch)

    turns = [make_turn(number, is_backward=False) for number in range(ahead)]
    for number in range(total - ahead):
        turns += [make_turn(number + ahead, is_backward=False), make_turn(number, is_backward=True)]
    return turns + [make_turn(number, is_backward=True) for number in range(total - ahead, total)]


def build_pipeline_tasks(run: PipelinedRun, cluster: Cluster) -> TaskList:
    """Return the tasks of a step, for the first rank of every stage.

    Raises:
        ValueError: as `order_turns`.
    """
    stages = run.pipeline
    seconds = _predict_part_seconds(run, cluster)
    stage_tasks: dict[Key, _StageTask] = {}
    for stage in range(stages):
        _add_stage(run, cluster, stage, seconds, stage_tasks)
    task_ids = {key: task_id for task_id, key in enumerate(stage_tasks)}
    tasks = TaskList()
    for (verb, stage, model_part, micro_batch), (stream, task_s, after, kind) in stage_tasks.items():
        name = f"stage {stage}: {verb} of part {model_part}, microbatch {micro_batch}"
        dependencies = tuple(sorted(task_ids[key] for key in after))
        tasks.append(Task(name, stream, task_s, dependencies, kind, rank=stage))
    held = count_held_parameters(run) / stages
    moved = 4 * held + (5 * run.parameter_bytes + 2 * run.state_bytes) * held
    tasks.add(
        "norm, clipping and the optimizer",
        COMPUTE,
        predict_move_seconds(moved, cluster.spec),
        range(len(tasks)),
        "optimizer",
    )
    return tasks


def _predict_part_seconds(run: PipelinedRun, cluster: Cluster) -> dict[str, float]:
    """Return the seconds of one part of a stage per microbatch, of the model's ends, and of collectives."""
    blocks = run.model.n_layers / (run.pipeline * run.virtual)
    times, unpipelined = predict_block_times(run, cluster), replace(run, pipeline=1)
    stride = run.tp * run.cp * run.dp_shard * run.dp_replicate
    activation = 2 * run.micro_batch_tokens * run.model.dim / run.tp
    share = run.checkpointed_blocks / run.model.n_layers
    directions = {"forward": times.forward, "backward": times.backward + share * times.recomputed}
    seconds = {}
    for name, computed in directions.items():
        block = TaskList()
        collectives = list_block_collectives(unpipelined, backward=name == "backward")
        overlapped = list_overlapped_kinds(unpipelined)
        add_block(block, "block", computed, kind=name, collectives=collectives, overlapped=overlapped, cluster=cluster)
        seconds[name] = blocks * simulate(block).seconds
    head, embedding = predict_head_times(run, cluster), predict_embedding_times(run, cluster)
    ends = (
        ("embedding", embedding, list_embedding_collectives),
        ("head", head, list_head_collectives),
    )
    for name, both, list_collectives in ends:
        for is_backward, computed in zip((False, True), both, strict=True):
            sent = sum(
                cluster.predict_collective_seconds(collective.kind, collective.tensor_bytes, collective.ranks)
                for collective in list_collectives(unpipelined, backward=is_backward)
            )
            seconds[f"{name} {'backward' if is_backward else 'forward'}"] = computed + sent
    gather = reduce = 0.0
    for group in list_block_groups(run):
        gather += cluster.predict_collective_seconds("all_gather", group.gathered_bytes, group.ranks, group.stride)
        scattered = GRADIENT_BYTES * group.parameters
        reduce += cluster.predict_collective_seconds("reduce_scatter", scattered, group.ranks, group.stride)
        replicas = group.stride * group.ranks
        reduce += cluster.predict_collective_seconds("all_reduce", scattered / group.ranks, run.dp_replicate, replicas)
    return seconds | {
        "gather": blocks * gather,
        "reduce": blocks * reduce,
        "send": predict_send_seconds(cluster, activation, stride),
    }


def predict_send_seconds(cluster: Cluster, tensor_bytes: float, stride: int) -> float:
    """Return the time to send a tensor from a stage to the next one, whose ranks are `stride` away."""
    if stride < cluster.gpus_per_node:
        return NCCL_PROTOCOLS[-1].hop_in_node_s + tensor_bytes / (1e9 * cluster.spec.link_gb_per_s * LINK_SHARE)
    return NCCL_PROTOCOLS[-1].hop_between_nodes_s + tensor_bytes / (
        1e9 * cluster.network_gbit_per_s / 8 * NETWORK_SHARE
    )


def _add_stage(
    run: PipelinedRun,
    cluster: Cluster,
    stage: int,
    seconds: dict[str, float],
    tasks: dict[Key, _StageTask],
) -> None:
    stages, parts, micro_batches = run.pipeline, run.virtual, run.micro_batches
    turns = order_turns(stages, parts, micro_batches, stage)
    link = cluster.find_link(run.dp_shard * run.dp_replicate * run.cp, run.tp)
    for part in range(parts):
        tasks["gather", stage, part, 0] = _StageTask(link, seconds["gather"], [], "all_gather")
    last = {
        part: max(i for i, turn in enumerate(turns) if turn.is_backward and turn.part == part) for part in range(parts)
    }
    for number, (is_backward, part, micro_batch) in enumerate(turns):
        direction = "backward" if is_backward else "forward"
        turn_s = seconds[direction]
        step = 1 if is_backward else -1
        place = part * stages + stage
        if place == stages * parts - 1:
            turn_s += seconds[f"head {direction}"]
        if place == 0:
            turn_s += seconds[f"embedding {direction}"]
        after: list[Key] = []
        if not is_backward:
            after.append(("gather", stage, part, 0))
        elif place == stages * parts - 1:
            after.append(("forward", stage, part, micro_batch))
        if 0 <= place + step < stages * parts:
            after.append((f"send {direction}", (place + step) % stages, (place + step) // stages, micro_batch))
        key = direction, stage, part, micro_batch
        tasks[key] = _StageTask(COMPUTE, turn_s, after, direction)
        if 0 <= place - step < stages * parts:
            send = f"send {direction}"
            tasks[send, stage, part, micro_batch] = _StageTask(send, seconds["send"], [key], "send")
        if is_backward and number == last[part]:
            tasks["reduce", stage, part, 0] = _StageTask(link, seconds["reduce"], [key], "reduce_scatter")

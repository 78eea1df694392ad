"""Computes the time for which a checkpoint (quaver/lab/runs/checkpoint.py) stops training.

Each rank waits until the previous checkpoint is written and copies its part of the state to host memory. With
checkpoint.async_mode = disabled it also waits until all nodes have written. The time of a checkpoint is spread evenly
over the steps between two checkpoints.
"""

from __future__ import annotations

from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.compute_time import count_held_parameters
from quaver.lab.plan.planned_run import PlannedRun

STAGED_GB_PER_S = 0.7
"""The rate of a rank's copy to host memory. torch's DefaultStager, a new one per checkpoint, fills pages that the
process has not touched, at 0.5 to 0.7 GB/s per core (docs/experiments/log.md). Not measured on a GPU; PCIe 5 moves
60 GB/s."""


def predict_checkpoint_seconds_per_step(run: PlannedRun, cluster: Cluster, step_s: float) -> float:
    """Return the seconds that checkpoints add to a step, which takes `step_s` without them."""
    if not run.steps_between_saves:
        return 0.0
    writing_s = predict_write_seconds(run, cluster)
    if not run.saves_in_background:
        return writing_s / run.steps_between_saves
    staging_s = _count_state_bytes(run) / (1e9 * STAGED_GB_PER_S)
    return staging_s / run.steps_between_saves + max(0.0, writing_s / run.steps_between_saves - step_s)


def predict_write_seconds(run: PlannedRun, cluster: Cluster) -> float:
    """Return the seconds in which all nodes together write one checkpoint, each replica a part of it."""
    node_bytes = _count_state_bytes(run) / run.dp_replicate * min(cluster.gpus_per_node, run.world_size)
    return node_bytes / (1e9 * cluster.storage_gb_per_s)


def _count_state_bytes(run: PlannedRun) -> float:
    """Return the bytes of one rank's parameters and optimizer states."""
    return count_held_parameters(run) * (run.parameter_bytes + run.state_bytes)

"""The seconds for which saving a checkpoint stops a step, as quaver/lab/runs/checkpoint.py saves.

Each rank copies its part of the state to host memory, and with checkpoint.async_mode = disabled waits until all nodes
have written theirs. In a step stands its share of that: the seconds of a checkpoint over the steps between two.
"""

from __future__ import annotations

from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.compute import held_parameters
from quaver.lab.plan.run import PlannedRun

STAGED_GB_PER_S = 0.7
"""A rank's copy to host memory: torch's DefaultStager, a new one for each checkpoint, fills pages that the process
has not touched. 0.5 to 0.7 GB/s of a core's time (docs/log.md); no GPU was there to measure, and PCIe 5 moves 60."""


def saving_s(run: PlannedRun, cluster: Cluster) -> float:
    """The seconds for which one checkpoint stops all ranks; 0 where none is saved."""
    if not run.steps_between_saves:
        return 0.0
    if run.saves_in_background:
        return _state_bytes(run) / (1e9 * STAGED_GB_PER_S)
    return written_s(run, cluster)


def written_s(run: PlannedRun, cluster: Cluster) -> float:
    """The seconds in which all nodes together write one checkpoint: replicas write a part each."""
    of_node = _state_bytes(run) / run.replicate * min(cluster.nodes_of, run.ranks)
    return of_node / (1e9 * cluster.storage_gb_per_s)


def _state_bytes(run: PlannedRun) -> float:
    """The bytes of one rank's parameters and optimizer states."""
    return held_parameters(run) * (run.parameter_bytes + run.state_bytes)

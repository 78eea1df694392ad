"""Extrapolates the seconds of a step from a few blocks and microbatches: each further one adds the same time."""

from __future__ import annotations

from dataclasses import replace

from quaver.lab.plan.checkpoint_time import predict_checkpoint_seconds_per_step
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.mfu import check_below_peak
from quaver.lab.plan.planned_run import PlannedRun
from quaver.lab.plan.simulate import simulate
from quaver.lab.plan.step import ComputeTimes, build_tasks

_SIMULATED_DEPTHS = (2, 4)
"""Few, and even, so that half of the blocks can be checkpointed. From the second block on, each adds the same time."""


def predict_step_seconds(run: PlannedRun, cluster: Cluster, compute_times: ComputeTimes | None = None) -> float:
    """Return the seconds of `simulate(build_tasks(run, cluster, compute_times))` plus a step's share of checkpoints.

    Args:
        compute_times: of a microbatch, by default from the formulas of compute_time.py.
    Raises:
        RuntimeError: the step is faster than the GPU's peak allows.
    """
    compute_times = compute_times or ComputeTimes.from_formulas(run, cluster)
    seconds = first_s = extrapolate_seconds(run, 1, cluster, compute_times)
    if run.micro_batches > 1:
        seconds += (run.micro_batches - 1) * (extrapolate_seconds(run, 2, cluster, compute_times) - first_s)
    check_below_peak(run, seconds, cluster.spec)
    seconds += predict_checkpoint_seconds_per_step(run, cluster, seconds)
    return seconds


def extrapolate_seconds(run: PlannedRun, micro_batches: int, cluster: Cluster, compute_times: ComputeTimes) -> float:
    """Return the seconds of a step of `micro_batches`, extrapolated from a few of its blocks.

    None, half or all of the few blocks are checkpointed. Other shares are interpolated between these.
    """
    blocks, (shallow, deep) = run.model.n_layers, _SIMULATED_DEPTHS
    if blocks <= deep:
        return _simulate_shallow(run, blocks, run.checkpointed_blocks, micro_batches, cluster, compute_times)

    def extrapolate(halves: int) -> float:
        shallow_s, deep_s = (
            _simulate_shallow(run, depth, halves * depth // 2, micro_batches, cluster, compute_times)
            for depth in _SIMULATED_DEPTHS
        )
        return shallow_s + (blocks - shallow) / (deep - shallow) * (deep_s - shallow_s)

    halves, rest = divmod(2 * run.checkpointed_blocks, blocks)
    seconds = extrapolate(halves)
    return seconds + rest / blocks * (extrapolate(halves + 1) - seconds) if rest else seconds


def sum_compute_seconds(run: PlannedRun, compute_times: ComputeTimes) -> float:
    """Return the seconds of the compute of a step's microbatches, a lower bound of the step."""
    block = compute_times.block
    blocks = run.model.n_layers * (block.forward + block.backward) + run.checkpointed_blocks * block.recomputed
    return run.micro_batches * (blocks + sum(compute_times.head) + sum(compute_times.embedding))


def _simulate_shallow(
    run: PlannedRun, depth: int, checkpointed: int, micro_batches: int, cluster: Cluster, compute_times: ComputeTimes
) -> float:
    model = replace(run.model, n_layers=depth)
    shallow = replace(run, model=model, checkpointed_blocks=checkpointed, micro_batches=micro_batches)
    return simulate(build_tasks(shallow, cluster, compute_times)).seconds

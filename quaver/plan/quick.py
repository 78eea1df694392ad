"""The seconds of a step from a few of its blocks and micro-batches: each further one adds the same time."""

from __future__ import annotations

from dataclasses import replace

from quaver.plan.cluster import Cluster
from quaver.plan.run import Run
from quaver.plan.simulate import simulate
from quaver.plan.step import training_step

_DEPTHS = (2, 4)


def quick_seconds(run: Run, cluster: Cluster) -> float:
    """The seconds of `simulate(training_step(run, cluster))`."""

    def whole(micro_batches: int) -> float:
        blocks, (shallow, deep) = run.model.n_layers, _DEPTHS
        if blocks <= deep:
            return _seconds(run, blocks, micro_batches, cluster)
        few, more = (_seconds(run, depth, micro_batches, cluster) for depth in _DEPTHS)
        return few + (blocks - shallow) / (deep - shallow) * (more - few)

    one = whole(1)
    return one if run.micro_batches == 1 else one + (run.micro_batches - 1) * (whole(2) - one)


def _seconds(run: Run, depth: int, micro_batches: int, cluster: Cluster) -> float:
    checkpointed = round(run.checkpointed_blocks * depth / run.model.n_layers)
    model = replace(run.model, n_layers=depth)
    shallow = replace(run, model=model, checkpointed_blocks=checkpointed, micro_batches=micro_batches)
    return simulate(training_step(shallow, cluster)).seconds

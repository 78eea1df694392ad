"""The FLOPs and the simulated time of a training step, to order settings by speed.

step_flops = microbatches * (forward + backward + recomputation), per rank. quaver/lab/plan/step.py simulates the
seconds, on nodes of 8 GPUs with 400 Gb/s each, without saving checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from quaver.lab.model.llama import count_training_flops_per_token
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.compute_time import count_recomputed_flops
from quaver.lab.plan.extrapolate import predict_step_seconds
from quaver.lab.plan.planned_run import find_float8_shares, make_planned_run
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.roofline.device_specs import DeviceSpec


@dataclass(frozen=True)
class StepCost:
    """The cost of one step of one rank."""

    step_flops: int
    """The FLOPs of forward and backward (`count_training_flops_per_token`), and of the recomputation."""
    recomputed_flops: int | None
    """The FLOPs of the recomputation. None if the compiler decides it; then `step_flops` does not include it."""
    simulated_s: float | None
    """None without a device, outside bfloat16, or if the compiler decides the recomputation."""


def compute_step_cost(config: TrainConfig, dims: ParallelDims, spec: DeviceSpec | None) -> StepCost:
    """Return the cost of a step for the `config` and `dims` that `resolve_parallel_dims` returned.

    Raises:
        InputError, NotImplementedError: the trainer refuses the model.
    """
    find_float8_shares(config)  # raises for a model that the trainer refuses
    training = config.training
    micro_batches = dims.count_micro_batches(training)
    tokens = training.local_batch_size * training.seq_len
    flops = micro_batches * tokens * count_training_flops_per_token(config.model, training.seq_len) // dims.tp
    if config.activation_checkpoint.mode == "memory_budget":
        return StepCost(flops, None, None)
    # FLOPs do not depend on the precision; times are simulated in bfloat16 and without saving, which depends on states.
    in_bfloat16 = replace(config, training=replace(training, mixed_precision_param="bfloat16"))
    run = replace(make_planned_run(in_bfloat16, dims), steps_between_saves=0)
    recomputed_flops = run.checkpointed_blocks * micro_batches * tokens * count_recomputed_flops(run) // dims.tp
    simulated_s = None
    if spec is not None and training.mixed_precision_param == "bfloat16":
        simulated_s = predict_step_seconds(run, Cluster.from_spec(spec))
    return StepCost(flops + recomputed_flops, recomputed_flops, simulated_s)

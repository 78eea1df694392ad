"""Counts the FLOPs of a run's matmuls, and bounds the speed of a step by the peaks in the data sheet."""

from __future__ import annotations

from quaver.conversion.roles import LM_HEAD
from quaver.lab.model.llama import count_expert_elements
from quaver.lab.plan.compute_time import list_linear_sizes
from quaver.lab.plan.planned_run import EXPERTS, PlannedRun
from quaver.roofline.device_specs import DeviceSpec
from quaver.roofline.scaled_matmul import find_scale_kinds


def count_flops_per_token(run: PlannedRun) -> float:
    """Return the FLOPs of forward and backward for one token: 6 per weight that multiplies it, and attention's.

    Only the causal half of attention counts, which is what kernels compute. The trainer's
    `count_training_flops_per_token` counts all of it, as is usual, so for long sequences its rate may exceed the peak.
    """
    model = run.model
    weights = sum(inputs * outputs for inputs, outputs in list_linear_sizes(model).values())
    weights += model.top_k * count_expert_elements(model)
    attention = 6 * model.n_heads * model.head_dim * run.seq_len
    return model.n_layers * (6 * weights + attention) + 6 * model.dim * model.vocab_size


def count_float8_flops_per_token(run: PlannedRun) -> float:
    """Return the FLOPs of float8 matmuls for one token, forward and backward."""
    if run.recipe is None:
        return 0
    model = run.model
    linears = list_linear_sizes(model).items()
    weights = sum(run.get_float8_share(name) * inputs * outputs for name, (inputs, outputs) in linears)
    weights += run.get_float8_share(EXPERTS) * model.top_k * count_expert_elements(model)
    weights = weights * model.n_layers + run.get_float8_share(LM_HEAD) * model.dim * model.vocab_size
    return 2 * len(find_scale_kinds(run.precision)) * weights


def compute_mfu(run: PlannedRun, seconds: float, spec: DeviceSpec) -> float:
    """Return the share of `seconds` that a step's matmuls take at the data sheet's peak of their precisions."""
    float8_flops = count_float8_flops_per_token(run)
    float8_tflops_per_s = spec.float8_tflops or spec.bfloat16_tflops
    peak_s = (count_flops_per_token(run) - float8_flops) / spec.bfloat16_tflops + float8_flops / float8_tflops_per_s
    return 1e-12 * peak_s * run.step_tokens / run.world_size / seconds


def check_below_peak(run: PlannedRun, seconds: float, spec: DeviceSpec) -> None:
    """Raise a RuntimeError if a step of `seconds` would be faster than the data sheet's peak allows."""
    share = compute_mfu(run, seconds, spec)
    if share > 1:
        raise RuntimeError(
            f"a step of {seconds:.3g} s would be {share:.1f} times as fast as the peak of {spec.name} allows: the "
            "simulation is wrong"
        )

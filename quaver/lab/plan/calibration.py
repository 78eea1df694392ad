"""Calibrates the share of a GPU's best matmul rate that a long run sustains, from one published run per GPU.

MATMUL_SHARES (quaver/roofline/matmul.py) are the best rates of many shapes, each measured alone on a cold GPU. A GPU
that trains for hours is limited by its power: an H100 at 8192^3 falls below its peak clock, more so with random than
with zero operands (thonking.ai/p/strangely-matrix-multiplications), and torchtitan's H100s ran with 500 W of 700 W. No
table of rates at a power limit was found, so `sustained_share` is fitted: with it the simulated time of one published
run equals its measured time. The times of attention, linears (with casts and launches) and recomputation are divided by
it. All other published runs are predicted, not fitted (docs/experiments/published-runs.md).
"""

from __future__ import annotations

from typing import NamedTuple

from quaver.roofline.device_specs import DEVICE_SPECS, DeviceSpec


class CalibratedGPU(NamedTuple):
    """A GPU in the setup of a published run."""

    spec: DeviceSpec
    sustained_share: float
    published_run: str
    """The name of the run (benchmarks/plan/published_runs.toml) from which `sustained_share` was derived."""


_SPEC_BY_NAME = {spec.name: spec for spec in DEVICE_SPECS}


CALIBRATED_GPUS = {
    "A100": CalibratedGPU(_SPEC_BY_NAME["A100"], 0.871, "fms-fsdp llama2-7b 128 A100"),
    "B200": CalibratedGPU(_SPEC_BY_NAME["B200"], 0.78, "megatron-bridge-25.11 llama3-8b 8 B200 FP8-CS TP1 PP1 CP1"),
    "H100": CalibratedGPU(_SPEC_BY_NAME["H100"], 0.723, "fms-fsdp llama2-7b 96 H100"),
    "H200": CalibratedGPU(_SPEC_BY_NAME["H200"], 0.813, "trainy-202506 8B 32 H200 tensorwise"),
}
"""benchmarks/plan/published.py adds the GPUs of other setups."""


def get_sustained_share(spec: DeviceSpec) -> float:
    """Return the share of the GPU with this specification, or of the H100 if no published run has that GPU."""
    return _find_calibrated(spec).sustained_share


def describe_sustained_share(spec: DeviceSpec) -> str:
    """Return a sentence that says which share is taken and from which run, or that the H100's is assumed."""
    gpu = _find_calibrated(spec)
    share, runs = f"{gpu.sustained_share:.0%} of the best rate of a matmul", f"as in {gpu.published_run}"
    if gpu.spec == spec:
        trained_by = ", with Megatron and TransformerEngine" if gpu.published_run.startswith("megatron") else ""
        return f"a long run keeps {share}, {runs}{trained_by}"
    return (
        f"no published run says what a long run on {spec.name} keeps of a matmul's rate: assumed are the H100's "
        f"{share}, {runs}"
    )


def _find_calibrated(spec: DeviceSpec) -> CalibratedGPU:
    return next((gpu for gpu in CALIBRATED_GPUS.values() if gpu.spec == spec), CALIBRATED_GPUS["H100"])

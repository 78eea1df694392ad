"""Describes the CPU, for the provenance of a run and for `quaver doctor`, which has no extra."""

import platform

import torch

from quaver.kernels.exact_mm import has_bfloat16_units
from quaver.torch_private.hardware import has_amx_tiles


def describe_cpu() -> str:
    """Return the architecture of the CPU and the instructions that decide the speed of casts and matmuls."""
    features = torch.backends.cpu.get_cpu_capability()
    units = " with AMX" if has_amx_tiles() else ""
    if not has_bfloat16_units(torch.device("cpu")):
        units = " without bfloat16 instructions"
    return f"{platform.machine()} CPU, {features}{units}"

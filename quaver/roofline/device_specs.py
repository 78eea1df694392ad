"""Speeds of devices: peaks from data sheets, or the measured rate of matmuls.

Sources:
    matmul rates, bandwidth    data sheets, dense rates without sparsity: NVIDIA A100 (SXM of 80 and of 40 GB, PCIe of
                               80 GB), L40S, H100 (SXM5, PCIe, NVL), H200 SXM, B200 (HGX, per GPU), GB200 (half of a
                               superchip); AMD Instinct MI300X
    multiprocessors, links     data sheets and "Machine Learning Engineering" (github.com/stas00/ml-engineering,
                               network); chipsandcheese.com for B200; CUDA's report of 152 multiprocessors for GB200
    memory                     the report of nvidia-smi, in 10^9 bytes: for example 189,471 MiB for a GB200 and 95,830
                               MiB for an H100 NVL
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass

import torch

from quaver.runtime.devices import get_cuda_device, has_cuda, is_cuda_device, synchronize
from quaver.runtime.errors import InputError


@dataclass(frozen=True)
class DeviceSpec:
    """One kind of accelerator. `float8_tflops` is None if the hardware does not multiply float8."""

    name: str
    bfloat16_tflops: float
    float8_tflops: float | None
    memory_gb_per_s: float
    memory_gb: float
    """10^9 bytes."""
    multiprocessors: int
    link_gb_per_s: float
    """The rate to other GPUs of its machine in one direction: NVLink, Infinity Fabric or PCI Express."""
    block_length: int | None = None
    """The block length for which its matmuls take scales (kernels/native_mm.py; cuBLAS's scaling modes)."""
    compute_capability: int | None = None
    """NVIDIA's, 90 for 9.0; None for other vendors. It decides which kernel torch's attention uses."""


_SPEC_BY_REPORTED_NAME = {
    "NVIDIA GB200": DeviceSpec("GB200", 2500.0, 5000.0, 8000.0, 198.7, 152, 900.0, 32, 100),
    "NVIDIA B200": DeviceSpec("B200", 2250.0, 4500.0, 8000.0, 192.0, 148, 900.0, 32, 100),
    "NVIDIA H200": DeviceSpec("H200", 989.4, 1978.9, 4800.0, 150.8, 132, 450.0, 128, 90),
    "NVIDIA H100 80GB HBM3": DeviceSpec("H100", 989.4, 1978.9, 3350.0, 85.5, 132, 450.0, 128, 90),
    "NVIDIA H100 NVL": DeviceSpec("H100-NVL", 835.5, 1670.5, 3938.0, 100.5, 132, 64.0, 128, 90),
    "NVIDIA H100 PCIe": DeviceSpec("H100-PCIe", 756.5, 1513.0, 2039.0, 85.5, 114, 64.0, 128, 90),
    "NVIDIA A100-SXM4-80GB": DeviceSpec("A100", 312.0, None, 2039.0, 85.5, 108, 300.0, None, 80),
    "NVIDIA A100-SXM4-40GB": DeviceSpec("A100-40GB", 312.0, None, 1555.0, 42.9, 108, 300.0, None, 80),
    "NVIDIA A100 80GB PCIe": DeviceSpec("A100-PCIe", 312.0, None, 1935.0, 85.9, 108, 32.0, None, 80),
    "NVIDIA L40S": DeviceSpec("L40S", 362.05, 733.0, 864.0, 48.3, 142, 32.0, None, 89),
    "AMD Instinct MI300X": DeviceSpec("MI300X", 1307.4, 2614.9, 5300.0, 206.0, 304, 448.0),
}
"""The specs by the name that the driver reports. Bridges join only two or four PCI Express cards, H100 NVL included, so
the links of their machines are PCI Express."""

DEVICE_SPECS = tuple(_SPEC_BY_REPORTED_NAME.values())

_SPEC_BY_NAME = {
    name.lower(): spec for reported, spec in _SPEC_BY_REPORTED_NAME.items() for name in (spec.name, reported)
}
DEVICE_NAMES = ", ".join(spec.name for spec in DEVICE_SPECS)


def find_device_spec(name: str) -> DeviceSpec | None:
    """Return the spec of a device by its full name ("H100", "a100-40gb") or the driver's ("NVIDIA H100 80GB HBM3").

    None for all other names. A longer name is a different card, such as an H100 with HBM2e or a slice of a GPU.
    """
    return _SPEC_BY_NAME.get(name.strip().lower())


def require_device_spec(name: str, *, option: str) -> DeviceSpec:
    """Return the spec of a device by its name.

    Args:
        name: as for `find_device_spec`.
        option: the option that named the device, for the error.
    Raises:
        ValueError: the device is unknown; the message lists the known devices.
    """
    spec = find_device_spec(name)
    if spec is None:
        raise InputError(f"{option}: unknown device {name!r}: expected the full name of one of {DEVICE_NAMES}")
    return spec


def find_spec_of_device(device: torch.device) -> DeviceSpec | None:
    """Return the spec of a device of this machine; None for CPUs and unknown devices."""
    return find_device_spec(torch.cuda.get_device_name(device)) if is_cuda_device(device) else None


def find_machine_spec() -> DeviceSpec | None:
    """Return the spec of the current GPU; None if there is no GPU or it is unknown."""
    return find_spec_of_device(get_cuda_device()) if has_cuda() else None


@dataclass(frozen=True)
class PeakFlops:
    """Matmul rates in FLOP/s, their source, and whether they are measured, so that they are not peaks.

    `flops_per_s` is the rate of bfloat16. `float8_flops_per_s` is None if the device does not multiply float8, and
    `float32_flops_per_s` is None for data sheets, because the rate depends on torch's settings.
    """

    flops_per_s: float
    source: str
    float8_flops_per_s: float | None = None
    float32_flops_per_s: float | None = None
    is_measured: bool = False

    def compute_seconds(self, flops: dict[str, int]) -> float | None:
        """Return the least time for the FLOPs of each precision; None if a peak is not known."""
        rates = {
            "bfloat16": self.flops_per_s,
            "float8": self.float8_flops_per_s,
            "float32": self.float32_flops_per_s,
        }
        known_rates = {precision: rates.get(precision) for precision, count in flops.items() if count}
        if any(rate is None for rate in known_rates.values()):
            return None
        return sum(flops[precision] / rate for precision, rate in known_rates.items() if rate is not None)


@functools.cache
def get_peak_flops(device: torch.device) -> PeakFlops:
    """Return the peaks of `device` from its data sheet, or the measured rate of a linear's fastest matmul.

    Unknown devices are measured. A measured rate is not a peak: `source` says "unknown device", and a share of the rate
    compares the model with a plain matmul.
    """
    spec = find_spec_of_device(device)
    if spec is not None:
        float8 = spec.float8_tflops * 1e12 if spec.float8_tflops else None
        return PeakFlops(spec.bfloat16_tflops * 1e12, f"data sheet of {spec.name}, bfloat16 dense", float8)
    threads = torch.get_num_threads()
    threads_text = f"{threads} thread{'s' * (threads != 1)}"
    source = f"unknown device; measured: the fastest matmul of a linear, {threads_text}"
    bfloat16, float32 = (_measure_fastest_matmul(device, dtype) for dtype in (torch.bfloat16, torch.float32))
    return PeakFlops(bfloat16, source, float32_flops_per_s=float32, is_measured=True)


def _measure_fastest_matmul(device: torch.device, dtype: torch.dtype) -> float:
    """Measure a linear's fastest matmul, of forward and grad_weight, in a size for caches and a size for GPUs.

    grad_input is not measured: a CPU without bfloat16 instructions takes 10 times as long for two row-major matrices.
    """
    best = 0.0
    for size in (256, 1024):
        # A separate generator keeps a resumed run's random number states, which are already loaded.
        a = torch.randn(size, size, dtype=dtype, device=device, generator=torch.Generator(device))
        for left, right in ((a, a.t()), (a.t(), a)):
            for _ in range(4):
                synchronize(device)
                start = time.perf_counter()
                torch.mm(left, right)
                synchronize(device)
                best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best

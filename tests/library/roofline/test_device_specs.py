"""Tests peaks of devices, from data sheets and measured."""

from itertools import count
from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.roofline import device_specs
from quaver.roofline.device_specs import DEVICE_SPECS, find_device_spec

REPORTED = {
    "NVIDIA H200": "H200",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA GB200": "GB200",
    "AMD Instinct MI300X": "MI300X",
}
UNKNOWN = ("Some GPU", "GH200", "a100-80gb", "NVIDIA H200 NVL", "NVIDIA H100 80GB HBM2e")
MIG_SLICE = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"


def test_devices_have_whole_names():
    """A part of a name would take an A100 of 40 GB for one of 80, and a slice of an H100 for a whole one."""
    assert {name: find_device_spec(name).name for name in REPORTED} == REPORTED
    assert not any(map(find_device_spec, (*UNKNOWN, MIG_SLICE)))
    assert find_device_spec("a100-40gb").memory_gb < find_device_spec("A100").memory_gb / 1.9
    assert find_device_spec("h100-pcie").bfloat16_tflops < 0.8 * find_device_spec("H100").bfloat16_tflops
    assert all(find_device_spec(spec.name) is spec for spec in DEVICE_SPECS)
    assert find_device_spec("A100").float8_tflops is None
    h100 = find_device_spec("H100")
    assert h100.float8_tflops > 1.9 * h100.bfloat16_tflops


class RecordMatmuls(TorchDispatchMode):
    """Records for each matmul whether its operands are row-major."""

    def __init__(self):
        super().__init__()
        self.row_major = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default:
            self.row_major.add(tuple(operand.is_contiguous() for operand in args))
        return func(*args, **kwargs or {})


def test_the_rate_of_a_cpu_is_that_of_a_linears_matmuls_and_its_source_says_so(monkeypatch):
    """Two row-major bfloat16 operands take a CPU 10 times as long, and a model then reached 643% of such a rate."""
    monkeypatch.setattr(device_specs, "time", SimpleNamespace(perf_counter=count().__next__))  # 1 s between two calls
    with RecordMatmuls() as recorded:
        peak = device_specs.get_peak_flops.__wrapped__(torch.device("cpu"))  # bypasses the cache
    assert recorded.row_major == {(True, False), (False, True)}
    assert peak.flops_per_s == peak.float32_flops_per_s == 2 * 1024**3
    assert peak.float8_flops_per_s is None
    assert peak.source.startswith("unknown device; measured")

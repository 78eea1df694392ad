"""Peaks of devices, from data sheets and measured."""

import torch

from quaver.roofline.device_specs import DEVICE_SPECS, find_device_spec, peak_flops

REPORTED = {
    "NVIDIA H200": "H200",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H100 PCIe": "H100-PCIe",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "NVIDIA GB200": "GB200",
    "AMD Instinct MI300X": "MI300X",
}
OTHERS = (
    "Some GPU",
    "NVIDIA H100 80GB HBM2e",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA H200 NVL",
    "GH200",
    "a100-80gb",
)


def test_devices_have_whole_names():
    """A part of a name would take an A100 of 40 GB for one of 80, and a slice of an H100 for a whole one."""
    assert {name: find_device_spec(name).name for name in REPORTED} == REPORTED
    assert not any(map(find_device_spec, OTHERS))
    assert find_device_spec("a100-40gb").memory_gb < find_device_spec("A100").memory_gb / 1.9
    assert find_device_spec("h100-pcie").bfloat16_tflops < 0.8 * find_device_spec("H100").bfloat16_tflops
    assert all(find_device_spec(spec.name) is spec for spec in DEVICE_SPECS)
    assert find_device_spec("A100").float8_tflops is None
    h100 = find_device_spec("H100")
    assert h100.float8_tflops > 1.9 * h100.bfloat16_tflops


def test_peak_of_a_cpu_is_that_of_a_linears_matmuls_and_says_so(monkeypatch):
    """In bfloat16 a CPU takes 10 times as long for row-major operands; a model then "used" 643% of that."""
    multiply, row_major = torch.mm, set()

    def recorded(a, b):
        row_major.add((a.is_contiguous(), b.is_contiguous()))
        return multiply(a, b)

    monkeypatch.setattr(torch, "mm", recorded)
    peak = peak_flops.__wrapped__(torch.device("cpu"))  # another test may have filled the cache
    assert row_major == {(True, False), (False, True)}
    assert min(peak.flops_per_s, peak.float32_flops_per_s) > 1e8
    assert peak.float8_flops_per_s is None
    assert peak.source.startswith("unknown device; measured")

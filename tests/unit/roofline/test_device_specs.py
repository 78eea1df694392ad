"""Peaks of devices, from data sheets and measured."""

import torch

from quaver.roofline.device_specs import DEVICE_SPECS, find_device_spec, peak_flops


def test_device_names():
    assert find_device_spec("NVIDIA H200").name == "H200"
    assert find_device_spec("AMD Instinct MI300X").name == "MI300X"
    assert find_device_spec("Some GPU") is None
    assert {spec.name for spec in DEVICE_SPECS} == {"H100", "H200", "B200", "A100", "L40S", "MI300X"}
    assert all(find_device_spec(spec.name) is spec for spec in DEVICE_SPECS)
    assert find_device_spec("A100").float8_tflops is None
    h100 = find_device_spec("H100")
    assert h100.float8_tflops > 1.9 * h100.bfloat16_tflops


def test_peak_of_a_cpu_is_measured_and_says_so():
    peak = peak_flops(torch.device("cpu"))
    assert min(peak.flops_per_s, peak.float32_flops_per_s) > 1e8
    assert peak.float8_flops_per_s is None
    assert peak.source.startswith("unknown device; measured")

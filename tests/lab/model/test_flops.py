"""Tests the utilization against the peaks of a device by hand."""

import pytest

from quaver.lab.model.flops import MASKED_FLOPS, compute_utilization
from quaver.roofline.device_specs import PeakFlops


def test_utilization_counts_against_both_peaks():
    """100 FLOPs in float8 and 100 in bfloat16 a token, a million tokens a second: 2e8 FLOP/s."""
    used = compute_utilization({"float8": 100, "bfloat16": 100}, 1e6, PeakFlops(1e9, "", 2e9))
    assert used == {"tflops": 2e-4, "mfu": pytest.approx(0.2), "mfu_by_precision": pytest.approx(0.1 + 0.05)}
    only = compute_utilization({"bfloat16": 200}, 1e6, PeakFlops(1e9, ""))
    assert only["mfu_by_precision"] == pytest.approx(only["mfu"])
    unknown = compute_utilization({"float8": 100, "bfloat16": 100}, 1e6, PeakFlops(1e9, ""))
    assert unknown["mfu_by_precision"] is None
    assert compute_utilization({"float32": 200}, 1e6, PeakFlops(1e9, "", 2e9))["mfu_by_precision"] is None
    long = compute_utilization({"bfloat16": 120, MASKED_FLOPS: 80}, 1e7, PeakFlops(1.2e9, ""))
    assert long["mfu_by_precision"] == pytest.approx(1.0)
    assert long["mfu"] == pytest.approx(200 / 120)  # as usual
    measured = PeakFlops(1e9, "", float32_flops_per_s=4e9)  # a CPU without bfloat16 instructions
    used = compute_utilization({"float32": 300, "bfloat16": 100}, 1e6, measured)
    assert used["mfu_by_precision"] == pytest.approx(0.075 + 0.1)

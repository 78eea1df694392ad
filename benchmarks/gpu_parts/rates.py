"""Measures the limits of the card: a copy in memory, and matmuls in bfloat16 and float8."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import torch

from benchmarks.gpu_parts.part_context import PartContext, Row, make_timing_row
from quaver.linear.gemm import float8_mm
from quaver.roofline.device_specs import find_spec_of_device


def measure_rates(context: PartContext) -> Iterator[Row]:
    """Yield GB/s of a copy and TFLOP/s of 8192 x 8192 x 8192, twice each: on a quiet card both are equal."""
    spec = find_spec_of_device(context.device)
    yield {"what": "data sheet", "known": spec is not None, **(asdict(spec) if spec else {})}
    for turn in ("first", "again"):
        yield {"what": f"copy, {turn}", **_time_copy(context)}
        for name, row in _time_matmuls(context).items():
            yield {"what": f"matmul {name}, {turn}", **row}


def _time_copy(context: PartContext) -> Row:
    source = context.randn(1 << (15 if context.dry else 31))
    target = torch.empty_like(source)
    measured = context.time({"copy": lambda: target.copy_(source)}, rounds=10)["copy"]
    return {"timing": make_timing_row(measured), "gb_per_s": 2e-3 * source.nbytes / measured.median_us}


def _time_matmuls(context: PartContext) -> dict[str, Row]:
    size = 64 if context.dry else 8192
    a, b, one = context.randn(size, size), context.randn(size, size), torch.ones((), device=context.device)
    codes = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t()
    calls = {
        "bfloat16": lambda: torch.mm(a, b),
        "float8": lambda: float8_mm(*codes, one, one, out_dtype=torch.bfloat16, scales_are_powers_of_2=True),
    }
    return {
        name: {"timing": make_timing_row(measured), "tflops": 2e-6 * size**3 / measured.median_us}
        for name, measured in context.time(calls, rounds=10).items()
    }

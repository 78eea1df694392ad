"""Profiles a step by kernel, and sums its kernels by the categories of a ledger, beside the ledger's predictions.

`quaver bench ledger` counts the kernels of a compiled block without a GPU, and writes `LEDGER`: for each contestant and
category the names of Inductor's kernels, the launches and the modeled milliseconds. PyTorch 2.11 and 2.13 give nearly
all kernels the same names. Kernels of Inductor that are not in a ledger have a separate category.
"""

from __future__ import annotations

import json
import re
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.part_context import Call, PartContext
from benchmarks.record import ROOT
from quaver.runtime.devices import synchronize

LEDGER = ROOT / "benchmarks" / "results" / "ledger.json"

CATEGORIES = (
    ("fused by Inductor", r"^triton_"),
    ("attention", r"flash|fmha|attention|sdpa|cudnn.*mha"),
    ("casts", r"^_cast_|^_quant_scales|quaver::cast|float8_copy_kernel"),
    ("amax", r"^_amax|^_group_amax|quaver::.*amax|aten::amax"),
    ("copies", r"column_major|copy_kernel|::copy_|memcpy"),
    ("small", r"fill|memset|zero_"),
    ("hp", r"elementwise_kernel|::reduce_kernel|norm|softmax|aten::(sum|mean|mul|add|silu|rsqrt|pow)"),
    ("float8 matmul", r"nvjet_[qr]|e4m3|e5m2|fp8|scaled_mm|f8f8|qgmma|native_block|float8_mm"),
    ("bfloat16 matmul", r"gemm|nvjet|cutlass|cublas|wgmma|::mm$|::bmm$|splitk|xmma"),
)
"""The ledger's categories, and one for Inductor's kernels without a ledger. The first pattern in a name decides.

Inductor's names list the fused operations, which do not determine the category: many have transposes and amaxes. cuBLAS
names its kernels by the dtypes of operands, q for e4m3, t for bfloat16. CUTLASS puts the dtypes late in
a long name, as aten does for kernels on float8.
"""


def find_category(kernel: str) -> str:
    """Return the category of a kernel by its name in lower case, or "other"."""
    name = kernel.lower()
    return next((category for category, pattern in CATEGORIES if re.search(pattern, name)), "other")


def profile_step(context: PartContext, step: Call) -> list[dict[str, Any]]:
    """Profile one step. Returns name, total microseconds and count of each kernel, the longest first.

    A dry run has operators of the CPU instead of kernels.
    """
    step()
    activities = [ProfilerActivity.CPU] if context.dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as profiler:
        step()
        synchronize(context.device)
    wanted = DeviceType.CPU if context.dry else DeviceType.CUDA
    kernels = []
    for event in profiler.key_averages():
        us = event.self_cpu_time_total if context.dry else event.self_device_time_total
        if event.device_type == wanted and us > 0:
            kernels.append({"name": event.key, "us": round(float(us), 1), "count": event.count})
    return sorted(kernels, key=lambda kernel: -kernel["us"])


def sum_by_category(kernels: list[dict[str, Any]], contestant: str = "") -> dict[str, dict[str, Any]]:
    """Return the milliseconds and launches of each category, the longest first, with the ledger's predictions."""
    ledger = read_ledger(contestant)
    categories = ledger.get("categories", {})
    known = {name: category for category, counted in categories.items() for name in counted["kernels"]}
    totals: dict[str, dict[str, Any]] = {}
    for kernel in kernels:
        category = known.get(kernel["name"]) or find_category(kernel["name"])
        total = totals.setdefault(category, {"ms": 0.0, "launches": 0})
        total["ms"] += kernel["us"] / 1e3
        total["launches"] += kernel["count"]
    for category, milliseconds in ledger.get("milliseconds", {}).items():
        total = totals.setdefault(category, {"ms": 0.0, "launches": 0})
        total |= {"predicted_ms": milliseconds, "predicted_launches": categories[category]["launches"]}
    return dict(sorted(totals.items(), key=lambda item: -item[1]["ms"]))


def read_ledger(contestant: str) -> dict[str, Any]:
    """Return the ledger of a contestant, empty if there is none."""
    if not contestant or not LEDGER.is_file():
        return {}
    ledgers = json.loads(LEDGER.read_text())["ledgers"]
    return next((ledger for ledger in ledgers if ledger["name"] == contestant), {})

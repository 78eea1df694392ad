"""A profile by kernel, and its kernels by the categories of a ledger, beside what the ledger predicts for each.

`quaver bench ledger` counts what a compiled block launches on a GPU, without one, and writes `LEDGER`: for each
contestant the names of Inductor's kernels in each category, its launches and its modelled milliseconds. PyTorch 2.11
and 2.13 give nearly all kernels the same names. Those that a ledger lacks, and all without a file, are a category of
their own.
"""

from __future__ import annotations

import json
import re
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_parts.lab import Call, Lab
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
"""The ledger's and one more, for Inductor's kernels without a ledger; the first that is found in a kernel's name.

Inductor's names list what a kernel fuses, which tells no category: transposes and amaxes are in many. cuBLAS names its
kernels by the dtypes of operands, q for e4m3, t for bfloat16; CUTLASS says them late in a long name, and so do kernels
of aten that read or write float8.
"""


def category_of(kernel: str) -> str:
    """By its name, in small letters; "other" of what no pattern knows."""
    name = kernel.lower()
    return next((category for category, pattern in CATEGORIES if re.search(pattern, name)), "other")


def profiled(lab: Lab, step: Call) -> list[dict[str, Any]]:
    """The kernels of one step, those that take longest first: name, microseconds of all, and how often each ran.

    A dry run has the operators of the CPU in their place.
    """
    step()
    activities = [ProfilerActivity.CPU] if lab.dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with profile(activities=activities) as made:
        step()
        synchronize(lab.device)
    wanted = DeviceType.CPU if lab.dry else DeviceType.CUDA
    found = []
    for event in made.key_averages():
        us = event.self_cpu_time_total if lab.dry else event.self_device_time_total
        if event.device_type == wanted and us > 0:
            found.append({"name": event.key, "us": round(float(us), 1), "count": event.count})
    return sorted(found, key=lambda each: -each["us"])


def by_category(kernels: list[dict[str, Any]], contestant: str = "") -> dict[str, dict[str, Any]]:
    """Milliseconds and launches of each category, the longest first; with a ledger, what it predicts."""
    ledger = ledger_of(contestant)
    categories = ledger.get("categories", {})
    known = {name: category for category, counted in categories.items() for name in counted["kernels"]}
    found: dict[str, dict[str, Any]] = {}
    for each in kernels:
        category = known.get(each["name"]) or category_of(each["name"])
        of_category = found.setdefault(category, {"ms": 0.0, "launches": 0})
        of_category["ms"] += each["us"] / 1e3
        of_category["launches"] += each["count"]
    for category, milliseconds in ledger.get("milliseconds", {}).items():
        of_category = found.setdefault(category, {"ms": 0.0, "launches": 0})
        of_category |= {"predicted_ms": milliseconds, "predicted_launches": categories[category]["launches"]}
    return dict(sorted(found.items(), key=lambda item: -item[1]["ms"]))


def ledger_of(contestant: str) -> dict[str, Any]:
    """That of a contestant; empty without one."""
    if not contestant or not LEDGER.is_file():
        return {}
    ledgers = json.loads(LEDGER.read_text())["ledgers"]
    return next((each for each in ledgers if each["name"] == contestant), {})

"""Diagnoses this machine: tries every recipe on every device, torch.compile, and the optional parts."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import platform
from typing import Any, TypedDict

import torch

from quaver.conversion.convert import convert_to_float8_training
from quaver.conversion.persistent_scales import sync_float8_amax_and_scale_history
from quaver.kernels import cpu
from quaver.kernels.exact_mm import has_bfloat16_units
from quaver.lab.runs.cpu_description import describe_cpu
from quaver.lab.terminal.counts import format_count
from quaver.linear.backends import find_native_failure, list_matmul_casts, predict_scale_kind
from quaver.linear.module import Float8Linear
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.recipes.sqnr import compute_sqnr_db
from quaver.runtime.devices import get_compute_capability, get_device_index, has_cuda, is_cuda_device
from quaver.runtime.slow_paths import error_on_slow_path, list_slow_paths

_FEATURES = 64
"""M, K and N of the linear that is tried."""
_MIN_SQNR_DB = 20.0
"""A wrong result has about 0 dB, and the coarsest recipe about 24."""


class Finding(TypedDict):
    """One recipe that was tried on one device."""

    device: str
    recipe: str
    verdict: str
    """native, exact or impossible."""
    detail: str


def diagnose(*, try_compile: bool = True) -> dict[str, Any]:
    """Try every recipe on every device, and return the findings as a dict for JSON.

    `ok` is true if every recipe runs on every device, natively or exactly. `slow_paths` has a sentence for each code
    path that was slower than necessary; none raises an error here. `recommended` has a sentence per device.

    Args:
        try_compile: try torch.compile, which takes some seconds.
    """
    threads = format_count(torch.get_num_threads(), "thread")
    devices = {"cpu": f"{_find_cpu_name()}, {describe_cpu()}, {threads}"}
    if has_cuda():
        for index in range(torch.cuda.device_count()):
            major, minor = get_compute_capability(index)
            devices[f"cuda:{index}"] = f"{torch.cuda.get_device_name(index)}, capability {major}.{minor}"
    with error_on_slow_path(False):
        recipes = [try_recipe(recipe, torch.device(device)) for device in devices for recipe in Float8LinearRecipeName]
        compiles = _try_compile() if try_compile else "not tried"
    diagnosis = {"versions": _list_versions(), "devices": devices, "recipes": recipes, "slow_paths": list_slow_paths()}
    diagnosis["recommended"] = {device: recommend_recipe(device, recipes) for device in devices}
    return {**diagnosis, "compile": compiles, "ok": all(finding["verdict"] != "impossible" for finding in recipes)}


def try_recipe(recipe: Float8LinearRecipeName, device: torch.device) -> Finding:
    """Run a small linear forward and backward and compare with float64."""
    verdict, detail = _try_config(Float8LinearConfig.from_recipe_name(recipe), device)
    return {"device": str(device), "recipe": recipe.value, "verdict": verdict, "detail": detail}


def recommend_recipe(device: str, findings: list[Finding]) -> str:
    """Recommend recipes for a device from its native matmuls. No time is measured."""
    device_findings = [finding for finding in findings if finding["device"] == device]
    native = {finding["recipe"] for finding in device_findings if finding["verdict"] == "native"}
    if not native:
        return "no recipe is faster than bfloat16 on this device; choose the recipe for the GPU that you will train on"
    robust = next((recipe for recipe in ("mxfp8", "blockwise", "rowwise") if recipe in native), None)
    goals = {"speed": "tensorwise" if "tensorwise" in native else robust, "outliers": robust}
    gathered = "tensorwise" if robust == "rowwise" else robust  # FSDP2 all-gathers two casts of a rowwise weight
    goals["FSDP2 (all-gathers one byte per element)"] = gathered or "tensorwise"
    goals["accuracy"] = f"{robust}_with_gw_hp" if robust else None
    return ", ".join(f"{recipe} for {goal}" for goal, recipe in goals.items() if recipe)


def _try_config(config: Float8LinearConfig, device: torch.device) -> tuple[str, str]:
    try:
        linear = Float8Linear(_FEATURES, _FEATURES, bias=False, device=device, config=config)
        convert_to_float8_training(linear, config=config)  # adds a state if the recipe has persistent scales
        worst_db = _measure_worst_sqnr(linear)
        if config.has_persistent_scales:
            sync_float8_amax_and_scale_history(linear)
            linear.zero_grad()
            worst_db = min(worst_db, _measure_worst_sqnr(linear))
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return "impossible", str(error).splitlines()[0]
    if worst_db < _MIN_SQNR_DB:
        return "impossible", f"wrong results ({worst_db:.1f} dB)"
    verdict, detail = _describe_backend(config, device)
    return verdict, f"{detail}; worst gradient {worst_db:.1f} dB"


def _describe_backend(config: Float8LinearConfig, device: torch.device) -> tuple[str, str]:
    if is_cuda_device(device):
        kinds = {predict_scale_kind(*pair) for pair in list_matmul_casts(config).values()}
        failures = {
            find_native_failure(get_device_index(device), kind) if kind else "no hardware multiplies such scales"
            for kind in kinds
        }
        reasons = failures - {None}
        if not reasons:
            return "native", "float8 tensor cores"
        return "exact", f"no native float8 ({'; '.join(sorted(map(str, reasons)))})"
    return "exact", "bfloat16 units" if has_bfloat16_units(device) else "float32 arithmetic"


def _measure_worst_sqnr(module: Float8Linear) -> float:
    generator = torch.Generator().manual_seed(0)
    input, grad_output = (
        torch.randn(_FEATURES, _FEATURES, generator=generator).to(module.weight.device) for _ in range(2)
    )
    input.requires_grad_()
    with torch.enable_grad():
        output = module(input)
        output.backward(grad_output)
    x, w, g = (tensor.detach().double().cpu() for tensor in (input, module.weight, grad_output))
    pairs = ((x @ w.t(), output), (g @ w, input.grad), (g.t() @ x, module.weight.grad))
    return min(compute_sqnr_db(reference, result.cpu()) for reference, result in pairs if result is not None)


def _try_compile() -> str:
    module = Float8Linear(_FEATURES, _FEATURES, bias=False)
    input = torch.randn(_FEATURES, _FEATURES)
    try:
        # The sine makes the compiler generate a kernel; the linear may only call existing ones.
        torch.compile(lambda input: module(input).sin(), fullgraph=True)(input).sum().backward()
    except Exception as error:  # noqa: BLE001 - the compiler, the toolchain and the OS each raise their own
        return f"fails: {str(error).splitlines()[0]}"
    return "works"


def _find_cpu_name() -> str:
    name = platform.processor() or platform.machine()
    if platform.system() == "Linux":
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return name


def _find_version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # its distribution has another name, such as pytorch-triton
        return str(getattr(importlib.import_module(name), "__version__", "unknown"))


def _list_versions() -> dict[str, str]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    for name in ("triton", "torchao"):
        is_installed = importlib.util.find_spec(name) is not None
        versions[name] = _find_version(name) if is_installed else "not installed"
    versions["C extension"] = "built" if cpu.HAS_EXTENSION else f"off, casts run in PyTorch: {cpu.UNAVAILABLE_REASON}"
    return versions

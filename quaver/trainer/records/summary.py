"""The numbers that stand in summary.json and in the table at the end."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch

from quaver.devices import PeakFlops, describe
from quaver.trainer.config import TrainConfig
from quaver.trainer.layout import Layout
from quaver.trainer.records.metrics import median_step_seconds, utilization
from quaver.trainer.twin import Twin


def summarize(
    config: TrainConfig,
    twins: Sequence[Twin],
    device: torch.device,
    peak: PeakFlops,
    layout: Layout,
    flops_per_token: dict[str, dict[str, int]],
    *,
    status: str,
    steps: int,
    error: str | None,
) -> dict[str, Any]:
    """Return the JSON-able summary of a run that made `steps` whole steps and ended with `status`.

    Speed is of the median step, over all ranks; MFU is of one device, and memory is the first rank's. `comparison`
    puts the first twin over the second, memory only where it is exact.
    """
    runs = {twin.name: _run_summary(config, twin, peak, layout, flops_per_token[twin.name]) for twin in twins}
    summary: dict[str, Any] = {
        "status": status,
        "error": error,
        "steps": steps,
        "ranks": layout.world_size,
        "mesh": layout.mesh,
        "runs": runs,
        "bfloat16_peak": {"flops_per_s": peak.flops_per_s, "source": peak.source},
        "float8_peak_flops_per_s": peak.float8_flops_per_s,
        "float32_peak_flops_per_s": peak.float32_flops_per_s,
        "environment": {"quaver": version("quaver"), **describe(device)},
    }
    if len(twins) == 2:
        summary["comparison"] = _compare(*runs.values())
    return summary


def _run_summary(
    config: TrainConfig, twin: Twin, peak: PeakFlops, layout: Layout, flops_per_token: dict[str, int]
) -> dict[str, Any]:
    seconds = median_step_seconds(twin.step_seconds) if twin.step_seconds else None
    tokens_per_s = config.training.step_tokens / seconds if seconds else None
    used: dict[str, float | None] = {"tflops": None, "mfu": None, "mfu_by_precision": None}
    if tokens_per_s:
        used = utilization(flops_per_token, tokens_per_s / layout.world_size, peak)
    whose_memory = "" if layout.world_size == 1 else f", of rank {layout.rank}"
    return {
        "validation_loss": twin.validation_loss,
        **({"validation_loss_hp": twin.validation_loss_hp} if config.validation.high_precision_too else {}),
        "median_step_seconds": seconds,
        "tokens_per_s": tokens_per_s,
        **used,
        "peak_memory_bytes": twin.peak.peak_bytes,
        "peak_memory_exact": twin.peak.exact,
        "peak_memory_source": twin.peak.source + whose_memory,
    }


def _compare(run: dict[str, Any], twin: dict[str, Any]) -> dict[str, float | None]:
    loss_ratio = _ratio(run["validation_loss"], twin["validation_loss"])
    memory_ratio = _ratio(run["peak_memory_bytes"], twin["peak_memory_bytes"])
    return {
        "loss_gap": None if loss_ratio is None else loss_ratio - 1,
        "tokens_per_s_ratio": _ratio(run["tokens_per_s"], twin["tokens_per_s"]),
        "peak_memory_ratio": memory_ratio if run["peak_memory_exact"] and twin["peak_memory_exact"] else None,
    }


def _ratio(value: float | None, reference: float | None) -> float | None:
    return value / reference if value is not None and reference else None

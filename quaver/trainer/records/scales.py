"""What becomes of the scales that are kept from step to step: one JSON object for each recorded step.

    {"step": 7, "run": "delayed",
     "quant_scale":     {"model.layers.0.mlp.down_proj.input": 301.2, ...},   multiplied by the step's casts
     "amax":            {...},   of the step, over all ranks
     "used_over_ideal": {...},   quant_scale over the one that brings amax to the format's largest number
     "saturated":       {...},   elements, the most in one cast on one rank; only tensors in which some saturated
     "dynamic":         [...],   tensors scaled dynamically: without a history, or after they had left the window
     "nonfinite":       [...]}   tensors with an inf or a NaN, which have no amax

A tensor is named `<linear>.<operand>`, an input that siblings share by the first of them. One that was not cast in the
step is in none of these. JSON has no NaN: where a tensor has no number (no scale fits an amax of 0) it has no entry.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from quaver import TensorScaling


def scales_record(step: int, run: str, report: Iterable[TensorScaling]) -> dict[str, Any]:
    """Return the JSON-able record of the step that `report` (`Float8ScalingState.report`) tells of."""
    cast = [tensor for tensor in report if was_cast(tensor)]
    columns = {
        name: {tensor.name: _short(value) for tensor in cast if math.isfinite(value := getattr(tensor, name))}
        for name in ("quant_scale", "amax", "used_over_ideal")
    }
    return {
        "step": step,
        "run": run,
        **columns,
        "saturated": {tensor.name: tensor.saturated for tensor in cast if tensor.saturated},
        "dynamic": [tensor.name for tensor in cast if tensor.is_dynamic],
        "nonfinite": [tensor.name for tensor in cast if not math.isfinite(tensor.amax)],
    }


def saturation_summary(report: Sequence[TensorScaling]) -> dict[str, int]:
    """Return what a step's record in metrics.jsonl says of its kept scales; empty where there are none."""
    if not report:
        return {}
    counts = [tensor.saturated for tensor in report if was_cast(tensor)]
    return {"float8_saturated": sum(counts), "float8_saturated_tensors": sum(count > 0 for count in counts)}


def was_cast(tensor: TensorScaling) -> bool:
    """Whether any cast of the step saw the tensor."""
    return not tensor.amax < 0  # a NaN was seen


def _short(value: float) -> float:
    """Nine digits, which tell any two float32 apart."""
    return float(f"{value:.9g}")

"""The persistent scales of a run: one JSON object per recorded step in float8_scales.jsonl.

    {"step": 7, "model": "delayed",
     "quant_scale":     {"model.layers.0.mlp.down_proj.input": 301.2, ...},   the scale of the step's casts
     "amax":            {...},   the amax of the step over all ranks
     "used_over_ideal": {...},   quant_scale / the scale that maps amax to the format's largest number
     "saturated":       {...},   the largest number of saturated elements in one cast on one rank, if any saturated
     "dynamic":         [...],   tensors scaled dynamically, because they have no history yet
     "nonfinite":       [...]}   tensors with an inf or a NaN, which have no amax

A tensor is named `<linear>.<operand>`; an input that linears share is named after the first one. Tensors that were not
cast in the step have no entry. Numbers that are not finite, such as the scale for an amax of 0, are left out: JSON has
none.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from quaver import TensorScaleReport


def make_scales_record(step: int, model: str, report: Iterable[TensorScaleReport]) -> dict[str, Any]:
    """Return the record of a step from its `Float8ScalingState.report`."""
    cast = [tensor for tensor in report if _was_cast(tensor)]
    columns = {
        name: {
            tensor.name: float(f"{value:.9g}")  # nine digits identify every float32
            for tensor in cast
            if math.isfinite(value := getattr(tensor, name))
        }
        for name in ("quant_scale", "amax", "used_over_ideal")
    }
    return {
        "step": step,
        "model": model,
        **columns,
        "saturated": {tensor.name: tensor.saturated for tensor in cast if tensor.saturated},
        "dynamic": [tensor.name for tensor in cast if tensor.is_dynamic],
        "nonfinite": [tensor.name for tensor in cast if not math.isfinite(tensor.amax)],
    }


def summarize_saturation(report: Sequence[TensorScaleReport]) -> dict[str, int]:
    """Return the fields of metrics.jsonl on a step's persistent scales; empty if there are none."""
    if not report:
        return {}
    counts = [tensor.saturated for tensor in report if _was_cast(tensor)]
    return {"float8_saturated": sum(counts), "float8_saturated_tensors": sum(count > 0 for count in counts)}


def _was_cast(tensor: TensorScaleReport) -> bool:
    return not tensor.amax < 0  # a tensor with a NaN was cast

"""Makes headers and samples of a healthy run of two blocks, as numerics.jsonl has them, and the sums of a linear."""

from __future__ import annotations

import math
import random
from typing import Any

from quaver import Float8LinearConfig
from quaver.linear.quantize import Quantizer
from quaver.numerics.accumulation import HOPPER
from quaver.numerics.matmul_sums import MatmulSqnrs, observe_sums, sample_rows

LAYERS = tuple(f"layers.{index}.mlp.{name}" for index in range(2) for name in ("up_proj", "down_proj"))
OPERANDS = (
    ("input", "both", "float8_e4m3fn"),
    ("weight", "both", "float8_e4m3fn"),
    ("grad_output", "both", "float8_e5m2"),
    ("output", "result", None),
    ("grad_input", "result", None),
    ("grad_weight", "result", None),
)
RMS = {"input": 1.0, "weight": 0.02, "grad_output": 1e-5, "output": 0.32, "grad_input": 3.2e-6, "grad_weight": 5e-4}
NAMES = ["numel", "amax", "rms", "smallest", "underflow", "saturated", "sqnr_db"]
NAMES += ["scale_min", "scale_median", "scale_max", "nonfinite", "zeros"]


def make_header(recipe: str = "tensorwise") -> dict[str, Any]:
    scaling = "delayed" if recipe.startswith("delayed") else "dynamic"
    tensors = [
        {"layer": layer, "operand": operand, "cast": cast, "dtype": dtype, "scaling": scaling if dtype else None}
        | {"granularity": "tensorwise", "recipe": recipe}
        for layer in LAYERS
        for operand, cast, dtype in OPERANDS
    ]
    return {"kind": "header", "schema": 1, "step": 1, "statistics": NAMES, "tensors": tensors}


def find_position(layer: str, operand: str) -> int:
    return LAYERS.index(layer) * len(OPERANDS) + [name for name, *_ in OPERANDS].index(operand)


def make_sample(step: int, changes: dict[tuple[str, str], dict[str, Any]] | None = None) -> dict[str, Any]:
    """Return a sample with jitter of half a power of two; `changes` replace values of (layer, operand)."""
    noise = random.Random(step)
    line: dict[str, Any] = {"kind": "sample", "step": step, **{name: [] for name in NAMES}}
    for layer in LAYERS:
        for operand, _, dtype in OPERANDS:
            values = _draw_healthy_values(operand, dtype, step, noise) | (changes or {}).get((layer, operand), {})
            for name in NAMES:
                line[name].append(values[name])
    return line


def _draw_healthy_values(operand: str, dtype: str | None, step: int, noise: random.Random) -> dict[str, Any]:
    rms = RMS[operand] * (2 ** noise.uniform(-0.5, 0.5) if operand != "weight" else 1 + 1e-4 * step)
    largest = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}.get(dtype or "", math.nan)
    scale = 5 * rms / largest if dtype else None
    return {
        "numel": 4096.0,
        "amax": 5 * rms,
        "rms": rms,
        "smallest": 1e-5 * rms,
        "underflow": 1e-5 if dtype else None,
        "saturated": 0.0 if dtype else None,
        "sqnr_db": {"float8_e4m3fn": 31.5, "float8_e5m2": 25.6}.get(dtype or "", 24.6 if operand != "output" else 28.5),
        **{name: scale for name in ("scale_min", "scale_median", "scale_max")},
        "nonfinite": 0.0,
        "zeros": 0.0,
    }


def compare_sums(recipe, input, weight):
    """Return the SQNRs of the output of a linear."""
    casts = Float8LinearConfig.from_recipe_name(recipe).casts
    rows = []
    for operand_casts, hp in ((casts.input, input), (casts.weight, weight)):
        operand = Quantizer(operand_casts, hp.dtype)(hp, row=True, column=False).row
        rows.append(sample_rows(hp, operand, "row"))
    return MatmulSqnrs.from_values(observe_sums(*rows, HOPPER).tolist())

"""The three matmuls of a linear, without casts: float8 against bfloat16, in FLOP/s and as a share of the device's peak.

    output       [M, K] @ [K, N]      input, weight.t()
    grad_input   [M, N] @ [N, K]      grad_output, weight
    grad_weight  [N, M] @ [M, K]      grad_output.t(), input

bfloat16 is `torch.mm` on the views that autograd multiplies. float8 is `quaver.gemm.float8_mm` on operands that are
already cast and in the layout that the backend reads, with a scale per tensor (`tensorwise`) or per row (`rowwise`).
The native backend runs with and without fast accumulation; the exact one has no such choice.

A matmul has 2 * M * K * N FLOPs. Values are Gaussian, because a GPU's clock depends on the data. Each call gets the
next of several operand pairs (harness.Rotation). The peak is the data sheet's for the operands' precision.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quaver.bench.harness import Rotation, time_alternating
from quaver.bench.results import BFLOAT16, Row, Setup, run_cases
from quaver.bench.shapes import Shape
from quaver.config import CastConfig, Float8LinearConfig
from quaver.devices import PeakFlops, device_spec, peak_flops
from quaver.gemm import GemmBackend, along_contracted, backend_for, float8_mm
from quaver.scaling import dynamic_cast

GRANULARITIES = ("tensorwise", "rowwise")


@dataclass(frozen=True)
class Gemm:
    """One matmul of a linear: [m, k] @ [k, n]. The transposed operands are views of row-major matrices."""

    name: str
    m: int
    k: int
    n: int
    left_is_transposed: bool
    right_is_transposed: bool

    def __str__(self) -> str:
        return self.name

    def casts(self, config: Float8LinearConfig) -> tuple[CastConfig, CastConfig]:
        """The casts of the left and the right operand."""
        casts = config.casts
        return {
            "output": (casts.input, casts.weight),
            "grad_input": (casts.grad_output, casts.weight_for_grad_input),
            "grad_weight": (casts.grad_output_for_grad_weight, casts.input_for_grad_weight),
        }[self.name]

    def hp_operands(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """bfloat16 [m, k] and [k, n], as the views that autograd multiplies."""
        return (
            _matrix(self.m, self.k, self.left_is_transposed, device),
            _matrix(self.k, self.n, self.right_is_transposed, device),
        )


def gemms_of(shape: Shape) -> list[Gemm]:
    """The three matmuls of a linear."""
    m, k, n = shape.m, shape.k, shape.n
    return [
        Gemm("output", m, k, n, False, True),
        Gemm("grad_input", m, n, k, False, False),
        Gemm("grad_weight", n, m, k, True, False),
    ]


def bench_gemm(setup: Setup, shapes: Sequence[Shape], granularities: Sequence[str]) -> dict[str, Any]:
    """Run the benchmark; returns `results.result` of a row for each matmul and contestant.

    `share_of_peak` is None without a data sheet, `fast_accumulation` on a backend without that choice.
    """
    peak = peak_flops(setup.device) if device_spec(setup.device) else None
    cases = ((shape, gemm) for shape in shapes for gemm in gemms_of(shape))
    rows_of = partial(_rows_of, setup, granularities, peak)
    return run_cases("gemm", setup, cases, rows_of, peak=peak.source if peak else "unknown")


def _rows_of(setup: Setup, granularities: Sequence[str], peak: PeakFlops | None, shape: Shape, gemm: Gemm) -> list[Row]:
    device = setup.device
    plain = Rotation(lambda: gemm.hp_operands(device), 2 * gemm.k * (gemm.m + gemm.n), device)
    calls: dict[str, Callable[[], object]] = {BFLOAT16: lambda: torch.mm(*plain.next())}
    about: dict[str, Row] = {BFLOAT16: _about("torch.mm", None, plain)}
    for granularity in granularities:
        backend = backend_for(device, rowwise=granularity == "rowwise")
        operands = Rotation(
            lambda granularity=granularity: _float8_operands(gemm, granularity, device),  # type: ignore[misc]
            gemm.k * (gemm.m + gemm.n),
            device,
        )
        for fast in (True, False) if backend is GemmBackend.NATIVE else (None,):
            name = granularity + {True: ", fast accumulation", False: ", exact accumulation", None: ""}[fast]
            calls[name] = _float8_call(operands, granularity, bool(fast))
            about[name] = _about(backend.value, fast, operands)
    with torch.no_grad():
        timings = time_alternating(calls, device, rounds=setup.rounds)
    rows = []
    for name, timing in timings.items():
        flops_per_s = 2 * gemm.m * gemm.k * gemm.n / (1e-6 * timing.median_us)
        rows.append(
            {
                "shape": str(shape),
                "gemm": gemm.name,
                "m": gemm.m,
                "k": gemm.k,
                "n": gemm.n,
                "contestant": name,
                **about[name],
                "timing": asdict(timing),
                "tflops_per_s": flops_per_s / 1e12,
                "share_of_peak": _share(flops_per_s, name, peak),
                "time_over_bfloat16": timing.median_us / timings[BFLOAT16].median_us,
            }
        )
    return rows


def _about(backend: str, fast: bool | None, operands: Rotation[Any]) -> Row:
    return {"backend": backend, "fast_accumulation": fast, "input_copies": len(operands)}


def _share(flops_per_s: float, contestant: str, peak: PeakFlops | None) -> float | None:
    if peak is None:
        return None
    most = peak.flops_per_s if contestant == BFLOAT16 else peak.float8_flops_per_s
    return None if most is None else flops_per_s / most


def _matrix(rows: int, columns: int, is_transposed: bool, device: torch.device) -> Tensor:
    if is_transposed:
        return _matrix(columns, rows, False, device).t()
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)


Float8Operands = tuple[Tensor, Tensor, Tensor, Tensor]
"""Two matrices and their dequant_scales."""


def _float8_operands(gemm: Gemm, granularity: str, device: torch.device) -> Float8Operands:
    config = Float8LinearConfig.from_recipe_name(granularity)
    made = []
    for hp, cast, dim in zip(gemm.hp_operands(device), gemm.casts(config), (1, 0), strict=True):
        scale_dim = dim if cast.is_rowwise else None
        codes, _, dequant = dynamic_cast(
            hp.contiguous(), cast.float8_dtype, scale_dim, power_of_2=config.round_scales_to_power_of_2
        )
        made.append((along_contracted(codes, dim), dequant))
    (a, a_scale), (b, b_scale) = made
    return a, b, a_scale, b_scale


def _float8_call(operands: Rotation[Float8Operands], granularity: str, fast: bool) -> Callable[[], object]:
    powers_of_2 = Float8LinearConfig.from_recipe_name(granularity).round_scales_to_power_of_2

    def call() -> Tensor:
        return float8_mm(
            *operands.next(), out_dtype=torch.bfloat16, use_fast_accum=fast, scales_are_powers_of_2=powers_of_2
        )

    return call

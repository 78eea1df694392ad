"""The three matmuls of a linear, alone: float8 against bfloat16, in FLOP/s and as a share of the device's peak.

    output       [M, K] @ [K, N]      input, weight.t()
    grad_input   [M, N] @ [N, K]      grad_output, weight
    grad_weight  [N, M] @ [M, K]      grad_output.t(), input

bfloat16 is `torch.mm` on the views that `nn.Linear` gives it. float8 is `quaver.gemm.float8_mm` on operands of a
recipe's formats, already cast and in the layout that the backend reads, with a scale per tensor (`tensorwise`) or per
row (`rowwise`); on a GPU with fast accumulation and without it, which mean nothing where float8 is multiplied exactly.
Casts are not in it: `quaver bench cast` times them, `quaver bench linear` both.

A matmul has 2 * M * K * N FLOPs. Values are Gaussian, since a GPU's clock depends on what it multiplies. Each call gets
the next of several operand pairs, which together are larger than the last-level cache. The peak is that of the
device's data sheet for the precision of the operands; without one it is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.bench.harness import Timing, time_alternating
from quaver.bench.results import collecting, result
from quaver.bench.rotation import Rotation
from quaver.bench.shapes import Shape
from quaver.config import CastConfig, Float8LinearConfig
from quaver.devices import PeakFlops, device_spec, peak_flops
from quaver.gemm import GemmBackend, along_contracted, backend_for, float8_mm
from quaver.scaling import dynamic_cast

GRANULARITIES = ("tensorwise", "rowwise")

BFLOAT16 = "bfloat16"


@dataclass(frozen=True)
class Row:
    """One contestant in one matmul of one shape [m, k] @ [k, n]."""

    shape: str
    gemm: str
    m: int
    k: int
    n: int
    contestant: str
    backend: str
    fast_accumulation: bool | None
    """None where it means nothing."""
    timing: Timing
    tflops_per_s: float
    share_of_peak: float | None
    time_over_bfloat16: float
    input_copies: int


@dataclass(frozen=True)
class Gemm:
    """One matmul: its name, its sizes, and which cast of a recipe each operand has."""

    name: str
    m: int
    k: int
    n: int
    left_is_transposed: bool
    right_is_transposed: bool

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


def bench_gemm(
    shapes: Sequence[Shape],
    granularities: Sequence[str],
    *,
    device: torch.device,
    rounds: int,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the benchmark; returns what `results.result` makes of its rows."""
    peak = peak_flops(device) if device_spec(device) else None
    with collecting() as collected:
        for shape in shapes:
            for gemm in gemms_of(shape):
                report(f"{shape}, {gemm.name}")
                collected.rows += _rows_of(shape, gemm, granularities, device, rounds, peak)
    return result("gemm", collected, device=device, peak=peak.source if peak else "unknown")


def _rows_of(
    shape: Shape,
    gemm: Gemm,
    granularities: Sequence[str],
    device: torch.device,
    rounds: int,
    peak: PeakFlops | None,
) -> list[Row]:
    plain = Rotation(lambda: gemm.hp_operands(device), 2 * gemm.k * (gemm.m + gemm.n), device)
    calls: dict[str, Callable[[], object]] = {BFLOAT16: lambda: torch.mm(*plain.next())}
    about: dict[str, tuple[str, bool | None, int]] = {BFLOAT16: ("torch.mm", None, len(plain))}
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
            about[name] = (backend.value, fast, len(operands))
    with torch.no_grad():
        timings = time_alternating(calls, device, rounds=rounds)
    baseline = timings[BFLOAT16].median_us
    rows = []
    for name, timing in timings.items():
        backend_name, fast, copies = about[name]
        rate = 2 * gemm.m * gemm.k * gemm.n / (1e-6 * timing.median_us)
        share = _share(rate, name, peak)
        figures = (timing, rate / 1e12, share, timing.median_us / baseline, copies)
        rows.append(Row(str(shape), gemm.name, gemm.m, gemm.k, gemm.n, name, backend_name, fast, *figures))
    return rows


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

"""The three matmuls of a linear, without casts: float8 against bfloat16, in FLOP/s and as a share of the device's peak.

    output       [M, K] @ [K, N]      input, weight.t()
    grad_input   [M, N] @ [N, K]      grad_output, weight
    grad_weight  [N, M] @ [M, K]      grad_output.t(), input

bfloat16 is `torch.mm` on the views that autograd multiplies. float8 is `quaver.linear.gemm.float8_mm` on operands that
are already cast and in the layout that the backend reads. The native backend runs with and without fast accumulation;
the exact one has no such choice. A matmul has 2 * M * K * N FLOPs. Values are Gaussian: a GPU's clock depends on the
data. The peak is the data sheet's for the operands' precision.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from quaver.lab.bench.harness import Rotation, time_alternating
from quaver.lab.bench.options import BenchOptions, ShapeOptions
from quaver.lab.bench.results import Result, Row
from quaver.lab.bench.shapes import Shape
from quaver.lab.settings.fields import OneOf, setting
from quaver.lab.settings.float8 import BFLOAT16
from quaver.linear.backends import GemmBackend, choose_backend, predict_scale_kind
from quaver.linear.gemm import float8_mm, lay_out_columns, lay_out_rows
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.linear_casts import MATMULS
from quaver.recipes.scaling import dynamic_cast
from quaver.roofline.device_specs import PeakFlops, find_spec_of_device, get_peak_flops

GRANULARITIES = ("tensorwise", "rowwise")


@dataclass(frozen=True)
class GemmBenchmark(ShapeOptions, BenchOptions):
    """The three matmuls of a linear, without casts: float8 against bfloat16."""

    scales: tuple[Annotated[str, OneOf(GRANULARITIES)], ...] = setting(GRANULARITIES, "Granularities of the scales.")

    case_fields = ("shape", "gemm", "M x K x N")
    tables = (("contestant", "backend", "median", "spread", "tflops_per_s", "share_of_peak", "time_over_bfloat16"),)

    def measure(self) -> Result:
        """Return a row for each matmul and contestant.

        `share_of_peak` is None without a data sheet, `fast_accumulation` on a backend without that choice.
        """
        cases = ((shape, matmul) for shape in self.parse_shapes() for matmul in list_matmuls(shape))
        peak = self._peak
        return self.run_cases(cases, self._make_rows, peak=peak.source if peak else "unknown")

    @property
    def _peak(self) -> PeakFlops | None:
        """The rates of the data sheet."""
        return get_peak_flops(self.torch_device) if find_spec_of_device(self.torch_device) else None

    def _make_rows(self, shape: Shape, matmul: Matmul) -> list[Row]:
        device, (m, k, n) = self.torch_device, matmul.sizes
        plain = Rotation(partial(matmul.make_hp_operands, device), 2 * k * (m + n), device)
        calls: dict[str, Callable[[], object]] = {BFLOAT16: lambda: torch.mm(*plain.next())}
        contestants: dict[str, tuple[str, bool | None, int]] = {BFLOAT16: ("torch.mm", None, len(plain))}
        for granularity in self.scales:
            casts = Float8LinearConfig.from_recipe_name(granularity).casts
            left, right = (casts.get(*operand) for operand in MATMULS[matmul.name])
            backend = choose_backend(device, predict_scale_kind(left, right))
            operands = Rotation(partial(matmul.make_float8_operands, granularity, device), k * (m + n), device)
            for fast in (True, False) if backend is GemmBackend.NATIVE else (None,):
                name = granularity + {True: ", fast accumulation", False: ", exact accumulation", None: ""}[fast]
                calls[name] = _make_float8_call(operands, granularity, use_fast_accum=bool(fast))
                contestants[name] = (backend.value, fast, len(operands))
        with torch.no_grad():
            timings = time_alternating(calls, device, rounds=self.rounds)
        rows = []
        for name, timing in timings.items():
            flops_per_s = 2 * m * k * n / (1e-6 * timing.median_us)
            backend_name, fast, copies = contestants[name]
            row: Row = {"shape": str(shape), "gemm": matmul.name, "m": m, "k": k, "n": n, "contestant": name}
            row |= {"backend": backend_name, "fast_accumulation": fast, "input_copies": copies}
            row |= {"timing": asdict(timing), "tflops_per_s": flops_per_s / 1e12}
            row["share_of_peak"] = compute_share_of_peak(flops_per_s, name, self._peak)
            row["time_over_bfloat16"] = timing.median_us / timings[BFLOAT16].median_us
            rows.append(row)
        return rows

    def format_note(self, result: Result) -> str:
        no_peak = "unknown: quaver/roofline/device_specs.py has no data sheet for this device"
        return f"peak: {no_peak if result['peak'] == 'unknown' else result['peak']}"


Float8Operands = tuple[Tensor, Tensor, Tensor, Tensor]
"""Two matrices and their dequant_scales."""


@dataclass(frozen=True)
class Matmul:
    """One matmul of a linear: [m, k] @ [k, n], of views of the linear's row-major matrices."""

    name: str
    sizes: tuple[int, int, int]
    transposed: tuple[bool, bool]
    """Whether the left and the right operands are transposed views."""

    def __str__(self) -> str:
        return self.name

    def make_hp_operands(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return bfloat16 [m, k] and [k, n], as the views that autograd multiplies."""
        m, k, n = self.sizes
        left, right = self.transposed
        return _make_matrix(m, k, device, is_transposed=left), _make_matrix(k, n, device, is_transposed=right)

    def make_float8_operands(self, granularity: str, device: torch.device) -> Float8Operands:
        """Return the operands in float8, in the layout that the backend reads."""
        config = Float8LinearConfig.from_recipe_name(granularity)
        operands = []
        for hp, operand, dim in zip(self.make_hp_operands(device), MATMULS[self.name], (1, 0), strict=True):
            cast = config.casts.get(*operand)
            scale_dim = dim if cast.is_rowwise else None
            power_of_2 = config.round_scales_to_power_of_2
            codes, _, dequant = dynamic_cast(hp.contiguous(), cast.float8_dtype, scale_dim, power_of_2=power_of_2)
            operands.append((lay_out_rows(codes) if dim == 1 else lay_out_columns(codes), dequant))
        (a, a_scale), (b, b_scale) = operands
        return a, b, a_scale, b_scale


def list_matmuls(shape: Shape) -> list[Matmul]:
    """Return the three matmuls of a linear."""
    m, k, n = shape.sizes
    return [
        Matmul("output", (m, k, n), (False, True)),
        Matmul("grad_input", (m, n, k), (False, False)),
        Matmul("grad_weight", (n, m, k), (True, False)),
    ]


def _make_matrix(rows: int, columns: int, device: torch.device, *, is_transposed: bool) -> Tensor:
    if is_transposed:
        return _make_matrix(columns, rows, device, is_transposed=False).t()
    return torch.randn(rows, columns, device=device, dtype=torch.bfloat16)


def _make_float8_call(
    operands: Rotation[Float8Operands], granularity: str, *, use_fast_accum: bool
) -> Callable[[], object]:
    powers_of_2 = Float8LinearConfig.from_recipe_name(granularity).round_scales_to_power_of_2
    options: dict[str, Any] = {"use_fast_accum": use_fast_accum, "scales_are_powers_of_2": powers_of_2}
    return lambda: float8_mm(*operands.next(), out_dtype=torch.bfloat16, **options)


def compute_share_of_peak(flops_per_s: float, contestant: str, peak: PeakFlops | None) -> float | None:
    """Return the share of the peak for the contestant's precision, or None if the peak is unknown."""
    if peak is None:
        return None
    most = peak.flops_per_s if contestant == BFLOAT16 else peak.float8_flops_per_s
    return None if most is None else flops_per_s / most

"""Casts to float8: time, and bytes per second, against compiled PyTorch, torchao, and a copy of the same matrix.

The contestants cast one operand of a linear: `quaver.linear.quantize.Quantizer`, eager and compiled; the same
arithmetic in plain PyTorch (`quaver.recipes.scaling`), compiled; torchao's dynamic casts, if installed.

`floor` is the least bytes per element: the source's bytes times the passes over it, and 1 for each layout of the codes.
A dynamic scale of a matrix, or of rows and of columns, needs one pass for the amaxes and one for the codes. The scale
of a row needs one pass, because a row stays on the chip; a persistent scale needs one. Hardware float8 matmuls read
operands that are contiguous along the contracted dim, so codes are written in two layouts. A CPU's matmuls take any
layout, so one set of codes serves both matmuls if they share a scale. Rates count the bytes of the floor only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Annotated

import torch
from torch import Tensor

from quaver.lab.bench.harness import Rotation, time_alternating
from quaver.lab.bench.options import OperandOptions, ShapeOptions
from quaver.lab.bench.peer import make_torchao_cast
from quaver.lab.bench.results import Result, Row
from quaver.lab.bench.shapes import Shape
from quaver.lab.settings.fields import OneOf, setting
from quaver.linear.gemm import lay_out_columns, lay_out_rows, needs_contracted_dim_contiguous
from quaver.linear.quantize import Quantizer
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.formats import FLOAT8_FORMATS
from quaver.recipes.scaling import PersistentScale, cast_with_persistent_scale, compute_amax, dynamic_cast

CastFunction = Callable[[Tensor], tuple[Tensor, ...]]
"""Maps a matrix [rows, columns] to its float8 codes, its scales, and anything else that the cast returns."""

COPY_LIBRARY = "copy"
"""The contestant that moves the same matrix without a cast."""


@dataclass(frozen=True)
class CastKind:
    """One way to cast an operand: as the input of `recipe`, for the matmuls that contract `dims`."""

    recipe: str
    dims: tuple[int, ...]
    passes: int
    """The least number of passes over the source."""

    @property
    def config(self) -> Float8LinearConfig:
        return Float8LinearConfig.from_recipe_name(self.recipe)

    @property
    def cast(self) -> CastConfig:
        return self.config.casts.input.row

    @property
    def scale_dims(self) -> tuple[int | None, ...]:
        """The dims along which elements share a scale; None for one scale of the tensor."""
        return self.dims if self.cast.is_rowwise else (None,)

    def count_floor_bytes(self, itemsize: int, device: torch.device) -> int:
        """Return the least bytes per element."""
        needs_layouts = needs_contracted_dim_contiguous(device) or self.cast.is_rowwise
        return self.passes * itemsize + (len(self.dims) if needs_layouts else 1)


CAST_KINDS = {
    "tensorwise": CastKind("tensorwise", (1, 0), 2),
    "delayed": CastKind("delayed", (1, 0), 1),
    "rowwise": CastKind("rowwise", (1,), 1),
    "rowwise_both": CastKind("rowwise", (1, 0), 2),
}
"""Casts by name. They serve both matmuls, except `rowwise`, which serves one."""


@dataclass(frozen=True)
class CastBenchmark(ShapeOptions, OperandOptions):
    """Casts of one matrix, the input of a linear, to float8: quaver's, compiled PyTorch's, torchao's; and a copy."""

    shapes: str = setting(
        "1024,2048x4096",
        "Sizes (1024), rows x columns (512x4096) or models (llama-8b, llama-70b), with commas between.",
    )
    casts: tuple[Annotated[str, OneOf(tuple(CAST_KINDS))], ...] = setting(tuple(CAST_KINDS), "Kinds of casts.")

    are_matrices = True
    case_fields = ("matrix", "cast")
    tables = (
        (
            *("library", "mode", "median", "spread", "floor_bytes_per_element", "gb_per_s", "share_of_copy"),
            "same_codes",
        ),
    )

    def measure(self) -> Result:
        """Return a row for each matrix, kind of cast and contestant.

        `same_codes` says whether a contestant's float8 codes equal `quaver.recipes.scaling`'s bit for bit.
        """
        cases = product(self.parse_shapes(), dict.fromkeys(self.casts))
        return self.run_cases(cases, self._make_rows, dtype=str(self.torch_dtype))

    def _make_rows(self, matrix: Shape, name: str) -> list[Row]:
        device, dtype = self.torch_device, self.torch_dtype
        kind, source = CAST_KINDS[name], torch.randn(matrix.sizes, device=device, dtype=dtype)
        inputs, target = Rotation(source.clone, source.nbytes, device), torch.empty_like(source)
        casts = make_contestants(kind, source, with_torchao=self.with_torchao)
        with torch.no_grad():
            expected = _select_codes(casts["PyTorch", "eager"](source))
            codes = {contestant: _select_codes(cast(source)) for contestant, cast in casts.items()}
            same_codes = {contestant: _has_same_codes(actual, expected) for contestant, actual in codes.items()}
            del casts["PyTorch", "eager"]  # the reference of `same_codes` is not timed
            calls: dict[tuple[str, str], Callable[[], object]] = {
                (COPY_LIBRARY, ""): lambda: target.copy_(inputs.next())
            }
            calls |= {contestant: partial(_cast_next, cast, inputs) for contestant, cast in casts.items()}
            timings = time_alternating(calls, device, rounds=self.rounds)
        rows: list[Row] = []
        for (library, mode), timing in timings.items():
            floor = 2 * dtype.itemsize if library == COPY_LIBRARY else kind.count_floor_bytes(dtype.itemsize, device)
            rate = floor * source.numel() / (1e3 * timing.median_us)
            share_of_copy = rate / rows[0]["gb_per_s"] if rows else 1.0
            row: Row = {"matrix": str(matrix), "cast": name, "library": library, "mode": mode, "timing": asdict(timing)}
            row |= {"floor_bytes_per_element": floor, "gb_per_s": rate, "share_of_copy": share_of_copy}
            row |= {"same_codes": same_codes.get((library, mode)), "input_copies": len(inputs)}
            rows.append(row)
        return rows

    def format_note(self, result: Result) -> str:
        return f"dtype {self.dtype}; floor: bytes per element; GB/s are of these"


def _cast_next(cast: CastFunction, inputs: Rotation[Tensor]) -> object:
    return cast(inputs.next())


def make_contestants(kind: CastKind, source: Tensor, *, with_torchao: bool) -> dict[tuple[str, str], CastFunction]:
    """Return the casts by library and mode. A persistent scale, if `kind` has one, fits `source`."""
    config, dims, float8_dtype = kind.config, kind.dims, kind.cast.float8_dtype
    power_of_2 = config.round_scales_to_power_of_2
    scale = None
    if kind.cast.is_persistent:  # as delayed scaling would have it after a step
        quant_scale = FLOAT8_FORMATS[float8_dtype].max / compute_amax(source).float()
        scale = PersistentScale(
            quant_scale, torch.zeros(2, device=source.device), torch.tensor(True), is_known_to_compiler=True
        )

    def cast_with_quaver(hp: Tensor) -> tuple[Tensor, ...]:
        operands = Quantizer(config.casts.input, hp.dtype, scale)(hp, row=1 in dims, column=0 in dims)
        return tuple(part for operand in operands if operand is not None for part in operand[:2] if part is not None)

    def cast_with_pytorch(hp: Tensor, dim: int | None) -> tuple[Tensor, ...]:
        if scale is not None:
            return cast_with_persistent_scale(hp, scale.quant_scale, float8_dtype, power_of_2=power_of_2)
        codes, _, dequant = dynamic_cast(hp, float8_dtype, dim, power_of_2=power_of_2)
        return codes, dequant

    eager = {"quaver": cast_with_quaver, "PyTorch": _make_cast_with_layouts(kind, cast_with_pytorch)}
    if with_torchao and scale is None:
        peers = {dim: make_torchao_cast(float8_dtype, dim, power_of_2=power_of_2) for dim in kind.scale_dims}
        eager["torchao"] = _make_cast_with_layouts(kind, lambda hp, dim: (peers[dim](hp),))
    functions: dict[tuple[str, str], CastFunction] = {}
    for library, cast in eager.items():
        functions[library, "eager"] = cast
        functions[library, "compiled"] = torch.compile(cast, fullgraph=True, dynamic=False)
    return functions


def _make_cast_with_layouts(
    kind: CastKind, cast_along: Callable[[Tensor, int | None], tuple[Tensor, ...]]
) -> CastFunction:
    """Return a cast whose codes are laid out for each matmul; `cast_along` gets a dim, or None for one scale."""
    scale_dims, dims = kind.scale_dims, kind.dims

    def cast(hp: Tensor) -> tuple[Tensor, ...]:
        results = [cast_along(hp, dim) for dim in scale_dims]
        codes = [result[0] for result in results] * (len(dims) // len(results))
        layouts = [
            lay_out_rows(matrix) if dim == 1 else lay_out_columns(matrix)
            for matrix, dim in zip(codes, dims, strict=True)
        ]
        return (*layouts, *(scale for result in results for scale in result[1:]))

    return cast


def _select_codes(results: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in results if tensor.dtype in FLOAT8_FORMATS]


def _has_same_codes(codes: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(codes, expected, strict=True)
    return all(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in pairs)

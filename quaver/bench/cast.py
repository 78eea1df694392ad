"""Casts to float8: time, and bytes per second, against compiled PyTorch, torchao, and a copy of the same matrix.

The contestants cast one operand of a linear: `quaver.quantize.Quantizer`, eager and compiled; the same arithmetic in
plain PyTorch (`quaver.scaling`), compiled; torchao's dynamic casts, if installed.

    floor          bytes per element that the algorithm must move:
                   passes over the source * its bytes + 1 for each layout of the codes
    GB/s           floor * elements / median time: traffic beyond the floor does not count
    share of copy  GB/s over that of `copy_` of the same matrix in the same run, which reads and writes all of it

A dynamic scale of a whole matrix, or of rows and of columns, needs one pass for the amaxes and one for the codes; the
scale of a row needs one pass, because a row stays on the chip; a persistent scale needs one. Hardware float8 matmuls
want each operand contiguous along its contracted dim, so codes are written in two layouts; a CPU's matmuls take any
layout, so one set of codes serves both matmuls wherever there is one scale. Tests count what the kernels really read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from quaver.bench.harness import Rotation, time_alternating
from quaver.bench.peer import torchao_cast
from quaver.bench.results import Row, Setup, run_cases
from quaver.bench.shapes import Matrix
from quaver.config import Float8LinearConfig
from quaver.formats import FORMATS
from quaver.gemm import GemmBackend, along_contracted, backend_for
from quaver.quantize import INPUT, Quantizer, cast_pair
from quaver.scaling import PersistentScale, amax, cast_with_persistent_scale, dynamic_cast

CastFunction = Callable[[Tensor], tuple[Tensor, ...]]
"""From a matrix [rows, columns] to its float8 codes, the scales, and anything else that the cast returns."""

COPY = "copy"
"""The contestant that moves the same matrix without a cast."""


@dataclass(frozen=True)
class CastKind:
    """One way to cast an operand: as the input of `recipe`, for the matmuls that contract `dims`."""

    recipe: str
    dims: tuple[int, ...]
    passes: int
    """Over the source, at least."""

    @property
    def config(self) -> Float8LinearConfig:
        return Float8LinearConfig.from_recipe_name(self.recipe)

    @property
    def is_rowwise(self) -> bool:
        return self.config.casts.input.is_rowwise

    @property
    def is_persistent(self) -> bool:
        return self.config.casts.input.is_persistent

    def floor(self, itemsize: int, device: torch.device) -> int:
        """Bytes per element."""
        is_native = backend_for(device, rowwise=self.is_rowwise) is GemmBackend.NATIVE
        return self.passes * itemsize + (len(self.dims) if is_native or self.is_rowwise else 1)


KINDS = {
    "tensorwise": CastKind("tensorwise", (1, 0), 2),
    "delayed": CastKind("delayed", (1, 0), 1),
    "rowwise": CastKind("rowwise", (1,), 1),
    "rowwise_both": CastKind("rowwise", (1, 0), 2),
}
"""By name: casts for both matmuls, except `rowwise`, which is for one."""


def bench_cast(setup: Setup, matrices: Sequence[Matrix], kinds: Sequence[str]) -> dict[str, Any]:
    """Run the benchmark; returns `results.result` of a row for each matrix, kind of cast and contestant.

    `same_codes` says whether a contestant's float8 codes are those of `quaver.scaling`, bit for bit.
    """
    rows_of = partial(_rows_of, setup)
    return run_cases("cast", setup, product(matrices, kinds), rows_of, dtype=str(setup.dtype))


def _rows_of(setup: Setup, matrix: Matrix, name: str) -> list[Row]:
    device, dtype = setup.device, setup.dtype
    kind, source = KINDS[name], torch.randn(matrix.rows, matrix.columns, device=device, dtype=dtype)
    inputs, target = Rotation(source.clone, source.nbytes, device), torch.empty_like(source)
    casts = contestants_of(kind, source, setup.with_torchao)
    with torch.no_grad():
        expected = _codes(_plain_cast(kind, _persistent_scale(source, kind))(source))
        same = {contestant: _same(_codes(cast(source)), expected) for contestant, cast in casts.items()}
        calls = {contestant: _next_call(cast, inputs) for contestant, cast in casts.items()}
        copy = {(COPY, ""): lambda: target.copy_(inputs.next())}
        timed = {" ".join(each): call for each, call in (copy | calls).items()}
        timings = time_alternating(timed, device, rounds=setup.rounds)
    rows: list[Row] = []
    for contestant in ((COPY, ""), *casts):
        timing = timings[" ".join(contestant)]
        floor = 2 * dtype.itemsize if contestant[0] == COPY else kind.floor(dtype.itemsize, device)
        rate = floor * source.numel() / (1e3 * timing.median_us)
        rows.append(
            {
                "matrix": str(matrix),
                "cast": name,
                "library": contestant[0],
                "mode": contestant[1],
                "timing": asdict(timing),
                "floor_bytes_per_element": floor,
                "gb_per_s": rate,
                "share_of_copy": rate / rows[0]["gb_per_s"] if rows else 1.0,
                "same_codes": same.get(contestant),
                "input_copies": len(inputs),
            }
        )
    return rows


def _next_call(cast: CastFunction, inputs: Rotation[Tensor]) -> Callable[[], object]:
    return lambda: cast(inputs.next())


def contestants_of(kind: CastKind, source: Tensor, with_torchao: bool) -> dict[tuple[str, str], CastFunction]:
    """The casts by library and mode; the persistent scale, where `kind` has one, fits `source`."""
    scale = _persistent_scale(source, kind)
    ours = _quaver_cast(kind, scale)
    functions = {
        ("quaver", "eager"): ours,
        ("quaver", "compiled"): _compiled(ours),
        ("PyTorch", "compiled"): _compiled(_plain_cast(kind, scale)),
    }
    if with_torchao and not kind.is_persistent:
        peer = _torchao_cast(kind)
        functions |= {("torchao", "eager"): peer, ("torchao", "compiled"): _compiled(peer)}
    return functions


def _compiled(function: CastFunction) -> CastFunction:
    return torch.compile(function, fullgraph=True, dynamic=False)


def _persistent_scale(source: Tensor, kind: CastKind) -> PersistentScale | None:
    """A scale that fits `source`, as delayed scaling would have it after a step."""
    if not kind.is_persistent:
        return None
    largest = FORMATS[kind.config.casts.input.float8_dtype].max
    quant_scale = largest / amax(source).float()
    return PersistentScale(quant_scale, torch.zeros(2, device=source.device), torch.tensor(True))


def _quaver_cast(kind: CastKind, scale: PersistentScale | None) -> CastFunction:
    config, dims = kind.config, kind.dims

    def cast(hp: Tensor) -> tuple[Tensor, ...]:
        made = Quantizer(cast_pair(config, INPUT, hp.dtype), scale)(hp, last=1 in dims, first=0 in dims)
        return tuple(part for operand in made[:2] if operand is not None for part in operand if part is not None)

    return cast


def _plain_cast(kind: CastKind, scale: PersistentScale | None) -> CastFunction:
    config, dims = kind.config, kind.dims
    float8_dtype, power_of_2 = config.casts.input.float8_dtype, config.round_scales_to_power_of_2
    is_rowwise = kind.is_rowwise

    def cast(hp: Tensor) -> tuple[Tensor, ...]:
        if is_rowwise:
            made = [dynamic_cast(hp, float8_dtype, dim, power_of_2=power_of_2) for dim in dims]
            layouts = [along_contracted(codes, dim) for (codes, _, _), dim in zip(made, dims, strict=True)]
            return (*layouts, *(dequant for _, _, dequant in made))
        if scale is None:
            codes, *rest = dynamic_cast(hp, float8_dtype, power_of_2=power_of_2)
        else:
            codes, *rest = cast_with_persistent_scale(hp, scale.quant_scale, float8_dtype, power_of_2=power_of_2)
        return (*(along_contracted(codes, dim) for dim in dims), *rest)

    return cast


def _torchao_cast(kind: CastKind) -> CastFunction:
    config, dims = kind.config, kind.dims
    float8_dtype, power_of_2 = config.casts.input.float8_dtype, config.round_scales_to_power_of_2
    of_dims = [torchao_cast(float8_dtype, dim, power_of_2=power_of_2) for dim in (dims if kind.is_rowwise else (None,))]

    def cast(hp: Tensor) -> tuple[Tensor, ...]:
        made = [cast_one(hp) for cast_one in of_dims]
        made = made if len(made) == len(dims) else made * len(dims)  # one set of codes, in each layout
        return tuple(along_contracted(codes, dim) for codes, dim in zip(made, dims, strict=True))

    return cast


def _codes(results: Sequence[Tensor]) -> list[Tensor]:
    return [each for each in results if each.dtype in FORMATS]


def _same(codes: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(codes, expected, strict=True)
    return all(torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8)) for ours, theirs in pairs)

"""Casts to float8: time, and bytes per second, against compiled PyTorch, torchao, and a copy of the same matrix.

Measured is what a linear does to one operand (`quaver.casts.MatrixCasts`), eagerly and compiled; the same arithmetic as
plain PyTorch (`quaver.scaling`) compiled; and torchao's dynamic casts where it is installed. Each call gets the next of
several equal matrices, which together are larger than the last-level cache.

    floor          bytes per element that the algorithm must move:
                   passes over the source * its bytes + 1 for each layout of the codes
    GB/s           floor * elements / median time, so that traffic beyond the floor earns nothing
    share of copy  GB/s over those of `copy_` of the same matrix in the same run, which reads and writes all of it

A pass ends where a scale must be known: a dynamic scale of the whole matrix, or of rows and of columns, takes one pass
for amaxes and one for codes; the scale of a row needs the row alone, which stays on the chip; a kept one is there.
Where hardware multiplies float8, matmuls want each operand along their contracted dim, so that codes are written in two
layouts; a CPU's take any, and one set of codes does for both wherever there is one scale.

Beside the floor stands what was counted, per element: the bytes that the C extension read and wrote, those of the
compiler's schedule of its kernels, or of the operators' tensors (quaver/bench/traffic.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quaver.bench.cast_contestants import COPY, KINDS, CastFunction, contestants_of, copy_of
from quaver.bench.harness import Timing, time_alternating
from quaver.bench.results import collecting, result
from quaver.bench.rotation import Rotation
from quaver.bench.shapes import Matrix


@dataclass(frozen=True)
class Row:
    """One contestant on one matrix. `same_codes`: whether its float8 is that of `quaver.scaling`, bit for bit."""

    matrix: str
    cast: str
    library: str
    mode: str
    timing: Timing
    floor_bytes_per_element: float
    counted_bytes_per_element: float | None
    counted_by: str
    gb_per_s: float
    share_of_copy: float
    same_codes: bool | None
    input_copies: int


def bench_cast(
    matrices: Sequence[Matrix],
    kinds: Sequence[str],
    *,
    device: torch.device,
    dtype: torch.dtype,
    rounds: int,
    with_torchao: bool,
    report: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Run the benchmark; returns what `results.result` makes of its rows."""
    with collecting() as collected:
        for matrix in matrices:
            for name in kinds:
                report(f"{matrix}, {name}")
                torch.compiler.reset()
                collected.rows += _rows_of(matrix, name, device, dtype, rounds, with_torchao)
    return result("cast", collected, device=device, with_torchao=with_torchao, dtype=str(dtype))


def _rows_of(
    matrix: Matrix, name: str, device: torch.device, dtype: torch.dtype, rounds: int, with_torchao: bool
) -> list[Row]:
    source = torch.randn(matrix.rows, matrix.columns, device=device, dtype=dtype)
    inputs = Rotation(source.clone, source.nbytes, device)
    with torch.no_grad():
        contestants = [copy_of(source), *contestants_of(KINDS[name], source, with_torchao)]
        calls = {each.name: _next_call(each.function, inputs) for each in contestants}
        timings = time_alternating(calls, device, rounds=rounds)
    elements = source.numel()
    rates = {each.name: each.floor * elements / (1e3 * timings[each.name].median_us) for each in contestants}
    return [
        Row(
            matrix=str(matrix),
            cast=name,
            library=each.library,
            mode=each.mode,
            timing=timings[each.name],
            floor_bytes_per_element=each.floor,
            counted_bytes_per_element=None if each.traffic.moved is None else each.traffic.moved / elements,
            counted_by=each.traffic.source,
            gb_per_s=rates[each.name],
            share_of_copy=rates[each.name] / rates[COPY],
            same_codes=each.same_codes,
            input_copies=len(inputs),
        )
        for each in contestants
    ]


def _next_call(function: CastFunction, inputs: Rotation[Tensor]) -> Callable[[], object]:
    return lambda: function(inputs.next())

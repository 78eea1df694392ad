"""Times each cast and copy alone, in GB/s of the bytes that it must move. The rate of a plain copy is the limit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_parts.other_measurements import EXPERTS
from benchmarks.gpu_parts.part_context import Call, PartContext, Row, catch_failures, make_timing_row
from quaver.experts.cast import group_amax
from quaver.kernels.cast import cast_with_scale, to_column_major
from quaver.linear.quantize import Quantizer
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.formats import FLOAT8_FORMATS
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scaling import PersistentScale, compute_amax

E4M3 = torch.float8_e4m3fn
DIRECTIONS = {"both": (True, True), "row": (True, False), "column": (False, True)}
RECIPES = ("tensorwise", "rowwise", "delayed", "blockwise", "mxfp8")


def time_kernels(context: PartContext) -> Iterator[Row]:
    """Yield a row for each matrix and kernel."""
    model = context.model
    sizes = ((context.tokens, model.dim), (context.tokens, model.hidden_dim), (model.dim, model.hidden_dim))
    for rows, columns in sizes:
        hp = context.randn(rows, columns)
        about = {"size": f"{rows} x {columns}"}
        for kind in (_make_copies, _make_casts):
            named = kind(hp).items()
            yield from catch_failures(
                (about | {"what": name}, partial(_time_kernel, context, hp, *kernel)) for name, kernel in named
            )


Kernel = tuple[Call, float]
"""The call, and the bytes per element that it must read and write."""


def _time_kernel(context: PartContext, hp: Tensor, call: Call, copy_bytes: float) -> Iterator[Row]:
    measured = context.time({"it": call}, rounds=20)["it"]
    moved = copy_bytes * hp.numel()
    yield {
        "timing": make_timing_row(measured),
        "gb_per_s": moved / (1e3 * measured.median_us),
        "ps_per_element": 1e6 * measured.median_us / hp.numel(),
    }


def _make_copies(hp: Tensor) -> dict[str, Kernel]:
    """Return plain copies, and transposing copies of codes by quaver, aten and Inductor."""
    codes = hp.to(E4M3)
    of_bytes, target = codes.view(torch.uint8), torch.empty_like(hp)
    inductor = _compile(lambda matrix: matrix.t().contiguous(), hp.device)
    return {
        "copy of bfloat16": (lambda: target.copy_(hp), 4),
        "copy of codes": (lambda: of_bytes.clone(), 2),
        "transpose of codes, column_major": (lambda: to_column_major(codes), 2),
        "transpose of codes, aten": (lambda: of_bytes.t().contiguous(), 2),
        "transpose of codes, Inductor": (lambda: inductor(of_bytes), 2),
    }


def _compile(function: Callable[[Tensor], Tensor], device: torch.device) -> Callable[[Tensor], Tensor]:
    return torch.compile(
        function, fullgraph=True, dynamic=False, backend="aot_eager" if device.type == "cpu" else "inductor"
    )


def _make_casts(hp: Tensor) -> dict[str, Kernel]:
    """Return eager casts by each recipe and direction, with square blocks, with known scales, and grouped amaxes."""
    kernel_of: dict[str, Kernel] = {}
    one = torch.ones((), device=hp.device)
    for recipe in RECIPES:
        casts = Float8LinearConfig.from_recipe_name(recipe).casts.input
        quantizer = Quantizer(casts, hp.dtype, _make_persistent_scale(casts, hp))
        for name, (row, column) in DIRECTIONS.items():
            reads = 1 if casts.row.is_persistent or (casts.row.block_size and name != "both") else 2
            copy_bytes = 2 * reads + row + column
            kernel_of[f"{recipe}, {name}"] = (partial(quantizer, hp, row=row, column=column), copy_bytes)
    for recipe in ("blockwise", "mxfp8"):
        casts = Float8LinearConfig.from_recipe_name(recipe).casts.weight
        kernel_of[f"{recipe}, square blocks"] = (
            partial(Quantizer(casts, hp.dtype, None), hp, row=True, column=True),
            3,
        )
    groups = torch.arange(hp.shape[0], device=hp.device) * EXPERTS // hp.shape[0]
    kernel_of[f"amax of columns in {EXPERTS} groups of rows"] = (partial(group_amax, hp, groups, EXPERTS), 2)
    kernel_of["known scale, both"] = (lambda: cast_with_scale(hp, E4M3, one, one, ""), 4)
    kernel_of["known scale, column"] = (lambda: cast_with_scale(hp, E4M3, None, one, ""), 3)
    return kernel_of


def _make_persistent_scale(casts: OperandCasts, hp: Tensor) -> PersistentScale | None:
    if not casts.row.is_persistent:
        return None
    quant_scale = FLOAT8_FORMATS[casts.row.float8_dtype].max / compute_amax(hp).float()
    return PersistentScale(quant_scale, torch.zeros(2, device=hp.device), torch.tensor(True))

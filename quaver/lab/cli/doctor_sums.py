"""The part of `quaver doctor --model --hardware`: what a GPU's sums would lose in each matmul, beside its casts."""

from collections.abc import Iterator
from typing import Any

from rich.table import Table

from quaver.lab.cli.console import make_table
from quaver.numerics.survey_sums import MatmulSums
from quaver.recipes.scaling import without_inf

MATMULS_SHOWN, MATMULS_NAMED = 12, 4
"""How many of the matmuls that sums cost most stand in the table and in the sentence below it; --json has all."""


def views_of_sums(sums: list[MatmulSums], hardware: str) -> Iterator[str | Table]:
    """The table of those that sums cost most, and what to do about them."""
    yield f"decibels of the casts, and of an {hardware.upper()}'s sums with and without fast accumulation"
    columns = ("matmul\n  its accumulation", "casts", "fast", "exact")
    rows = [
        (f"{each.name} {each.matmul}\n  {_accumulation(each)}", *(f"{value:.1f}" for value in each.sums))
        for each in sums[:MATMULS_SHOWN]
    ]
    yield make_table(None, columns, rows=rows, wrapped=columns[:1], right=columns[1:])
    yield _verdict(sums, hardware)


def _accumulation(matmul: MatmulSums) -> str:
    return "fast" if matmul.use_fast_accum else "exact"


def _verdict(sums: list[MatmulSums], hardware: str) -> str:
    costly = [each for each in sums if each.margin < 0]
    if not sums:
        return f"no matmul of these recipes runs in float8 on an {hardware.upper()}"
    if not costly:
        return f"in all {len(sums)} float8 matmuls the sums lose less than the casts, or than rounding to bfloat16"
    names = ", ".join(f"{each.name} {each.matmul}" for each in costly[:MATMULS_NAMED])
    more = f" and {len(costly) - MATMULS_NAMED} more" if len(costly) > MATMULS_NAMED else ""
    is_remedy = any(each.use_fast_accum and each.sums.exact > each.used for each in costly)
    remedy = "; float8.use_fast_accum=false, gemm_config_output=Float8GemmConfig(), adds exactly" if is_remedy else ""
    return f"sums lose more than the casts in {len(costly)} of {len(sums)} float8 matmuls: {names}{more}{remedy}"


def sums_as_dict(matmul: MatmulSums) -> dict[str, Any]:
    """One matmul for JSON."""
    decibels = without_inf(matmul.sums._asdict())
    return {"name": matmul.name, "matmul": matmul.matmul, "use_fast_accum": matmul.use_fast_accum, **decibels}

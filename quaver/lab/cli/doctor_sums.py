"""The table of `quaver doctor --model --emulate-sums-of`: the precision that a GPU's sums lose in each matmul."""

from collections.abc import Iterator

from rich.table import Table

from quaver.lab.doctor.sum_survey import MatmulSums
from quaver.lab.terminal.tables import make_table

MAX_SHOWN_MATMULS, MAX_NAMED_MATMULS = 12, 4
"""The numbers of matmuls in the table and in the sentence below it. --json has all."""


def iter_sum_views(sums: list[MatmulSums], gpu: str) -> Iterator[str | Table]:
    """Yield a table of the matmuls that lose most to sums, and what to do about them."""
    yield f"decibels of the casts, and of the sums of one {gpu.upper()} with and without fast accumulation"
    columns = ("matmul\n  its accumulation", "casts", "fast", "exact")
    rows = [
        (
            f"{matmul.name} {matmul.matmul}\n  {'fast' if matmul.use_fast_accum else 'exact'}",
            *(f"{value:.1f}" for value in matmul.sums),
        )
        for matmul in sums[:MAX_SHOWN_MATMULS]
    ]
    yield make_table(None, columns, rows=rows, wrapped=columns[:1], right=columns[1:])
    yield _describe_verdict(sums, gpu)


def _describe_verdict(sums: list[MatmulSums], gpu: str) -> str:
    costly = [matmul for matmul in sums if matmul.margin_db < 0]
    if not sums:
        return f"no matmul of these recipes runs in float8 on {gpu.upper()}"
    if not costly:
        return f"in all {len(sums)} float8 matmuls the sums lose less than the casts, or than rounding to bfloat16"
    names = ", ".join(f"{matmul.name} {matmul.matmul}" for matmul in costly[:MAX_NAMED_MATMULS])
    more = f" and {len(costly) - MAX_NAMED_MATMULS} more" if len(costly) > MAX_NAMED_MATMULS else ""
    is_remedy = any(matmul.use_fast_accum and matmul.sums.exact > matmul.used_db for matmul in costly)
    remedy = "; float8.use_fast_accum=false, gemm_config_output=Float8GemmConfig(), adds exactly" if is_remedy else ""
    return f"sums lose more than the casts in {len(costly)} of {len(sums)} float8 matmuls: {names}{more}{remedy}"

"""The memory table as a page, and what must hold in it."""

from typing import Any

from benchmarks.record import ROOT, markdown

RECORD = ROOT / "benchmarks" / "results" / "memory.json"
PAGE = ROOT / "benchmarks" / "results" / "memory.md"

Row = dict[str, Any]

BASELINE = "bfloat16"

PROMISED = 1.01
"""The promise: a float8 module or model peaks at no more than this times bfloat16. A lone linear is only reported."""


def baseline_of(row: Row, rows: list[Row]) -> Row:
    """The bfloat16 row that is like `row` otherwise.

    Raises:
        ValueError: there is none among `rows`.
    """
    like = [each for each in rows if each["precision"] == BASELINE and _place(each) == _place(row)]
    if not like:
        raise ValueError(f"expected a bfloat16 row like {name_of(row)}; measure bfloat16 too")
    return like[0]


def _place(row: Row) -> tuple[Any, ...]:
    return tuple(row[key] for key in ("module", "checkpointing", "ranks", "compiled"))


def name_of(row: Row) -> str:
    """A row in words."""
    ranks = "1 process" if row["ranks"] == 1 else f"FSDP2 on {row['ranks']} ranks"
    how = "compiled" if row["compiled"] else "eager"
    return f"{row['module']}, {row['precision']}, checkpointing {row['checkpointing']}, {ranks}, {how}"


def peak_of(row: Row) -> int:
    """What a step adds at its highest point: without scratch where that is known, all of it elsewhere."""
    tensors: int | None = row["added_tensor_peak_bytes"]
    everything: int = row["added_peak_bytes"]
    return everything if tensors is None else tensors


def exceptions(rows: list[Row]) -> list[Row]:
    """The float8 rows, lone linears aside, whose peak breaks the promise."""
    promised = (row for row in rows if row["precision"] != BASELINE and row["module"] != "linear")
    return [row for row in promised if ratios(row, rows)["peak"] > PROMISED]


def ratios(row: Row, rows: list[Row]) -> dict[str, Any]:
    """Of `row` to its bfloat16 row: the peak, the peak with scratch, and the bytes saved for backward."""
    base = baseline_of(row, rows)
    return {
        "peak": peak_of(row) / peak_of(base),
        "peak_with_scratch": row["added_peak_bytes"] / base["added_peak_bytes"],
        "saved": row["saved_bytes"] / base["saved_bytes"],
    }


HEADINGS = {
    (1, False): "One process, eager",
    (1, True): "One process, compiled",
    (2, False): "FSDP2 on 2 ranks, eager",
    (2, True): "FSDP2 on 2 ranks, compiled",
}


def page(results: dict[str, Any]) -> str:
    """The whole page, in Markdown."""
    rows = results["rows"]
    head = ["# Memory of a training step, float8 against bfloat16", _provenance(results), _HOW_TO_READ]
    return "\n\n".join([*head, tables(rows), _exceptions(rows)]) + "\n"


def tables(rows: list[Row]) -> str:
    """A table for each way to run that is among `rows`."""
    parts = []
    for (ranks, compiled), heading in HEADINGS.items():
        here = _of(rows, ranks=ranks, compiled=compiled)
        if here:
            parts += [f"## {heading}", _table(here)]
    return "\n\n".join(parts)


def _provenance(results: dict[str, Any]) -> str:
    about, size = results["environment"], results["size"]
    changed = " with changes that were not committed" if about["uncommitted_changes_in_quaver"] else ""
    return (
        f"Measured on {about['date']} in {about['minutes']:.0f} minutes by `{about['command']}`: {about['device']}, "
        f"{about['threads']} thread, Python {about['python']}, torch {about['torch']}, "
        f"commit {about['commit']}{changed}. This page is made from `memory.json`.\n\n"
        f"A step of one rank has {size['sequences']} sequences of {size['seq_len']} tokens. The width is "
        f"{size['dim']}, the feed-forward's {size['hidden_dim']}, with {size['n_heads']} heads and "
        f"{size['n_kv_heads']} of keys and values; `linear` is {size['dim']} to {size['hidden_dim']}. "
        "Parameters are float32, autocast bfloat16, AdamW is fused."
    )


_HOW_TO_READ = """\
**peak** is the most that tensors take in a step beyond parameters and optimizer state, **saved** what is alive
between forward and backward; both in MB (10^6 bytes) for bfloat16, and as a share of bfloat16's for float8. A peak in
parentheses counts the scratch of operations too, where that changes a share by 0.005 or more: most of it is
the exact float8 matmul of the CPU, which widens what float8 hardware reads directly.

Every allocation of PyTorch's CPU allocator is counted, in eager and in compiled code, FSDP2's buffers included. Scratch
is what an operation allocates and frees before it returns. A module's input is produced inside the step by an operation
that does not save it (benchmarks/memory_modules.py). `full` is `apply_activation_checkpointing` with mode "full", `op`
with "selective". Under FSDP2 each figure is the least of eight steps, because gloo's threads free buffers at chance
moments."""


def _table(rows: list[Row]) -> str:
    recipes = [name for name in dict.fromkeys(row["precision"] for row in rows) if name != BASELINE]
    head = ["module", "checkpointing", "bfloat16 peak, MB", "saved, MB"]
    head += [f"`{name}` {figure}" for name in recipes for figure in ("peak", "saved")]
    lines = []
    for base in (row for row in rows if row["precision"] == BASELINE):
        peak, saved = (f"{figure / 1e6:.2f}" for figure in (peak_of(base), base["saved_bytes"]))
        cells = [base["module"], base["checkpointing"], peak, saved]
        like = {row["precision"]: row for row in rows if _place(row) == _place(base)}
        for name in recipes:
            cells += _shares(like[name], rows)
        lines.append(cells)
    return markdown(head, lines)


def _shares(row: Row, rows: list[Row]) -> list[str]:
    of = ratios(row, rows)
    differs = abs(of["peak_with_scratch"] - of["peak"]) >= 0.005
    scratch = f" ({of['peak_with_scratch']:.2f})" if differs else ""
    return [f"{of['peak']:.3f}{scratch}", f"{of['saved']:.3f}"]


def _of(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _exceptions(rows: list[Row]) -> str:
    lines = [
        f"- {name_of(row)}: {peak_of(row):,} bytes, bfloat16 {peak_of(baseline_of(row, rows)):,}"
        for row in exceptions(rows)
    ]
    title = f"**Peaks above {PROMISED} of bfloat16**, in tensors, lone linears aside"
    return f"{title}: none." if not lines else "\n\n".join([f"{title}:", "\n".join(lines), _WHY_ABOVE])


_WHY_ABOVE = """\
They are attention or a feed-forward sharded or checkpointed by itself. A checkpoint holds the module's bfloat16 input,
and the linears that read it save its codes as well, one byte per element. FSDP2 holds both casts of a row-wise weight,
two bytes per element; compiled code of a CPU holds the feed-forward's product and both of its casts at once. In a block
neither is at the peak. [design/0008](../../docs/design/0008-what-earns-its-place.md) says what it would take."""

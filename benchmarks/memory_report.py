"""The memory table as a page, and what must hold in it."""

from typing import Any

from benchmarks.record import ROOT, markdown

RECORD = ROOT / "benchmarks" / "results" / "memory.json"
PAGE = ROOT / "benchmarks" / "results" / "memory.md"

Row = dict[str, Any]

BASELINE = "bfloat16"

SCALES = 1.08
"""What float8 may keep more than bfloat16 where both keep only inputs: scales, a few numbers for each row of an input
and each row and column of a weight, which weigh most in the smallest modules."""


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


def has_scratch(row: Row) -> bool:
    """Whether the peak with scratch is known: tensors alone are measured again on another CPU."""
    return row["added_peak_bytes"] is not None


def peak_of(row: Row) -> int:
    """What a step adds at its highest point: without scratch where that is known, all of it elsewhere."""
    tensors: int | None = row["added_tensor_peak_bytes"]
    everything: int = row["added_peak_bytes"]
    return everything if tensors is None else tensors


def exceptions(rows: list[Row]) -> list[str]:
    """The float8 rows that take more than bfloat16, at the peak or between forward and backward, and how much more."""
    found = []
    for row in (row for row in rows if row["precision"] != BASELINE):
        base = baseline_of(row, rows)
        if peak_of(row) > peak_of(base):
            found.append(f"{name_of(row)}: peak {peak_of(row):,} bytes, bfloat16 {peak_of(base):,}")
        if row["kept_bytes"] > SCALES * base["kept_bytes"]:
            found.append(f"{name_of(row)}: keeps {row['kept_bytes']:,} bytes, bfloat16 {base['kept_bytes']:,}")
    return found


def ratios(row: Row, rows: list[Row]) -> dict[str, Any]:
    """Of `row` to its bfloat16 row: the peak, the peak with scratch or None, and the bytes kept for the backward."""
    base = baseline_of(row, rows)
    return {
        "peak": peak_of(row) / peak_of(base),
        "peak_with_scratch": row["added_peak_bytes"] / base["added_peak_bytes"] if has_scratch(row) else None,
        "kept": row["kept_bytes"] / base["kept_bytes"],
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
    head = ["# Memory of a training step, float8 beside bfloat16", _provenance(results), _HOW_TO_READ]
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
        f"commit {about['commit']}{changed}.{_measured_again(results)} This page is made from `memory.json`.\n\n"
        f"A step of one rank has {size['sequences']} sequences of {size['seq_len']} tokens. The width is "
        f"{size['dim']}, the feed-forward's {size['hidden_dim']}, with {size['n_heads']} heads and "
        f"{size['n_kv_heads']} of keys and values; `linear` is {size['dim']} to {size['hidden_dim']}. "
        "Parameters are float32, autocast bfloat16, AdamW is fused."
    )


def _measured_again(results: dict[str, Any]) -> str:
    parts = []
    for about in results.get("again", []):
        where = "there" if about["device"] == results["environment"]["device"] else f"on {about['device']}"
        changed = " with changes that were not committed" if about["uncommitted_changes_in_quaver"] else ""
        parts.append(
            f" {about['rows']} rows were measured again on {about['date']} by `{about['command']}`, {where}, commit "
            f"{about['commit']}{changed}."
        )
    if any(not has_scratch(row) for row in results["rows"]):
        parts.append(
            " Tensors are the same on each CPU: of those rows, those that gave other figures stand here without their "
            "scratch, which was measured on one CPU only, and are marked (?)."
        )
    return "".join(parts)


_HOW_TO_READ = """\
**These rows were measured before the core was rebuilt**. What the rebuilt core takes stands in
[design/0008](../../docs/design/0008-what-earns-its-place.md); an attention module that is checkpointed or sharded by
itself takes more than in bfloat16 there.

**peak** is the most that tensors take in a step beyond parameters and optimizer state, **kept** what is alive
between forward and backward; both in MB (10^6 bytes) for bfloat16, and as a share of bfloat16's for float8. A peak in
parentheses counts the scratch of operations too, where that changes a share by 0.005 or more: most of it is
the exact float8 matmul of the CPU, which widens what float8 hardware reads directly.

Every allocation of PyTorch's CPU allocator is counted, in eager and in compiled code, FSDP2's buffers included. Scratch
is what an operation allocates and frees before it returns. A module's input is produced inside the step by an operation
that does not save it (benchmarks/memory_modules.py). `full` is `apply_activation_checkpointing` with mode "full", `op`
with "selective". Under FSDP2 each figure is the least of two steps, because gloo's threads free buffers at chance
moments."""


def _table(rows: list[Row]) -> str:
    recipes = [name for name in dict.fromkeys(row["precision"] for row in rows) if name != BASELINE]
    head = ["module", "checkpointing", "bfloat16 peak, MB", "kept, MB"]
    head += [f"`{name}` {figure}" for name in recipes for figure in ("peak", "kept")]
    lines = []
    for base in (row for row in rows if row["precision"] == BASELINE):
        cells = [base["module"], base["checkpointing"], f"{peak_of(base) / 1e6:.2f}", f"{base['kept_bytes'] / 1e6:.2f}"]
        like = {row["precision"]: row for row in rows if _place(row) == _place(base)}
        for name in recipes:
            cells += _shares(like[name], rows)
        lines.append(cells)
    return markdown(head, lines)


def _shares(row: Row, rows: list[Row]) -> list[str]:
    of = ratios(row, rows)
    scratch = ""
    if not has_scratch(row):
        scratch = " (?)"
    elif abs(of["peak_with_scratch"] - of["peak"]) >= 0.005:
        scratch = f" ({of['peak_with_scratch']:.2f})"
    return [f"{of['peak']:.3f}{scratch}", f"{of['kept']:.3f}"]


def _of(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _exceptions(rows: list[Row]) -> str:
    found = exceptions(rows)
    if not found:
        return "**Above bfloat16**: no row, in tensors."
    return "**Above bfloat16**, in tensors:\n\n" + "\n".join(f"- {line}" for line in found)

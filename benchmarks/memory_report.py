"""The memory table as a page, and what must hold in it."""

from collections import Counter
from typing import Any

from benchmarks.record import ROOT, markdown
from quaver.recorder.allocator import Usage

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
        raise ValueError(f"expected a bfloat16 row beside {name_of(row)}; measure bfloat16 too")
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


def kept_beyond(usage: Usage, base: Usage) -> list[str]:
    """The tensors that one step keeps for its backward and the other does not, by size, largest first."""
    sizes = Counter(block.size_bytes for block in usage.at_mark)
    sizes.subtract(block.size_bytes for block in base.at_mark)
    maker = {block.size_bytes: block.ranges[0] if block.ranges else "unknown" for block in usage.at_mark}
    more = sorted((size for size, count in sizes.items() if count > 0), reverse=True)
    return [f"{sizes[size]} x {size:,} bytes, made in {maker[size]}" for size in more]


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
    return "\n\n".join([*head, tables(rows), "## Reading", *_reading(results), _exceptions(rows)]) + "\n"


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
**peak** is the most that tensors take in a step beyond parameters and optimizer state, **kept** what is alive
between forward and backward; both in MB (10^6 bytes) for bfloat16, and as a share of bfloat16's for float8. A peak in
parentheses counts the scratch of operations too, where that changes a share by 0.005 or more: most of it is
the exact float8 matmul of the CPU, which widens what float8 hardware reads as it is.

What is counted: every allocation of PyTorch's CPU allocator, in eager and in compiled code, FSDP2's buffers included
(quaver/recorder/allocator.py). Scratch is what an operation allocates and frees before it returns. A module's input
is made inside the step by an operation that does not keep it, and only the module's own graph holds it, as in a network
(benchmarks/memory_modules.py). `full` is `apply_activation_checkpointing` with mode "full", `op` with "selective"."""


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


def _above_with_scratch(row: Row, rows: list[Row]) -> bool:
    return has_scratch(row) and ratios(row, rows)["peak_with_scratch"] > 1


# ---- what the figures say --------------------------------------------------------------------------------------------


def _reading(results: dict[str, Any]) -> list[str]:
    rows = results["rows"]
    return [_holds(rows), _causes(results), _CHOICES, _peaks(rows), _kept(rows), _weight_copies(results)]


def _of(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _peaks(rows: list[Row]) -> str:
    float8 = [row for row in rows if row["precision"] != BASELINE]
    shares = [ratios(row, rows)["peak"] for row in float8]
    above = [row for row in float8 if _above_with_scratch(row, rows)]
    places = Counter(row["module"] for row in above)
    named = ", ".join(f"{count} of {module}" for module, count in places.items()) or "none"
    unknown = sum(not has_scratch(row) for row in float8)
    of_known = f"{len(above)} of {len(float8) - unknown} where it was measured" if unknown else str(len(above))
    return (
        f"**Peaks.** Of {len(float8)} float8 rows the peak is {_range(shares)} of "
        f"bfloat16's. With the scratch of operations it is above bfloat16's in {of_known}: {named}. Scratch is "
        "bounded, and weighs most where a step is but a matmul: packed panels of operands with AVX512_BF16 and no AMX, "
        "elsewhere one operand in bfloat16 and a panel of the other."
    )


def _kept(rows: list[Row]) -> str:
    lines = []
    for ranks, compiled in HEADINGS:
        blocks = _of(rows, module="1 block", checkpointing="none", ranks=ranks, compiled=compiled)
        shares = [(row["precision"], ratios(row, rows)["kept"]) for row in blocks if row["precision"] != BASELINE]
        if shares:
            lines.append(
                f"- {HEADINGS[ranks, compiled]}: " + ", ".join(f"`{name}` {kept:.3f}" for name, kept in shares)
            )
    return "**Kept for the backward** by one block without checkpointing, as a share of bfloat16's:\n\n" + "\n".join(
        lines
    )


def _weight_copies(results: dict[str, Any]) -> str:
    rows, size = results["rows"], results["size"]
    dim, kv_dim = size["dim"], size["dim"] // size["n_heads"] * size["n_kv_heads"]
    copies = 2 * (2 * dim * dim + 2 * dim * kv_dim + 3 * dim * size["hidden_dim"])
    found = _of(rows, module="1 block", checkpointing="none", ranks=1, compiled=False)
    kept = {row["precision"]: row["kept_bytes"] for row in found}
    without = ", ".join(f"`{name}` {kept[name] / (kept[BASELINE] - copies):.2f}" for name in kept if name != BASELINE)
    return (
        f"Eager bfloat16 keeps {copies / 1e6:.2f} MB of it as bfloat16 copies of its float32 weights, which autocast "
        f"makes and float8 does not need. Without them the shares in one eager process would be {without}. What both "
        "keep alike is the residual stream in float32, gate and up, and attention's q, k, v and result. "
        "`rowwise_with_gw_hp` keeps inputs in bfloat16, as its grad_weight is computed from them: it saves copies, "
        "not the inputs."
    )


def _holds(rows: list[Row]) -> str:
    lines = []
    for (ranks, compiled), heading in HEADINGS.items():
        here = _of(rows, ranks=ranks, compiled=compiled)
        float8 = [row for row in here if row["precision"] != BASELINE]
        tensors = sum(ratios(row, here)["peak"] > 1 for row in float8)
        everything = sum(_above_with_scratch(row, here) for row in float8)
        unknown = sum(not has_scratch(row) for row in float8)
        of_known = f" ({unknown} not measured)" if unknown else ""
        lines.append(f"- {heading}: {tensors} of {len(float8)} in tensors, {everything} with scratch{of_known}")
    return "**Float8 is not below bfloat16 in every row.** Rows whose peak is above:\n\n" + "\n".join(lines)


def _causes(results: dict[str, Any]) -> str:
    """Why rows are above bfloat16, with the bytes."""
    size = results["size"]
    dim, tokens = size["dim"], size["sequences"] * size["seq_len"]
    linear = [(size["hidden_dim"], dim)]
    shared = 2 * tokens * (dim + 2 * size["hidden_dim"])
    input_scales = 8 * tokens
    return f"""\
**Why**, by what is alive at those peaks: the same bytes as in bfloat16, and scales on top.

- *Scales wait between two gathers.* Who casts shards for a gather needs the scales of whole weights. They are computed
  for the forward's gather and kept for the backward's, which would else have to read the shards and ask the other
  ranks again: in float32, one for a weight in `tensorwise`, one for each row and column in `rowwise`, one for each row
  and one for all in `rowwise_with_gw_hp`. Those of `linear` are {_of_weights(linear)} bytes, in this order. They are
  alive at every moment between. Each gather makes the scales that undo the cast out of them, as many bytes again, which
  go with what was gathered.
- *`linear` with `rowwise_with_gw_hp`* peaks while the loss is computed. Alive are the input, which the recipe keeps in
  bfloat16, the output, and what the loss makes of it: {shared:,} bytes in either precision, nothing of which the linear
  could have in float8. In eager code with `full` the scales of the input's rows are known as long as the input lives:
  {input_scales:,} bytes. The other recipes keep codes of the input, checkpointed or not: a lone float8 linear is left
  out of checkpoints, which would keep its input in bfloat16.

A scale belongs to a row of hundreds of elements here, and of thousands in a real model. Where nothing is checkpointed,
each gather brings only the code that is read, 1 byte an element, and so where a policy keeps the output; what is
gathered for a recomputation goes when the last one that reads it is over."""


def _of_weights(weights: list[tuple[int, int]]) -> str:
    """The bytes of the quant_scales of weights [N, K] in each recipe."""
    tensorwise = 4 * len(weights)
    rows, columns = (4 * sum(shape[dim] for shape in weights) for dim in (0, 1))
    return f"{tensorwise:,}, {rows + columns:,} and {rows + tensorwise:,}"


_CHOICES = """\
**What the choice of sizes and figures does.** `linear` has 3.5 times as many outputs as inputs, which is hardest on
float8: its input is small beside grad_output, which is cast. The shares in tensors are kinder to float8 than those with
scratch: all that is allocated and freed inside a float8 matmul is scratch, while bfloat16 copies that autocast makes
are tensors. Under FSDP2 each figure is the least of two steps, because the threads of collectives release buffers at
chance moments. Where that was not enough, in 18 of the 144 rows on two ranks, which came out above what is predicted
without that chance ([predicted.md](predicted.md)), the row was measured once or twice more, and the least stands.

**What is float8's own doing, and what is not.** In eager code float8 keeps less also because its norms and SwiGLU keep
only their inputs (`fused_producers`). A bfloat16 model could use the same functions: one block would then keep 11.68
MB in one eager process and not 15.62, and `tensorwise` 0.75 of that; compiled rows show the same, since a compiler
computes such things again in either precision."""


def _exceptions(rows: list[Row]) -> str:
    found = exceptions(rows)
    if not found:
        return "**Above bfloat16**: no row, in tensors."
    return "**Above bfloat16**, in tensors:\n\n" + "\n".join(f"- {line}" for line in found)

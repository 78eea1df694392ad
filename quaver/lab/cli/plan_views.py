"""Output of `quaver plan`: the table of the fastest layouts, what limits them, and notes on what the numbers mean."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.table import Table

from quaver.lab.cli.plan_options import PlanOptions
from quaver.lab.plan.calibration import describe_sustained_share
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.layouts import Layouts
from quaver.lab.plan.ledger_times import predict_ledger_times
from quaver.lab.plan.limits import list_links
from quaver.lab.plan.mfu import compute_mfu
from quaver.lab.plan.peak_memory import ESTIMATE_ERROR
from quaver.lab.plan.search import SearchResult, SimulatedLayout, simulate_step
from quaver.lab.plan.step import ComputeTimes
from quaver.lab.settings.float8 import BFLOAT16
from quaver.lab.terminal.byte_sizes import format_bytes
from quaver.lab.terminal.progress import show_progress
from quaver.lab.terminal.tables import make_table

_NUMBER_COLUMNS = ("GiB", "step\ntok", "step\ns", "tok/s\n/GPU", "MFU\n%", "wait\n%")
_LEGEND = """\
gather: dtype of the gathered weights of blocks; x2: again for the backward
batch: sequences of a microbatch x microbatches; training.reduce is last (L)
       or last_all_reduce (A)
AC: what blocks recompute; 1/2: every second block is checkpointed
MFU: share of the data sheet's FLOP/s, each matmul at the peak of its precision,
     attention as its causal half
wait: share of the step that waits for collectives and checkpoints
*: as configured"""


def iter_views(
    options: PlanOptions, result: SearchResult, limits: list[list[str]], cluster: Cluster, usable_bytes: int
) -> Iterator[str | Table]:
    """Yield the table of the fastest layouts, what limits them, and how far to trust the numbers."""
    first = result.fastest[0]
    yield (
        f"{options.gpus} x {cluster.spec.name}, {options.gpus_per_node} to a node, "
        f"{options.network_gbit_per_s:g} Gb/s each; "
        f"{first.run.seq_len:,} tokens a sequence; {result.fitting_count:,} layouts compared, "
        f"{sum(result.refusals.values()):,} refused by the trainer"
    )
    rows = [_make_cells(number, layout, cluster) for number, layout in enumerate(result.fastest, 1)]
    yield make_layout_table(rows, usable_bytes)
    has_bytes = cluster.spec.memory_gb * 1e9
    if usable_bytes > has_bytes:
        yield f"--memory {options.memory}: one {cluster.spec.name} has only {format_bytes(has_bytes)}"
    yield _LEGEND
    best_bfloat16 = next((layout for layout in result.fastest if layout.candidate.precision_label == BFLOAT16), None)
    if best_bfloat16 is not None and best_bfloat16 is not first:
        speedup = first.tokens_per_s / best_bfloat16.tokens_per_s
        is_equal = best_bfloat16.run.step_tokens == first.run.step_tokens
        note = "" if is_equal else "; their steps have different numbers of tokens"
        label = first.candidate.precision_label
        yield f"{label} has {speedup:.2f} times the tokens/s of the best layout in bfloat16{note}"
    elif best_bfloat16 is None:
        yield "no bfloat16 layout fits"
    yield f"row 1: {'; '.join(limits[0])}"
    if options.explain is not None:
        yield from _explain(result.fastest[options.explain - 1], limits[options.explain - 1], options, cluster)
    yield (
        f"memory is estimated, typically within {ESTIMATE_ERROR:.0%}: a layout near the limit may not fit. "
        f"To check a row, write it with --write FILE.toml and run quaver memory FILE.toml --ranks {options.gpus}"
    )
    share = describe_sustained_share(cluster.spec)
    yield f"{share}; times are simulated, not measured: docs/plan.md has published runs"


def make_layout_table(rows: Iterable[tuple[str, ...]], usable_bytes: int) -> Table:
    """Return the table of layouts whose peak fits into `usable_bytes`; `rows` are cells."""
    columns = ("", "precision", "FSDP\nxHSDP", "TP\nxEP", "gather", "batch", "AC", *_NUMBER_COLUMNS)
    title = f"Fastest layouts whose peak fits into {format_bytes(usable_bytes)}"
    return make_table(title, columns, rows=rows, right=_NUMBER_COLUMNS, wrapped=("precision",))


def iter_notes_on_steps(options: PlanOptions, layouts: Layouts, result: SearchResult) -> Iterator[str]:
    """Say how steps and batches of the table are limited, and why the configured layout is not in it."""
    planned = result.fastest[0].run
    steps = {layout.run.step_tokens for layout in result.fastest}
    if len(steps) > 1:
        yield ("the config has no global batch, so steps have different tokens; --global-batch compares equal ones")
    elif options.global_batch is not None and steps != {options.global_batch_tokens}:
        yield (
            f"--global-batch {options.global_batch}: a step has {planned.step_tokens:,} tokens, "
            f"{planned.step_tokens // planned.seq_len:,} sequences of {planned.seq_len:,}, "
            "rounded so that ranks divide them"
        )
    settings = [candidate.config.training for candidate in layouts.candidates]
    largest = max(training.local_batch_size for training in settings)
    is_step_fixed = len({training.step_batch_size for training in settings}) == 1
    if planned.local_batch == largest and (planned.micro_batches > 1 or not is_step_fixed):
        yield f"row 1 has the largest local batch of the search, {largest}; --training.local_batch_size adds another"
    if layouts.configured_refusal:
        yield f"the configured layout is no row: {layouts.configured_refusal}"


_REDUCTION_MARKS = {"": "", "every": "", "last": " L", "last_all_reduce": " A"}


def _make_cells(number: int, layout: SimulatedLayout, cluster: Cluster) -> tuple[str, ...]:
    waiting_share = 1 - layout.timeline.sum_seconds(stream="compute") / layout.timeline.seconds
    dims = layout.candidate.dims
    return (
        f"{number}{'*' if layout.candidate.is_configured else ''}",
        layout.candidate.precision_label,
        _format_degrees(dims.dp_shard, dims.dp_replicate),
        _format_degrees(dims.tp, dims.ep),
        layout.candidate.gathering_label,
        f"{layout.run.local_batch}x{layout.run.micro_batches}{_REDUCTION_MARKS[layout.candidate.reduction]}",
        layout.candidate.checkpointing_label,
        f"{layout.peak_bytes / 2**30:.1f}",
        _format_tokens(layout.run.step_tokens),
        f"{layout.seconds:.3g}",
        f"{layout.tokens_per_s:,.0f}",
        f"{100 * compute_mfu(layout.run, layout.seconds, cluster.spec):.0f}",
        f"{100 * waiting_share:.0f}",
    )


def _format_tokens(tokens: int) -> str:
    if tokens < 1000:
        return str(tokens)
    return f"{tokens / 1e6:.3g}M" if tokens >= 999_500 else f"{tokens / 1e3:.3g}k"


def _format_degrees(first: int, second: int) -> str:
    return f"{first}x{second}" if second > 1 else str(first)


def _explain(
    layout: SimulatedLayout, limits: list[str], options: PlanOptions, cluster: Cluster
) -> Iterator[str | Table]:
    yield f"row {options.explain}: {layout.candidate.precision_label}, {layout.candidate.description}"
    yield from (f"  {sentence}" for sentence in limits)
    numbers = ("sent GB", "busy s", "hidden s", "waited for s")
    rows = [
        (
            link.name,
            f"{link.sent_bytes / 1e9:.3g}",
            *(f"{s:.3g}" for s in (link.busy_s, link.busy_s - link.exposed_s, link.exposed_s)),
        )
        for link in list_links(layout.timeline)
    ]
    if rows:
        yield make_table("Links in a step", ("link", *numbers), rows=rows, right=numbers)
    seconds_by_kind = {kind: layout.timeline.sum_seconds(kind=kind) for kind in layout.timeline.kinds}
    parts = [
        (name.replace("_", "-"), f"{s:.3g}", f"{s / layout.timeline.seconds:.1%}")
        for name, s in seconds_by_kind.items()
        if s
    ]
    yield make_table("Seconds of a step", ("what", "s", "of the step"), rows=parts, right=("s", "of the step"))
    if options.ledger:
        yield _count_kernels(layout, cluster)


def _count_kernels(layout: SimulatedLayout, cluster: Cluster) -> str:
    """Return the times of a row's block and step from counted kernels, next to the times from formulas."""
    try:
        with show_progress("compiling the block of the row"):
            compute_times = predict_ledger_times(layout.candidate.config, layout.run.world_size, layout.run, cluster)
    except NotImplementedError as error:
        return f"the kernels of its block are not counted: {error}"
    seconds = simulate_step(layout.run, cluster, compute_times).seconds
    computed_block = ComputeTimes.from_formulas(layout.run, cluster).block
    times = zip(("forward", "backward"), compute_times.block, computed_block, strict=False)
    blocks = [f"{name} {1e3 * counted:.2f} ms ({1e3 * computed:.2f})" for name, counted, computed in times]
    tokens_per_s = layout.run.step_tokens / seconds / layout.run.world_size
    return (
        f"by the kernels that its compiled block launches, and by formulas in brackets: {', '.join(blocks)}, a step "
        f"{seconds:.3g} s ({layout.seconds:.3g}), {tokens_per_s:,.0f} tokens/s per GPU ({layout.tokens_per_s:,.0f})"
    )

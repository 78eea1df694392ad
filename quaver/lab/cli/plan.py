"""`quaver plan CONFIG.toml --gpus N --gpu NAME [options] [--section.field value ...]`."""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from quaver.lab.cli.errors import report_bad_input
from quaver.lab.cli.run_config import load_and_warn
from quaver.lab.output_file import Output, check_outputs, replace_output, write_json
from quaver.lab.plan.calibration import describe_sustained_share
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.counted import check_counts_for, count_costs
from quaver.lab.plan.device_file import read_device_spec
from quaver.lab.plan.estimate import ESTIMATE_ERROR
from quaver.lab.plan.layouts import Layouts, list_layouts, list_precisions
from quaver.lab.plan.limits import describe_limits, list_links
from quaver.lab.plan.peak import compute_share_of_peak
from quaver.lab.plan.picture import draw_step
from quaver.lab.plan.search import USABLE, FittingLayout, SearchResult, search, simulate_step
from quaver.lab.plan.step import Costs
from quaver.lab.plan.unsimulated import iter_unsimulated
from quaver.lab.plan.write import check_target, write_run
from quaver.lab.runs.provenance import describe_measurement
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.config_file import parse_arguments
from quaver.lab.settings.fields import AtLeast1, MostRanks, Settings, UserPath, setting
from quaver.lab.settings.flags import split_options
from quaver.lab.settings.float8 import BFLOAT16
from quaver.lab.terminal.byte_sizes import format_bytes, parse_bytes
from quaver.lab.terminal.console import print_views
from quaver.lab.terminal.progress import show_progress
from quaver.lab.terminal.tables import make_table
from quaver.recipes.recipe_name import canonicalize_recipe
from quaver.roofline.cost import find_unmultiplied_kinds
from quaver.roofline.device_specs import DEVICE_NAMES, DeviceSpec, require_device_spec
from quaver.runtime.errors import InputError

_NETWORK = re.compile(r"(\d+(?:\.\d+)?)\s*([Gg]bps|Gb/s|Gbit/s|GBps|GB/s)")
_TOKENS = re.compile(r"(\d+(?:\.\d+)?)\s*([kmb]?)(?:\s*tokens)?", re.IGNORECASE)
_THOUSANDS = {"": 1, "k": 1000, "m": 1000**2, "b": 1000**3}


@dataclass(frozen=True)
class PlanOptions(Settings):
    """Find the layouts and recipes with which a run is fastest on a cluster, and what limits them. Memory is
    estimated, the time of a step is simulated. Needs no GPU. The flags of quaver train are accepted too.
    """

    gpus: MostRanks = setting(8, "Number of GPUs of the run.")
    gpu: str = setting("h100", f"Kind of the GPUs: {DEVICE_NAMES.lower()}.")
    spec: UserPath | None = setting(None, "TOML file with the numbers of another GPU; see docs/plan.md.")
    nodes_of: AtLeast1 = setting(8, "Number of GPUs that the links of a node connect.")
    network: str = setting(
        "400gbps", "Rate of the network between nodes, for each GPU: 400gbps or 400Gb/s are bits, 50GB/s bytes."
    )
    storage: float = setting(1.0, "GB/s that each node writes to the folder of checkpoints while all of them do.")
    global_batch: str | None = setting(
        None, 'Tokens of a step, such as "4M", rounded so that the ranks divide it. Default: the configured batch.'
    )
    recipes: tuple[str, ...] = setting((), "Recipes to try besides the configured run; bfloat16 is one.")
    memory: str | None = setting(
        None, f"Bytes that a peak may have, such as 75GiB; {USABLE:.0%} of the GPU's by default."
    )
    store_less: bool = setting(
        False,
        "Also try a bfloat16 residual stream, and optimizer states and saved activations in float8, which change "
        "a run's numbers.",
    )
    top: AtLeast1 = setting(3, "Fastest layouts to print.")
    explain: AtLeast1 | None = setting(None, "Row to explain: its links and limits, and a picture of its step.")
    png: UserPath = setting("runs/plan.png", "File of the picture, with --explain.")
    ledger: bool = setting(
        False, "Compile the block of the explained row for the GPU, count its kernels, and simulate their times."
    )
    write: UserPath | None = setting(None, "TOML file to write the run of a row to; launch files stand beside it.")
    row: AtLeast1 = setting(1, "Row to write, with --write.")
    output: UserPath = setting("runs/plan.json", "File of the JSON, which is always written.")

    def check(self) -> None:
        """Raise InputError for numbers without units, and for options that do not fit together."""
        super().check()
        rates = "a rate above 0 with its unit: 400gbps or 400Gb/s for bits, 50GB/s for bytes"
        self.require(0 < self.network_gbps < math.inf, "network", rates)
        self.require(0 < self.storage < math.inf, "storage", "a rate above 0")
        for name in self.recipes:
            if name != BFLOAT16:
                canonicalize_recipe(name)
        if self.spec is not None:
            self.require_default("gpu", beside="--spec")
        if self.memory is not None:
            parse_bytes(self.memory, "--memory")
        if self.explain is not None:
            self.require(self.png.endswith(".png"), "png", "a file whose name ends with .png")
        else:
            self.require_default("png", "ledger", unless="--explain names a row")
        if self.write is None:
            self.require_default("row", unless="--write names a file")
        else:
            self.require(self.write.endswith(".toml"), "write", "a file whose name ends with .toml")

    def check_files(self) -> None:
        """Raise InputError for files that `check_outputs` refuses."""
        outputs = [Output(Path(self.output))]
        if self.explain is not None:
            outputs.append(Output(Path(self.png), "--png", "PNG picture"))
        if self.write is not None:
            outputs.append(Output(Path(self.write), "--write", "TOML file"))
        check_outputs(*outputs)

    @property
    def network_gbps(self) -> float:
        """The rate of the network in Gb/s per GPU; 0 if `network` cannot be parsed."""
        match = _NETWORK.fullmatch(self.network.strip())
        return float(match[1]) * (8 if match[2].startswith("GB") else 1) if match else 0.0

    def read_device(self) -> DeviceSpec:
        """Return the specification of the GPU. Raises InputError or OSError."""
        if self.spec is not None:
            return read_device_spec(Path(self.spec))
        try:
            return require_device_spec(self.gpu, "--gpu")
        except InputError as error:
            raise InputError(f"{error}; or give --spec a file of its numbers") from None

    @property
    def asked_tokens(self) -> int:
        """The tokens of `global_batch`; 0 if it is unset or cannot be parsed."""
        match = _TOKENS.fullmatch((self.global_batch or "").strip())
        tokens = float(match[1]) * _THOUSANDS[match[2].lower()] if match else 0
        return int(tokens) if tokens < math.inf else 0

    def choose_step_sequences(self, config: TrainConfig) -> int | None:
        """Return the sequences of a step on all ranks, or None for one micro-batch per data-parallel rank."""
        if self.global_batch is None:
            size = config.training.global_batch_size
            return None if size == -1 else size
        tokens = self.asked_tokens
        expected = f'tokens such as "4M", at least those of a sequence, {config.training.seq_len}'
        self.require(tokens >= config.training.seq_len, "global_batch", expected)
        sequences = tokens // config.training.seq_len
        if sequences < self.gpus:
            powers = (1 << power for power in range(self.gpus.bit_length()))
            return min(powers, key=lambda power: abs(power - sequences))
        if sequences % self.gpus == 0:
            return sequences
        unit = self.gpus * config.training.local_batch_size  # the smallest step of the configured run
        unit = unit if unit <= sequences else self.gpus
        return round(sequences / unit) * unit

    def choose_precisions(self, spec: DeviceSpec) -> list[str]:
        """Return bfloat16 and the recipes to try. Raises InputError for one that the GPU does not multiply."""
        if not self.recipes:
            return list_precisions(spec.block_length, spec.float8_tflops is not None)
        names = [name if name == BFLOAT16 else canonicalize_recipe(name) for name in self.recipes]
        for name in names:
            if name != BFLOAT16 and find_unmultiplied_kinds(spec, name):
                raise InputError(f"--recipes {name}: {spec.name} does not multiply float8 with such scales")
        return list(dict.fromkeys((BFLOAT16, *names)))


def run(argv: list[str]) -> int:
    """Print the fastest layouts; returns 0 when done, 2 for bad input."""
    with report_bad_input():
        options, run_flags = split_options(PlanOptions, argv, prog="quaver plan [CONFIG.toml]")
        options.check_files()
        config = load_and_warn(*parse_arguments(run_flags, PlanOptions))
        spec = options.read_device()
        cluster = Cluster.from_spec(spec, options.nodes_of, options.network_gbps, options.storage)
        if options.ledger:
            check_counts_for(spec)
        memory = parse_bytes(options.memory, "--memory") if options.memory else int(USABLE * spec.memory_gb * 1e9)
        layouts = list_layouts(
            config,
            options.gpus,
            gpus_per_node=options.nodes_of,
            precisions=options.choose_precisions(spec),
            step_sequences=options.choose_step_sequences(config),
            less_precise_storage=options.store_less,
        )
        layouts.refuse_unmultiplied(spec)
        if options.write is not None:
            check_target(config, options.gpus, options.nodes_of, Path(options.write))
        with show_progress("planning") as set_activity:
            result = search(layouts, cluster, memory, top=options.top, set_activity=set_activity)
        if not result.rows:
            raise InputError(_describe_misfit(result, spec, memory))
        for option, number in (("--explain", options.explain), ("--row", options.row if options.write else None)):
            if number is not None and number > len(result.rows):
                raise InputError(f"{option} must be a row of 1 to {len(result.rows)}, got {number}")
    limits = [describe_limits(row, cluster) for row in result.rows]
    print_views(iter_views(options, result, limits, cluster, memory))
    print_views(_iter_notes_on_steps(options, layouts, result))
    print_views(f"not simulated: {sentence}" for sentence in iter_unsimulated(config))
    _write(options, result, limits, cluster)
    return 0


def _describe_misfit(result: SearchResult, spec: DeviceSpec, memory: int) -> str:
    candidate, needed = result.nearest
    return (
        f"no layout fits into {format_bytes(memory)} of one {spec.name}: the nearest, {candidate.precision} on "
        f"{candidate.description}, needs about {format_bytes(needed)}, {format_bytes(needed - memory)} more; "
        "add GPUs with --gpus, or try --store-less"
    )


NUMBERS = ("GiB", "step\ntok", "step\ns", "tok/s\n/GPU", "MFU\n%", "wait\n%")


def iter_views(
    options: PlanOptions, result: SearchResult, limits: list[list[str]], cluster: Cluster, memory: int
) -> Iterator[str | Table]:
    """Yield the table of the fastest layouts, what limits them, and how far to trust the numbers."""
    first = result.rows[0]
    yield (
        f"{options.gpus} x {cluster.spec.name}, {options.nodes_of} to a node, {options.network_gbps:g} Gb/s each; "
        f"{first.run.seq_len:,} tokens a sequence; {result.tried:,} layouts compared, "
        f"{sum(result.refusals.values()):,} refused by the trainer"
    )
    rows = [_make_cells(number, row, cluster) for number, row in enumerate(result.rows, 1)]
    yield make_layout_table(rows, memory)
    yield (
        "Gather: the dtype in which weights of blocks are gathered; x2: for the forward, and again for the backward. "
        "Batch: sequences of a micro-batch x micro-batches; L: training.reduce = last, A: last_all_reduce. "
        "AC 1/2: every second block is checkpointed. "
        "MFU: the share of the data sheet's FLOP/s, each matmul at the peak of its precision, attention as its causal "
        "half. "
        "Wait: for collectives and checkpoints. * as configured."
    )
    best = next((row for row in result.rows if row.candidate.precision == BFLOAT16), None)
    if best is not None and best is not first:
        gain = first.tokens_per_s / best.tokens_per_s
        is_equal = best.run.step_tokens == first.run.step_tokens
        unequal = "" if is_equal else "; their steps have different numbers of tokens"
        yield f"{first.candidate.precision} has {gain:.2f} times the tokens/s of the best layout in bfloat16{unequal}"
    elif best is None:
        yield "no bfloat16 layout fits"
    yield f"row 1: {'; '.join(limits[0])}"
    if options.explain is not None:
        yield from _explain(result.rows[options.explain - 1], limits[options.explain - 1], options, cluster)
    yield (
        f"memory is estimated within {ESTIMATE_ERROR:.0%}: a layout near the limit may not fit. To check a row, write "
        f"it with --write FILE.toml and run quaver memory FILE.toml --ranks {options.gpus}"
    )
    share = describe_sustained_share(cluster.spec)
    yield f"{share}; times are simulated, not measured: docs/plan.md has published runs"


def make_layout_table(rows: Iterable[tuple[str, ...]], memory: int) -> Table:
    """Return the table of layouts whose peak fits into `memory` bytes; `rows` are cells."""
    columns = ("", "precision", "FSDP\nxHSDP", "TP\nxEP", "gather", "batch", "AC", *NUMBERS)
    title = f"Fastest layouts whose peak fits into {format_bytes(memory)}"
    return make_table(title, columns, rows=rows, right=NUMBERS, wrapped=("precision",))


def _iter_notes_on_steps(options: PlanOptions, layouts: Layouts, result: SearchResult) -> Iterator[str]:
    """Say how steps and batches of the table are limited, and why the configured layout is not in it."""
    planned = result.rows[0].run
    steps = {row.run.step_tokens for row in result.rows}
    if len(steps) > 1:
        yield ("the config has no global batch, so steps have different tokens; --global-batch compares equal ones")
    elif options.global_batch is not None and steps != {options.asked_tokens}:
        yield (
            f"--global-batch {options.global_batch}: a step has {planned.step_tokens:,} tokens, "
            f"{planned.step_tokens // planned.seq_len:,} sequences of {planned.seq_len:,}, "
            "rounded so that ranks divide them"
        )
    trainings = [candidate.config.training for candidate in layouts.candidates]
    largest = max(training.local_batch_size for training in trainings)
    is_step_fixed = len({training.step_batch_size for training in trainings}) == 1
    if planned.local_batch == largest and (planned.micro_batches > 1 or not is_step_fixed):
        yield f"row 1 has the largest local batch of the search, {largest}; --training.local_batch_size adds another"
    if layouts.configured_refusal:
        yield f"the configured layout is no row: {layouts.configured_refusal}"


_REDUCED = {"": "", "every": "", "last": " L", "last_all_reduce": " A"}


def _make_cells(number: int, row: FittingLayout, cluster: Cluster) -> tuple[str, ...]:
    waits = 1 - row.timeline.sum_seconds(stream="compute") / row.timeline.seconds
    dims = row.candidate.dims
    return (
        f"{number}{'*' if row.candidate.is_configured else ''}",
        row.candidate.precision,
        _format_degrees(dims.shard, dims.replicate),
        _format_degrees(dims.tensor, dims.expert),
        row.candidate.gathering,
        f"{row.run.local_batch}x{row.run.micro_batches}{_REDUCED[row.candidate.reduction]}",
        row.candidate.storage,
        f"{row.peak_bytes / 2**30:.1f}",
        _format_tokens(row.run.step_tokens),
        f"{row.seconds:.3g}",
        f"{row.tokens_per_s:,.0f}",
        f"{100 * compute_share_of_peak(row.run, row.seconds, cluster.spec):.0f}",
        f"{100 * waits:.0f}",
    )


def _format_tokens(tokens: int) -> str:
    return f"{tokens / 1e6:.3g}M" if tokens >= 999_500 else f"{tokens / 1e3:.3g}k"


def _format_degrees(degree: int, second: int) -> str:
    return f"{degree}x{second}" if second > 1 else str(degree)


def _explain(row: FittingLayout, limits: list[str], options: PlanOptions, cluster: Cluster) -> Iterator[str | Table]:
    yield f"row {options.explain}: {row.candidate.precision}, {row.candidate.description}"
    yield from (f"  {sentence}" for sentence in limits)
    numbers = ("sent GB", "busy s", "hidden s", "waited for s")
    links = [
        (
            link.name,
            f"{link.sent_bytes / 1e9:.2f}",
            *(f"{s:.3f}" for s in (link.busy_s, link.busy_s - link.exposed_s, link.exposed_s)),
        )
        for link in list_links(row.timeline)
    ]
    if links:
        yield make_table("Links in a step", ("link", *numbers), rows=links, right=numbers)
    kinds = {kind: row.timeline.sum_seconds(kind=kind) for kind in row.timeline.kinds}
    parts = [(name.replace("_", "-"), f"{s:.3f}", f"{s / row.timeline.seconds:.1%}") for name, s in kinds.items() if s]
    yield make_table("Seconds of a step", ("what", "s", "of the step"), rows=parts, right=("s", "of the step"))
    if options.ledger:
        yield _count_kernels(row, cluster)


def _count_kernels(row: FittingLayout, cluster: Cluster) -> str:
    """Return the times of a row's block and step from counted kernels, next to the times from formulas."""
    try:
        with show_progress("compiling the block of the row"):
            costs = count_costs(row.candidate.config, row.run.ranks, row.run, cluster)
    except NotImplementedError as error:
        return f"the kernels of its block are not counted: {error}"
    seconds = simulate_step(row.run, cluster, costs).seconds
    both = zip(("forward", "backward"), costs.block, Costs.from_formulas(row.run, cluster).block, strict=False)
    blocks = [f"{name} {1e3 * counted:.2f} ms ({1e3 * computed:.2f})" for name, counted, computed in both]
    tokens_per_s = row.run.step_tokens / seconds / row.run.ranks
    return (
        f"by the kernels that its compiled block launches, and by formulas in brackets: {', '.join(blocks)}, a step "
        f"{seconds:.3g} s ({row.seconds:.3g}), {tokens_per_s:,.0f} tokens/s per GPU ({row.tokens_per_s:,.0f})"
    )


def _write(options: PlanOptions, result: SearchResult, limits: list[list[str]], cluster: Cluster) -> None:
    files = [Path(options.output)]
    rows = [_make_json_row(row, sentences, cluster) for row, sentences in zip(result.rows, limits, strict=True)]
    write_json(
        {"environment": describe_measurement(torch.device("cpu")), "options": asdict(options), "rows": rows}, files[0]
    )
    if options.explain is not None:
        row = result.rows[options.explain - 1]
        files.append(Path(options.png))
        with replace_output(files[-1], "--png") as image:
            draw_step(row.timeline, image, title=f"{row.candidate.precision}, {row.candidate.description}")
    if options.write is not None:
        row = result.rows[options.row - 1]
        comment = (
            f"{row.candidate.precision} on {options.gpus} x {cluster.spec.name}: {row.candidate.description}.\n"
            f"Estimated peak {format_bytes(row.peak_bytes)}; simulated {row.tokens_per_s:,.0f} tokens/s per GPU."
        )
        with report_bad_input():
            files += write_run(
                row.candidate.config, options.gpus, options.nodes_of, Path(options.write), comment=comment
            )
    for file in files:
        print(f"saved {file}")


def _make_json_row(row: FittingLayout, limits: list[str], cluster: Cluster) -> dict[str, Any]:
    return {
        "precision": row.candidate.precision,
        "mesh": row.candidate.dims.mesh,
        "expert_parallel": row.candidate.dims.expert,
        "peak_bytes": row.peak_bytes,
        "step_seconds": row.seconds,
        "tokens_per_second_per_gpu": row.tokens_per_s,
        "step_tokens": row.run.step_tokens,
        "mfu": compute_share_of_peak(row.run, row.seconds, cluster.spec),
        "links": [asdict(link) for link in list_links(row.timeline)],
        "limits": limits,
        "is_configured": row.candidate.is_configured,
        "config": asdict(row.candidate.config),
    }

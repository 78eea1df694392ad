"""`quaver plan CONFIG.toml --gpus N --gpu NAME [options] [--section.field value ...]`."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quaver.lab.cli.errors import report_bad_input
from quaver.lab.cli.plan_options import PlanOptions
from quaver.lab.cli.plan_views import iter_notes_on_steps, iter_views
from quaver.lab.cli.run_config import load_config_and_warn
from quaver.lab.output_file import replace_output, write_result
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.layouts import list_layouts, list_precisions
from quaver.lab.plan.ledger_times import check_ledger_gpu
from quaver.lab.plan.limits import describe_limits, list_links
from quaver.lab.plan.mfu import compute_mfu
from quaver.lab.plan.picture import draw_step
from quaver.lab.plan.search import USABLE_MEMORY_SHARE, SearchResult, SimulatedLayout, search
from quaver.lab.plan.unsimulated import iter_unsimulated
from quaver.lab.plan.write_run import check_run_files, write_run
from quaver.lab.runs.provenance import describe_measurement
from quaver.lab.settings.config_file import parse_arguments
from quaver.lab.settings.flags import split_options
from quaver.lab.terminal.byte_sizes import format_bytes, parse_bytes
from quaver.lab.terminal.console import print_views
from quaver.lab.terminal.progress import show_progress
from quaver.roofline.device_specs import DeviceSpec
from quaver.runtime.errors import InputError


def main(argv: list[str]) -> int:
    """Print the fastest layouts; returns 0 when done, 2 for bad input."""
    with report_bad_input():
        options, run_flags = split_options(PlanOptions, argv, prog="quaver plan [CONFIG.toml]")
        options.check_files()
        config = load_config_and_warn(*parse_arguments(run_flags, PlanOptions, prog="quaver plan"))
        spec = options.read_device()
        cluster = Cluster.from_spec(spec, options.gpus_per_node, options.network_gbit_per_s, options.storage)
        if options.ledger:
            check_ledger_gpu(spec)
        usable_bytes = (
            parse_bytes(options.memory, "--memory")
            if options.memory
            else int(USABLE_MEMORY_SHARE * spec.memory_gb * 1e9)
        )
        layouts = list_layouts(
            config,
            options.gpus,
            gpus_per_node=options.gpus_per_node,
            precisions=list_precisions(spec, options.recipes),
            step_batch_size=options.find_step_batch_size(config),
            less_precise_storage=options.less_precise_storage,
        )
        layouts.drop_configured_if_unsupported(spec)
        if options.write is not None:
            check_run_files(config, options.gpus, options.gpus_per_node, Path(options.write))
        with show_progress("planning") as set_activity:
            result = search(layouts, cluster, usable_bytes, top=options.top, set_activity=set_activity)
        if not result.fastest:
            raise InputError(_describe_misfit(result, spec, usable_bytes))
        for option, number in (("--explain", options.explain), ("--row", options.row if options.write else None)):
            if number is not None and number > len(result.fastest):
                raise InputError(f"{option} must be a row of 1 to {len(result.fastest)}, got {number}")
    limits = [describe_limits(layout, cluster) for layout in result.fastest]
    print_views(iter_views(options, result, limits, cluster, usable_bytes))
    print_views(iter_notes_on_steps(options, layouts, result))
    print_views(f"not simulated: {sentence}" for sentence in iter_unsimulated(config))
    _write_files(options, result, limits, cluster)
    return 0


def _describe_misfit(result: SearchResult, spec: DeviceSpec, usable_bytes: int) -> str:
    candidate, _, needed = result.smallest
    return (
        f"no layout fits into {format_bytes(usable_bytes)} of one {spec.name}: the smallest, "
        f"{candidate.precision_label} on {candidate.description}, needs about {format_bytes(needed)}, "
        f"{format_bytes(needed - usable_bytes)} more; add GPUs with --gpus, or try --less-precise-storage"
    )


def _write_files(options: PlanOptions, result: SearchResult, limits: list[list[str]], cluster: Cluster) -> None:
    files = []
    if options.output is not None:
        rows = [
            _make_json_row(layout, sentences, cluster) for layout, sentences in zip(result.fastest, limits, strict=True)
        ]
        content = {"environment": describe_measurement(torch.device("cpu")), "options": asdict(options), "rows": rows}
        files.append(Path(options.output))
        write_result(content, files[-1])
    if options.explain is not None and options.png is not None:
        layout = result.fastest[options.explain - 1]
        files.append(Path(options.png))
        with replace_output(files[-1], "--png") as image:
            draw_step(
                layout.timeline, image, title=f"{layout.candidate.precision_label}, {layout.candidate.description}"
            )
    if options.write is not None:
        layout = result.fastest[options.row - 1]
        comment = (
            f"{layout.candidate.precision_label} on {options.gpus} x {cluster.spec.name}: "
            f"{layout.candidate.description}.\n"
            f"Estimated peak {format_bytes(layout.peak_bytes)}; simulated {layout.tokens_per_s:,.0f} tokens/s per GPU."
        )
        with report_bad_input():
            files += write_run(
                layout.candidate.config, options.gpus, options.gpus_per_node, Path(options.write), comment=comment
            )
    for file in files:
        print(f"saved {file}")


def _make_json_row(layout: SimulatedLayout, limits: list[str], cluster: Cluster) -> dict[str, Any]:
    return {
        "precision": layout.candidate.precision_label,
        "mesh": layout.candidate.dims.mesh,
        "expert_parallel": layout.candidate.dims.ep,
        "peak_bytes": layout.peak_bytes,
        "step_seconds": layout.seconds,
        "tokens_per_second_per_gpu": layout.tokens_per_s,
        "step_tokens": layout.run.step_tokens,
        "mfu": compute_mfu(layout.run, layout.seconds, cluster.spec),
        "links": [asdict(link) for link in list_links(layout.timeline)],
        "limits": limits,
        "is_configured": layout.candidate.is_configured,
        "config": asdict(layout.candidate.config),
    }

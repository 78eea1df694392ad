"""`quaver memory [CONFIG.toml] [options] [--section.field value ...]`."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch

from quaver.lab.cli.errors import report_bad_input
from quaver.lab.cli.memory_views import (
    iter_comparison_views,
    iter_prediction_views,
    iter_traffic_views,
    make_advice_table,
    make_side_by_side_table,
    summarize_advice,
)
from quaver.lab.cli.run_config import load_config_and_warn
from quaver.lab.memory.reports.compare import compare
from quaver.lab.memory.reports.html import write_html
from quaver.lab.memory.train_step.measure import measure_memory, tabulate_side_by_side
from quaver.lab.memory.train_step.predict_run import RunMemory, predict_run_memory
from quaver.lab.memory.train_step.traffic import predict_traffic
from quaver.lab.output_file import check_option_files, replace_output, write_result
from quaver.lab.plan.advise import advise
from quaver.lab.plan.peak_memory import ESTIMATE_ERROR, estimate_peak
from quaver.lab.recorder.draw import draw_timeline
from quaver.lab.runs.provenance import describe_measurement
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.config_file import parse_arguments
from quaver.lab.settings.fields import NotNegative, OneOf, RankCount, Settings, UserPath, setting
from quaver.lab.settings.flags import split_options
from quaver.lab.terminal.byte_sizes import format_bytes, parse_bytes
from quaver.lab.terminal.console import print_views
from quaver.lab.terminal.counts import format_count
from quaver.lab.terminal.progress import show_progress
from quaver.roofline.device_specs import require_device_spec
from quaver.runtime.devices import resolve_device
from quaver.runtime.errors import reraise_as_input_error


@dataclass(frozen=True)
class MemoryOptions(Settings):
    """Predict the memory of a run's training step on one rank, and say what is alive at its peak. The step runs with
    fake tensors: no GPU, no data and no memory are needed. The flags of quaver train are accepted too.
    """

    ranks: RankCount = setting(1, "Processes of the run; the first one is predicted.")
    device: Annotated[str, OneOf(("cuda", "cpu"))] | None = setting(
        None, "Device of the run: an NVIDIA GPU that multiplies float8 (cuda, the default) or a CPU."
    )
    vs: str | None = setting(
        None,
        'Compare with another run: "--float8.recipe_name rowwise", or "OTHER.toml --a.b c", quoted as one argument.',
    )
    advise: bool = setting(False, "Predict the peak and the recomputation of other settings.")
    fit: str | None = setting(None, "Find the fastest setting whose peak is at most this, such as 80GiB.")
    time_on: str | None = setting(None, "GPU whose step time --advise and --fit simulate, such as h100 or b200.")
    quick: bool = setting(
        False,
        f"Estimate the peak in closed form, typically within {ESTIMATE_ERROR:.0%}, instead of predicting it; --advise "
        "and --fit do so too.",
    )
    measure: bool = setting(False, "Run real steps on this machine, and print them next to the prediction.")
    traffic: bool = setting(
        False,
        "Print instead what the ranks send each other in a step, as collectives and bytes by mesh dim, and the bytes "
        "of a checkpoint.",
    )
    checkpoint_bandwidth: str | None = setting(
        None, "With --traffic: bytes per second to the file system of checkpoints, such as 50GB."
    )
    top: NotNegative = setting(12, "Rows of the largest tensors, and of differences, to print.")
    output: UserPath | None = setting(None, "File of the result as JSON.")
    html: UserPath | None = setting(
        None, "File of a page: timeline, breakdown of the peak, tensors saved for backward."
    )
    png: UserPath | None = setting(None, "File of a picture of the timeline.")

    def check(self) -> None:
        """Raise InputError for options that exclude each other."""
        if self.measure:
            hint = "it measures on training.device, and predicts for it"
            self.require_default("device", beside="--measure", hint=hint)
        if not (self.advise or self.fit):
            self.require_default("time_on", unless="--advise or --fit is given")
        for flag in ("fit", "checkpoint_bandwidth"):
            if getattr(self, flag) is not None:
                parse_bytes(getattr(self, flag), self.name_field(flag))
        self.require(self.png is None or self.png.endswith(".png"), "png", "a file whose name ends with .png")
        if self.time_on is not None:
            require_device_spec(self.time_on, option="--time-on")
        if self.quick:
            hint = "it estimates the peak on a GPU alone"
            self.require_default("vs", "measure", "html", "png", "traffic", "top", beside="--quick", hint=hint)
            self.require(self.device != "cpu", "device", "cuda with --quick", hint)
        if self.traffic:
            names = ("vs", "advise", "fit", "measure", "html", "png", "top")
            self.require_default(*names, beside="--traffic", hint="it predicts no memory")
        else:
            self.require_default("checkpoint_bandwidth", unless="--traffic is given")

    def check_files(self) -> None:
        """Raise InputError for files that `check_option_files` refuses."""
        check_option_files(self, output="JSON result", html="HTML page", png="PNG picture")


def main(argv: list[str]) -> int:
    """Print and write the predicted memory of a training step; returns 0 when done, 2 for bad input."""
    with report_bad_input():
        options, run_flags = split_options(MemoryOptions, argv, prog="quaver memory [CONFIG.toml]")
        options.check_files()
        config_path, flags = parse_arguments(run_flags, MemoryOptions, prog="quaver memory")
        config = load_config_and_warn(config_path, flags)
        default_device = resolve_device(config.training.device).type if options.measure else "cuda"
        device = options.device or default_device
        if options.traffic:
            return _print_traffic(options, config, device)
        if options.quick:
            return _print_estimate(options, config)
        memory, results = _predict(options, run_flags, config, device)
    views = [*iter_prediction_views(memory, device, options.top)]
    if "comparison" in results:
        views += iter_comparison_views(
            results["comparison"], memory.prediction, results["other"].prediction, options.top
        )
    if "advice" in results:
        views += [make_advice_table(results["advice"]), *summarize_advice(results["advice"])]
    if "measured" in results:
        views.append(make_side_by_side_table(tabulate_side_by_side(memory, results["measured"])))
    print_views(views)
    name = config_path.stem if config_path else "defaults"
    title = f"{name} in {memory.name}, {format_count(options.ranks, 'rank')}"
    _write_files(memory, results, options, title)
    return 0


def _print_traffic(options: MemoryOptions, config: TrainConfig, device: str) -> int:
    bandwidth = options.checkpoint_bandwidth
    per_s = None if bandwidth is None else parse_bytes(bandwidth, "--checkpoint-bandwidth")
    with show_progress("counting the collectives of a step"):
        traffic = predict_traffic(config, options.ranks, device)
    print_views(iter_traffic_views(traffic, per_s))
    _write_json(traffic.to_dict(), options)
    return 0


def _print_estimate(options: MemoryOptions, config: TrainConfig) -> int:
    estimate, advice = estimate_peak(config, options.ranks), None
    if options.advise or options.fit is not None:
        fit_bytes = None if options.fit is None else parse_bytes(options.fit, "--fit")
        with show_progress("estimating") as set_activity:
            advice = advise(
                config,
                options.ranks,
                fit_bytes=fit_bytes,
                time_on=options.time_on,
                quick=True,
                set_activity=set_activity,
            )
    place = "" if options.ranks == 1 else f" of one of {options.ranks:,} ranks"
    print_views(
        [f"about {format_bytes(estimate)} at the peak{place}, estimated, typically within {ESTIMATE_ERROR:.0%}"]
    )
    if advice is not None:
        print_views([make_advice_table(advice), *summarize_advice(advice)])
    result = {"estimated_peak_bytes": estimate} | ({} if advice is None else {"advice": advice.to_dict()})
    _write_json(result, options)
    return 0


def _predict(
    options: MemoryOptions, run_flags: list[str], config: TrainConfig, device: str
) -> tuple[RunMemory, dict[str, Any]]:
    """Return the prediction, and the optional results by their JSON names: other and comparison, advice, measured."""
    fit_bytes = None if options.fit is None else parse_bytes(options.fit, "--fit")
    with reraise_as_input_error("--vs: "):
        other_flags = shlex.split(options.vs or "")
    if options.vs is not None:  # --vs has flags that override the first run's, or a whole command line
        is_override = not other_flags or other_flags[0].startswith("--")
        other_config = load_config_and_warn(
            *parse_arguments([*run_flags, *other_flags] if is_override else other_flags, prog="quaver memory")
        )
    results: dict[str, Any] = {}
    with show_progress("predicting a step") as set_activity:
        memory = predict_run_memory(config, options.ranks, device)
        if options.vs is not None:
            set_activity("predicting a step of the other run")
            other = predict_run_memory(other_config, options.ranks, device)
            labels = {"label_a": "as given", "label_b": " ".join(other_flags)}
            results |= {"other": other, "comparison": compare(memory.prediction, other.prediction, **labels)}
        if options.advise or fit_bytes is not None:
            results["advice"] = advise(
                config,
                options.ranks,
                fit_bytes=fit_bytes,
                device=device,
                time_on=options.time_on,
                set_activity=set_activity,
            )
    if options.measure:
        with show_progress("training to measure"):
            results["measured"] = measure_memory(config, options.ranks)
    return memory, results


def _write_files(memory: RunMemory, results: dict[str, Any], options: MemoryOptions, title: str) -> None:
    """Write the files that the options ask for."""
    other_results = {name: result.to_dict() for name, result in results.items()}
    _write_json(memory.to_dict() | other_results, options)
    if options.html is not None:
        pages = {name: _with_timeline(results[name]) for name in ("other", "measured") if name in results}
        with replace_output(Path(options.html), "--html") as page:
            write_html(page, title=title, prediction=_with_timeline(memory), **(other_results | pages))
        print(f"saved {options.html}")
    if options.png is not None:
        with replace_output(Path(options.png), "--png") as image:
            draw_timeline(memory.prediction.report, image, title=title)
        print(f"saved {options.png}")


def _write_json(result: dict[str, Any], options: MemoryOptions) -> None:
    if options.output is not None:
        write_result({"environment": describe_measurement(torch.device("cpu")), **result}, Path(options.output))
        print(f"saved {options.output}")


def _with_timeline(memory: RunMemory) -> dict[str, Any]:
    return {**memory.to_dict(), **memory.prediction.to_dict(timeline=True)}

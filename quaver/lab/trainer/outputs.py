"""Writes and shows the numbers of a run: metrics.jsonl, loggers, float8 scales, profiles, the terminal."""

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from quaver.conversion.report import conversion_report
from quaver.lab.model.flops import compute_utilization
from quaver.lab.runs.errors import OutputFailures
from quaver.lab.runs.file_names import CONVERSION_FILE
from quaver.lab.runs.json_lines import JsonLinesWriter, RecordKind
from quaver.lab.terminal.console import make_stdout_console
from quaver.lab.trainer.alarms import RunAlarms
from quaver.lab.trainer.display import Display
from quaver.lab.trainer.float8_scales import make_scales_record, summarize_saturation
from quaver.lab.trainer.loggers import Loggers, list_scalars
from quaver.lab.trainer.memory import read_device_memory
from quaver.lab.trainer.numerics import NumericsLog, close_monitor, open_monitor
from quaver.lab.trainer.profiling import Profiler
from quaver.lab.trainer.trained_model import StepResult, TrainedModel, ValidationResult
from quaver.lab.trainer.training_run import TrainingRun


@dataclass
class Outputs:
    """The destinations of a run's numbers. Only the first rank has loggers and a visible display."""

    run: TrainingRun
    metrics: JsonLinesWriter | None
    loggers: Loggers
    scales: JsonLinesWriter | None
    """float8_scales.jsonl, for recipes with persistent scales."""
    display: Display
    profiler: Profiler
    alarms: RunAlarms
    failures: OutputFailures

    def write(self, record: dict[str, Any]) -> None:
        """Append the record of a step or a validation to metrics.jsonl, and log its numbers."""
        if self.metrics is not None:
            with self.failures.catch():
                self.metrics.write(record)
        self.loggers.log(record["step"], list_scalars(record))

    def record_step(self, trained: TrainedModel, step: int, result: StepResult, *, is_loss_spike: bool) -> None:
        """Write and show one step of `trained`."""
        if result.nonfinite_reason:
            self.write_nonfinite(RecordKind.SKIPPED_STEP, trained, step, result.nonfinite_reason)
            self.display.print_skipped_step(step, trained.name, result.nonfinite_reason)
            return
        scaling = trained.scaling.report() if self.run.ranks.is_first and trained.step_label == trained.name else []
        record = _make_step_record(self.run, trained, step, result) | summarize_saturation(scaling)
        record["loss_spike"] = is_loss_spike
        self.write(record)
        self.display.print_step(record)
        if self.scales and scaling and step % self.run.config.metrics.float8_scales_freq == 0:
            with self.failures.catch():
                self.scales.write(make_scales_record(step, trained.name, scaling))

    def write_nonfinite(self, kind: RecordKind, trained: TrainedModel, step: int, reason: str) -> None:
        """Write that a step of `trained` was skipped, or ended the run, because of a value that was not finite."""
        self.write({"kind": kind, "step": step, "model": trained.name, "reason": reason})

    def record_validation(self, trained: TrainedModel, result: ValidationResult) -> None:
        """Write and show a validation of `trained` after the last step."""
        record: dict[str, Any] = {
            "kind": RecordKind.VALIDATION,
            "step": self.run.progress.step,
            "model": trained.name,
            "precision": trained.step_label,
            "validation_loss": result.loss,
        }
        if trained.expert_load is not None:
            record["expert_load"] = trained.expert_load.tolist()
        if result.loss_hp is not None:
            record["validation_loss_hp"] = result.loss_hp
        self.write(record)
        self.display.print_validation(record)

    def check_folder(self) -> None:
        """Keep an error if the run folder is gone, on the first rank."""
        if self.run.ranks.is_first:
            with self.failures.catch():
                self.run.folder.check_exists()

    def write_conversion_report(self) -> None:
        """Write the report of a float8 model that has taken a step, with the backends that ran, on the first rank."""
        if self.run.ranks.is_first and self.run.config.float8.enable_float8_linear:
            with self.failures.catch():
                report = conversion_report(self.run.models[0].model)
                self.run.folder.write_json(CONVERSION_FILE, report.to_dict())


@contextmanager
def open_outputs(run: TrainingRun, failures: OutputFailures) -> Iterator[Outputs]:
    """Open the files, loggers and monitor of `run` for the block. A collective.

    Raises NotWrittenError on every rank if one cannot be opened.
    """
    folder, config, is_first = run.folder, run.config.metrics, run.ranks.is_first
    with ExitStack() as stack:
        loggers = stack.enter_context(closing(Loggers()))
        metrics = scales = None
        if is_first:
            with failures.catch():
                metrics = stack.enter_context(closing(JsonLinesWriter(folder.metrics_path)))
                loggers.open(config, folder, asdict(run.config))
                if config.float8_scales_freq > 0 and any(trained.scaling for trained in run.models):
                    scales = stack.enter_context(closing(JsonLinesWriter(folder.float8_scales_path)))
        display = Display(make_stdout_console(quiet=not is_first), config.log_freq, run.peak_flops.is_measured)
        alarms = RunAlarms(run.config.numerics, display, run.models[0].model, set(run.progress.fallbacks))
        if run.config.numerics.every:
            if is_first:
                with failures.catch():
                    alarms.sink = alarms.make_sink(NumericsLog(folder, loggers), folder, failures)
            stack.callback(close_monitor, run.models[0])
            open_monitor(run.models[0], alarms.sink, completed_steps=run.progress.step)
        failures.raise_on_all_ranks()
        profiler = Profiler(run.config, folder.path, run.ranks.rank, run.device, failures)
        yield Outputs(run, metrics, loggers, scales, display, stack.enter_context(profiler), alarms, failures)


def _make_step_record(run: TrainingRun, trained: TrainedModel, step: int, result: StepResult) -> dict[str, Any]:
    tokens_per_s, load = run.config.training.step_tokens / result.seconds, trained.expert_load
    flops = trained.flops_per_token
    if trained.step_label != trained.name:  # float8.high_precision_schedule
        flops = trained.count_flops_per_token()
    return {
        "kind": RecordKind.STEP,
        "step": step,
        "model": trained.name,
        "precision": trained.step_label,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "step_seconds": result.seconds,
        "tokens_per_s": tokens_per_s,
        **({"measures_memory": True} if result.is_memory_measured else {}),
        **compute_utilization(flops, tokens_per_s / run.ranks.world_size, run.peak_flops),
        **read_device_memory(run.device),
        **({} if load is None else {"expert_load_max": load.max().item() * load.shape[1]}),  # relative to the mean
    }

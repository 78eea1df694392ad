"""The training loop: trains the models of a run step by step, validates, saves, and writes the summary.

With `job.compare` a float8 model and its bfloat16 baseline take turns, step by step and in alternating order. A slow
moment of the machine then affects both, and the ratio of their median step times is fair.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quaver.conversion.report import conversion_report
from quaver.lab.data import Batch
from quaver.lab.runs.errors import CheckpointError, OutputError, OutputFailures
from quaver.lab.runs.json_lines import JsonLines
from quaver.lab.runs.run_folder import replace_file
from quaver.lab.terminal.console import make_stdout_console, say
from quaver.lab.trainer.alarms import RunAlarms, fall_back
from quaver.lab.trainer.display import Display, print_results
from quaver.lab.trainer.float8_scales import make_scales_record, summarize_saturation
from quaver.lab.trainer.flops import compute_utilization
from quaver.lab.trainer.memory import read_device_memory, reset_device_peaks
from quaver.lab.trainer.metrics import Logger, is_spike, list_scalars, open_loggers, remember
from quaver.lab.trainer.nonfinite import NonFiniteError, is_finite
from quaver.lab.trainer.numerics import NumericsLog
from quaver.lab.trainer.plot import draw_curves
from quaver.lab.trainer.process import Requests, Watchdog, catch_stop_signals, silence_other_ranks, use_determinism
from quaver.lab.trainer.profiling import Profiler
from quaver.lab.trainer.summary import summarize
from quaver.lab.trainer.trained_model import StepResult, TrainedModel
from quaver.lab.trainer.training_run import TrainingRun
from quaver.numerics.monitoring import Monitor
from quaver.numerics.watch import AlarmSink
from quaver.recipes.linear_casts import MATMULS

MEMORY_STEP = 2
"""The step of this process whose peak memory is measured: the optimizer's state exists after the first step.

If torch.profiler is needed for it (memory.py) but traces that step, a later step is measured.
"""

SLOW_PHASE_PATIENCE = 10
"""The watchdog's factor for the first step and the first validation, which may compile, and for checkpoints."""

VARIANTS_OF_A_BLOCK = 8
"""The compiled variants of a block: training or validation, float8 or high precision, with or without a monitor."""


def train(run: TrainingRun) -> dict[str, Any]:
    """Train every model to the last step, and return the summary, which is also written to summary.json.

    Ctrl-C, SIGTERM or SIGHUP on any rank ends the run on all ranks after the current step, with status "interrupted"
    and with a checkpoint if checkpoints are enabled. An alarm with numerics.on_alarm = stop does the same with status
    "alarm". However the loop ends, the summary and the curves are written and the run folder is unlocked.

    Raises:
        NonFiniteError: if a loss or a gradient norm is not finite; on every rank, with the same message.
        CheckpointError: if a checkpoint cannot be written; on every rank.
        OutputError: if another file cannot be written, on any rank; on every rank, after the same step.
        KeyboardInterrupt: with several ranks, at a second Ctrl-C, without waiting for the other ranks.
    """
    try:
        with silence_other_ranks(run.ranks.is_first):
            return _train(run)
    finally:
        run.folder.release()


def _train(run: TrainingRun) -> dict[str, Any]:
    status, error, waits, is_writable, failures = "failed", None, True, True, OutputFailures(run.ranks)
    try:
        deterministic = use_determinism(run.config.training.deterministic)
        with (
            deterministic,
            _raise_limit(run),
            _open_outputs(run, failures) as outputs,
            catch_stop_signals() as requests,
        ):
            _introduce(run, outputs.display)
            _train_steps(run, outputs, requests)
            reason = run.ranks.gather(outputs.alarms.reason)[0]
            is_done = run.progress.step >= run.config.training.steps
            status, error = "finished" if is_done else "alarm" if reason else "interrupted", reason or None
    except KeyboardInterrupt:
        status, waits = "interrupted", False
        if not run.ranks.is_alone:
            raise
    except Exception as raised:
        statuses: dict[type, str] = {NonFiniteError: "non-finite", CheckpointError: "checkpoint failed"}
        status = statuses.get(type(raised), "failed")
        is_writable = not isinstance(raised, OutputError)
        is_one_line = isinstance(raised, (NonFiniteError, CheckpointError, OutputError))
        error = str(raised) if is_one_line else f"{type(raised).__name__}: {next(iter(str(raised).splitlines()), '')}"
        raise
    finally:
        with _watch(run, "the end of the last checkpoint", SLOW_PHASE_PATIENCE):
            unsaved = run.checkpoints.close(waits=waits)
        if unsaved:
            error = f"{error}; {unsaved}" if error else unsaved
            if run.ranks.is_first:
                say(unsaved)
        summary = summarize(run, status=status, error=error)
        if is_writable:
            with failures.catch():  # an error that ended the run has priority
                _conclude(run, status, summary)
    failures.raise_on_all_ranks()
    _print_end(run, status, summary)
    return summary


def _raise_limit(run: TrainingRun) -> AbstractContextManager[Any]:
    """Raise Dynamo's recompile limit to what a run needs: with recipes per layer no two blocks share compiled code."""
    if not run.config.training.compile:
        return nullcontext()
    from quaver.torch_private.compiler import recompile_limit  # imports the compiler, which takes seconds

    torch.compiler.reset()  # code of an earlier run in this process would be reused, and not be counted
    phases_of_block = 2 ** len(MATMULS) if run.config.float8.high_precision_schedule else 1
    blocks = sum(len(list(model.model.iter_blocks())) for model in run.models)
    return recompile_limit(VARIANTS_OF_A_BLOCK * phases_of_block * blocks)


def _train_steps(run: TrainingRun, outputs: "Outputs", requests: Requests) -> None:
    """Train to the last step, or to a signal, an alarm or a write error on any rank; then save, or raise the error."""
    config, progress = run.config, run.progress
    while progress.step < config.training.steps:
        has_failed = run.checkpoints.failed or bool(outputs.failures.first)
        patience = SLOW_PHASE_PATIENCE if progress.step == run.began_at_step else 1  # ranks load at different speeds
        with _watch(run, f"the agreement before step {progress.step + 1}", patience):
            ends = run.ranks.any(requests.stop or has_failed or bool(outputs.alarms.reason), run.device)
        if ends:
            break
        try:
            _train_step(run, progress.step + 1, outputs)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}{_save_last_finite(run, error)}") from error
        _fall_back(run, outputs)
        _check_folder(run, outputs)
        if progress.step % config.validation.freq == 0 or progress.step == config.training.steps:
            is_first = progress.step - run.began_at_step <= config.validation.freq
            with _watch(run, f"the validation after step {progress.step}", SLOW_PHASE_PATIENCE if is_first else 1):
                _validate(run, progress.step, outputs)
        if run.checkpoints.is_due(progress.step):
            _save(run)
    with _watch(run, "the agreement after the last step"):
        outputs.failures.raise_on_all_ranks()
    if progress.step > run.began_at_step:
        _save(run, waits=True)


def _save(run: TrainingRun, *, waits: bool = False) -> None:
    with _watch(run, f"the checkpoint of step {run.progress.step}", SLOW_PHASE_PATIENCE):
        run.checkpoints.save(run.progress, run.models)
        if waits:
            run.checkpoints.wait()


def _watch(run: TrainingRun, phase: str, patience: int = 1) -> AbstractContextManager[None]:
    """Write the stacks of this process if the block takes longer than comm.watchdog_seconds times `patience`."""
    watchdog = Watchdog(run.folder.get_stacks_path(run.ranks.rank))
    return watchdog.watch(run.config.comm.watchdog_seconds * patience, f"{phase} on rank {run.ranks.rank}")


def _check_folder(run: TrainingRun, outputs: "Outputs") -> None:
    """Note a removed run folder. After the first step, write the report of conversion with the backends that ran."""
    if not run.ranks.is_first:
        return
    with outputs.failures.catch():
        run.folder.check_exists()
        if run.progress.step == run.began_at_step + 1 and run.config.float8.enable_float8_linear:
            run.folder.write_json("conversion_report.json", conversion_report(run.models[0].model).to_dict())


def _train_step(run: TrainingRun, step: int, outputs: "Outputs") -> None:
    """Run one step of every model, on the same batches, and record it."""
    training, progress = run.config.training, run.progress
    batches = _to_device(run.data.make_step_batches(training, progress.consumed_sequences, run.dims), run.device)
    steps_here = step - run.began_at_step
    patience = SLOW_PHASE_PATIENCE if steps_here == 1 else 1
    models = run.models if step % 2 else run.models[::-1]
    for model in models:
        reset_device_peaks(run.device)
        with (
            _watch(run, f"step {step} of {model.name}", patience),
            outputs.profiling.profile(step, model.name, model.model, model.optimizer),
        ):
            measure_memory = _is_memory_due(run, model, step, outputs.profiling)
            try:
                result = model.train_step(step, batches, measure_memory=measure_memory)
            except NonFiniteError as error:
                outputs.write({"step": step, "run": model.name, "nonfinite": str(error)})
                error.can_continue = model is models[0]  # otherwise the other model has taken this step
                raise
        _record_step(run, model, step, result, outputs)
        if steps_here == 1 and model.note_on_compile:
            outputs.display.print_line(f"{model.name}: {model.note_on_compile}")
    progress.step = step
    progress.consumed_sequences += training.step_batch_size


def _save_last_finite(run: TrainingRun, error: NonFiniteError) -> str:
    """Save the run after its last finite step, if it can continue from there, and return the end of the message.

    Non-finite weights are not saved, because the new checkpoint would replace an older one.
    """
    if not run.config.checkpoint.enable or run.progress.step == run.began_at_step or not error.can_continue:
        return ""
    are_finite = all(is_finite(parameter) for model in run.models for parameter in model.model.parameters())
    if run.ranks.any(not are_finite, run.device):
        return "; the weights are not finite, and are not saved"
    try:
        _save(run, waits=True)
    except CheckpointError as failed:
        return f"; {failed}"
    return f"; the checkpoint of step {run.progress.step} is from before it"


def _is_memory_due(run: TrainingRun, model: TrainedModel, step: int, profiling: Profiler) -> bool:
    """Return whether to measure memory: once, and on the first rank only, which writes the summary."""
    first = min(MEMORY_STEP, run.config.training.steps - run.began_at_step)
    is_reached = step - run.began_at_step >= first
    is_free = model.has_countable_memory or not profiling.traces(step)
    return run.ranks.is_first and is_reached and is_free and model.peak.peak_bytes is None


def _validate(run: TrainingRun, step: int, outputs: "Outputs") -> None:
    config = run.config
    batches = _to_device(run.data.make_validation_batches(config.training, config.validation, run.dims), run.device)
    for model in run.models:
        record = {"step": step, "run": model.name, "validation_loss": model.validate(batches)}
        record["precision"] = model.precision
        if model.expert_load is not None:
            record["expert_load"] = model.expert_load.tolist()
        if config.validation.high_precision_too:
            record["validation_loss_hp"] = model.validation_loss_hp
        outputs.write(record)
        outputs.display.print_validation(record)


def _to_device(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    return [batch.to(device) for batch in batches]


@dataclass
class Outputs:
    """The destinations of a run's numbers during training. Only the first rank has loggers and a visible display."""

    metrics: JsonLines | None
    loggers: list[Logger]
    scales: JsonLines | None
    """float8_scales.jsonl, for recipes with persistent scales."""
    display: Display
    profiling: Profiler
    alarms: RunAlarms
    alarm_sink: AlarmSink | None
    """The sink of the monitor, on the first rank."""
    failures: OutputFailures

    def write(self, record: dict[str, Any]) -> None:
        """Append the record of a step or a validation to metrics.jsonl, and log its numbers."""
        if self.metrics is not None:
            with self.failures.catch():
                self.metrics.write(record)
        for logger in self.loggers:
            with self.failures.catch():
                logger.log(record["step"], list_scalars(record))


@contextmanager
def _open_outputs(run: TrainingRun, failures: OutputFailures) -> Iterator[Outputs]:
    folder, config, is_first = run.folder, run.config.metrics, run.ranks.is_first
    with ExitStack() as stack:
        loggers: list[Logger] = []
        metrics = scales = None
        if is_first:
            with failures.catch():
                metrics = stack.enter_context(closing(JsonLines(folder.metrics)))
                loggers = stack.enter_context(open_loggers(config, folder, asdict(run.config), failures))
                if config.float8_scales_freq > 0 and any(model.scaling for model in run.models):
                    scales = stack.enter_context(closing(JsonLines(folder.float8_scales)))
        display = Display(make_stdout_console(quiet=not is_first), config.log_freq, run.peak.source)
        alarms = RunAlarms(run.config.numerics, display, run.models[0].model, run.progress.fallbacks)
        sink = None
        if run.config.numerics.every:
            if is_first:
                sink = alarms.make_sink(NumericsLog(folder, loggers, failures), folder, failures)
            stack.callback(_close_monitor, run)
            _open_monitor(run, sink)
        failures.raise_on_all_ranks()
        yield Outputs(
            metrics,
            loggers,
            scales,
            display,
            stack.enter_context(Profiler(run.config, folder.path, run.ranks.rank, run.device, failures)),
            alarms,
            sink,
            failures,
        )


def _open_monitor(run: TrainingRun, sink: AlarmSink | None) -> None:
    numerics, model = run.config.numerics, run.models[0]
    model.monitor = Monitor(
        model.model,
        every=numerics.every,
        extras_every=numerics.extras_every,
        hardware=None if numerics.hardware == "none" else numerics.hardware,
        sink=sink,
        completed_steps=run.progress.step,
        steps_by_hand=True,
    )


def _close_monitor(run: TrainingRun) -> None:
    if run.models[0].monitor is not None:
        run.models[0].monitor.close()
        run.models[0].monitor = None


def _fall_back(run: TrainingRun, outputs: "Outputs") -> None:
    """Change the recipes of layers that alarms of this step name, on every rank."""
    numerics, step, model = run.config.numerics, run.progress.step, run.models[0]
    if numerics.on_alarm != "fallback" or not (step == 1 or step % numerics.every == 0):
        return
    with _watch(run, f"the fallback after step {step}"):
        layers: dict[str, str] = run.ranks.gather(outputs.alarms.take_fallbacks())[0]
        if not layers:
            return
        _close_monitor(run)
        fall_back(model, run.checkpoints, layers)
    run.flops_per_token[model.name] = model.count_flops_per_token()
    run.progress.fallbacks |= layers
    for name, recipe in layers.items():
        outputs.display.print_line(f"step {step}: {name} computes in {recipe} from now on")
    _open_monitor(run, outputs.alarm_sink)


def _record_step(run: TrainingRun, model: TrainedModel, step: int, result: StepResult, outputs: Outputs) -> None:
    if result.nonfinite:
        skipped = run.progress.skipped_steps
        skipped[model.name] = skipped.get(model.name, 0) + 1
        outputs.write({"step": step, "run": model.name, "skipped": result.nonfinite})
        outputs.display.print_skipped_step(step, model.name, result.nonfinite)
        return
    scaling = model.scaling.report() if run.ranks.is_first and model.precision == model.name else []
    record = _make_step_record(run, model, step, result) | summarize_saturation(scaling)
    recent = run.progress.recent_losses.setdefault(model.name, [])
    record["loss_spike"] = is_spike(result.loss, recent, run.config.metrics.loss_spike_deviations)
    remember(result.loss, recent)
    outputs.write(record)
    outputs.display.print_step(record)
    if outputs.scales and scaling and step % run.config.metrics.float8_scales_freq == 0:
        with outputs.failures.catch():
            outputs.scales.write(make_scales_record(step, model.name, scaling))


def _make_step_record(run: TrainingRun, model: TrainedModel, step: int, result: StepResult) -> dict[str, Any]:
    tokens_per_s = run.config.training.step_tokens / result.seconds
    flops = run.flops_per_token[model.name]
    if model.precision != model.name:  # float8.high_precision_schedule
        flops = model.count_flops_per_token()
    return {
        "step": step,
        "run": model.name,
        "precision": model.precision,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "step_seconds": result.seconds,
        "tokens_per_s": tokens_per_s,
        **compute_utilization(flops, tokens_per_s / run.ranks.world_size, run.peak),
        **read_device_memory(run.device),
        **_find_fullest_expert(model),
    }


def _find_fullest_expert(model: TrainedModel) -> dict[str, float]:
    """Return the load of the fullest expert of any layer, relative to the mean."""
    load = model.expert_load
    return {} if load is None else {"expert_load_max": load.max().item() * load.shape[1]}


def _introduce(run: TrainingRun, display: Display) -> None:
    if not run.ranks.is_first:
        return
    config, origin = run.config, run.data.origin
    parameters = sum(parameter.numel() for parameter in run.models[0].model.parameters())
    display.print_line(f"run folder   {run.folder.path}")
    if run.folder.resume_step is not None:
        changes = "; ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in run.folder.changes.items())
        display.print_line(
            f"resumed      after step {run.progress.step}" + (f", changed: {changes}" if changes else "")
        )
    precisions = " and ".join(model.name for model in run.models)
    display.print_line(f"model        {parameters:,} parameters, trained in {precisions}")
    display.print_line(
        f"data         {origin['path']}: {origin['files']:,} files ({origin['corrupt']:,} corrupt items left out), "
        f"{origin['train_tokens']:,} tokens to train, {origin['validation_tokens']:,} to validate"
    )
    display.print_line(
        f"step         {config.training.step_tokens:,} tokens; {config.training.steps} steps on {run.device}"
    )
    if not run.ranks.is_alone:
        display.print_line(f"ranks        {run.dims}")
        for note in dict.fromkeys(note for model in run.models for note in model.notes):
            display.print_line(f"{'':<12} {note}")
    peaks = {"bfloat16": run.peak.flops_per_s}
    if run.peak.float32_flops_per_s and any("float32" in flops for flops in run.flops_per_token.values()):
        peaks["float32"] = run.peak.float32_flops_per_s
    for name, flops_per_s in peaks.items():
        display.print_line(f"{name:<12} {flops_per_s / 1e12:.3g} TFLOP/s ({run.peak.source})")


def _conclude(run: TrainingRun, status: str, summary: dict[str, Any]) -> None:
    """Write the summary and the curves, on the first rank. Raises OutputError."""
    did_something = run.progress.step > run.began_at_step or status != "finished"
    if run.ranks.is_first and did_something:
        run.folder.write_json("summary.json", summary)
        with replace_file(run.folder.curves) as image:
            draw_curves(run.folder.metrics, image, title=run.folder.path.name)


def _print_end(run: TrainingRun, status: str, summary: dict[str, Any]) -> None:
    if not run.ranks.is_first:
        return
    if run.progress.step == run.began_at_step and status == "finished":
        say(f"nothing left to do: the run is at training.steps = {run.config.training.steps}; set more steps")
    else:
        print_results(summary)
    say(f"run folder: {run.folder.path}")
    if status in ("interrupted", "alarm") and run.checkpoints.folder.list_steps():
        say(f"resume with: quaver train --resume {run.folder.path}")

"""The training loop: trains the models of a run step by step, validates and saves.

With `job.compare` a float8 model and its bfloat16 baseline take turns, step by step and in alternating order. A slow
moment of the machine then affects both, and the ratio of their median step times is fair.

A step is synchronous: the host waits for the device before and after it, to time it, and reads the loss before the
optimizer's step and the ranks' agreement before the next step. So the host cannot launch kernels ahead from step to
step. Every step pays the latency of its first kernels and of one all-reduce of a number.
"""

from collections.abc import Sequence
from typing import Any

import torch

from quaver.lab.data import Batch
from quaver.lab.model.parallelize import ignore_view_warning
from quaver.lab.runs.dcp import ignore_single_process_warning
from quaver.lab.runs.errors import CheckpointError, OutputFailures
from quaver.lab.runs.json_lines import RecordKind
from quaver.lab.runs.status import RunStatus
from quaver.lab.trainer.alarms import apply_fallbacks
from quaver.lab.trainer.memory import reset_device_peaks
from quaver.lab.trainer.nonfinite import NonFiniteError, is_finite
from quaver.lab.trainer.outputs import Outputs, open_outputs
from quaver.lab.trainer.process import (
    StopRequest,
    catch_stop_signals,
    silence_other_ranks,
    use_determinism,
    use_fresh_compiler,
)
from quaver.lab.trainer.profiling import Profiler
from quaver.lab.trainer.run_description import explain_eager_blocks, print_nothing_left, print_run_description
from quaver.lab.trainer.run_end import write_summary_on_exit
from quaver.lab.trainer.step_statistics import append_recent_loss, is_spike
from quaver.lab.trainer.trained_model import StepResult, TrainedModel
from quaver.lab.trainer.training_run import TrainingRun

MEMORY_STEP = 2
"""The step of this process whose peak memory is measured: the optimizer's state exists after the first step.

If torch.profiler is needed for it (memory.py) but traces that step, a later step is measured.
"""


def train(run: TrainingRun) -> dict[str, Any]:
    """Train every model to the last step, and return the summary, which is also written to summary.json.

    A run that has ended writes nothing, and its summary has only the status.
    Ctrl-C, SIGTERM or SIGHUP on any rank ends the run on all ranks after the current step, with status "interrupted"
    and with a checkpoint if checkpoints are enabled. An alarm with numerics.on_alarm = stop does the same with status
    "alarm". However the loop ends, the summary and the curves are written and the run folder is unlocked.

    Raises:
        NonFiniteError: if a loss or a gradient norm is not finite; on every rank, with the same message.
        CheckpointError: if a checkpoint cannot be written; on every rank.
        NotWrittenError: if another file cannot be written, on any rank; on every rank, after the same step.
        KeyboardInterrupt: with several ranks, at a second Ctrl-C, without waiting for the other ranks.
    """
    failures = OutputFailures(run.ranks)
    try:
        if run.has_ended:
            print_nothing_left(run)
            return {"status": RunStatus.FINISHED}
        with (
            # Around all collectives: a scheduler's signals reach ranks one by one.
            catch_stop_signals(run.ranks.launcher_pid) as stop_request,
            silence_other_ranks(is_first=run.ranks.is_first),
            ignore_view_warning(),
            ignore_single_process_warning(),
            write_summary_on_exit(run, failures) as end,
            use_determinism(enabled=run.config.training.deterministic),
            use_fresh_compiler(run.config, [trained.model for trained in run.models]),
            open_outputs(run, failures) as outputs,
        ):
            print_run_description(run, outputs.display)
            _train_steps(run, outputs, stop_request)
            end.set_status(alarm=run.ranks.all_gather_objects(outputs.alarms.stop_reason)[0])
        return end.summary
    finally:
        run.folder.release()


def _train_steps(run: TrainingRun, outputs: Outputs, stop_request: StopRequest) -> None:
    """Train to the last step, or to a signal, an alarm or a write error on any rank; then save, or raise the error."""
    config, progress = run.config, run.progress
    while not run.has_ended and not _must_end(run, outputs, stop_request):
        try:
            _train_step(run, progress.step + 1, outputs)
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}{_save_last_finite(run, error)}") from error
        apply_fallbacks(run, outputs.alarms)
        outputs.check_folder()
        if progress.step == run.began_at_step + 1:
            outputs.write_conversion_report()
        if progress.step % config.validation.freq == 0 or progress.step == config.training.steps:
            _validate(run, outputs)
        if run.checkpoints.is_due(progress.step):
            _save(run)
    with run.watch_for_hangs("the agreement after the last step"):
        outputs.failures.raise_on_all_ranks()
    if progress.step > run.began_at_step:
        _save(run, waits=True)


def _must_end(run: TrainingRun, outputs: Outputs, stop_request: StopRequest) -> bool:
    """Return whether any rank must end before the next step. A collective."""
    step = run.progress.step
    has_error = run.checkpoints.has_error or outputs.failures.has_error
    must_end = stop_request.must_stop or has_error or bool(outputs.alarms.stop_reason)
    has_just_loaded = step == run.began_at_step  # ranks load at different speeds
    with run.watch_for_hangs(f"the agreement before step {step + 1}", is_slow=has_just_loaded):
        return run.ranks.holds_on_any(must_end, run.device)


def _train_step(run: TrainingRun, step: int, outputs: Outputs) -> None:
    """Run one step of every model, on the same batches, and record it."""
    training, progress = run.config.training, run.progress
    batches = _to_device(run.data.make_step_batches(training, progress.consumed_sequences, run.dims), run.device)
    is_first_in_process = step == run.began_at_step + 1
    models = run.models if step % 2 else run.models[::-1]
    for trained in models:
        reset_device_peaks(run.device)
        with (
            run.watch_for_hangs(f"step {step} of {trained.name}", is_slow=is_first_in_process),
            outputs.profiler.profile(step, trained.name, trained.model, trained.optimizer),
        ):
            measure_memory = is_memory_due(run, trained, step, outputs.profiler)
            try:
                result = trained.train_step(step, batches, measure_memory=measure_memory)
            except NonFiniteError as error:
                outputs.write_nonfinite(RecordKind.NONFINITE_STEP, trained, step, str(error))
                error.can_continue = trained is models[0]  # otherwise the other model has taken this step
                raise
        outputs.record_step(trained, step, result, is_loss_spike=_update_progress(run, trained, result))
        if is_first_in_process and (reason := explain_eager_blocks(trained)):
            outputs.display.print_line(f"{trained.name}: {reason}")
    progress.step = step
    progress.consumed_sequences += training.step_batch_size


def _update_progress(run: TrainingRun, trained: TrainedModel, result: StepResult) -> bool:
    """Count a skipped step, or add the loss to the recent ones, in the progress; return whether the loss is a spike."""
    progress = run.progress
    if result.nonfinite_reason:
        progress.skipped_steps[trained.name] = progress.skipped_steps.get(trained.name, 0) + 1
        return False
    recent = progress.recent_losses.setdefault(trained.name, [])
    is_loss_spike = is_spike(result.loss, recent, run.config.metrics.loss_spike_deviations)
    append_recent_loss(result.loss, recent)
    return is_loss_spike


def _validate(run: TrainingRun, outputs: Outputs) -> None:
    config, step = run.config, run.progress.step
    batches = _to_device(run.data.make_validation_batches(config.training, config.validation, run.dims), run.device)
    is_first = step - run.began_at_step <= config.validation.freq
    with run.watch_for_hangs(f"the validation after step {step}", is_slow=is_first):
        for trained in run.models:
            outputs.record_validation(trained, trained.validate(batches))


def _save(run: TrainingRun, *, waits: bool = False) -> None:
    with run.watch_for_hangs(f"the checkpoint of step {run.progress.step}", is_slow=True):
        run.checkpoints.save(run.progress, run.models)
        if waits:
            run.checkpoints.wait()


def _save_last_finite(run: TrainingRun, error: NonFiniteError) -> str:
    """Save the run after its last finite step, if it can continue from there, and return the end of the message.

    Non-finite weights are not saved, because the new checkpoint would replace an older one.
    """
    if not run.config.checkpoint.enable or run.progress.step == run.began_at_step:
        return ""
    if not error.can_continue:
        return f"; step {run.progress.step} is not saved, because the other model has taken the next one"
    are_finite = all(is_finite(parameter) for trained in run.models for parameter in trained.model.parameters())
    if run.ranks.holds_on_any(not are_finite, run.device):
        return "; the weights are not finite, and are not saved"
    try:
        _save(run, waits=True)
    except CheckpointError as save_error:
        return f"; {save_error}"
    checkpoint = f"the checkpoint of step {run.progress.step} is from before that step"
    return f"; {checkpoint}; if it fails again, give an earlier checkpoint.load_step, or begin again"


def is_memory_due(run: TrainingRun, trained: TrainedModel, step: int, profiler: Profiler) -> bool:
    """Return whether to measure memory: once, and on the first rank only, which writes the summary."""
    earliest = min(MEMORY_STEP, run.config.training.steps - run.began_at_step)
    is_reached = step - run.began_at_step >= earliest
    is_countable = trained.has_countable_memory or not profiler.is_traced(step)
    return run.ranks.is_first and is_reached and is_countable and trained.peak_memory.peak_bytes is None


def _to_device(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    return [batch.to(device) for batch in batches]

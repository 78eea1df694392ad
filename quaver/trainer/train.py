"""The training loop, from a checked plan to a run folder.

`plan_run` (plan.py) refuses everything that can be wrong with the input before a file is written or a process group
made; `build` makes the models, on as many ranks as there are, and loads a checkpoint where the run goes on; `train`
then runs. With `job.compare` two twins take turns, step by step and in alternating order, so that a slow moment of the
machine falls on both and the ratio of their median step times is fair.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from quaver.devices import PeakFlops, peak_flops
from quaver.trainer.checkpoints.checkpointer import Checkpointer, Progress, load_weights
from quaver.trainer.config import TrainConfig
from quaver.trainer.data import Batch, TokenData
from quaver.trainer.determinism import determinism
from quaver.trainer.errors import CheckpointError, NonFiniteError, OutputError
from quaver.trainer.initialize import allocate, initialize
from quaver.trainer.interrupt import Interrupt, deferred_interrupt
from quaver.trainer.layout import Layout
from quaver.trainer.parallelize import parallelize
from quaver.trainer.plan import Plan, open_folder, plan_run
from quaver.trainer.profiling.steps import Profiling
from quaver.trainer.ranks import Ranks
from quaver.trainer.records.device_memory import begin_step, step_memory
from quaver.trainer.records.display import Display, print_results, training_display
from quaver.trainer.records.loggers import Logger, loggers
from quaver.trainer.records.loss_spikes import is_spike, remember
from quaver.trainer.records.metrics import MetricsWriter, utilization
from quaver.trainer.records.plot import draw_curves
from quaver.trainer.records.plot_scales import draw_scales
from quaver.trainer.records.run_folder import RunFolder
from quaver.trainer.records.scales import saturation_summary, scales_record
from quaver.trainer.records.summary import summarize
from quaver.trainer.twin import StepResult, Twin
from quaver.trainer.watchdog import Watchdog, watchdog

MEMORY_STEP = 2
"""The step of this process that is measured for peak memory: the optimizer's state exists from the first one on."""

FIRST_STEP_PATIENCE = 10
"""How many times as long the watchdog waits for the first step, which may compile."""


@dataclass
class Run:
    """Everything a run needs: the twins (the one asked for first), the data, the folder (of the first rank)."""

    config: TrainConfig
    ranks: Ranks
    layout: Layout
    device: torch.device
    peak: PeakFlops
    flops_per_token: dict[str, dict[str, int]]
    data: TokenData
    twins: list[Twin]
    folder: RunFolder | None
    paths: RunFolder
    """The same folder on every rank, for what each writes itself."""
    checkpoints: Checkpointer
    progress: Progress = field(default_factory=Progress)
    began_at_step: int = 0


def prepare(config: TrainConfig) -> Run:
    """Return the run of a single process. Raises what `plan_run`, `open_folder` and `build` raise."""
    plan = plan_run(config, Ranks())
    open_folder(plan)
    return build(plan)


def build(plan: Plan) -> Run:
    """Parallelize the models of `plan` and give them their first weights, or those of a checkpoint.

    The first weights are the same for any number of ranks. With several ranks this needs the process group, and every
    rank must call it.

    Raises:
        CheckpointError: on every rank, if a checkpoint cannot be read or does not fit.
    """
    config, ranks = plan.config, plan.ranks
    mine = (str(plan.folder.path), plan.folder.resume_step) if plan.folder else None
    path, resume_step = ranks.gather(mine)[0]
    loads_weights = resume_step is not None or bool(config.checkpoint.initial_load_path)
    twins = _build_twins(plan, draws_weights=not loads_weights)
    paths = RunFolder(Path(path), resume_step)
    checkpoints = Checkpointer(paths.checkpoints(config.checkpoint), config.checkpoint, ranks, plan.device, plan.about)
    progress = Progress()
    if resume_step is not None:
        progress = checkpoints.load(resume_step, twins)
    elif loads_weights:
        load_weights(config.checkpoint.initial_weights, twins)
    return Run(
        config,
        ranks,
        plan.layout,
        plan.device,
        peak_flops(plan.device),
        plan.models.flops_per_token,
        plan.data,
        twins,
        plan.folder,
        paths,
        checkpoints,
        progress,
        progress.step,
    )


def _build_twins(plan: Plan, *, draws_weights: bool) -> list[Twin]:
    mesh = None
    if plan.layout.mesh:
        dims = plan.layout.mesh
        mesh = init_device_mesh(plan.device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    twins = []
    for name, model in plan.models.by_name.items():
        parallelize(model, plan.config, mesh)
        allocate(model, plan.device)
        if draws_weights:
            initialize(model, plan.config.training.seed)
        twins.append(Twin(name, model, plan.config, plan.device, plan.ranks))
    return twins


def train(run: Run) -> dict[str, Any]:
    """Train every twin to the last step and return the summary, which is also written to the run folder.

    Ctrl-C or SIGTERM, on any rank, ends the run on all of them after the current step with status "interrupted", and
    with a checkpoint where these are enabled. However the loop ends, the folder has its summary and curves.

    Raises:
        NonFiniteError: if a loss or a gradient norm is not finite; on every rank, with the same message.
        CheckpointError: if a checkpoint cannot be written; on every rank.
        OutputError: if another file cannot be written; on the first rank.
        KeyboardInterrupt: with several ranks, at a second Ctrl-C: the others are left wherever they are.
    """
    status, error, in_a_hurry = "failed", None, False
    try:
        with (
            determinism(run.config.training.deterministic),
            _outputs(run) as outputs,
            deferred_interrupt() as interrupt,
        ):
            _introduce(run, outputs.display)
            _train_steps(run, outputs, interrupt)
            status = "finished" if run.progress.step >= run.config.training.steps else "interrupted"
    except KeyboardInterrupt:
        status, in_a_hurry = "interrupted", True
        if not run.ranks.is_alone:
            raise
    except (NonFiniteError, CheckpointError, OutputError) as found:
        status = {NonFiniteError: "non-finite", CheckpointError: "checkpoint failed"}.get(type(found), "failed")
        error = str(found)
        raise
    finally:
        run.checkpoints.close(waits=not in_a_hurry)
        summary = _conclude(run, status, error)
    if run.folder:
        if run.progress.step == run.began_at_step and status == "finished":
            print(f"nothing left to do: the run has done training.steps = {run.config.training.steps}; give it more")
        else:
            print_results(summary)
        print(f"run folder: {run.folder.path}")
        if status == "interrupted" and run.checkpoints.folder.steps():
            print(f"go on with: quaver train --resume {run.folder.path}")
    return summary


def _train_steps(run: Run, outputs: "Outputs", interrupt: Interrupt) -> None:
    """Train until the last step, an interruption, or a checkpoint that failed; save what was reached."""
    config, progress = run.config, run.progress
    while progress.step < config.training.steps:
        if run.ranks.any(interrupt.requested or run.checkpoints.failed, run.device):
            break
        _train_step(run, progress.step + 1, outputs)
        if progress.step % config.validation.freq == 0 or progress.step == config.training.steps:
            _validate(run, progress.step, outputs)
        if run.checkpoints.is_due(progress.step):
            run.checkpoints.save(progress, run.twins)
    if progress.step > run.began_at_step:
        run.checkpoints.save(progress, run.twins)
    run.checkpoints.wait()


def _conclude(run: Run, status: str, error: str | None) -> dict[str, Any]:
    summary = summarize(
        run.config,
        run.twins,
        run.device,
        run.peak,
        run.layout,
        run.flops_per_token,
        status=status,
        steps=run.progress.step,
        error=error,
    )
    did_something = run.progress.step > run.began_at_step or status != "finished"
    if run.folder and did_something and not (status == "failed" and error):  # else the folder cannot be written
        run.folder.write_json("summary.json", summary)
        draw_curves(run.folder.metrics, run.folder.curves, title=run.folder.path.name)
        if run.config.metrics.plot_float8_scales:
            draw_scales(run.folder.float8_scales, run.folder.float8_scales_plot, title=run.folder.path.name)
    return summary


@dataclass
class Outputs:
    """Where a run's numbers go while it trains; on every rank but the first, nowhere."""

    metrics: MetricsWriter
    scales: MetricsWriter
    loggers: list[Logger]
    display: Display
    watchdog: Watchdog
    """Of every rank, as the next."""
    profiling: Profiling

    def write(self, record: dict[str, Any]) -> None:
        """Record the numbers of a step or a validation."""
        self.metrics.write(**record)
        for logger in self.loggers:
            logger.write(record)


@contextmanager
def _outputs(run: Run) -> Iterator[Outputs]:
    folder, config = run.folder, run.config.metrics
    records_scales = config.float8_scales_freq > 0 and any(twin.scaling for twin in run.twins)
    names = [twin.name for twin in run.twins]
    with (
        MetricsWriter(folder.metrics if folder else None) as metrics,
        MetricsWriter(folder.float8_scales if folder and records_scales else None) as scales,
        loggers(config, folder.path if folder else None, asdict(run.config)) as others,
        training_display(names, run.config.training.steps, config.log_freq, quiet=folder is None) as display,
        watchdog(run.paths.stacks(run.ranks.rank)) as watching,
        Profiling(run.config, run.paths.path, run.ranks, run.device) as profiling,
    ):
        yield Outputs(metrics, scales, others, display, watching, profiling)


def _train_step(run: Run, step: int, outputs: Outputs) -> None:
    """Do one step of every twin, in the same order whichever of them is first, and record it."""
    training, progress = run.config.training, run.progress
    batches = _to_device(run.data.step_batches(training, progress.consumed_sequences, run.layout), run.device)
    steps_here = step - run.began_at_step
    measure_memory = steps_here == min(MEMORY_STEP, training.steps - run.began_at_step)
    patience_s = run.config.comm.watchdog_seconds * (FIRST_STEP_PATIENCE if steps_here == 1 else 1)
    for twin in run.twins if step % 2 else reversed(run.twins):
        begin_step(run.device)
        with (
            outputs.watchdog.step(patience_s, f"step {step} of {twin.name} on rank {run.ranks.rank}"),
            outputs.profiling.step(step, twin.name, twin.model, twin.optimizer),
        ):
            result = twin.train_step(step, batches, measure_memory=measure_memory)
        _record_step(run, twin, step, result, outputs)
    progress.step = step
    progress.consumed_sequences += training.step_batch_size


def _record_step(run: Run, twin: Twin, step: int, result: StepResult, outputs: Outputs) -> None:
    if result.nonfinite:
        progress = run.progress
        progress.skipped_steps[twin.name] = progress.skipped_steps.get(twin.name, 0) + 1
        outputs.write({"step": step, "run": twin.name, "skipped": result.nonfinite})
        outputs.display.skipped(step, twin.name, result.nonfinite)
        return
    scaling = twin.scaling.report() if run.folder and twin.precision == twin.name else []
    record = _step_record(run, twin, step, result) | saturation_summary(scaling)
    recent = run.progress.recent_losses.setdefault(twin.name, [])
    record["loss_spike"] = is_spike(result.loss, recent, run.config.metrics.loss_spike_deviations)
    remember(result.loss, recent)
    outputs.write(record)
    outputs.display.step(record)
    freq = run.config.metrics.float8_scales_freq
    if scaling and freq and step % freq == 0:
        outputs.scales.write(**scales_record(step, twin.name, scaling))


def _validate(run: Run, step: int, outputs: Outputs) -> None:
    config = run.config
    batches = _to_device(run.data.validation_batches(config.training, config.validation, run.layout), run.device)
    for twin in run.twins:
        record = {"step": step, "run": twin.name, "validation_loss": twin.validate(batches)}
        record["precision"] = twin.precision
        if config.validation.high_precision_too:
            record["validation_loss_hp"] = twin.validation_loss_hp
        outputs.write(record)
        outputs.display.validation(record)


def _step_record(run: Run, twin: Twin, step: int, result: StepResult) -> dict[str, Any]:
    tokens_per_s = run.config.training.step_tokens / result.seconds
    # In the last steps of a run with float8.last_steps_high_precision every FLOP is one of the high precision.
    flops = run.flops_per_token[twin.name]
    if twin.precision != twin.name:
        flops = {twin.precision: sum(flops.values())}
    return {
        "step": step,
        "run": twin.name,
        "precision": twin.precision,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "step_seconds": result.seconds,
        "tokens_per_s": tokens_per_s,
        **utilization(flops, tokens_per_s / run.ranks.world_size, run.peak),
        **step_memory(run.device),
    }


def _introduce(run: Run, display: Display) -> None:
    if run.folder is None:
        return
    config, origin = run.config, run.data.origin
    parameters = sum(parameter.numel() for parameter in run.twins[0].model.parameters())
    display.line(f"run folder   {run.folder.path}")
    if run.folder.resume_step is not None:
        changes = "; ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in run.folder.changes.items())
        display.line(f"resumed      after step {run.progress.step}" + (f", changed: {changes}" if changes else ""))
    display.line(f"model        {parameters:,} parameters, twins: {', '.join(twin.name for twin in run.twins)}")
    display.line(
        f"data         {origin['path']}: {origin['files']:,} files ({origin['corrupt']:,} corrupt items left out), "
        f"{origin['train_tokens']:,} tokens to train, {origin['validation_tokens']:,} to validate"
    )
    display.line(f"step         {config.training.step_tokens:,} tokens; {config.training.steps} steps on {run.device}")
    if not run.ranks.is_alone:
        mesh = " x ".join(f"{name} {size}" for name, size in run.layout.mesh.items())
        display.line(f"ranks        {run.ranks.world_size}: {mesh}")
    peaks = {"bfloat16": run.peak.flops_per_s}
    if run.peak.float32_flops_per_s and any("float32" in flops for flops in run.flops_per_token.values()):
        peaks["float32"] = run.peak.float32_flops_per_s
    for name, flops_per_s in peaks.items():
        display.line(f"{name:<12} {flops_per_s / 1e12:.3g} TFLOP/s at most ({run.peak.source})")


def _to_device(batches: Sequence[Batch], device: torch.device) -> list[Batch]:
    return [batch.to(device) for batch in batches]

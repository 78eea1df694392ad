"""The training loop, from a config to a run folder.

`plan_run` refuses everything that can be wrong with the input before a file is written or a process group made;
`build` makes the models, on as many ranks as there are; `train` then runs.
With `job.compare` two twins take turns, step by step and in alternating order, so that a slow moment of the
machine falls on both and the ratio of their median step times is fair.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh

from quaver.convert import ConversionReport
from quaver.devices import PeakFlops, peak_flops, resolve_device
from quaver.trainer.config import TrainConfig
from quaver.trainer.data import Micro, TextData, load_text
from quaver.trainer.display import Display, print_results, training_display
from quaver.trainer.float8 import convert_model
from quaver.trainer.initialize import initialize
from quaver.trainer.interrupt import deferred_interrupt
from quaver.trainer.layout import Layout, resolve
from quaver.trainer.metrics import MetricsWriter, model_flops_utilization
from quaver.trainer.model import Llama, training_flops_per_token
from quaver.trainer.nonfinite import NonFiniteError
from quaver.trainer.parallelize import parallelize
from quaver.trainer.plot import draw_curves
from quaver.trainer.plot_scales import draw_scales
from quaver.trainer.ranks import Ranks
from quaver.trainer.run_folder import RunFolder
from quaver.trainer.scales import saturation_summary, scales_record
from quaver.trainer.summary import summarize
from quaver.trainer.twin import StepResult, Twin

MEMORY_STEP = 2
"""The step that is measured for peak memory: the optimizer's state exists from the first one on."""


@dataclass
class Plan:
    """A run that was checked: the models without storage yet, the one asked for first, and what was converted.

    Every rank has the same plan but for its place in the layout. `folder` is there after `open_folder`, on the first.
    """

    config: TrainConfig
    ranks: Ranks
    layout: Layout
    device: torch.device
    data: TextData
    models: dict[str, Llama]
    report: ConversionReport | None
    folder: RunFolder | None = None

    @property
    def fingerprint(self) -> str:
        """What must be equal on every rank: the settings and the text."""
        return json.dumps([asdict(self.config), self.data.origin["sha256"]])


@dataclass
class Run:
    """Everything a run needs: the twins (the one asked for first), the data, the folder."""

    config: TrainConfig
    ranks: Ranks
    layout: Layout
    device: torch.device
    peak: PeakFlops
    data: TextData
    twins: list[Twin]
    folder: RunFolder | None


def prepare(config: TrainConfig) -> Run:
    """Return the run of a single process. Raises what `plan_run` and `open_folder` raise."""
    plan = plan_run(config, Ranks())
    open_folder(plan)
    return build(plan)


def plan_run(config: TrainConfig, ranks: Ranks) -> Plan:
    """Read the data, make and convert the models. Nothing is written, and no rank waits for another.

    Raises:
        ValueError: for a value that does not fit, OSError for a path, NotImplementedError for a known gap,
            MissingDeviceError for a device that is not there.
    """
    config, layout = resolve(config, rank=ranks.rank, world_size=ranks.world_size)
    device = ranks.device(resolve_device(config.training.device))
    data = load_text(config.data, config.training)
    models = {config.training.mixed_precision_param: _unmade(config)}
    report = None
    if config.float8.enable_float8_linear:
        model = _unmade(config)
        tokens = config.training.local_batch_size * config.training.seq_len
        report = convert_model(model, config.float8, tokens=tokens, device=device)
        models = {config.float8.recipe_name: model, **(models if config.job.compare else {})}
    return Plan(config, ranks, layout, device, data, models, report)


def open_folder(plan: Plan) -> None:
    """Make the run folder on the first rank. Raises OSError if it cannot be made, or is used already."""
    if plan.ranks.is_first:
        plan.folder = RunFolder.create(plan.config)
        plan.folder.write_json("data.json", plan.data.origin)
        if plan.report:
            plan.folder.write_json("conversion_report.json", plan.report.to_dict())


def build(plan: Plan) -> Run:
    """Parallelize the models of `plan` and give them their first weights: the same for any number of ranks.

    With several ranks this needs the process group, and every rank must call it.
    """
    mesh = None
    if plan.layout.mesh:
        dims = plan.layout.mesh
        mesh = init_device_mesh(plan.device.type, tuple(dims.values()), mesh_dim_names=tuple(dims))
    twins = []
    for name, model in plan.models.items():
        parallelize(model, plan.config, mesh)
        initialize(model, plan.config.training.seed, plan.device)
        twins.append(Twin(name, model, plan.config, plan.device, plan.ranks))
    peak = peak_flops(plan.device)
    return Run(plan.config, plan.ranks, plan.layout, plan.device, peak, plan.data, twins, plan.folder)


def _unmade(config: TrainConfig) -> Llama:
    with torch.device("meta"):
        return Llama(config.model).to(getattr(torch, config.training.dtype))


def train(run: Run) -> dict[str, Any]:
    """Train every twin to the last step and return the summary, which is also written to the run folder.

    Ctrl-C or SIGTERM, on any rank, ends the run on all of them after the current step with status "interrupted".
    However the loop ends, the folder has its summary and curves.

    Raises:
        NonFiniteError: if a loss or a gradient norm is not finite; on every rank, with the same message.
        KeyboardInterrupt: with several ranks, at a second Ctrl-C: the others are left wherever they are.
    """
    training = run.config.training
    status, step, error = "failed", 0, None
    try:
        with (
            _outputs(run) as outputs,
            deferred_interrupt() as interrupt,
        ):
            _introduce(run, outputs.display)
            while step < training.steps and not run.ranks.any(interrupt.requested, run.device):
                _train_step(run, step + 1, outputs)
                step += 1
                if step % run.config.validation.freq == 0 or step == training.steps:
                    _validate(run, step, outputs)
            status = "finished" if step == training.steps else "interrupted"
    except KeyboardInterrupt:
        status = "interrupted"
        if not run.ranks.is_alone:
            raise
    except NonFiniteError as found:
        status, error = "non-finite", str(found)
        raise
    finally:
        summary = _conclude(run, status, step, error)
    if run.folder:
        print_results(summary)
        print(f"run folder: {run.folder.path}")
    return summary


def _conclude(run: Run, status: str, steps: int, error: str | None) -> dict[str, Any]:
    summary = summarize(
        run.config, run.twins, run.device, run.peak, run.layout, status=status, steps=steps, error=error
    )
    if run.folder:
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
    display: Display


@contextmanager
def _outputs(run: Run) -> Iterator[Outputs]:
    folder, config = run.folder, run.config.metrics
    records_scales = config.float8_scales_freq > 0 and any(twin.scaling for twin in run.twins)
    names = [twin.name for twin in run.twins]
    with (
        MetricsWriter(folder.metrics if folder else None) as metrics,
        MetricsWriter(folder.float8_scales if folder and records_scales else None) as scales,
        training_display(names, run.config.training.steps, config.log_freq, quiet=folder is None) as display,
    ):
        yield Outputs(metrics, scales, display)


def _train_step(run: Run, step: int, outputs: Outputs) -> None:
    batches = _to_device(run.data.step_batches(run.config.training, step, run.layout), run.device)
    measure_memory = step == min(MEMORY_STEP, run.config.training.steps)
    freq = run.config.metrics.float8_scales_freq
    for twin in run.twins if step % 2 else reversed(run.twins):
        result = twin.train_step(step, batches, measure_memory=measure_memory)
        scaling = twin.scaling.report() if run.folder and twin.precision == twin.name else []
        record = _step_record(run, twin, step, result) | saturation_summary(scaling)
        outputs.metrics.write(**record)
        outputs.display.step(record)
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
        outputs.metrics.write(**record)
        outputs.display.validation(record)


def _step_record(run: Run, twin: Twin, step: int, result: StepResult) -> dict[str, Any]:
    tokens_per_s = run.config.training.step_tokens / result.seconds
    flops_per_token = training_flops_per_token(run.config.model, run.config.training.seq_len)
    return {
        "step": step,
        "run": twin.name,
        "precision": twin.precision,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "step_seconds": result.seconds,
        "tokens_per_s": tokens_per_s,
        "mfu": model_flops_utilization(flops_per_token, tokens_per_s / run.ranks.world_size, run.peak.flops_per_s),
    }


def _introduce(run: Run, display: Display) -> None:
    if run.folder is None:
        return
    config, origin = run.config, run.data.origin
    parameters = sum(parameter.numel() for parameter in run.twins[0].model.parameters())
    display.line(f"run folder   {run.folder.path}")
    display.line(f"model        {parameters:,} parameters, twins: {', '.join(twin.name for twin in run.twins)}")
    display.line(
        f"data         {origin['path']}: {origin['files']:,} files ({origin['skipped_files']} without text "
        f"left out), {origin['train_bytes']:,} bytes to train, {origin['validation_bytes']:,} to validate"
    )
    display.line(f"step         {config.training.step_tokens:,} tokens; {config.training.steps} steps on {run.device}")
    if not run.ranks.is_alone:
        mesh = " x ".join(f"{name} {size}" for name, size in run.layout.mesh.items())
        display.line(f"ranks        {run.ranks.world_size}: {mesh}")
    display.line(f"bfloat16     {run.peak.flops_per_s / 1e12:.3g} TFLOP/s at most ({run.peak.source})")


def _to_device(batches: Sequence[Micro], device: torch.device) -> list[Micro]:
    return [(tokens.to(device), targets.to(device)) for tokens, targets in batches]

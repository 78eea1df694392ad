"""The training loop, from a config to a run folder.

`prepare` refuses everything that can be wrong with the input before a file is written; `train` then runs.
With `job.compare` two twins take turns, step by step and in alternating order, so that a slow moment of the
machine falls on both and the ratio of their median step times is fair.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quaver.devices import PeakFlops, peak_flops, resolve_device
from quaver.trainer.config import TrainConfig
from quaver.trainer.data import Micro, TextData, load_text
from quaver.trainer.display import Display, print_results, training_display
from quaver.trainer.float8 import convert_model
from quaver.trainer.interrupt import deferred_interrupt
from quaver.trainer.metrics import MetricsWriter, model_flops_utilization
from quaver.trainer.model import Llama, training_flops_per_token
from quaver.trainer.nonfinite import NonFiniteError
from quaver.trainer.plot import draw_curves
from quaver.trainer.run_folder import RunFolder
from quaver.trainer.summary import summarize
from quaver.trainer.twin import StepResult, Twin

MEMORY_STEP = 2
"""The step that is measured for peak memory: the optimizer's state exists from the first one on."""


@dataclass
class Run:
    """Everything a run needs, made and checked: the twins (the one asked for first), the data, the folder."""

    config: TrainConfig
    device: torch.device
    peak: PeakFlops
    data: TextData
    twins: list[Twin]
    folder: RunFolder


def prepare(config: TrainConfig) -> Run:
    """Read the data, build the twins and make the run folder.

    Raises:
        ValueError: for a value that does not fit, OSError for a path, NotImplementedError for a known gap,
            MissingDeviceError for a device that is not there.
    """
    device = resolve_device(config.training.device)
    data = load_text(config.data, config.training)
    torch.manual_seed(config.training.seed)
    model = Llama(config.model)
    twin_model = copy.deepcopy(model)
    tokens = config.training.local_batch_size * config.training.seq_len
    enabled = config.float8.enable_float8_linear
    report = convert_model(model, config.float8, tokens=tokens, device=device) if enabled else None
    folder = RunFolder.create(config)
    folder.write_json("data.json", data.origin)

    high_precision = config.training.mixed_precision_param
    twins = [Twin(config.float8.recipe_name if report else high_precision, model, config, device)]
    if report:
        folder.write_json("conversion_report.json", report.to_dict())
    if config.job.compare:
        twins.append(Twin(high_precision, twin_model, config, device))
    return Run(config, device, peak_flops(device), data, twins, folder)


def train(run: Run) -> dict[str, Any]:
    """Train every twin to the last step and return the summary, which is also written to the run folder.

    Ctrl-C ends the run after the current step with status "interrupted". However the loop ends, the folder
    has its summary and curves.

    Raises:
        NonFiniteError: if a loss or a gradient norm is not finite.
    """
    training, names = run.config.training, [twin.name for twin in run.twins]
    status, step, error = "failed", 0, None
    try:
        with (
            MetricsWriter(run.folder.metrics) as writer,
            training_display(names, training.steps, run.config.metrics.log_freq) as display,
            deferred_interrupt() as interrupt,
        ):
            _introduce(run, display)
            while step < training.steps and not interrupt.requested:
                _train_step(run, step + 1, writer, display)
                step += 1
                if step % run.config.validation.freq == 0 or step == training.steps:
                    _validate(run, step, writer, display)
            status = "finished" if step == training.steps else "interrupted"
    except KeyboardInterrupt:
        status = "interrupted"
    except NonFiniteError as found:
        status, error = "non-finite", str(found)
        raise
    finally:
        summary = summarize(run.config, run.twins, run.device, run.peak, status=status, steps=step, error=error)
        run.folder.write_json("summary.json", summary)
        draw_curves(run.folder.metrics, run.folder.curves, title=run.folder.path.name)
    print_results(summary)
    print(f"run folder: {run.folder.path}")
    return summary


def _train_step(run: Run, step: int, writer: MetricsWriter, display: Display) -> None:
    batches = _to_device(run.data.step_batches(run.config.training, step), run.device)
    measure_memory = step == min(MEMORY_STEP, run.config.training.steps)
    for twin in run.twins if step % 2 else reversed(run.twins):
        result = twin.train_step(step, batches, measure_memory=measure_memory)
        record = _step_record(run, twin, step, result)
        writer.write(**record)
        display.step(record)


def _validate(run: Run, step: int, writer: MetricsWriter, display: Display) -> None:
    batches = _to_device(run.data.validation_batches(run.config.training, run.config.validation), run.device)
    for twin in run.twins:
        record = {"step": step, "run": twin.name, "validation_loss": twin.validate(batches)}
        writer.write(**record)
        display.validation(record)


def _step_record(run: Run, twin: Twin, step: int, result: StepResult) -> dict[str, Any]:
    tokens_per_s = run.config.training.step_tokens / result.seconds
    flops_per_token = training_flops_per_token(run.config.model, run.config.training.seq_len)
    return {
        "step": step,
        "run": twin.name,
        "loss": result.loss,
        "grad_norm": result.grad_norm,
        "lr": result.lr,
        "step_seconds": result.seconds,
        "tokens_per_s": tokens_per_s,
        "mfu": model_flops_utilization(flops_per_token, tokens_per_s, run.peak.flops_per_s),
    }


def _introduce(run: Run, display: Display) -> None:
    config, origin = run.config, run.data.origin
    parameters = sum(parameter.numel() for parameter in run.twins[0].model.parameters())
    display.line(f"run folder   {run.folder.path}")
    display.line(f"model        {parameters:,} parameters, twins: {', '.join(twin.name for twin in run.twins)}")
    display.line(
        f"data         {origin['path']}: {origin['files']:,} files ({origin['skipped_files']} without text "
        f"left out), {origin['train_bytes']:,} bytes to train, {origin['validation_bytes']:,} to validate"
    )
    display.line(f"step         {config.training.step_tokens:,} tokens; {config.training.steps} steps on {run.device}")
    display.line(f"bfloat16     {run.peak.flops_per_s / 1e12:.3g} TFLOP/s at most ({run.peak.source})")


def _to_device(batches: Sequence[Micro], device: torch.device) -> list[Micro]:
    return [(tokens.to(device), targets.to(device)) for tokens, targets in batches]

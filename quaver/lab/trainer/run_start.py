"""Prints what a run trains, on what data and devices, before its first step."""

from quaver.lab.terminal.console import print_line
from quaver.lab.trainer.display import Display
from quaver.lab.trainer.training_run import TrainingRun


def print_nothing_left(run: TrainingRun) -> None:
    """Print that `run` has ended before this start, on the first rank."""
    if run.ranks.is_first:
        steps = f"training.steps = {run.config.training.steps}"
        print_line(f"nothing left to do: the run is after step {run.progress.step}, and {steps}; raise training.steps")
        print_line(f"run folder: {run.folder.path}")


def print_run_description(run: TrainingRun, display: Display) -> None:
    """Print the run folder, model, data, step, ranks and peak FLOPs of `run`, on the first rank."""
    if not run.ranks.is_first:
        return
    config, origin = run.config, run.data.origin
    parameters = sum(parameter.numel() for parameter in run.models[0].model.parameters())
    display.print_line(f"run folder   {run.folder.path}")
    if run.folder.resume_step is not None:
        display.print_line(f"resumed      after step {run.progress.step}")
    if changed_settings := run.folder.changed_settings:
        changes = "; ".join(f"{name} {old!r} -> {new!r}" for name, (old, new) in changed_settings.items())
        display.print_line(f"changed      {changes}")
    for note in run.notes:
        display.print_line(f"{'':<12} {note}")
    precisions = " and ".join(model.name for model in run.models)
    display.print_line(f"model        {parameters:,} parameters, trained in {precisions}")
    places = origin["corrupt_places"]
    left_out = f" (left out: {origin['corrupt']:,}, such as {places[0]})" if places else ""
    display.print_line(
        f"data         {origin['path']}: {origin['files']:,} files{left_out}, "
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
    if run.peak.float32_flops_per_s and any("float32" in model.flops_per_token for model in run.models):
        peaks["float32"] = run.peak.float32_flops_per_s
    for name, flops_per_s in peaks.items():
        display.print_line(f"{name:<12} {flops_per_s / 1e12:.3g} TFLOP/s ({run.peak.source})")

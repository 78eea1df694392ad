"""Says what a run trains, on what data and devices, and what its user should know about its models."""

from torch.distributed.fsdp import FSDPModule

from quaver.conversion.high_precision import iter_float8_modules
from quaver.lab.terminal.console import print_line
from quaver.lab.terminal.counts import format_count
from quaver.lab.trainer.display import Display
from quaver.lab.trainer.trained_model import TrainedModel
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
    precisions = " and ".join(trained.name for trained in run.models)
    display.print_line(f"model        {parameters:,} parameters, trained in {precisions}")
    places = origin["corrupt_places"]
    left_out = f" (left out: {origin['corrupt']:,}, such as {places[0]})" if places else ""
    display.print_line(
        f"data         {origin['path']}: {format_count(origin['files'], 'file')}{left_out}, "
        f"{origin['train_tokens']:,} tokens to train, {origin['validation_tokens']:,} to validate"
    )
    steps = format_count(config.training.steps, "step")
    display.print_line(f"step         {config.training.step_tokens:,} tokens; {steps} on {run.device}")
    if not run.ranks.is_alone:
        display.print_line(f"ranks        {run.dims}")
        for note in dict.fromkeys(note for trained in run.models for note in list_model_notes(trained)):
            display.print_line(f"{'':<12} {note}")
    peaks = {"bfloat16": run.peak_flops.flops_per_s}
    if run.peak_flops.float32_flops_per_s and any("float32" in trained.flops_per_token for trained in run.models):
        peaks["float32"] = run.peak_flops.float32_flops_per_s
    for name, flops_per_s in peaks.items():
        display.print_line(f"{name:<12} {flops_per_s / 1e12:.3g} TFLOP/s ({run.peak_flops.source})")


def list_model_notes(trained: TrainedModel) -> list[str]:
    """Return facts for the user: how tokens reach experts of other ranks, that weights are rounded before their cast,
    and after a step that training.compile compiled nothing.
    """
    dispatchers = [(experts.dispatcher, experts) for experts in trained.experts]
    notes = [dispatcher.describe_precision(experts) for dispatcher, experts in dispatchers if dispatcher is not None]
    training, gathered = trained.config.training, trained.config.float8.enable_fsdp_float8_all_gather
    is_rounded = training.dtype != training.mixed_precision_param and not gathered
    is_sharded = any(isinstance(module, FSDPModule) for module in trained.model.modules())
    if is_rounded and is_sharded and any(True for _ in iter_float8_modules(trained.model)):
        notes.append(
            f"FSDP2 gathers weights in {training.mixed_precision_param}: float8 casts read rounded weights, where one "
            "process and float8 all-gathers cast those in " + training.dtype
        )
    if trained.step_seconds and (reason := explain_eager_blocks(trained)):
        notes.append(reason)
    return notes


def explain_eager_blocks(trained: TrainedModel) -> str:
    """Return the reason why training.compile has compiled nothing so far; "" if it has, or is off.

    A graph break inside a checkpoint makes Dynamo skip the whole frame, and expert parallelism breaks graphs.
    """
    if not trained.config.training.compile or trained.num_compiled_graphs:
        return ""
    note = "training.compile compiled no graph, so the blocks run eagerly"
    is_split = any(experts.dispatcher is not None for experts in trained.experts)
    if is_split and trained.config.activation_checkpoint.mode in ("selective", "full"):
        why = "expert parallelism ends graphs, and torch compiles no part of a checkpoint"
        return f"{note}: {why}; set activation_checkpoint.mode = none, or training.compile = false"
    return f"{note}; TORCH_LOGS=graph_breaks says why"

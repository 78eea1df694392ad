"""The summary of a run, summary.json: the speed, memory and last loss of each model, and how the two compare."""

from typing import Any

from quaver.lab.model.flops import compute_utilization
from quaver.lab.runs.provenance import describe_environment
from quaver.lab.runs.status import RunStatus
from quaver.lab.trainer.run_description import list_model_notes
from quaver.lab.trainer.step_statistics import compute_median_after_warmup
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.lab.trainer.training_run import TrainingRun


def summarize(run: TrainingRun, *, status: RunStatus, reason: str | None) -> dict[str, Any]:
    """Return the summary of a run that ended with `status`, by a `reason` such as an alarm, ready for JSON.

    Speed is the median step's over all ranks, MFU is per device, and memory is the first rank's. `comparison` has the
    first model relative to the bfloat16 baseline.
    """
    models = {trained.name: _summarize_model(run, trained) for trained in run.models}
    summary: dict[str, Any] = {
        "status": status,
        "reason": reason,
        "steps": run.progress.step,
        "ranks": run.dims.world_size,
        "mesh": run.dims.mesh,
        "notes": [*run.notes, *dict.fromkeys(note for trained in run.models for note in list_model_notes(trained))],
        "models": models,
        "bfloat16_peak": {
            "flops_per_s": run.peak_flops.flops_per_s,
            "source": run.peak_flops.source,
            "is_measured": run.peak_flops.is_measured,
        },
        "float8_peak_flops_per_s": run.peak_flops.float8_flops_per_s,
        "float32_peak_flops_per_s": run.peak_flops.float32_flops_per_s,
        "environment": describe_environment(run.device),
    }
    if len(models) == 2:
        summary["comparison"] = _compare(*models.values())
    return summary


def _summarize_model(run: TrainingRun, trained: TrainedModel) -> dict[str, Any]:
    config, dims = run.config, run.dims
    seconds = compute_median_after_warmup(trained.step_seconds) if trained.step_seconds else None
    tokens_per_s = config.training.step_tokens / seconds if seconds else None
    utilization: dict[str, float | None] = {"tflops": None, "mfu": None, "mfu_by_precision": None}
    if tokens_per_s:
        utilization = compute_utilization(trained.flops_per_token, tokens_per_s / dims.world_size, run.peak_flops)
    rank = "" if dims.world_size == 1 else f", of rank {dims.rank}"
    return {
        "skipped_steps": run.progress.skipped_steps.get(trained.name, 0),
        "validation_loss": trained.validation.loss,
        **({"validation_loss_hp": trained.validation.loss_hp} if config.validation.high_precision_too else {}),
        "median_step_seconds": seconds,
        "tokens_per_s": tokens_per_s,
        **utilization,
        "compiled_graphs": trained.num_compiled_graphs if config.training.compile else None,
        "peak_memory_bytes": trained.peak_memory.peak_bytes,
        "peak_memory_source": trained.peak_memory.source + rank,
    }


def _compare(model: dict[str, Any], baseline: dict[str, Any]) -> dict[str, float | None]:
    def ratio(key: str) -> float | None:
        return model[key] / baseline[key] if model[key] is not None and baseline[key] else None

    loss_ratio = ratio("validation_loss")
    return {
        "loss_gap": None if loss_ratio is None else loss_ratio - 1,
        "tokens_per_s_ratio": ratio("tokens_per_s"),
        "peak_memory_ratio": ratio("peak_memory_bytes"),
    }

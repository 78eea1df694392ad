"""Names the settings of a run that the simulated time of a step ignores."""

from __future__ import annotations

from collections.abc import Iterator

from quaver.lab.settings import TrainConfig


def iter_unsimulated(config: TrainConfig) -> Iterator[str]:
    """Yield a sentence per setting that changes the time of a step, but not the simulated time."""
    yield from _iter_unsimulated_float8(config)
    training, checkpoint, optimizer = config.training, config.activation_checkpoint, config.optimizer
    if not training.compile:
        yield "training.compile is false: times are those of compiled code"
    if config.data.document_mask:
        yield "data.document_mask: attention is timed as over one document"
    if checkpoint.mode == "memory_budget":
        yield "activation_checkpoint.mode memory_budget: the compiler chooses what to recompute; the run has no row"
    if checkpoint.selective_ac_also_save or checkpoint.selective_ac_never_save:
        yield "activation_checkpoint.selective_ac_also_save and never_save: not simulated; only row * has them"
    if optimizer.is_muon:
        yield f"optimizer.name {optimizer.name}: the matmuls of its update are not timed"
    if optimizer.implementation not in ("auto", "fused"):
        yield f"optimizer.implementation {optimizer.implementation}: timed as fused"
    if config.job.compare:
        yield "job.compare: the steps and the memory of the other model come on top"
    if config.numerics.every:
        yield "numerics.every: samples are not timed"


def _iter_unsimulated_float8(config: TrainConfig) -> Iterator[str]:
    float8 = config.float8
    if not float8.enable_float8_linear:
        return
    if any(not entry.endswith("=high_precision") for entry in float8.layer_recipes):
        yield "float8.layer_recipes: time and memory of these layers are computed with the run's recipe"
    if float8.serving:
        yield "float8.serving: the forward is timed with recipe_name's casts, not the engine's"
    if float8.high_precision_schedule:
        yield "float8.high_precision_schedule: steps are timed without the schedule"
    if float8.emulate:
        yield "float8.emulate: matmuls are timed as on float8 hardware"
    if float8.auto_filter:
        yield "float8.auto_filter: linears are chosen as for an H100"
    if not float8.use_fast_accum:
        yield "float8.use_fast_accum is false: timed with it"
    if not float8.fused_producers:
        yield "float8.fused_producers is false: norms and SwiGLU are timed as fused"

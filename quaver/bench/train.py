"""Steps of `quaver train` per recipe: step time, tokens per second and peak memory, on any of its configs.

Every precision is a model of the trainer, from the same weights, on the same batches, with the trainer's own step:
clipping, optimizer and weight casts included. All models are in memory at once and take turns step by step; each round
starts with the next model. The trainer's clock times the steps and waits for the device; the first steps, in which code
is compiled and memory is measured (quaver/trainer/memory.py), are not timed. Nothing is validated, logged or saved. The
run is long enough that no timed step is one of `float8.last_steps_high_precision`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from quaver.bench.harness import Timing
from quaver.bench.results import Row, Setup, result
from quaver.trainer.config import TrainConfig
from quaver.trainer.initialize import allocate, initialize
from quaver.trainer.model import Llama
from quaver.trainer.parallel_dims import ParallelDims
from quaver.trainer.parallelize import parallelize
from quaver.trainer.process import determinism
from quaver.trainer.ranks import Ranks
from quaver.trainer.run_setup import RunSetup, make_models, set_up_run
from quaver.trainer.train import MEMORY_STEP
from quaver.trainer.trained_model import TrainedModel

LEAST_WARMUP = MEMORY_STEP

_MOST_COMPILED_VARIANTS = 64
"""Of one block: every precision is one, and torch gives up after 8."""


@dataclass(frozen=True)
class Subject:
    """The plan of the first recipe; for each recipe its settings and its models by name, without storage."""

    plan: RunSetup
    models: list[tuple[TrainConfig, dict[str, Llama]]]


def prepare(config: TrainConfig, recipes: Sequence[str], *, steps: int) -> Subject:
    """Check that every recipe can train with `config`, and read the data.

    Raises:
        ValueError, NotImplementedError, OSError, MissingDeviceError: as `quaver train` does, before anything runs.
    """
    configs = [_config_of(config, recipe, steps, compare=number == 0) for number, recipe in enumerate(recipes)]
    plan = set_up_run(configs[0], Ranks())
    others = [(each, make_models(each, plan.device).by_name) for each in configs[1:]]
    return Subject(plan, [(plan.config, plan.models.by_name), *others])


def _config_of(config: TrainConfig, recipe: str, steps: int, *, compare: bool) -> TrainConfig:
    float8 = replace(config.float8, enable_float8_linear=True, recipe_name=recipe)
    steps_needed = steps + float8.last_steps_high_precision
    training = replace(config.training, steps=max(steps_needed, config.training.steps))
    return replace(config, float8=float8, training=training, job=replace(config.job, compare=compare))


def bench_train(setup: Setup, subject: Subject, *, warmup: int) -> dict[str, Any]:
    """Train; returns `results.result` of a row for each precision, with ratios to the high-precision dtype.

    Args:
        setup: `rounds` timed steps of each precision; the device is that of the config.
        warmup: untimed steps before them, at least LEAST_WARMUP.
    Raises:
        NonFiniteError: as `quaver train` does.
    """
    plan = subject.plan
    config = plan.config
    tokens = config.training.step_tokens
    recompiles = torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED_VARIANTS)
    with recompiles, determinism(config.training.deterministic):
        models = _models_of(subject)
        names = ", ".join(model.name for model in models)
        setup.report(f"{names}: {warmup} + {setup.rounds} steps of {tokens} tokens")
        seconds: dict[str, list[float]] = {model.name: [] for model in models}
        is_complete = True
        try:
            _train(models, seconds, plan, warmup, setup.rounds)
        except KeyboardInterrupt:
            if not all(seconds.values()):
                raise
            is_complete = False
    timings = {name: Timing.of(times) for name, times in seconds.items()}
    rows = [_row(model, timings, models[0], tokens) for model in models]
    parameters = sum(parameter.numel() for parameter in models[0].model.parameters())
    about: dict[str, Any] = {"parameters": parameters, "step_tokens": tokens, "config": asdict(config)}
    return result("train", replace(setup, device=plan.device), rows, is_complete, **about)


def _models_of(subject: Subject) -> list[TrainedModel]:
    """The models with storage, the high-precision one first."""
    plan = subject.plan
    models = []
    for config, by_name in subject.models:
        for name, model in by_name.items():
            parallelize(model, config, None)
            allocate(model, plan.device)
            initialize(model, config.training.seed)
            models.append(TrainedModel(name, model, config, plan.device))
    return sorted(models, key=lambda model: model.name != plan.config.training.mixed_precision_param)


def _train(
    models: Sequence[TrainedModel], seconds: dict[str, list[float]], plan: RunSetup, warmup: int, rounds: int
) -> None:
    """Append the seconds of each timed step to the list of its precision."""
    training = plan.config.training
    for step in range(1, warmup + rounds + 1):
        batches = plan.data.step_batches(training, (step - 1) * training.step_batch_size, ParallelDims())
        batches = [batch.to(plan.device) for batch in batches]
        first = step % len(models)
        for model in (*models[first:], *models[:first]):
            done = model.train_step(step, batches, measure_memory=step == MEMORY_STEP)
            if step > warmup:
                seconds[model.name].append(done.seconds)


def _row(model: TrainedModel, timings: dict[str, Timing], plain: TrainedModel, tokens: int) -> Row:
    """The ratio of peaks is None unless both are exact."""
    timing, peak, baseline = timings[model.name], model.peak, plain.peak
    ratio = None
    if peak.exact and baseline.exact and peak.peak_bytes and baseline.peak_bytes:
        ratio = peak.peak_bytes / baseline.peak_bytes
    return {
        "precision": model.name,
        "timing": asdict(timing),
        "tokens_per_s": tokens / (1e-6 * timing.median_us),
        "time_over_high_precision": timing.median_us / timings[plain.name].median_us,
        "peak_bytes": peak.peak_bytes,
        "peak_is_exact": peak.exact,
        "peak_source": peak.source,
        "peak_over_high_precision": ratio,
    }

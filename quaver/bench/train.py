"""`quaver train` without its records: step time, tokens per second and peak memory per recipe, on any of its configs.

Every precision is a TrainedModel of the trainer: the same weights, the same batches, the same step with clipping,
optimizer and weight casts. All are in memory at once and take turns step by step, each step beginning with the next
one, as `quaver train --compare` does with two. Steps are timed by the trainer's own clock, which waits for the device;
the first ones, in which code is compiled and memory is measured, are left out. Nothing is validated,
logged or saved. The run is as long as it must be for no step to be one of `float8.last_steps_high_precision`.

Peak memory is that of one step as the trainer measures it (quaver/trainer/memory.py); only exact figures are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from quaver.bench.harness import Timing
from quaver.bench.results import Collected, result
from quaver.trainer.config import TrainConfig
from quaver.trainer.data import Batch, TokenData
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
"""Of one block: torch gives up after 8, and every precision is one."""


@dataclass(frozen=True)
class Row:
    """One precision: a recipe, or the high-precision dtype, to which the ratios are."""

    precision: str
    timing: Timing
    tokens_per_s: float
    time_over_high_precision: float
    peak_bytes: int | None
    peak_is_exact: bool
    peak_source: str
    peak_over_high_precision: float | None
    """None unless both peaks are exact."""


@dataclass(frozen=True)
class Subject:
    """The plan of the first recipe; for each its settings, and its models by name, without storage yet."""

    plan: RunSetup
    models: list[tuple[TrainConfig, dict[str, Llama]]]


def prepare(config: TrainConfig, recipes: Sequence[str], *, steps: int) -> Subject:
    """Check that every recipe can train as `config` says, and read the data.

    Raises:
        ValueError, NotImplementedError, OSError, MissingDeviceError: as `quaver train` does, and before anything runs.
    """
    configs = [_config_of(config, recipe, steps, compare=number == 0) for number, recipe in enumerate(recipes)]
    plan = set_up_run(configs[0], Ranks())
    others = [(each, make_models(each, plan.device).by_name) for each in configs[1:]]
    return Subject(plan, [(plan.config, plan.models.by_name), *others])


def bench_train(
    subject: Subject, *, rounds: int, warmup: int, report: Callable[[str], None] = lambda line: None
) -> dict[str, Any]:
    """Train; returns what `results.result` makes of its rows.

    Args:
        rounds: timed steps of each precision, after `warmup` ones, which are at least LEAST_WARMUP.
    Raises:
        NonFiniteError: as `quaver train` does.
    """
    plan = subject.plan
    config = plan.config
    recompiles = torch._dynamo.config.patch(recompile_limit=_MOST_COMPILED_VARIANTS)
    with recompiles, determinism(config.training.deterministic):
        twins = _twins(subject)
        names = ", ".join(twin.name for twin in twins)
        report(f"{names}: {warmup} + {rounds} steps of {config.training.step_tokens} tokens")
        seconds: dict[str, list[float]] = {twin.name: [] for twin in twins}
        is_complete = True
        try:
            _train(twins, seconds, plan.data, config, plan.device, warmup, rounds)
        except KeyboardInterrupt:
            if not all(seconds.values()):
                raise
            is_complete = False
    timings = {name: Timing.of(times) for name, times in seconds.items()}
    collected = Collected([_row(twin, timings, twins[0], config) for twin in twins], is_complete)
    parameters = sum(parameter.numel() for parameter in twins[0].model.parameters())
    tokens = config.training.step_tokens
    about: dict[str, Any] = {"parameters": parameters, "step_tokens": tokens, "config": asdict(config)}
    return result("train", collected, device=plan.device, **about)


def _config_of(config: TrainConfig, recipe: str, steps: int, *, compare: bool) -> TrainConfig:
    float8 = replace(config.float8, enable_float8_linear=True, recipe_name=recipe)
    steps_needed = steps + float8.last_steps_high_precision
    training = replace(config.training, steps=max(steps_needed, config.training.steps))
    return replace(config, float8=float8, training=training, job=replace(config.job, compare=compare))


def _twins(subject: Subject) -> list[TrainedModel]:
    """The twin in high precision first."""
    plan = subject.plan
    twins = []
    for config, by_name in subject.models:
        for name, model in by_name.items():
            parallelize(model, config, None)
            allocate(model, plan.device)
            initialize(model, config.training.seed)
            twins.append(TrainedModel(name, model, config, plan.device))
    return sorted(twins, key=lambda twin: twin.name != plan.config.training.mixed_precision_param)


def _train(
    twins: Sequence[TrainedModel],
    seconds: dict[str, list[float]],
    data: TokenData,
    config: TrainConfig,
    device: torch.device,
    warmup: int,
    rounds: int,
) -> None:
    """Add the seconds of each timed step to those of its precision."""
    for step in range(1, warmup + rounds + 1):
        batches = _batches(data, config, step, device)
        first = step % len(twins)
        for twin in (*twins[first:], *twins[:first]):
            done = twin.train_step(step, batches, measure_memory=step == MEMORY_STEP)
            if step > warmup:
                seconds[twin.name].append(done.seconds)


def _batches(data: TokenData, config: TrainConfig, step: int, device: torch.device) -> list[Batch]:
    training = config.training
    batches = data.step_batches(training, (step - 1) * training.step_batch_size, ParallelDims())
    return [batch.to(device) for batch in batches]


def _row(twin: TrainedModel, timings: dict[str, Timing], plain: TrainedModel, config: TrainConfig) -> Row:
    timing, peak, baseline = timings[twin.name], twin.peak, plain.peak
    ratio = None
    if peak.exact and baseline.exact and peak.peak_bytes and baseline.peak_bytes:
        ratio = peak.peak_bytes / baseline.peak_bytes
    return Row(
        precision=twin.name,
        timing=timing,
        tokens_per_s=config.training.step_tokens / (1e-6 * timing.median_us),
        time_over_high_precision=timing.median_us / timings[plain.name].median_us,
        peak_bytes=peak.peak_bytes,
        peak_is_exact=peak.exact,
        peak_source=peak.source,
        peak_over_high_precision=ratio,
    )

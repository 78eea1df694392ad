"""Steps of `quaver train` per recipe: step time, tokens per second and peak memory, on any of its configs.

Every precision is a model of the trainer, from the same weights, on the same batches, with the trainer's own step:
clipping, optimizer and weight casts included. All models are in memory at once and take turns step by step; each round
starts with the next model. The trainer's clock times the steps and waits for the device; the first steps, in which code
is compiled and memory is measured (quaver/lab/trainer/memory.py), are not timed. Nothing is validated, logged or saved.
`float8.high_precision_schedule` is ignored, so that every timed step runs the recipe. `checkpoint.initial_load_path` is
checked and not loaded; [numerics] and [profiling] are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from quaver.lab.bench.harness import Timing
from quaver.lab.bench.options import MAX_COMPILED_VARIANTS, BenchOptions, RecipeOptions
from quaver.lab.bench.results import Result, Row, UnfinishedError
from quaver.lab.model.llama import Llama
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import TrainConfig
from quaver.lab.settings.fields import NotNegative, setting
from quaver.lab.settings.parallel_dims import ParallelDims
from quaver.lab.terminal.progress import show_progress
from quaver.lab.trainer.process import use_determinism
from quaver.lab.trainer.run_description import explain_eager_blocks
from quaver.lab.trainer.run_setup import RunSetup, make_models, set_up_run
from quaver.lab.trainer.train import MEMORY_STEP
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.runtime.errors import InputError
from quaver.torch_private.compiler import recompile_limit

RecipeModels = tuple[TrainConfig, dict[str, Llama]]
ComparedRuns = tuple[RunSetup, list[RecipeModels]]


@dataclass(frozen=True)
class TrainBenchmark(RecipeOptions, BenchOptions):
    """Steps of quaver train in high precision and in each recipe. The flags of quaver train are accepted too; the
    default config is train_configs/llama3_debug.toml.
    """

    warmup: NotNegative = setting(3, "Steps before the timed ones (--rounds).")

    tables = (
        ("precision", "median", "spread", "tokens_per_s", "time_over_high_precision"),
        ("precision", "peak_bytes", "peak_over_high_precision"),
    )

    def check(self) -> None:
        """Raise InputError if the warm-up is too short to measure memory."""
        super().check()
        if self.warmup < MEMORY_STEP:
            raise InputError(f"--warmup: expected {MEMORY_STEP} or more, got {self.warmup}: memory is measured in it")

    def set_up(self, config: TrainConfig) -> ComparedRuns:
        """Check that every recipe can train with `config`, and read the data.

        Returns:
            The setup of the first recipe's run; for each recipe its config and its models by name, without storage.
        Raises:
            InputError, NotImplementedError, OSError, MissingDeviceError: as `quaver train` does.
        """
        configs = [self._make_config(config, recipe) for recipe in self.recipe_names]
        configs[0] = replace(configs[0], job=replace(config.job, compare=True))
        setup = set_up_run(configs[0], Ranks())
        compared = [(recipe_config, make_models(recipe_config, setup.device).by_name) for recipe_config in configs[1:]]
        return setup, [(setup.config, setup.models.by_name), *compared]

    def _make_config(self, config: TrainConfig, recipe: str) -> TrainConfig:
        float8 = replace(config.float8, enable_float8_linear=True, recipe_name=recipe, high_precision_schedule=())
        steps = self.warmup + self.rounds
        training = replace(config.training, steps=max(steps, config.training.steps))
        return replace(config, float8=float8, training=training, job=replace(config.job, compare=False))

    def measure_steps(self, compared: ComparedRuns) -> Result:
        """Train, and return a row for each precision, with ratios to the high-precision dtype.

        Raises:
            NonFiniteError: as `quaver train` does.
            UnfinishedError: an error or Ctrl-C ended a later step than the first timed one.
        """
        setup, recipe_models = compared
        with (
            recompile_limit(MAX_COMPILED_VARIANTS),
            use_determinism(enabled=setup.config.training.deterministic),
            show_progress("making the models") as set_activity,
        ):
            models = _make_models(setup, recipe_models)
            steps = self.warmup + self.rounds
            seconds: dict[str, list[float]] = {model.name: [] for model in models}
            try:
                for step, model, step_s in _train(models, setup, steps):
                    set_activity(f"step {step} of {steps}, {model.name}")
                    if step > self.warmup:
                        seconds[model.name].append(step_s)
            except (Exception, KeyboardInterrupt) as error:
                if not all(seconds.values()):
                    raise
                raise UnfinishedError(self._summarize(setup, models, seconds, is_complete=False), error) from error
        return self._summarize(setup, models, seconds)

    def _summarize(
        self, setup: RunSetup, models: list[TrainedModel], seconds: dict[str, list[float]], *, is_complete: bool = True
    ) -> Result:
        config, tokens = setup.config, setup.config.training.step_tokens
        timings = {name: Timing.from_seconds(times) for name, times in seconds.items()}
        rows = [_make_row(model, timings, models[0], tokens) for model in models]
        parameters = sum(parameter.numel() for parameter in models[0].model.parameters())
        fields = {"parameters": parameters, "step_tokens": tokens, "config": asdict(config)}
        return replace(self, device=setup.device.type).make_result(rows, is_complete=is_complete, **fields)

    def format_note(self, result: Result) -> str:
        sources = "; ".join(dict.fromkeys(row["peak_source"] for row in result["rows"]))
        eager = "".join(f"; {row['precision']}: {row['eager']}" for row in result["rows"] if row["eager"])
        return f"{result['parameters']:,} parameters, {result['step_tokens']:,} tokens a step; MiB: {sources}{eager}"


def _make_models(setup: RunSetup, recipe_models: list[RecipeModels]) -> list[TrainedModel]:
    """Return the models with storage, the high-precision model first."""
    models = []
    for config, by_name in recipe_models:
        for name, model in by_name.items():
            models.append(TrainedModel.build(name, model, config, setup.device, setup.ranks, None))
    return sorted(models, key=lambda model: model.name != setup.config.training.mixed_precision_param)


def _train(models: list[TrainedModel], setup: RunSetup, steps: int) -> Iterator[tuple[int, TrainedModel, float]]:
    """Yield each step of each model, and its seconds."""
    training = setup.config.training
    for step in range(1, steps + 1):
        batches = setup.data.make_step_batches(training, (step - 1) * training.step_batch_size, ParallelDims())
        batches = [batch.to(setup.device) for batch in batches]
        first = step % len(models)
        for model in (*models[first:], *models[:first]):
            yield step, model, model.train_step(step, batches, measure_memory=step == MEMORY_STEP).seconds


def _make_row(model: TrainedModel, timings: dict[str, Timing], baseline: TrainedModel, tokens: int) -> Row:
    """Return the row of a model, with a ratio of peaks if both were measured."""
    timing, peak, baseline_peak = timings[model.name], model.peak_memory, baseline.peak_memory
    ratio = peak.peak_bytes / baseline_peak.peak_bytes if peak.peak_bytes and baseline_peak.peak_bytes else None
    return {
        "precision": model.name,
        "timing": asdict(timing),
        "tokens_per_s": tokens / (1e-6 * timing.median_us),
        "time_over_high_precision": timing.median_us / timings[baseline.name].median_us,
        "eager": explain_eager_blocks(model),
        "peak_bytes": peak.peak_bytes,
        "peak_source": peak.source,
        "peak_over_high_precision": ratio,
    }

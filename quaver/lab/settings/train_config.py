"""TrainConfig: all sections of a run, and the checks between them."""

from dataclasses import dataclass, field

from quaver.activations.policy import parse_selective_option
from quaver.lab.settings.checkpoint import Checkpoint
from quaver.lab.settings.data import Data, Validation
from quaver.lab.settings.fields import Settings, require
from quaver.lab.settings.float8 import DELAYED_RECIPES, Float8
from quaver.lab.settings.model import Model
from quaver.lab.settings.output import Job, Metrics, Numerics, Profiling
from quaver.lab.settings.training import ActivationCheckpoint, Comm, LRScheduler, Optimizer, Parallelism, Training

SPLIT_SIZES = ("model.n_heads", "model.n_kv_heads", "model.hidden_dim", "model.vocab_size", "training.seq_len")
"""Sizes that tensor parallel ranks split."""

MAX_ELEMENTS = 10**16
"""The largest number of elements of one activation."""


@dataclass(frozen=True)
class TrainConfig(Settings):
    """A whole run of `quaver train`."""

    job: Job = field(default_factory=Job)
    model: Model = field(default_factory=Model)
    training: Training = field(default_factory=Training)
    parallelism: Parallelism = field(default_factory=Parallelism)
    activation_checkpoint: ActivationCheckpoint = field(default_factory=ActivationCheckpoint)
    comm: Comm = field(default_factory=Comm)
    optimizer: Optimizer = field(default_factory=Optimizer)
    lr_scheduler: LRScheduler = field(default_factory=LRScheduler)
    float8: Float8 = field(default_factory=Float8)
    data: Data = field(default_factory=Data)
    validation: Validation = field(default_factory=Validation)
    metrics: Metrics = field(default_factory=Metrics)
    numerics: Numerics = field(default_factory=Numerics)
    profiling: Profiling = field(default_factory=Profiling)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    @classmethod
    def name_field(cls, field: str) -> str:
        """Return the name by which errors call a field: `section.field`, as `require` gets it."""
        return field

    def check(self) -> None:
        """Raise InputError for settings of different sections that exclude each other."""
        self.require(
            self.float8.enable_float8_linear or not self.job.compare,
            "float8.enable_float8_linear",
            "true with job.compare",
            "the bfloat16 baseline of a bfloat16 run would be itself",
        )
        is_sampled = self.numerics.every > 0
        expected = "0 where float8.enable_float8_linear is false"
        self.require(self.float8.enable_float8_linear or not is_sampled, "numerics.every", expected)
        resume = self.checkpoint.resume
        expected = f"set with checkpoint.resume = {resume}"
        self.require(resume == "never" or bool(self.job.name), "job.name", expected, "a run is resumed by its name")
        if not self.model.n_experts:
            self.optimizer.require_default("expert_bias_rate", unless="model.n_experts is above 0")
        self._check_logits()
        self._check_persistent_scales()
        self._check_tensor_parallel()
        self._check_expert_parallel()
        self._check_activation_checkpoint()
        self._check_steps()
        self._check_high_precision()

    def _check_logits(self) -> None:
        """Raise InputError for a batch whose largest activation has more bytes than a 64-bit integer counts."""
        max_width = max(self.model.vocab_size, self.model.hidden_dim, self.model.dim)
        seq_len = self.training.seq_len
        max_batch_size = max(1, MAX_ELEMENTS // (seq_len * max_width))
        expected = f"at most {max_batch_size} with training.seq_len = {seq_len} and a model as wide as {max_width}"
        self.require(self.training.local_batch_size <= max_batch_size, "training.local_batch_size", expected)

    def _check_persistent_scales(self) -> None:
        precision = self.float8.recipe_name if self.float8.enable_float8_linear else "no float8"
        is_read = self.float8.has_persistent_scales or self.metrics.float8_scales_freq <= 1
        expected = f"0 or 1 where no scale is saved from step to step ({precision})"
        hint = f"choose float8.recipe_name {DELAYED_RECIPES.replace(', ', ' or ')}"
        self.require(is_read, "metrics.float8_scales_freq", expected, hint)

    def _check_tensor_parallel(self) -> None:
        degree = self.parallelism.tensor_parallel_degree
        setting = f"parallelism.tensor_parallel_degree = {degree}"
        for name in SPLIT_SIZES:
            section, size = name.split(".")
            self.require(getattr(getattr(self, section), size) % degree == 0, name, f"a multiple of {setting}")
        hint = "experts are split by parallelism.expert_parallel_degree"
        self.require(degree == 1 or not self.model.n_experts, "model.n_experts", f"0 with {setting}", hint)
        hint = "the embedding and the output projection are split differently"
        splits_tied = degree > 1 and self.model.tie_word_embeddings
        self.require(not splits_tied, "model.tie_word_embeddings", f"false with {setting}", hint)
        hint = "linears that read one input gather it in one recipe"
        has_one_recipe = degree == 1 or not self.float8.layer_recipes
        self.require(has_one_recipe, "float8.layer_recipes", f"empty with {setting}", hint)

    def _check_expert_parallel(self) -> None:
        degree, experts = self.parallelism.expert_parallel_degree, self.model.n_experts
        setting = f"parallelism.expert_parallel_degree = {degree}"
        has_experts = degree == 1 or experts > 0
        self.require(has_experts, "model.n_experts", f"above 0 with {setting}", "a dense model has no experts to split")
        self.require(experts % degree == 0, "model.n_experts", f"a multiple of {setting}", "ranks have equally many")
        is_read = self.float8.enable_float8_linear and degree > 1
        expected = "false without float8.enable_float8_linear and a parallelism.expert_parallel_degree above 1"
        sends_codes = self.float8.grad_weight_from_codes
        self.require(
            is_read or not sends_codes, "float8.grad_weight_from_codes", expected, "no tokens are sent as codes"
        )

    def _check_steps(self) -> None:
        """Raise InputError for a warm-up, trace or snapshot that ends or starts after the last step."""
        schedule, profiling, steps = self.lr_scheduler, self.profiling, self.training.steps
        decay = schedule.count_decay_steps(steps)
        fits = schedule.schedule != "wsd" or schedule.warmup_steps + decay <= steps
        expected = f"at most {max(0, steps - decay)} with the {decay} steps of decay in {steps} steps"
        self.require(fits, "lr_scheduler.warmup_steps", expected)
        expected = f"at most training.steps = {steps}"
        traces, snapshots = profiling.enable_profiling, profiling.enable_memory_snapshot
        self.require(not traces or profiling.profile_freq <= steps, "profiling.profile_freq", expected)
        is_reached = not snapshots or profiling.memory_snapshot_step <= steps
        self.require(is_reached, "profiling.memory_snapshot_step", expected)

    def _check_high_precision(self) -> None:
        float8, layers, steps = self.float8, self.model.n_layers, self.training.steps
        skipped = float8.skip_first_layers + float8.skip_last_layers
        names = "float8.skip_first_layers + float8.skip_last_layers"
        require(skipped <= layers, names, f"at most model.n_layers = {layers}", skipped)
        for entry in float8.parse_schedule():
            for part, total, max_count, expected in (
                (entry.steps, steps, steps - 1, f"entries of fewer steps than training.steps = {steps}"),
                (entry.blocks, layers, layers, f"entries of at most model.n_layers = {layers} blocks"),
            ):
                fits = part is None or part.count(total) <= max_count
                require(fits, "float8.high_precision_schedule", expected, entry.text)
        hint = "every loss is one in high precision"
        is_read = float8.enable_float8_linear or not self.validation.high_precision_too
        self.require(is_read, "validation.high_precision_too", "false where float8.enable_float8_linear is false", hint)
        # A fallback to high precision needs weights or inputs that these settings send as float8 codes.
        degree = self.parallelism.tensor_parallel_degree
        reasons = {
            "where float8.enable_float8_linear is false": not float8.enable_float8_linear,
            f"with parallelism.tensor_parallel_degree = {degree}, which gathers inputs in float8": degree > 1,
            "with float8.enable_fsdp_float8_all_gather": float8.enable_fsdp_float8_all_gather,
        }
        for reason, holds in reasons.items():
            falls_back = self.numerics.on_alarm == "fallback"
            self.require(not (holds and falls_back), "numerics.on_alarm", f"log or stop {reason}")

    def _check_activation_checkpoint(self) -> None:
        checkpoint, is_compiled = self.activation_checkpoint, self.training.compile
        expected = "true with activation_checkpoint.mode = memory_budget"
        has_compiler = checkpoint.mode != "memory_budget" or is_compiled
        self.require(has_compiler, "training.compile", expected, "the compiler decides what to save")
        every = parse_selective_option(checkpoint.selective_ac_option)
        recomputes_blocks = checkpoint.mode in ("full", "memory_budget") or every is not None
        self.require(
            not (recomputes_blocks and is_compiled and self.parallelism.tensor_parallel_degree > 1),
            "activation_checkpoint.mode",
            "none, or selective with op, for compiled blocks that are split by tensor parallelism",
            "torch 2.13 cannot compile another recomputation of them",
        )
        is_reached = every is None or every <= self.model.n_layers
        expected = f"op or at most model.n_layers = {self.model.n_layers}"
        hint = "no block would be checkpointed"
        self.require(is_reached, "activation_checkpoint.selective_ac_option", expected, hint)

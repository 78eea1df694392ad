"""All sections together, and what must hold between them."""

from dataclasses import dataclass, field

from quaver.activation_checkpointing import selected_every
from quaver.trainer.config.checkpoint import Checkpoint
from quaver.trainer.config.data import Data, Validation
from quaver.trainer.config.float8 import DELAYED_RECIPES, Float8
from quaver.trainer.config.model import Model
from quaver.trainer.config.optimizer import LRScheduler, Optimizer
from quaver.trainer.config.output import Job, Metrics
from quaver.trainer.config.parallelism import Comm, Parallelism
from quaver.trainer.config.profiling import Profiling
from quaver.trainer.config.settings import Settings, require
from quaver.trainer.config.training import ActivationCheckpoint, Training

TENSOR_PARALLEL_SIZES = ("n_heads", "n_kv_heads", "hidden_dim", "vocab_size")
"""Sizes of the model that tensor parallel ranks split; they split the sequence too."""


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
    profiling: Profiling = field(default_factory=Profiling)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)

    def check(self) -> None:
        """Refuse sections that do not go together."""
        require(
            self.float8.enable_float8_linear or not self.job.compare,
            "float8.enable_float8_linear",
            "true with job.compare",
            self.float8.enable_float8_linear,
            "the bfloat16 baseline of a bfloat16 run would be itself",
        )
        require(
            self.checkpoint.resume != "auto" or bool(self.job.name),
            "job.name",
            "set with checkpoint.resume = auto",
            self.job.name,
            "the run is found again by its name",
        )
        self._check_persistent_scales()
        self._check_tensor_parallel()
        self._check_activation_checkpoint()
        self._check_decay()
        self._check_high_precision()
        self._check_profiling()

    def _check_persistent_scales(self) -> None:
        precision = self.float8.recipe_name if self.float8.enable_float8_linear else "no float8"
        without = f"where no scale is kept from step to step ({precision})"
        fix = f"choose float8.recipe_name {DELAYED_RECIPES.replace(', ', ' or ')}"
        keeps, plot, freq = (
            self.float8.has_persistent_scales,
            self.metrics.plot_float8_scales,
            self.metrics.float8_scales_freq,
        )
        require(keeps or not plot, "metrics.plot_float8_scales", f"false {without}", plot, fix)
        require(keeps or freq <= 1, "metrics.float8_scales_freq", f"0 or 1 {without}", freq, fix)

    def _check_tensor_parallel(self) -> None:
        degree = self.parallelism.tensor_parallel_degree
        split = {f"model.{name}": getattr(self.model, name) for name in TENSOR_PARALLEL_SIZES}
        for name, size in {**split, "training.seq_len": self.training.seq_len}.items():
            require(size % degree == 0, name, f"a multiple of parallelism.tensor_parallel_degree = {degree}", size)
        require(
            degree == 1 or not self.model.tie_word_embeddings,
            "model.tie_word_embeddings",
            f"false with parallelism.tensor_parallel_degree = {degree}",
            self.model.tie_word_embeddings,
            "the embedding and the output projection are split differently",
        )

    def _check_decay(self) -> None:
        schedule, steps = self.lr_scheduler, self.training.steps
        decay = schedule.decay_steps(steps)
        require(
            schedule.schedule != "wsd" or schedule.warmup_steps + decay <= steps,
            "lr_scheduler.warmup_steps",
            f"at most {max(0, steps - decay)} with the {decay} steps of decay in {steps} steps",
            schedule.warmup_steps,
        )

    def _check_high_precision(self) -> None:
        float8, layers, steps = self.float8, self.model.n_layers, self.training.steps
        tail, skipped = float8.last_steps_high_precision, float8.skip_first_layers + float8.skip_last_layers
        require(
            skipped <= layers,
            "float8.skip_first_layers + float8.skip_last_layers",
            f"at most model.n_layers = {layers}",
            skipped,
        )
        require(tail < steps, "float8.last_steps_high_precision", f"below training.steps = {steps}", tail)
        if tail:
            self._check_can_leave_float8("float8.last_steps_high_precision", tail, "0")
        if self.validation.high_precision_too:
            self._check_can_leave_float8("validation.high_precision_too", True, "false")

    def _check_can_leave_float8(self, name: str, value: object, off: str) -> None:
        """Refuse what would need weights or inputs in high precision where they are sent to a linear in float8."""
        degree = self.parallelism.tensor_parallel_degree
        reasons = {
            "where float8.enable_float8_linear is false": not self.float8.enable_float8_linear,
            f"with parallelism.tensor_parallel_degree = {degree}, which gathers inputs in float8": degree > 1,
            "with float8.enable_fsdp_float8_all_gather": self.float8.enable_fsdp_float8_all_gather,
        }
        for reason, holds in reasons.items():
            require(not holds, name, f"{off} {reason}", value)

    def _check_profiling(self) -> None:
        """Refuse what no step of the run would reach."""
        profiling, steps = self.profiling, self.training.steps
        for name, is_enabled in (
            ("profile_freq", profiling.enable_profiling),
            ("memory_snapshot_step", profiling.enable_memory_snapshot),
        ):
            value = getattr(profiling, name)
            require(not is_enabled or value <= steps, f"profiling.{name}", f"at most training.steps = {steps}", value)

    def _check_activation_checkpoint(self) -> None:
        checkpoint = self.activation_checkpoint
        require(
            checkpoint.mode != "memory_budget" or self.training.compile,
            "training.compile",
            "true with activation_checkpoint.mode = memory_budget",
            self.training.compile,
            "the compiler decides what to keep",
        )
        every = selected_every(checkpoint.selective_ac_option)
        in_full = checkpoint.mode == "full" or every is not None
        require(
            not (in_full and self.training.compile and self.parallelism.tensor_parallel_degree > 1),
            "activation_checkpoint.mode",
            "none, or selective with op, for compiled blocks that are split by tensor parallelism",
            checkpoint.mode,
            "torch 2.13 cannot compile their recomputation in full",
        )
        require(
            every is None or every <= self.model.n_layers,
            "activation_checkpoint.selective_ac_option",
            f"op or at most model.n_layers = {self.model.n_layers}",
            checkpoint.selective_ac_option,
            "no block would be checkpointed",
        )

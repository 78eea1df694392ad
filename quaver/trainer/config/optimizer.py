"""[optimizer] and [lr_scheduler]: AdamW and the learning rate of each step."""

from dataclasses import dataclass

from quaver.trainer.config.require import require, require_default, require_finite

OPTIMIZER_IMPLEMENTATIONS = ("auto", "fused", "foreach", "for-loop")
SCHEDULES = ("cosine", "linear", "wsd", "constant")
DECAY_TYPES = ("linear", "sqrt", "cosine")


@dataclass(frozen=True)
class Optimizer:
    """AdamW; norms and biases, the parameters of one dim, are not decayed; matrices are, the embedding among them."""

    lr: float = 3e-3
    """Highest learning rate, reached when the warm-up ends."""
    beta1: float = 0.9
    """Decay of the running mean of the gradient."""
    beta2: float = 0.95
    """Decay of the running mean of its square."""
    eps: float = 1e-8
    """Added to the denominator of the update."""
    weight_decay: float = 0.1
    """Decoupled weight decay of every matrix."""
    implementation: str = "auto"
    """How the update is computed: fused (one kernel over all parameters), foreach (a kernel for each operation), or
    for-loop (a kernel for each operation and parameter). auto is fused, which torch has for CUDA and for CPU."""

    def __post_init__(self) -> None:
        require_finite("optimizer", self, "lr", "eps", "weight_decay")
        require(
            self.implementation in OPTIMIZER_IMPLEMENTATIONS,
            "optimizer.implementation",
            f"one of {', '.join(OPTIMIZER_IMPLEMENTATIONS)}",
            self.implementation,
        )
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"optimizer.{name}", "at least 0 and below 1", value)


@dataclass(frozen=True)
class LRScheduler:
    """Linear warm-up to optimizer.lr, then down to min_lr_factor * optimizer.lr at the last step, or not down."""

    warmup_steps: int = 20
    """Steps of linear warm-up; may be longer than the run."""
    schedule: str = "cosine"
    """What follows the warm-up: cosine or linear (down from there on), wsd (warm-up, stable, decay: optimizer.lr until
    the last decay_ratio of the run), or constant."""
    decay_ratio: float = 0.1
    """wsd: share of the run's steps in the final decay; rounded to whole steps, at least one."""
    decay_type: str = "linear"
    """wsd: shape of the final decay: linear, sqrt (1 - sqrt, steep at first) or cosine."""
    min_lr_factor: float = 0.1
    """Share of optimizer.lr that is left at the end."""

    def __post_init__(self) -> None:
        require(self.warmup_steps >= 0, "lr_scheduler.warmup_steps", "not negative", self.warmup_steps)
        require(0 <= self.min_lr_factor <= 1, "lr_scheduler.min_lr_factor", "from 0 to 1", self.min_lr_factor)
        for name, choices in (("schedule", SCHEDULES), ("decay_type", DECAY_TYPES)):
            value = getattr(self, name)
            require(value in choices, f"lr_scheduler.{name}", f"one of {', '.join(choices)}", value)
        require(0 < self.decay_ratio <= 1, "lr_scheduler.decay_ratio", "above 0 and at most 1", self.decay_ratio)
        if self.schedule != "wsd":
            for name in ("decay_ratio", "decay_type"):
                require_default("lr_scheduler", self, name, "lr_scheduler.schedule is wsd")
        if self.schedule == "constant":
            require_default("lr_scheduler", self, "min_lr_factor", "lr_scheduler.schedule goes down")

    def decay_steps(self, steps: int) -> int:
        """Return how many of the last of `steps` steps are wsd's decay."""
        return max(1, round(self.decay_ratio * steps))

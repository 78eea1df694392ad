"""[optimizer] and [lr_scheduler]: AdamW and the learning rate of each step."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from quaver.trainer.config.settings import FiniteNotNegative, NotNegative, OneOf, Settings, Share

OPTIMIZER_IMPLEMENTATIONS = ("auto", "fused", "foreach", "for-loop")
SCHEDULES = ("cosine", "linear", "wsd", "constant")
DECAY_TYPES = ("linear", "sqrt", "cosine")

_Beta = Annotated[float, Ge(0), Lt(1)]


@dataclass(frozen=True)
class Optimizer(Settings, section="optimizer"):
    """AdamW. Matrices, the embedding among them, are decayed; norms and biases are not."""

    lr: FiniteNotNegative = 3e-3
    """Highest learning rate, reached when the warm-up ends."""
    beta1: _Beta = 0.9
    """Decay of the running mean of the gradient."""
    beta2: _Beta = 0.95
    """Decay of the running mean of its square."""
    eps: FiniteNotNegative = 1e-8
    """Added to the denominator of the update."""
    weight_decay: FiniteNotNegative = 0.1
    """Decoupled weight decay of matrices."""
    implementation: Annotated[str, OneOf(OPTIMIZER_IMPLEMENTATIONS)] = "auto"
    """fused: one kernel over all parameters. foreach: one per operation. for-loop: one per operation and parameter.
    auto: fused."""


@dataclass(frozen=True)
class LRScheduler(Settings, section="lr_scheduler"):
    """Linear warm-up to optimizer.lr, then the schedule."""

    warmup_steps: NotNegative = 20
    """Steps of linear warm-up; may exceed training.steps."""
    schedule: Annotated[str, OneOf(SCHEDULES)] = "cosine"
    """After the warm-up: cosine or linear decay, wsd (warm-up, stable, decay) or constant."""
    decay_ratio: Annotated[float, Gt(0), Le(1)] = 0.1
    """wsd: share of the steps in the final decay; at least one step."""
    decay_type: Annotated[str, OneOf(DECAY_TYPES)] = "linear"
    """wsd: shape of the final decay: linear, sqrt (1 - sqrt, steep at first) or cosine."""
    min_lr_factor: Share = 0.1
    """Share of optimizer.lr at the last step."""

    def check(self) -> None:
        """Refuse settings that the schedule does not read."""
        if self.schedule != "wsd":
            self.require_default("decay_ratio", "decay_type", unless="lr_scheduler.schedule is wsd")
        if self.schedule == "constant":
            self.require_default("min_lr_factor", unless="lr_scheduler.schedule goes down")

    def decay_steps(self, steps: int) -> int:
        """Return how many of the last of `steps` steps are wsd's decay."""
        return max(1, round(self.decay_ratio * steps))

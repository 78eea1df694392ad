"""[training] and [activation_checkpoint]: length, batch, precision, and what is kept for the backward."""

from dataclasses import dataclass
from typing import Annotated

from tyro.conf import arg

from quaver.activation_checkpointing import MODES as CHECKPOINT_MODES
from quaver.activation_checkpointing import named_operations, selected_every
from quaver.trainer.config.require import require, require_default, require_positive

DTYPES = ("float32", "bfloat16")
NONFINITE_POLICIES = ("stop", "skip")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Training:
    """Length, batch, precision and device."""

    steps: int = 200
    """Number of optimizer steps."""
    seq_len: int = 256
    """Tokens in one sequence."""
    local_batch_size: int = 8
    """Sequences in one forward and backward of one data-parallel rank."""
    global_batch_size: int = -1
    """Sequences in one optimizer step, over all ranks, reached by gradient accumulation; -1 means local_batch_size on
    each data-parallel rank, once."""
    max_norm: float = 1.0
    """Gradients are clipped to this norm."""
    compile: bool = False
    """Compile each transformer block with torch.compile."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    dtype: str = "float32"
    """Dtype of parameters, gradients and optimizer state: float32 or bfloat16."""
    mixed_precision_param: str = "bfloat16"
    """Dtype of the forward and backward computation, through autocast; equal to dtype means no autocast."""
    device: str = "auto"
    """auto (CUDA where there is one), cpu or cuda."""
    nonfinite: str = "stop"
    """What a loss or gradient norm that is inf or NaN does: stop ends the run; skip leaves the weights as they are,
    says where it began, and goes on."""
    max_nonfinite_steps: int = 10
    """With nonfinite skip: so many steps in a row are skipped, and the next one ends the run."""
    deterministic: bool = False
    """Use only algorithms that repeat to the bit (short: --deterministic). CPUs repeat without it."""

    def __post_init__(self) -> None:
        require_positive("training", self, "steps", "seq_len", "local_batch_size")
        require(self.max_norm > 0, "training.max_norm", "positive", self.max_norm)
        require(0 <= self.seed < 2**63, "training.seed", "between 0 and 2**63 - 1", self.seed)
        require(self.dtype in DTYPES, "training.dtype", f"one of {', '.join(DTYPES)}", self.dtype)
        require(
            self.mixed_precision_param in DTYPES,
            "training.mixed_precision_param",
            f"one of {', '.join(DTYPES)}",
            self.mixed_precision_param,
        )
        require(
            (self.dtype, self.mixed_precision_param) != ("bfloat16", "float32"),
            "training.mixed_precision_param",
            "bfloat16 when training.dtype is bfloat16",
            self.mixed_precision_param,
            "autocast only lowers precision",
        )
        policies = ", ".join(NONFINITE_POLICIES)
        require(self.nonfinite in NONFINITE_POLICIES, "training.nonfinite", f"one of {policies}", self.nonfinite)
        require_positive("training", self, "max_nonfinite_steps")
        if self.nonfinite != "skip":
            require_default("training", self, "max_nonfinite_steps", "training.nonfinite is skip")
        require(self.device in DEVICES, "training.device", f"one of {', '.join(DEVICES)}", self.device)
        require(
            self.global_batch_size == -1
            or (self.global_batch_size >= 1 and self.global_batch_size % self.local_batch_size == 0),
            "training.global_batch_size",
            f"-1 or a multiple of training.local_batch_size = {self.local_batch_size}",
            self.global_batch_size,
        )

    @property
    def step_batch_size(self) -> int:
        """Sequences in one optimizer step; of a config that `resolve` has not seen, on one data-parallel rank."""
        return self.local_batch_size if self.global_batch_size == -1 else self.global_batch_size

    @property
    def step_tokens(self) -> int:
        """Tokens in one optimizer step, over all ranks."""
        return self.step_batch_size * self.seq_len


@dataclass(frozen=True)
class ActivationCheckpoint:
    """What transformer blocks keep for the backward; the rest is computed again, to the same bits."""

    mode: Annotated[str, arg(help=f"One of {', '.join(CHECKPOINT_MODES)}.")] = "none"
    selective_ac_option: str = "op"
    """With mode selective: op keeps the results worth keeping in every block; a number n keeps nothing of every n-th
    block, and all of the others."""
    selective_ac_also_keep: tuple[str, ...] = ()
    """With mode selective and option op: operators, such as aten.silu, whose results are kept besides those worth
    keeping. To keep a pointwise result of a weight costs as much as the weight: `quaver memory --vs` shows it."""
    selective_ac_never_keep: tuple[str, ...] = ()
    """With mode selective and option op: operators, such as aten.amax, whose results are not kept, although they would
    be."""
    memory_budget: float = 0.5
    """With mode memory_budget: the share of what could be kept that the compiler keeps; 0 for blocks' inputs only."""

    def __post_init__(self) -> None:
        choices = ", ".join(CHECKPOINT_MODES)
        require(self.mode in CHECKPOINT_MODES, "activation_checkpoint.mode", f"one of {choices}", self.mode)
        for setting, mode in (("selective_ac_option", "selective"), ("memory_budget", "memory_budget")):
            value, default = getattr(self, setting), getattr(type(self), setting)
            require(
                self.mode == mode or value == default,
                f"activation_checkpoint.{setting}",
                f"its default, {default!r}, unless activation_checkpoint.mode is {mode}",
                value,
            )
        try:
            every = selected_every(self.selective_ac_option)
        except ValueError as error:
            raise ValueError(f"activation_checkpoint.{error}") from error
        for name in ("selective_ac_also_keep", "selective_ac_never_keep"):
            self._check_operators(name, by_policy=self.mode == "selective" and every is None)
        require(0 <= self.memory_budget <= 1, "activation_checkpoint.memory_budget", "from 0 to 1", self.memory_budget)

    def _check_operators(self, name: str, *, by_policy: bool) -> None:
        if not by_policy:
            unless = "activation_checkpoint.mode is selective and its selective_ac_option is op"
            require_default("activation_checkpoint", self, name, unless)
        try:
            named_operations(getattr(self, name))
        except ValueError as error:
            raise ValueError(f"activation_checkpoint.{name}: {error}") from error

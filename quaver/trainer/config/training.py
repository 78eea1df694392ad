"""[training] and [activation_checkpoint]: length, batch, precision, and what is saved for backward."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from quaver.activation_checkpointing import MODES as CHECKPOINT_MODES
from quaver.activation_checkpointing import named_operations, selected_every
from quaver.trainer.config.settings import AtLeast1, OneOf, Settings, Share

DTYPES = ("float32", "bfloat16")
NONFINITE_POLICIES = ("stop", "skip")
DEVICES = ("auto", "cpu", "cuda")


@dataclass(frozen=True)
class Training(Settings, section="training"):
    """Length, batch, precision and device."""

    steps: AtLeast1 = 200
    """Optimizer steps."""
    seq_len: AtLeast1 = 256
    """Tokens in one sequence."""
    local_batch_size: AtLeast1 = 8
    """Sequences in one forward and backward of one data-parallel rank."""
    global_batch_size: int = -1
    """Sequences in one optimizer step over all ranks, by gradient accumulation; -1 for one local batch per
    data-parallel rank."""
    max_norm: Annotated[float, Gt(0)] = 1.0
    """Gradients are clipped to this norm."""
    compile: bool = False
    """Compile each transformer block with torch.compile."""
    seed: int = 0
    """Seed of the initial weights and of the order of the data."""
    dtype: Annotated[str, OneOf(DTYPES)] = "float32"
    """Dtype of parameters, gradients and optimizer state: float32 or bfloat16."""
    mixed_precision_param: Annotated[str, OneOf(DTYPES)] = "bfloat16"
    """Dtype that autocast computes in; no autocast if equal to dtype."""
    device: Annotated[str, OneOf(DEVICES)] = "auto"
    """auto (CUDA if there is one), cpu or cuda."""
    nonfinite: Annotated[str, OneOf(NONFINITE_POLICIES)] = "stop"
    """At an inf or NaN loss or gradient norm: stop the run, or skip the update and say where it began."""
    max_nonfinite_steps: AtLeast1 = 10
    """nonfinite = skip: steps in a row that are skipped before the run ends."""
    deterministic: bool = False
    """Use only algorithms that repeat to the bit, as CPUs do anyway (short: --deterministic)."""

    def check(self) -> None:
        """Refuse what autocast cannot do, batches that do not divide, and settings that nothing reads."""
        self.require(0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")
        self.require(
            (self.dtype, self.mixed_precision_param) != ("bfloat16", "float32"),
            "mixed_precision_param",
            "bfloat16 when training.dtype is bfloat16",
            "autocast only lowers precision",
        )
        if self.nonfinite != "skip":
            self.require_default("max_nonfinite_steps", unless="training.nonfinite is skip")
        size = self.global_batch_size
        self.require(
            size == -1 or (size >= 1 and size % self.local_batch_size == 0),
            "global_batch_size",
            f"-1 or a multiple of training.local_batch_size = {self.local_batch_size}",
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
class ActivationCheckpoint(Settings, section="activation_checkpoint"):
    """What transformer blocks save for backward; the rest is recomputed, to the same bits."""

    mode: Annotated[str, OneOf(CHECKPOINT_MODES)] = "none"
    """Which blocks recompute what; see docs/memory.md."""
    selective_ac_option: str = "op"
    """selective: op saves the results worth saving in every block; a number n recomputes every n-th block in full."""
    selective_ac_also_keep: tuple[str, ...] = ()
    """selective with op: more operators, such as aten.silu, whose results are saved."""
    selective_ac_never_keep: tuple[str, ...] = ()
    """selective with op: operators, such as aten.amax, whose results are not saved."""
    memory_budget: Share = 0.5
    """memory_budget: the share of what could be saved that the compiler saves; 0 for the inputs of blocks only."""

    def check(self) -> None:
        """Refuse settings of another mode, and operators that torch does not have."""
        for setting, mode in (("selective_ac_option", "selective"), ("memory_budget", "memory_budget")):
            if self.mode != mode:
                self.require_default(setting, unless=f"activation_checkpoint.mode is {mode}")
        try:
            every = selected_every(self.selective_ac_option)
        except ValueError as error:
            raise ValueError(f"activation_checkpoint.{error}") from error
        for name in ("selective_ac_also_keep", "selective_ac_never_keep"):
            if self.mode != "selective" or every is not None:
                unless = "activation_checkpoint.mode is selective and its selective_ac_option is op"
                self.require_default(name, unless=unless)
            try:
                named_operations(getattr(self, name))
            except ValueError as error:
                raise ValueError(f"activation_checkpoint.{name}: {error}") from error

"""The sections of a step: [training], [activation_checkpoint], [optimizer], [lr_scheduler], [parallelism], [comm]."""

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

from quaver.activations import CHECKPOINT_MODES
from quaver.activations.policy import find_operators, find_savable_operators, parse_selective_option
from quaver.lab.settings.fields import (
    AtLeast1,
    FiniteNotNegative,
    Integer,
    NotNegative,
    OneOf,
    Settings,
    Share,
    setting,
)
from quaver.runtime.errors import reraise_as_input_error

DEVICES = ("auto", "cpu", "cuda")
Dtype = Annotated[str, OneOf(("float32", "bfloat16"))]
OPTIMIZERS = ("AdamW", "Float8AdamW", "Muon", "Float8Muon")
REDUCE_MODES = ("every", "last", "last_all_reduce")
_Beta = Annotated[float, Ge(0), Lt(1)]

MAX_SECONDS = 10**7
"""Four months. Timers of the system overflow at much longer times."""


@dataclass(frozen=True)
class Training(Settings, section="training"):
    """Length, batch, precision and device."""

    steps: AtLeast1 = setting(200, "Optimizer steps.")
    seq_len: Annotated[int, Ge(1), Le(10**7)] = setting(256, "Tokens in one sequence.")
    local_batch_size: Annotated[int, Ge(1), Le(10**6)] = setting(8, "Sequences in one forward of a data-parallel rank.")
    global_batch_size: Annotated[int, Le(10**9)] = setting(
        -1, "Sequences in one optimizer step; -1 for one local batch per data-parallel rank."
    )
    reduce: Annotated[str, OneOf(REDUCE_MODES)] = setting(
        "every",
        "When ranks reduce gradients. every: after each microbatch. last: once per step, from whole float32 sums. "
        "last_all_reduce: reduce-scatter after each microbatch, all-reduce once per step.",
    )
    max_norm: Annotated[float, Gt(0)] = setting(1.0, "Gradients are clipped to this norm.")
    compile: bool = setting(False, "Compile each transformer block with torch.compile.")
    seed: int = setting(0, "Seed of initial weights and data order.")
    dtype: Dtype = setting("float32", "Dtype of parameters, gradients and optimizer state: float32 or bfloat16.")
    mixed_precision_param: Dtype = setting("bfloat16", "Autocast's dtype; no autocast if equal to dtype.")
    residual_dtype: Annotated[str, OneOf(("auto", "float32", "bfloat16"))] = setting(
        "auto",
        "Dtype of the residual stream and of the embedding that FSDP2 gathers: auto (that of dtype), float32 or "
        "bfloat16.",
    )
    device: Annotated[str, OneOf(DEVICES)] = setting("auto", "auto (CUDA if there is one), cpu or cuda.")
    nonfinite: Annotated[str, OneOf(("stop", "skip"))] = setting(
        "stop", "What to do at an inf or NaN loss or gradient norm: stop, or skip the update."
    )
    max_nonfinite_steps: AtLeast1 = setting(10, "Steps in a row that nonfinite = skip leaves out before the run ends.")
    deterministic: bool = setting(
        False, "Use deterministic algorithms only, which CPUs always do (short: --deterministic)."
    )

    def check(self) -> None:
        """Raise InputError for dtypes that autocast cannot use, uneven batches, and settings that nothing reads."""
        self.require(0 <= self.seed < 2**63, "seed", "between 0 and 2**63 - 1")
        self.require(
            (self.dtype, self.mixed_precision_param) != ("bfloat16", "float32"),
            "mixed_precision_param",
            "bfloat16 when training.dtype is bfloat16",
            "autocast only lowers precision",
        )
        dtypes = tuple(dict.fromkeys((self.dtype, self.mixed_precision_param)))
        self.require(
            self.residual_dtype in ("auto", *dtypes),
            "residual_dtype",
            f"auto or {' or '.join(dtypes)}",
            "training.dtype and training.mixed_precision_param are the dtypes of the model",
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
    def residual_stream_dtype(self) -> str:
        """`residual_dtype` with "auto" resolved."""
        return self.dtype if self.residual_dtype == "auto" else self.residual_dtype

    @property
    def step_batch_size(self) -> int:
        """Sequences in one optimizer step. Before `resolve_parallel_dims`, -1 counts one data-parallel rank."""
        return self.local_batch_size if self.global_batch_size == -1 else self.global_batch_size

    @property
    def step_tokens(self) -> int:
        """Tokens in one optimizer step, over all ranks."""
        return self.step_batch_size * self.seq_len


@dataclass(frozen=True)
class ActivationCheckpoint(Settings, section="activation_checkpoint"):
    """Activations that blocks save for backward; others are recomputed, to the same bits unless stored in float8."""

    mode: Annotated[str, OneOf(CHECKPOINT_MODES)] = setting("none", "Which blocks recompute what; see docs/trainer.md.")
    selective_ac_option: str = setting(
        "op",
        "With mode = selective, op saves the costly results of every block; a number n recomputes every n-th block.",
    )
    selective_ac_also_save: tuple[str, ...] = setting((), "More operators whose results op saves, such as aten.silu.")
    selective_ac_never_save: tuple[str, ...] = setting(
        (), "Operators whose results op does not save, such as aten.amax."
    )
    memory_budget: Share = setting(0.5, "Share of results that the compiler saves; 0 for inputs of blocks only.")
    store_in_float8: bool = setting(
        False, "Store the tensors that norms, attention and feed-forwards save for backward as float8 codes."
    )

    def check(self) -> None:
        """Raise InputError for settings of another mode, and for operators that torch does not have."""
        for name, mode in (("selective_ac_option", "selective"), ("memory_budget", "memory_budget")):
            if self.mode != mode:
                self.require_default(name, unless=f"activation_checkpoint.mode is {mode}")
        with reraise_as_input_error("activation_checkpoint."):
            every = parse_selective_option(self.selective_ac_option)
        finders = {"selective_ac_also_save": find_savable_operators, "selective_ac_never_save": find_operators}
        for name, find in finders.items():
            if self.mode != "selective" or every is not None:
                unless = "activation_checkpoint.mode is selective and its selective_ac_option is op"
                self.require_default(name, unless=unless)
            with reraise_as_input_error(f"activation_checkpoint.{name}: "):
                find(getattr(self, name))


@dataclass(frozen=True)
class Optimizer(Settings, section="optimizer"):
    """AdamW or Muon. Matrices and the embedding are decayed; norms and biases are not."""

    name: Annotated[str, OneOf(OPTIMIZERS)] = setting(
        "AdamW",
        "AdamW, or Muon for matrices of blocks with AdamW for the rest; Float8AdamW and Float8Muon store states "
        "in float8.",
    )
    lr: FiniteNotNegative = setting(3e-3, "Learning rate after the warm-up.")
    beta1: _Beta = setting(0.9, "Decay of the running mean of the gradient.")
    beta2: _Beta = setting(0.95, "Decay of the running mean of its square.")
    eps: FiniteNotNegative = setting(1e-8, "Added to the denominator of the update.")
    weight_decay: FiniteNotNegative = setting(0.1, "Decoupled weight decay of matrices.")
    momentum: _Beta = setting(
        0.95,
        "Muon: decay of the running mean of the gradient. Updates are scaled to AdamW's RMS, so both use optimizer.lr.",
    )
    expert_bias_rate: FiniteNotNegative = setting(
        0.001, "Step size of the router's load-balancing bias; 0 disables it."
    )
    implementation: Annotated[str, OneOf(("auto", "fused", "foreach", "for-loop"))] = setting(
        "auto",
        "fused (one kernel), foreach (one kernel per operation) or for-loop (one kernel per operation and parameter); "
        "auto is fused.",
    )

    def check(self) -> None:
        """Raise InputError for settings of AdamW or Muon with another optimizer."""
        if self.has_float8_states:
            self.require_default("implementation", unless="optimizer.name is AdamW or Muon")
        if not self.is_muon:
            self.require_default("momentum", unless="optimizer.name is Muon or Float8Muon")

    @property
    def has_float8_states(self) -> bool:
        """Whether its states are float8 codes with scales."""
        return self.name in ("Float8AdamW", "Float8Muon")

    @property
    def is_muon(self) -> bool:
        """Whether matrices of blocks take Muon's step."""
        return self.name in ("Muon", "Float8Muon")


@dataclass(frozen=True)
class LRScheduler(Settings, section="lr_scheduler"):
    """Linear warm-up to optimizer.lr, then the schedule."""

    warmup_steps: NotNegative = setting(20, "Steps of linear warm-up; may exceed training.steps.")
    schedule: Annotated[str, OneOf(("cosine", "linear", "wsd", "constant"))] = setting(
        "cosine", "cosine or linear decay, wsd (stable, then decay) or constant."
    )
    decay_ratio: Annotated[float, Gt(0), Le(1)] = setting(
        0.1, "Share of the steps in the decay of wsd, at least one step."
    )
    decay_type: Annotated[str, OneOf(("linear", "sqrt", "cosine"))] = setting(
        "linear", "Shape of the decay of wsd: linear, sqrt (1 - sqrt, steep at first) or cosine."
    )
    min_lr_factor: Share = setting(0.1, "Share of optimizer.lr at the last step.")

    def check(self) -> None:
        """Raise InputError for settings that the schedule does not read."""
        if self.schedule != "wsd":
            self.require_default("decay_ratio", "decay_type", unless="lr_scheduler.schedule is wsd")
        if self.schedule == "constant":
            self.require_default("min_lr_factor", unless="lr_scheduler.schedule goes down")

    def count_decay_steps(self, steps: int) -> int:
        """Return the number of decay steps of the wsd schedule in `steps` steps."""
        return max(1, round(self.decay_ratio * steps))


@dataclass(frozen=True)
class Parallelism(Settings, section="parallelism"):
    """How ranks share the work; the degrees multiply to their number."""

    data_parallel_replicate_degree: AtLeast1 = setting(1, "Copies of the weights, each on a group of ranks (HSDP).")
    data_parallel_shard_degree: Integer = setting(-1, "Ranks over which FSDP2 shards a copy; -1 for the rest.")
    tensor_parallel_degree: AtLeast1 = setting(1, "Ranks that share each linear and, between linears, the sequence.")
    expert_parallel_degree: AtLeast1 = setting(
        1, "Ranks of each shard group that split the experts; FSDP2 shards those of a rank over the rest."
    )
    fsdp_reshard_after_forward: Annotated[str, OneOf(("default", "always", "never"))] = setting(
        "default",
        "When FSDP2 frees gathered weights after the forward; default: all but those that backward needs first.",
    )

    def check(self) -> None:
        """Raise InputError for a shard degree that is neither -1 nor at least 1."""
        shard = self.data_parallel_shard_degree
        self.require(shard == -1 or shard >= 1, "data_parallel_shard_degree", "-1 or at least 1")


@dataclass(frozen=True)
class Comm(Settings, section="comm"):
    """Communication between ranks."""

    float8_gradients: bool = setting(
        False, "FSDP2 sends gradients as e4m3 codes with a float32 scale per 256, and adds them up in float32."
    )
    train_timeout_seconds: Annotated[int, Ge(1), Le(MAX_SECONDS)] = setting(
        300, "Seconds until a waiting collective ends the run with an error."
    )
    watchdog_seconds: Annotated[int, Ge(0), Le(MAX_SECONDS)] = setting(
        120,
        "Seconds until a stuck rank writes stacks-rank<n>.txt (ten times that for checkpoints, the first step and "
        "validation); 0 for never.",
    )

"""Every setting of the trainer, as frozen dataclasses that are validated when made.

Sections and fields carry torchtitan's names where torchtitan has them. The text under a field is its help on
the command line.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from tyro.conf import arg

from quaver.activation_checkpointing import MODES as CHECKPOINT_MODES
from quaver.activation_checkpointing import selected_every
from quaver.config import DelayedScalingConfig, Float8LinearConfig, Float8LinearRecipeName

BYTE_VOCAB_SIZE = 256
"""Text is read as bytes, so a model needs one token for each value of a byte."""

DTYPES = ("float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
RECIPES = ", ".join(name.value for name in Float8LinearRecipeName)
DELAYED_RECIPES = ", ".join(
    name.value for name in Float8LinearRecipeName if Float8LinearConfig.from_recipe_name(name).keeps_scales
)
TENSOR_PARALLEL_SIZES = ("n_heads", "n_kv_heads", "hidden_dim", "vocab_size")
"""Sizes of the model that tensor parallel ranks split; they split the sequence too."""
RESHARD_POLICIES = ("default", "always", "never")
OPTIMIZER_IMPLEMENTATIONS = ("auto", "fused", "foreach", "for-loop")
SCHEDULES = ("cosine", "linear", "wsd", "constant")
DECAY_TYPES = ("linear", "sqrt", "cosine")


def require(holds: bool, name: str, expected: str, got: object, fix: str = "") -> None:
    """Raise ValueError saying what field `name` must be, what it is, and what to do, unless `holds`."""
    if not holds:
        raise ValueError(f"{name} must be {expected}, got {got!r}" + (f"; {fix}" if fix else ""))


def _require_positive(section: str, owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        require(value >= 1, f"{section}.{name}", "at least 1", value)


def _require_default(section: str, owner: Any, name: str, unless: str, fix: str = "") -> None:
    """Refuse a value of field `name` that nothing would read."""
    value, default = getattr(owner, name), type(owner).__dataclass_fields__[name].default
    require(value == default, f"{section}.{name}", f"its default, {default!r}, unless {unless}", value, fix)


def _require_finite(section: str, owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        require(math.isfinite(value) and value >= 0, f"{section}.{name}", "finite and not negative", value)


@dataclass(frozen=True)
class Job:
    """Where the run is kept, and whether it has a twin."""

    name: str = ""
    """Folder of the run inside dump_folder; empty makes one from the recipe and the time."""
    dump_folder: str = "runs"
    """Folder that holds the runs."""
    compare: bool = False
    """Also train the bfloat16 twin, from the same weights on the same data (short: --compare)."""

    def __post_init__(self) -> None:
        plain = self.name not in (".", "..") and not any(sep in self.name for sep in "/\\")
        require(plain, "job.name", "the name of one folder", self.name, "put parent folders in job.dump_folder")
        require(bool(self.dump_folder), "job.dump_folder", "a folder", self.dump_folder)


@dataclass(frozen=True)
class Model:
    """Shape of the Llama 3 style model."""

    vocab_size: int = BYTE_VOCAB_SIZE
    """Number of tokens; text is read as bytes, so at least 256."""
    dim: int = 256
    """Width of the residual stream."""
    n_layers: int = 4
    """Number of transformer blocks."""
    n_heads: int = 4
    """Number of query heads; dim / n_heads is the size of a head."""
    n_kv_heads: int = 2
    """Number of key and value heads, each shared by n_heads / n_kv_heads query heads."""
    hidden_dim: int = 768
    """Width inside the feed-forward network."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: float = 500000.0
    """Base of the rotary frequencies."""
    tie_word_embeddings: bool = False
    """Use the token embedding as the output projection too."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "hidden_dim")
        _require_positive("model", self, *sizes)
        _require_finite("model", self, "norm_eps", "rope_theta")
        require(self.rope_theta > 0, "model.rope_theta", "positive", self.rope_theta)
        require(
            self.n_heads % self.n_kv_heads == 0,
            "model.n_heads",
            f"a multiple of model.n_kv_heads = {self.n_kv_heads}",
            self.n_heads,
            "each key/value head serves the same number of query heads",
        )
        require(
            self.dim % (2 * self.n_heads) == 0,
            "model.dim",
            f"a multiple of 2 * model.n_heads = {2 * self.n_heads}",
            self.dim,
            "rotary embeddings need heads of one, even size",
        )

    @property
    def head_dim(self) -> int:
        """Size of one attention head."""
        return self.dim // self.n_heads


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

    def __post_init__(self) -> None:
        _require_positive("training", self, "steps", "seq_len", "local_batch_size")
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
class Parallelism:
    """How the ranks that torchrun starts share the work; the product of the degrees is their number."""

    data_parallel_replicate_degree: int = 1
    """Groups of ranks that hold a whole copy of the weights each (HSDP)."""
    data_parallel_shard_degree: int = -1
    """Ranks over which FSDP2 shards each copy; -1 means all that the other two degrees leave."""
    tensor_parallel_degree: int = 1
    """Ranks that share each linear and, between linears, the sequence."""
    fsdp_reshard_after_forward: str = "default"
    """When FSDP2 frees gathered weights after the forward: default (all but those that backward needs first), always
    or never."""

    def __post_init__(self) -> None:
        _require_positive("parallelism", self, "data_parallel_replicate_degree", "tensor_parallel_degree")
        shard = self.data_parallel_shard_degree
        require(shard == -1 or shard >= 1, "parallelism.data_parallel_shard_degree", "-1 or at least 1", shard)
        require(
            self.fsdp_reshard_after_forward in RESHARD_POLICIES,
            "parallelism.fsdp_reshard_after_forward",
            f"one of {', '.join(RESHARD_POLICIES)}",
            self.fsdp_reshard_after_forward,
        )


@dataclass(frozen=True)
class ActivationCheckpoint:
    """What transformer blocks keep for the backward; the rest is computed again, to the same bits."""

    mode: Annotated[str, arg(help=f"One of {', '.join(CHECKPOINT_MODES)}.")] = "none"
    selective_ac_option: str = "op"
    """With mode selective: op keeps the results worth keeping in every block; a number n keeps nothing of every n-th
    block, and all of the others."""
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
            selected_every(self.selective_ac_option)
        except ValueError as error:
            raise ValueError(f"activation_checkpoint.{error}") from error
        require(0 <= self.memory_budget <= 1, "activation_checkpoint.memory_budget", "from 0 to 1", self.memory_budget)


@dataclass(frozen=True)
class Comm:
    """Communication between ranks."""

    train_timeout_seconds: int = 300
    """Seconds that ranks wait for each other before the run ends with an error."""

    def __post_init__(self) -> None:
        _require_positive("comm", self, "train_timeout_seconds")


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
        _require_finite("optimizer", self, "lr", "eps", "weight_decay")
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
                _require_default("lr_scheduler", self, name, "lr_scheduler.schedule is wsd")
        if self.schedule == "constant":
            _require_default("lr_scheduler", self, "min_lr_factor", "lr_scheduler.schedule goes down")

    def decay_steps(self, steps: int) -> int:
        """Return how many of the last of `steps` steps are wsd's decay."""
        return max(1, round(self.decay_ratio * steps))


@dataclass(frozen=True)
class Float8:
    """Which linears compute in float8, and how."""

    enable_float8_linear: bool = True
    """Convert linears to float8; off trains in bfloat16."""
    recipe_name: Annotated[str, arg(help=f"One of {RECIPES}.")] = "tensorwise"
    filter_fqns: tuple[str, ...] = ("lm_head",)
    """A linear stays in high precision when its full name contains one of these."""
    skip_first_layers: int = 0
    """Transformer blocks at the input that stay in high precision."""
    skip_last_layers: int = 0
    """Transformer blocks at the output that stay in high precision."""
    last_steps_high_precision: int = 0
    """Steps at the end of the run that compute every linear in high precision, validation included. Neither with
    tensor parallelism nor with enable_fsdp_float8_all_gather, whose inputs and weights travel in float8."""
    auto_filter: bool = False
    """Also keep in high precision what a cost model expects to gain nothing on this GPU (without one, on an H100)."""
    emulate: bool = False
    """Multiply with the exact emulation even where the device multiplies float8."""
    enable_fsdp_float8_all_gather: bool = False
    """FSDP2 gathers the weights of float8 linears in float8: half the bytes of bfloat16."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all gathered weights together after each optimizer step, with one collective."""
    delayed_history_len: int = 16
    """Delayed scaling: how many steps' amaxes are remembered."""
    delayed_scale_fn_name: str = "max"
    """Delayed scaling: the scale follows the max of the remembered amaxes, or the most_recent."""
    delayed_margin: int = 0
    """Delayed scaling: how many powers of two to stay away from the largest number of the format."""
    delayed_headroom: float = 1.0
    """Delayed scaling: the factor by which a tensor may grow from one step to the next before it saturates."""
    delayed_nonfinite_amax: str = "skip"
    """Delayed scaling: what an inf or NaN does to a tensor's history. skip: nothing; keep_scale: it is remembered, and
    the scale stays as it is for as long."""
    delayed_dynamic_window: tuple[float, ...] = ()
    """Delayed scaling: low and high; a tensor is scaled dynamically for one step after each in which the ratio of its
    scale to the one that would have fit was outside. Empty: never."""
    enable_amax_init: bool = True
    """Accepted from older configs, unnecessary: a first use is always scaled dynamically. Changes nothing."""
    enable_pre_and_post_forward: bool = True
    """Accepted from older configs, unnecessary: no code runs before or after a forward. Changes nothing."""

    def __post_init__(self) -> None:
        Float8LinearConfig.from_recipe_name(self.recipe_name)  # raises ValueError listing the choices
        require(all(self.filter_fqns), "float8.filter_fqns", "names or parts of names", self.filter_fqns)
        for name in ("skip_first_layers", "skip_last_layers", "last_steps_high_precision"):
            value = getattr(self, name)
            require(value >= 0, f"float8.{name}", "not negative", value)
            if not self.enable_float8_linear:
                _require_default("float8", self, name, "float8.enable_float8_linear")
        require(
            self.enable_float8_linear or not self.enable_fsdp_float8_all_gather,
            "float8.enable_float8_linear",
            "true with float8.enable_fsdp_float8_all_gather",
            self.enable_float8_linear,
            "weights of linears in high precision are gathered in high precision",
        )
        require(
            self.enable_fsdp_float8_all_gather or not self.precompute_float8_dynamic_scale_for_fsdp,
            "float8.enable_fsdp_float8_all_gather",
            "true with float8.precompute_float8_dynamic_scale_for_fsdp",
            self.enable_fsdp_float8_all_gather,
            "the scales are those of weights that are gathered in float8",
        )
        self._check_delayed_scaling()

    @property
    def keeps_scales(self) -> bool:
        """Whether the recipe has scales that are kept from step to step."""
        return self.enable_float8_linear and Float8LinearConfig.from_recipe_name(self.recipe_name).keeps_scales

    @property
    def delayed_scaling_config(self) -> DelayedScalingConfig:
        """What the delayed_* settings say.

        Raises:
            ValueError: one of them is out of range.
        """
        values = {each.name: getattr(self, f"delayed_{each.name}") for each in fields(DelayedScalingConfig)}
        try:
            return DelayedScalingConfig(**{**values, "dynamic_window": values["dynamic_window"] or None})
        except ValueError as error:
            name, _, expected = str(error).partition(": expected ")
            raise ValueError(f"float8.delayed_{name} must be {expected}") from error

    def _check_delayed_scaling(self) -> None:
        window = self.delayed_dynamic_window
        require(len(window) in (0, 2), "float8.delayed_dynamic_window", "two numbers, low and high, or empty", window)
        self.delayed_scaling_config  # noqa: B018 - raises ValueError
        keeps_scales = self.keeps_scales
        for setting in fields(self):
            value = getattr(self, setting.name)
            require(
                keeps_scales or not setting.name.startswith("delayed_") or value == setting.default,
                f"float8.{setting.name}",
                f"its default, {setting.default!r}, without delayed scaling",
                value,
                f"set float8.enable_float8_linear and one of the recipes {DELAYED_RECIPES}",
            )


@dataclass(frozen=True)
class Data:
    """The text."""

    path: str = "stdlib"
    """A text file, a folder of text files, or stdlib: the sources of Python's own library (short: --data)."""

    def __post_init__(self) -> None:
        require(bool(self.path), "data.path", "stdlib, a file or a folder", self.path)


@dataclass(frozen=True)
class Validation:
    """The same sequences of the validation split, every time."""

    freq: int = 50
    """Steps between two validations; the last step always has one."""
    steps: int = 8
    """Batches of local_batch_size sequences in one validation."""
    high_precision_too: bool = False
    """Also report validation_loss_hp: the same weights with every linear in high precision. Not with tensor parallelism
    or float8.enable_fsdp_float8_all_gather, whose inputs and weights travel in float8."""

    def __post_init__(self) -> None:
        _require_positive("validation", self, "freq", "steps")


@dataclass(frozen=True)
class Metrics:
    """What is shown; metrics.jsonl gets every step whatever this says."""

    log_freq: int = 10
    """Steps between two printed lines where there is no terminal for a progress bar."""
    float8_scales_freq: int = 1
    """With delayed scaling: steps between two lines of float8_scales.jsonl, which has every tensor's scale, amax and
    saturation; 0 never."""
    plot_float8_scales: bool = False
    """With delayed scaling: draw float8_scales.png from them when the run ends."""

    def __post_init__(self) -> None:
        _require_positive("metrics", self, "log_freq")
        require(self.float8_scales_freq >= 0, "metrics.float8_scales_freq", "not negative", self.float8_scales_freq)
        require(
            self.float8_scales_freq > 0 or not self.plot_float8_scales,
            "metrics.float8_scales_freq",
            "at least 1 with metrics.plot_float8_scales",
            self.float8_scales_freq,
            "the picture is drawn from what is written",
        )


@dataclass(frozen=True)
class TrainConfig:
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

    def __post_init__(self) -> None:
        require(
            self.model.vocab_size >= BYTE_VOCAB_SIZE,
            "model.vocab_size",
            f"at least {BYTE_VOCAB_SIZE}, because text is read as bytes",
            self.model.vocab_size,
        )
        require(
            self.float8.enable_float8_linear or not self.job.compare,
            "float8.enable_float8_linear",
            "true with job.compare",
            self.float8.enable_float8_linear,
            "the twin of a bfloat16 run would be itself",
        )
        self._check_kept_scales()
        self._check_tensor_parallel()
        self._check_activation_checkpoint()
        self._check_decay()
        self._check_high_precision()

    def _check_kept_scales(self) -> None:
        precision = self.float8.recipe_name if self.float8.enable_float8_linear else "no float8"
        without = f"where no scale is kept from step to step ({precision})"
        fix = f"choose float8.recipe_name {DELAYED_RECIPES.replace(', ', ' or ')}"
        keeps, plot, freq = self.float8.keeps_scales, self.metrics.plot_float8_scales, self.metrics.float8_scales_freq
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

"""One model in training: its optimizer, its precision, its training step and its validation."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Self

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quaver import (
    Float8Linear,
    Float8ScalingState,
    cast_weights_once,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from quaver.lab.data import Batch
from quaver.lab.model.float8 import in_high_precision
from quaver.lab.model.flops import count_flops_per_token_by_precision
from quaver.lab.model.initialize import allocate, initialize
from quaver.lab.model.llama import Llama
from quaver.lab.model.loss import compute_next_token_loss
from quaver.lab.model.mixture import (
    Experts,
    Router,
    average_expert_gradients,
    balance_experts,
    list_modules,
    pop_expert_load,
)
from quaver.lab.model.parallelize import parallelize
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import Optimizer, TrainConfig, Training
from quaver.lab.trainer.memory import PeakMemory, measure_peak
from quaver.lab.trainer.micro_batches import accumulate_gradients
from quaver.lab.trainer.nonfinite import NonFiniteError, check_may_skip, locate_nonfinite
from quaver.lab.trainer.optimizer import (
    build_optimizer,
    clip_gradients,
    compute_learning_rate,
    compute_squared_norm_share,
    sum_partial_gradients,
)
from quaver.lab.trainer.precision_schedule import PrecisionSchedule
from quaver.lab.trainer.step_statistics import WARMUP_STEPS
from quaver.numerics.monitoring import Monitor
from quaver.runtime.devices import synchronize


def make_autocast(training: Training, device: torch.device) -> torch.autocast:
    """Return autocast to `mixed_precision_param` on `device`, disabled if the parameters have that dtype."""
    dtype = getattr(torch, training.mixed_precision_param)
    return torch.autocast(device.type, dtype=dtype, enabled=training.mixed_precision_param != training.dtype)


@dataclass(frozen=True)
class StepResult:
    """One optimizer step: mean loss (nats), gradient norm before clipping, learning rate, wall time.

    `nonfinite_reason` says what was not finite in a skipped step; otherwise it is empty. If `is_memory_measured`, the
    time includes the measuring of memory.
    """

    loss: float
    grad_norm: float
    lr: float
    seconds: float = math.nan
    nonfinite_reason: str = ""
    is_memory_measured: bool = False


@dataclass(frozen=True)
class ValidationResult:
    """The mean loss (nats) over the validation batches; None before the first validation."""

    loss: float | None = None
    loss_hp: float | None = None
    """The loss of the same weights with every linear in high precision, if validation.high_precision_too is set."""


@dataclass
class TrainedModel:
    """A model with its optimizer; `name` is its recipe, or the high-precision dtype for the bfloat16 baseline.

    `build` makes one. `model` must be parallelized and on `device`; call `precompute_scales` when it has its weights.

    A step with matmuls that float8.high_precision_schedule runs in high precision records neither time nor memory. The
    step whose memory is measured records no time after the warm-up, which medians leave out.

    Each rank has its shard of the model and of the batches. `train_step`, `validate` and `precompute_scales` are
    collectives: all ranks must call them, in the same order. Results are the same on all ranks, except for times
    and the peak of memory.
    """

    name: str
    model: Llama
    config: TrainConfig
    device: torch.device
    ranks: Ranks = field(default_factory=Ranks)
    peak_memory: PeakMemory = field(init=False, default_factory=PeakMemory)
    step_seconds: list[float] = field(init=False, default_factory=list)
    validation: ValidationResult = field(init=False, default=ValidationResult())
    expert_load: Tensor | None = field(init=False, default=None, repr=False)
    """The share of the last step's tokens that each expert took, [layers, E]; None without experts."""
    num_compiled_graphs: int = field(init=False, default=0)
    """The number of graphs that the steps have compiled."""
    monitor: Monitor | None = field(init=False, default=None, repr=False)
    """Samples the numerics of the float8 matmuls, if numerics.every is set."""
    scaling: Float8ScalingState = field(init=False, repr=False)
    """The persistent scales; empty for recipes with dynamic scaling."""
    flops_per_token: dict[str, int] = field(init=False, repr=False)
    """The FLOPs of forward and backward per token, by precision, outside of float8.high_precision_schedule."""
    _schedule: PrecisionSchedule = field(init=False, repr=False)
    _skipped_in_a_row: int = field(init=False, default=0)
    _routers: list[Router] = field(init=False, repr=False)
    experts: list[Experts] = field(init=False, repr=False)

    @classmethod
    def build(
        cls,
        name: str,
        model: Llama,
        config: TrainConfig,
        device: torch.device,
        ranks: Ranks,
        mesh: DeviceMesh | None,
        *,
        init_weights: bool = True,
    ) -> Self:
        """Parallelize `model`, which is on the meta device, and give it storage and its initial weights. A collective.

        Args:
            mesh: from `make_mesh`.
            init_weights: whether to draw the weights; otherwise they are undefined until they are loaded.
        """
        parallelize(model, config, mesh)
        allocate(model, device)
        if init_weights:
            initialize(model, config.training.seed)
        trained = cls(name, model, config, device, ranks)
        if init_weights:  # a load ends with it otherwise
            trained.precompute_scales()
        return trained

    def __post_init__(self) -> None:
        self.model.train()
        self.scaling = float8_scaling_state(self.model)
        self.flops_per_token = self.count_flops_per_token()
        self._schedule = PrecisionSchedule(self.name, self.model, self.config)
        self._routers, self.experts = list_modules(self.model, Router), list_modules(self.model, Experts)
        self.optimizer = build_optimizer(self.model, self.config.optimizer)

    def make_optimizer_for_loading(self, name: str) -> torch.optim.Optimizer:
        """Make the optimizer `name` with default settings, to load the states that a run with it saved."""
        return build_optimizer(self.model, Optimizer(name=name))

    @property
    def step_label(self) -> str:
        """The label of the last step in metrics: `name`, or the precision that `PrecisionSchedule` gave it."""
        return self._schedule.step_label

    @property
    def has_countable_memory(self) -> bool:
        """Whether a dispatch mode sees every tensor, which it does not in compiled code and in DTensor's operators."""
        return not self.config.training.compile and self.config.parallelism.tensor_parallel_degree == 1

    def train_step(self, step: int, batches: Sequence[Batch], *, measure_memory: bool = False) -> StepResult:
        """Run optimizer step `step` (from 1) on the microbatches of one global batch.

        A step with a non-finite loss or gradient norm leaves weights, moments and persistent scales unchanged.

        Raises:
            NonFiniteError: for such a step; with training.nonfinite = "skip" only after training.max_nonfinite_steps of
                them in a row.
        """
        self._schedule.apply(step)
        peak_context: AbstractContextManager[PeakMemory] = nullcontext(self.peak_memory)
        is_memory_measured = measure_memory and self.step_label == self.name
        if is_memory_measured:
            peak_context = measure_peak(
                self.iter_resident_tensors(), device=self.device, is_countable=self.has_countable_memory
            )
        synchronize(self.device)
        start = time.perf_counter()
        with peak_context as peak:
            result = self._run_step(step, batches)
            synchronize(self.device)
        seconds = time.perf_counter() - start
        if not result.nonfinite_reason:  # the peak of a skipped step includes its repetition in `_skip_step`
            self.peak_memory = peak
        is_late_measurement = is_memory_measured and len(self.step_seconds) >= WARMUP_STEPS
        if self.step_label == self.name and not result.nonfinite_reason and not is_late_measurement:
            self.step_seconds.append(seconds)
        return replace(result, seconds=seconds, is_memory_measured=is_memory_measured)

    def _run_step(self, step: int, batches: Sequence[Batch]) -> StepResult:
        """Run the step, and return its result without the time."""
        config = self.config
        rate = compute_learning_rate(step, config.training.steps, config.optimizer, config.lr_scheduler)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss_sum = self.forward_backward(batches)
        if self.monitor is not None:
            self.monitor.step()
        sum_partial_gradients(self.model)
        average_expert_gradients(self.experts)
        shares = torch.stack([loss_sum / self.ranks.world_size, compute_squared_norm_share(self.model)])
        loss, squared_norm = self.ranks.all_reduce(shares)
        norm = squared_norm.sqrt()
        clip_gradients(self.model, norm, config.training.max_norm)
        loss, grad_norm = torch.stack([loss, norm]).tolist()
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return StepResult(loss, grad_norm, rate, nonfinite_reason=self._skip_step(step, batches, loss, grad_norm))
        self._skipped_in_a_row = 0
        if self.scaling:  # after the check: a non-finite step is repeated with its own scales
            sync_float8_amax_and_scale_history(self.model)
        self.expert_load = pop_expert_load(self._routers, self.ranks.all_reduce)
        if self.expert_load is not None:
            balance_experts(self._routers, self.expert_load, config.optimizer.expert_bias_rate)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.precompute_scales()
        return StepResult(loss, grad_norm, rate)

    def forward_backward(self, batches: Sequence[Batch]) -> Tensor:
        """Accumulate the gradients of the mean loss over `batches`, and return the loss (float32, detached)."""
        graphs = self._count_graphs()
        loss_sum = torch.zeros((), device=self.device)
        casts_once = self.ranks.is_alone or self.config.float8.cast_weights_once
        with (
            cast_weights_once(self.model) if casts_once else nullcontext(),
            accumulate_gradients(self.model, self.config, list(batches)) as micro_batches,
        ):
            for batch in micro_batches:
                loss = self.compute_loss(batch) / len(batches)
                loss.backward()
                loss_sum += loss.detach()
        self.num_compiled_graphs += self._count_graphs() - graphs
        return loss_sum

    def _count_graphs(self) -> int:
        if not self.config.training.compile:
            return 0
        from quaver.torch_private.compiler import count_graphs  # imports the compiler, which takes seconds

        return count_graphs()

    def compute_loss(self, batch: Batch) -> Tensor:
        """Return the mean loss over the tokens of a batch, with its graph."""
        with make_autocast(self.config.training, self.device):
            return compute_next_token_loss(self.model(batch.tokens, batch.documents), batch.targets)

    def _skip_step(self, step: int, batches: Sequence[Batch], loss: float, grad_norm: float) -> str:
        """Discard a non-finite step, and return the reason. Raises NonFiniteError if the run must stop."""
        with self.monitor.repeating() if self.monitor else nullcontext():
            forward_backward = partial(self.forward_backward, batches)
            location = locate_nonfinite(self.model, forward_backward, self.ranks.all_gather_objects)
        reason = f"loss {loss:.4f} and gradient norm {grad_norm:.4f}, {location}"
        self.scaling.forget_recorded_amaxes()
        pop_expert_load(self._routers, self.ranks.all_reduce)
        self._skipped_in_a_row += 1
        check_may_skip(self.config.training, self._skipped_in_a_row, f"{self.name}: step {step} has {reason}")
        return reason

    @torch.no_grad()
    def validate(self, batches: Sequence[Batch]) -> ValidationResult:
        """Compute the loss over the validation batches in the precision of the last step, and set `validation`.

        Raises NonFiniteError if a loss is not finite.
        """
        loss, loss_hp = self._compute_mean_loss(batches), None
        if self.config.validation.high_precision_too:
            loss_hp = loss
            if self.step_label != self.config.training.mixed_precision_param:
                with in_high_precision(self.model):
                    loss_hp = self._compute_mean_loss(batches)
        self.validation = ValidationResult(loss, loss_hp)
        return self.validation

    def _compute_mean_loss(self, batches: Sequence[Batch]) -> float:
        self.model.eval()
        try:
            losses = torch.stack([self.compute_loss(batch) for batch in batches])
        finally:
            self.model.train()
        loss = self.ranks.all_reduce(losses.mean() / self.ranks.world_size).item()
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"{self.name}: the validation loss is {loss}; the weights may not be finite, and are not saved"
            )
        return loss

    def count_flops_per_token(self) -> dict[str, int]:
        """Return the FLOPs of forward and backward per token, by the precision that computes them now."""
        training = self.config.training
        sizes = self.config.model, training.seq_len, training.mixed_precision_param
        return count_flops_per_token_by_precision(self.model, *sizes, self.device)

    def iter_resident_tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that live between steps: parameters, buffers, persistent scales and optimizer state."""
        yield from self.model.parameters()
        yield from self.model.buffers()
        yield from self.scaling.state_dict().values()
        for state in self.optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, Tensor))

    def precompute_scales(self) -> None:
        """Compute the scales of the next float8 all-gathers, if the config says so. Call after the weights changed."""
        has_float8 = any(isinstance(module, Float8Linear) for module in self.model.modules())
        if has_float8 and self.config.float8.precompute_float8_dynamic_scale_for_fsdp:
            precompute_float8_dynamic_scale_for_fsdp(self.model)

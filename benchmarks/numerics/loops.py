"""Small models of transformers in float8 in plain PyTorch loops, for unseen.py."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import quaver
from quaver import CastConfig, DelayedScalingConfig, Float8LinearConfig, ScalingType


@dataclass
class Training:
    """A model in training; faults change its parts."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batch: Callable[[int], Tensor]
    compute_loss: Callable[[Tensor], Tensor]
    schedule: torch.optim.lr_scheduler.LRScheduler | None = None
    accumulation: int = 1
    clip: float | None = 1.0
    autocast: bool = True
    once: bool = False
    """Whether weights are cast once per step."""
    zeroes_gradients: bool = True
    losses: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scaling = quaver.float8_scaling_state(self.model)

    def step(self, number: int) -> None:
        total = 0.0
        with quaver.cast_weights_once(self.model) if self.once else nullcontext():
            for part in range(self.accumulation):
                with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                    loss = self.compute_loss(self.batch(number * self.accumulation + part)) / self.accumulation
                loss.backward()
                total += loss.item()
        self.losses.append(total)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(
                [weight for weight in self.model.parameters() if weight.requires_grad], self.clip
            )
        self.optimizer.step()
        if self.scaling:
            quaver.sync_float8_amax_and_scale_history(self.model)
        if self.schedule is not None:
            self.schedule.step()
        if self.zeroes_gradients:
            self.optimizer.zero_grad()

    @property
    def decoder(self) -> Any:
        """The module with the blocks."""
        return next(
            module for module in self.model.modules() if isinstance(getattr(module, "layers", None), nn.ModuleList)
        )


TrainingFactory = Callable[[], Training]


def read_text() -> Tensor:
    folder = Path(os.__file__).parent
    return torch.frombuffer(
        bytearray(b"".join(file.read_bytes() for file in sorted(folder.glob("*.py")))), dtype=torch.uint8
    )


def make_batches(size: int, length: int, seed: int) -> Callable[[int], Tensor]:
    data = read_text()

    def batch(number: int) -> Tensor:
        generator = torch.Generator().manual_seed(1000 * seed + number)
        starts = torch.randint(len(data) - length, (size,), generator=generator)
        return torch.stack([data[start : start + length] for start in starts.tolist()]).long()

    return batch


def build_architecture(
    family: str, *, width: int = 64, layers: int = 4, dtype: torch.dtype = torch.float32, **more: Any
) -> nn.Module:
    """Return a decoder of transformers with random weights; `more` are fields of its config."""
    import transformers

    heads = {"num_attention_heads": 4, "num_hidden_layers": layers, "hidden_size": width, "vocab_size": 256}
    gated = {**heads, "intermediate_size": 3 * width, "num_key_value_heads": 2, "head_dim": width // 4}
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(**gated, **more),
        "qwen3": lambda: transformers.Qwen3Config(**gated, **more),
        "gemma2": lambda: transformers.Gemma2Config(**gated, query_pre_attn_scalar=width // 4, **more),
        "neox": lambda: transformers.GPTNeoXConfig(**heads, intermediate_size=4 * width, **more),
        "opt": lambda: transformers.OPTConfig(
            **heads, ffn_dim=4 * width, word_embed_proj_dim=width, max_position_embeddings=256, **more
        ),
    }
    config = configs[family]()
    config._attn_implementation, config.use_cache = "eager", False
    return transformers.AutoModelForCausalLM.from_config(config).to(dtype)


def make_training(
    family: str = "llama",
    recipe: Any = "tensorwise",
    *,
    seed: int,
    model_options: dict[str, Any] | None = None,
    batch_shape: tuple[int, int] = (4, 64),
    lr: float = 1e-3,
    warmup: int = 10,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    pretrained: int = 0,
    lora: bool = False,
    prepare: Callable[[nn.Module, Callable[[int], Tensor]], None] | None = None,
    primary: bool = False,
    **loop_options: Any,
) -> TrainingFactory:
    """Return a function that makes the training of a decoder in float8, after `pretrained` steps without it.

    `model_options` are for `build_architecture`, `batch_shape` has sequences and tokens, `loop_options` are fields of
    `Training`.
    """

    def make() -> Training:
        from quaver.integrations.transformers import prepare_model_for_float8

        torch.manual_seed(seed)
        model = build_architecture(family, **(model_options or {}))
        batch = make_batches(*batch_shape, seed)
        if pretrained:
            _train(
                Training(model, torch.optim.AdamW(model.parameters(), 1e-3), batch, _make_next_token_loss(model)),
                pretrained,
            )
        if lora:
            import peft

            model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules="all-linear"))
        prepare_model_for_float8(model, recipe)
        if prepare is not None:
            prepare(model, batch)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        stepper: Any = optimizer(trained, lr=lr)
        if primary:
            stepper = quaver.use_float8_primary_weights(model, stepper)
        schedule = torch.optim.lr_scheduler.LambdaLR(stepper, lambda step: min(1.0, (step + 1) / max(warmup, 1)))
        return Training(model, stepper, batch, _make_next_token_loss(model), schedule, **loop_options)

    return make


def _make_next_token_loss(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda tokens: model(input_ids=tokens, labels=tokens).loss


def _train(training: Training, steps: int) -> None:
    for step in range(steps):
        training.step(step)


def make_regression(seed: int) -> TrainingFactory:
    """Return a function that makes the training of a deep MLP to match a smaller one, on Gaussian inputs."""

    def make() -> Training:
        torch.manual_seed(seed)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(6)), nn.Linear(64, 16))
        teacher = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 16)).requires_grad_(False)
        quaver.convert_to_float8_training(model, config="rowwise")

        def batch(number: int) -> Tensor:
            return torch.randn(128, 64, generator=torch.Generator().manual_seed(seed + number))

        def compute_loss(x: Tensor) -> Tensor:
            return nn.functional.mse_loss(model(x), teacher(x))

        return Training(
            model, torch.optim.Adam(model.parameters(), 3e-3), batch, compute_loss, autocast=False, clip=None
        )

    return make


def calibrate_static_scales() -> Float8LinearConfig:
    cast = CastConfig(scaling_type=ScalingType.STATIC)
    return Float8LinearConfig(
        cast_config_input=cast,
        cast_config_weight=cast,
        cast_config_grad_output=cast,
        delayed_scaling_config=DelayedScalingConfig(headroom=4.0),
    )


def calibrate(model: nn.Module, batch: Callable[[int], Tensor]) -> None:
    """Calibrate static scales on 4 batches."""
    with quaver.calibrate_float8_static_scales(model), torch.autocast("cpu", torch.bfloat16):
        for number in range(4):
            _make_next_token_loss(model)(batch(10_000 + number)).backward()
    model.zero_grad()


def make_muon(parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    """Return Muon for the matrices of blocks. Embeddings and norms do not train, as is common in fine-tuning."""
    return torch.optim.Muon([weight for weight in parameters if weight.dim() == 2 and weight.shape[0] != 256], lr=lr)


def make_sgd(parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


def make_undecayed_adamw(parameters: list[Tensor], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0, betas=(0.9, 0.999))

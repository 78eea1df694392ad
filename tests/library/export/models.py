"""Defines a decoder's linears under the names of Llama, small enough for a test, and their float8 checkpoints."""

from pathlib import Path

import torch
from torch import nn

from quaver import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training
from quaver.export import save_float8

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
STATIC = Float8LinearConfig(cast_config_input=CastConfig(scaling_type=ScalingType.STATIC))


class Tiny(nn.Module):
    """An embedding, six linears of one size, whose weights have different scales, and a head."""

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, size)
        self.layer = nn.ModuleDict({name: nn.Linear(size, size, bias=name == "q_proj") for name in PROJECTIONS})
        self.norm = nn.LayerNorm(size)
        self.lm_head = nn.Linear(size, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(tokens)
        for linear in self.layer.values():
            hidden = hidden + linear(hidden)
        return self.lm_head(self.norm(hidden))


def is_not_head(module: nn.Module, name: str) -> bool:
    return "lm_head" not in name


def tiny(recipe: object = "rowwise", size: int = 32) -> Tiny:
    """Return a model with the same weights at each call, converted but for the head."""
    torch.manual_seed(0)
    model = Tiny(size)
    with torch.no_grad():
        for index, linear in enumerate(model.layer.values()):
            linear.weight.mul_(1.1 ** (index + 1))
    return convert_to_float8_training(model, config=recipe, module_filter_fn=is_not_head)


def saved(folder: Path, recipe: object = "rowwise", size: int = 32, **options: object) -> Path:
    """Return the folder, in which save_float8 has written the model of `tiny`."""
    save_float8(tiny(recipe, size), folder, config={"model_type": "tiny"}, **options)
    return folder

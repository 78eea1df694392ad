"""A mixture of experts as transformers writes one, small enough for a test."""

import torch
from torch import nn

from quaver import convert_to_float8_training

EXPERTS = 3


class Experts(nn.Module):
    """What experts/module.py asks for; each expert has magnitudes of its own."""

    has_gate = True

    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        factors = torch.logspace(-1, 1, EXPERTS)[:, None, None]
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * inner, size) * factors)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, size, inner) / factors)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return nn.functional.silu(gate) * up

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            token, place = torch.where(index == expert)
            inner = self._apply_gate(hidden[token] @ self.gate_up_proj[expert].t())
            out[token] += inner @ self.down_proj[expert].t() * weights[token, place, None]
        return out


class Mixture(nn.Module):
    """A linear, a router that takes two experts, and a head."""

    def __init__(self, size: int = 64, inner: int = 48) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, size)
        self.o_proj = nn.Linear(size, size, bias=False)
        self.router = nn.Linear(size, EXPERTS, bias=False)
        self.experts = Experts(size, inner)
        self.lm_head = nn.Linear(size, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.o_proj(self.embed_tokens(tokens)).flatten(0, 1)
        weights, index = self.router(hidden).softmax(-1).topk(2)
        return self.lm_head(self.experts(hidden, index, weights))


def plain(size: int = 64, inner: int = 48) -> Mixture:
    """The same weights at each call."""
    torch.manual_seed(0)
    return Mixture(size, inner)


def mixture(recipe: object = "rowwise", size: int = 64, inner: int = 48, filtered: tuple[str, ...] = ()) -> Mixture:
    """`plain`, converted but for the router, the head and what `filtered` names."""
    left_out = ("router", "lm_head", *filtered)
    return convert_to_float8_training(
        plain(size, inner), config=recipe, module_filter_fn=lambda module, name: name not in left_out
    )

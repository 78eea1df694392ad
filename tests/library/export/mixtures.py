"""Defines a mixture of experts as transformers writes one, small enough for a test."""

import torch
from torch import nn

import quaver.experts.function
from quaver import convert_to_float8_training
from quaver.experts.groups import ExpertMatmul, find_group_bounds, select_group
from tests.mixture import Experts

EXPERTS = 3


def build_experts(size: int, inner: int) -> Experts:
    """Return experts, each with other magnitudes."""
    experts, factors = Experts(EXPERTS, size, inner, False), torch.logspace(-1, 1, EXPERTS)[:, None, None]
    experts.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * inner, size) * factors)
    experts.down_proj = nn.Parameter(torch.randn(EXPERTS, size, inner) / factors)
    return experts


class Mixture(nn.Module):
    """A linear, a router that takes two experts, and a head."""

    def __init__(self, size: int = 64, inner: int = 48) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(50, size)
        self.o_proj = nn.Linear(size, size, bias=False)
        self.router = nn.Linear(size, EXPERTS, bias=False)
        self.experts = build_experts(size, inner)
        self.lm_head = nn.Linear(size, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.o_proj(self.embed_tokens(tokens)).flatten(0, 1)
        weights, index = self.router(hidden).softmax(-1).topk(2)
        return self.lm_head(self.experts(hidden, index, weights))


def plain(size: int = 64, inner: int = 48) -> Mixture:
    """Return a model with the same weights at each call."""
    torch.manual_seed(0)
    return Mixture(size, inner)


def mixture(recipe: object = "rowwise", size: int = 64, inner: int = 48, filtered: tuple[str, ...] = ()) -> Mixture:
    """Return `plain`, converted but for the router, the head and the modules in `filtered`."""
    admits = lambda _, name: name not in ("router", "lm_head", *filtered)  # noqa: E731
    return convert_to_float8_training(plain(size, inner), config=recipe, module_filter_fn=admits)


def multiplied_experts(forward, monkeypatch):
    """Return the codes [N, K] and the scale of each expert that `forward()` multiplies, in the order of its stacks."""
    stacks = []
    multiply = quaver.experts.function.grouped_mm

    def record_and_multiply(a, b, ends, form, *args):
        assert form is ExpertMatmul.OUTPUT
        bounds = find_group_bounds(None, ends.shape[0], b.data.shape[0])
        stacks.append([select_group(b, group, *rows)[:2] for group, rows in enumerate(bounds)])
        return multiply(a, b, ends, form, *args)

    with monkeypatch.context() as patch:
        patch.setattr(quaver.experts.function, "grouped_mm", record_and_multiply)
        forward()
    return stacks

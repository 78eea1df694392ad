"""Builds the experts of a transformers model, and routes tokens to them."""

from types import SimpleNamespace

import torch

CONFIG = SimpleNamespace(
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict(hidden_size=64, moe_hidden_size=64, intermediate_size=96, moe_intermediate_size=96, moe_latent_size=None),
    **dict(hidden_act="silu", mlp_hidden_act="relu2", swiglu_alpha=1.702, swiglu_limit=7.0, mlp_bias=False),
    **dict(rms_norm_eps=1e-6, post_norm_eps=1e-6, _experts_implementation="eager"),
)


def build_experts(cls, dtype=torch.float32):
    torch.manual_seed(0)
    experts = cls(CONFIG)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.1)
    return experts.to(dtype)


def route_tokens(dtype=torch.float32, tokens=50):
    """Return tokens, their two experts, and the weights of these; expert 2 gets no token."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, 64, generator=generator).to(dtype)
    index = torch.stack([torch.randperm(3, generator=generator)[:2] for _ in range(tokens)])
    index[index == 2] = 3
    return hidden, index, torch.rand(tokens, 2, generator=generator).to(dtype)

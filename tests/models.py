"""Defines a Llama block, for tests of the library that need realistic shapes, names and saved activations."""

import torch
import torch.nn.functional as F
from torch import nn


def rope_tables(tokens, head_dim, device):
    """Return float32 cosines and sines [T, E / 2]."""
    frequencies = 1e4 ** -(torch.arange(0, head_dim, 2, device=device) / head_dim)
    angles = torch.outer(torch.arange(tokens, device=device), frequencies)
    return angles.cos(), angles.sin()


class Rope(torch.autograd.Function):
    """Rotates heads [B, T, H, E] by position. The gradient is the inverse rotation, which saves no heads."""

    @staticmethod
    def rotate(heads, cos, sin):
        (first, second), cos, sin = heads.chunk(2, dim=-1), cos[:, None], sin[:, None]
        halves = first * cos - second * sin, second * cos + first * sin
        # PyTorch 2.11's Dynamo drops the backward of a Function whose result went through a `.to` that did nothing.
        return torch.cat([half.to(heads.dtype) for half in halves], dim=-1)

    @staticmethod
    def forward(ctx, heads, cos, sin):
        ctx.save_for_backward(cos, sin)
        return Rope.rotate(heads, cos, sin)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return Rope.rotate(grad, cos, -sin), None, None


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.head_dim = dim // heads
        self.q_proj, self.o_proj = (nn.Linear(dim, dim, bias=False) for _ in range(2))
        self.k_proj, self.v_proj = (nn.Linear(dim, kv_heads * self.head_dim, bias=False) for _ in range(2))

    def forward(self, hidden, cos, sin):
        query, key, value = (
            proj(hidden).unflatten(-1, (-1, self.head_dim)) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        heads = (tensor.transpose(1, 2) for tensor in (Rope.apply(query, cos, sin), Rope.apply(key, cos, sin), value))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return self.o_proj(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, dim, hidden_dim):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(dim, hidden_dim, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, hidden):
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class Block(nn.Module):
    """Attention, then feed-forward, each on normalized input and added to the residual stream."""

    def __init__(self, dim, hidden_dim, heads=4, kv_heads=2):
        super().__init__()
        self.self_attn, self.mlp = Attention(dim, heads, kv_heads), FeedForward(dim, hidden_dim)
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, hidden, cos, sin):
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

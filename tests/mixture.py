"""Defines a small mixture of experts, with the attributes by which the package recognizes experts."""

import torch
import torch.nn.functional as F
from torch import nn

DIM, HIDDEN = 40, 36  # blocks of 32 and of 128 are cut; 2 and 4 ranks can shard both


class Experts(nn.Module):
    """Gated experts. Before a conversion the forward runs them one after another."""

    has_gate, has_bias, is_concatenated = True, False, True

    def __init__(self, num_experts, dim, hidden, is_transposed):
        super().__init__()
        self.num_experts, self.is_transposed = num_experts, is_transposed
        shapes = [(num_experts, 2 * hidden, dim), (num_experts, dim, hidden)]
        if is_transposed:
            shapes = [(count, columns, rows) for count, rows, columns in shapes]
        self.gate_up_proj, self.down_proj = (nn.Parameter(torch.empty(shape)) for shape in shapes)

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            up, down = (stack[expert] if self.is_transposed else stack[expert].t() for stack in self.parameters())
            weight = (top_k_weights * (top_k_index == expert)).sum(-1, keepdim=True)
            out = out + weight * (self._apply_gate(hidden_states @ up) @ down)
        return out


class GroupedExperts(nn.Module):
    """As torchtitan's: a method multiplies. The first of two experts has two tokens."""

    def __init__(self, dim=16, hidden=24):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2, hidden, dim))

    def _grouped_mm(self, *, A, B_t, offs):
        return F.grouped_mm(A, B_t, offs=offs)

    def forward(self, tokens):
        ends = torch.tensor([2, len(tokens)], dtype=torch.int32)
        return self._grouped_mm(A=tokens, B_t=self.w1.transpose(1, 2), offs=ends)


class Mixture(nn.Module):
    """A residual block with a router, two experts per token, and a linear after them."""

    def __init__(self, num_experts, dim, hidden, is_transposed):
        super().__init__()
        self.top_k = min(2, num_experts)
        self.norm = nn.LayerNorm(dim)
        self.router = nn.Parameter(torch.empty(num_experts, dim))
        self.experts = Experts(num_experts, dim, hidden, is_transposed)
        self.out = nn.Linear(dim, dim)

    def forward(self, hidden):
        tokens = self.norm(hidden)
        weights, index = F.linear(tokens, self.router).softmax(-1).topk(self.top_k, dim=-1)
        return hidden + self.out(self.experts(tokens, index, weights))


def make_mixture(layers=2, num_experts=3, dim=DIM, hidden=HIDDEN, is_transposed=False):
    """Return a model of `layers` blocks, with the same weights on every call.

    Experts, rows and columns differ in magnitude, so that no two of them have the same scale.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Mixture(num_experts, dim, hidden, is_transposed) for _ in range(layers)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.1)
                for axis, length in enumerate(parameter.shape):
                    shape = [-1 if dim == axis else 1 for dim in range(parameter.dim())]
                    parameter.mul_(torch.linspace(0.3, 2.0, length).view(shape))
    return model

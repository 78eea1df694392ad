"""Builds experts, draws the tokens of each rank, and takes a step with expert parallelism or without."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

from quaver import convert_to_float8_training
from quaver.distributed import Float8ExpertParallel
from quaver.experts.module import Float8Experts
from tests.ranks import get_cached_mesh

DIM, INNER, EXPERTS = 160, 96, 8


class Experts(nn.Module):
    """Experts with the attributes of transformers'."""

    def __init__(self, *, has_gate=True, has_bias=False, is_transposed=False, has_norm=False, experts=EXPERTS):
        super().__init__()
        self.num_experts, self.has_gate, self.has_bias = experts, has_gate, has_bias
        self.is_transposed, self.has_post_expert_norm = is_transposed, has_norm
        up = "gate_up_proj" if has_gate else "up_proj"
        for name, outputs, inputs in ((up, INNER * (1 + has_gate), DIM), ("down_proj", DIM, INNER)):
            shape = (inputs, outputs) if is_transposed else (outputs, inputs)
            self.register_parameter(name, nn.Parameter(torch.randn(experts, *shape) * 0.1))
            if has_bias:
                self.register_parameter(f"{name}_bias", nn.Parameter(torch.randn(experts, outputs)))
        self.act_fn = nn.SiLU()
        if has_norm:
            self.post_expert_norm = nn.RMSNorm(DIM)

    def _apply_gate(self, gate_up):
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, hidden_states, top_k_index, top_k_weights):
        raise AssertionError("this is converted")


def convert(recipe, dtype=torch.bfloat16, trained=True, **flags):
    torch.manual_seed(0)
    experts = Experts(**flags).to(dtype).requires_grad_(trained)
    convert_to_float8_training(experts, config=recipe)
    assert isinstance(experts, Float8Experts)
    return experts


def parallelize(experts, **options):
    return parallelize_module(experts, get_cached_mesh((dist.get_world_size(),)), Float8ExpertParallel(**options))


def make_tokens(ranks, top_k, dtype=torch.bfloat16, experts=EXPERTS):
    """Return each rank's tokens, their experts, the weights of these and the gradient of the result.

    Magnitudes differ by token and by rank. Every seventh token has an outlier, so that its other codes are subnormal,
    and column casts of codes would show. Expert 2 gets no token, and every fifth token has no expert in its first
    place. Of four ranks, rank 1 has no token, and the experts of the last get none.
    """
    generator = torch.Generator().manual_seed(1)
    used = [expert for expert in range(experts if ranks < 4 else experts - experts // ranks) if expert != 2]
    parts = []
    for rank in range(ranks):
        count = 0 if (rank, ranks) == (1, 4) else 70 + 100 * rank
        magnitudes = torch.logspace(-2, 1, count).view(-1, 1) * 3.0**rank
        hidden, grad = (torch.randn(count, DIM, generator=generator) * magnitudes for _ in range(2))
        hidden[::7, 3], grad[::7, 5] = 2.0**10, 2.0**10
        chosen = [torch.randperm(len(used), generator=generator)[:top_k] for _ in range(count)]
        index = torch.tensor(used)[torch.stack(chosen)] if count else torch.zeros(0, top_k, dtype=torch.int64)
        weights = torch.rand(count, top_k, generator=generator)
        index[::5, 0] = experts
        parts.append((hidden.to(dtype), index, weights.to(dtype), grad.to(dtype)))
    return parts


def step(experts, hidden, index, weights, grad, call=None):
    """Return the result, and the gradients of tokens, routing weights and parameters."""
    hidden, weights = (tensor.clone().requires_grad_() for tensor in (hidden, weights))
    out = (experts if call is None else call)(hidden, index, weights)
    out.backward(grad)
    gradients = {name: parameter.grad for name, parameter in experts.named_parameters()}
    experts.zero_grad()
    return {"out": out.detach(), "hidden": hidden.grad, "weights": weights.grad, **gradients}


def concatenate(parts):
    return [torch.cat(tensors) for tensors in zip(*parts, strict=True)]

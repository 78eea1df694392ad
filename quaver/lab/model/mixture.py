"""A mixture of experts in place of the feed-forward network, with the names and the routing of Hugging Face's GLM-4.5.

A token takes the k experts with the largest score + bias, weighted by their scores, which are scaled to a sum of 1:

    score = sigmoid(gate.weight @ hidden)     [E], in float32

The bias replaces an auxiliary loss (DeepSeek-V3, section 2.1.2): after each step it rises by a fixed rate for experts
with fewer tokens than the mean, and falls for experts with more. It affects the choice, not the weights.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.experts.function import float8_grouped_mm
from quaver.experts.module import RoutedExperts
from quaver.experts.token_exchange import TokenExchange, send_back, send_to_experts
from quaver.lab.model.functional import swiglu
from quaver.lab.model.plain_tensors import list_plain_tensors
from quaver.lab.settings import Model
from quaver.linear.function import get_output_dtype
from quaver.recipes.config import CastConfig, Float8LinearConfig, ScalingType

ModuleType = TypeVar("ModuleType", bound=nn.Module)


class Router(nn.Module):
    """Chooses the experts of each token."""

    e_score_correction_bias: Tensor
    """float32 [E]."""
    tokens_per_expert: Tensor
    """float32 [E], counted since the last balancing. Activation checkpointing counts the tokens of a recomputed block
    twice, for all experts alike."""

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.weight = nn.Parameter(torch.empty(config.n_experts, config.dim))
        for name, persistent in (("e_score_correction_bias", True), ("tokens_per_expert", False)):
            self.register_buffer(name, torch.zeros(config.n_experts), persistent=persistent)

    def reset_balance(self) -> None:
        """Set the biases and the counts to 0."""
        self.e_score_correction_bias.zero_()
        self.tokens_per_expert.zero_()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Router":
        super()._apply(fn, recurse)
        for name in ("e_score_correction_bias", "tokens_per_expert"):
            setattr(self, name, getattr(self, name).float())  # bfloat16 would lose small steps and counts
        return self

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return the experts of each token of `hidden` [T, D], int64 [T, k], and their float32 weights [T, k]."""
        with torch.autocast(hidden.device.type, enabled=False):
            scores = F.linear(hidden.float(), self.weight.float()).sigmoid()
        chosen = torch.topk(scores.detach() + self.e_score_correction_bias, self.top_k, sorted=False).indices
        weights = scores.gather(1, chosen)
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                ones = torch.ones_like(chosen, dtype=torch.float32).view(-1)
                self.tokens_per_expert.index_add_(0, chosen.view(-1), ones)
        return chosen, weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)


_DISABLED_CAST = CastConfig(scaling_type=ScalingType.DISABLED)
_HIGH_PRECISION_CONFIG = Float8LinearConfig(
    cast_config_input=_DISABLED_CAST, cast_config_weight=_DISABLED_CAST, cast_config_grad_output=_DISABLED_CAST
)


class Experts(RoutedExperts):
    """E SwiGLUs with the weights of transformers' experts."""

    feeds_float8 = False
    """Whether down_proj is float8, so that its input need not be saved in high precision."""
    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, config: Model) -> None:
        super().__init__()
        self.num_experts, self.top_k = config.n_experts, config.top_k
        self.gate_up_proj = nn.Parameter(torch.empty(config.n_experts, 2 * config.hidden_dim, config.dim))
        self.down_proj = nn.Parameter(torch.empty(config.n_experts, config.dim, config.hidden_dim))

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return swiglu(gate, up) if self.feeds_float8 else F.silu(gate) * up

    def _multiply_tokens(
        self,
        name: str,
        tokens: Tensor,
        ends: Tensor,
        *,
        input_exchange: TokenExchange | None = None,
        output_exchange: TokenExchange | None = None,
    ) -> Tensor:
        dtype = get_output_dtype(tokens)  # autocast does not cast the operands of a grouped matmul
        tokens = tokens.to(dtype)
        tokens = tokens if input_exchange is None else send_to_experts(tokens, input_exchange)
        weights = self._get_local(name).to(dtype).transpose(1, 2)
        if dtype is torch.bfloat16:
            output = F.grouped_mm(tokens, weights, offs=ends)
        else:  # torch.compile traces F.grouped_mm in bfloat16 only; this matmul has the same bits as its eager one
            output = float8_grouped_mm(tokens, weights, ends, config=_HIGH_PRECISION_CONFIG)
        return output if output_exchange is None else send_back(output, output_exchange)


class Mixture(nn.Module):
    """Routed experts, and shared experts that every token takes."""

    def __init__(self, config: Model, shared_experts: nn.Module | None) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config)
        self.shared_experts = shared_experts

    def forward(self, hidden: Tensor) -> Tensor:
        """Transform each token of `hidden` [B, T, D]."""
        tokens = hidden.flatten(0, -2)
        routed = self.experts(tokens, *self.gate(tokens)).view_as(hidden)
        return routed if self.shared_experts is None else routed + self.shared_experts(hidden)


def list_modules(model: nn.Module, module_class: type[ModuleType]) -> list[ModuleType]:
    """Return the modules of class `module_class`, in order."""
    return [module for module in model.modules() if isinstance(module, module_class)]


def pop_expert_load(routers: Sequence[Router], all_reduce: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return each expert's share of the tokens since the last call, [layers, E]; None for a model without experts.

    Args:
        all_reduce: sums a tensor in place over the ranks, and returns it.
    """
    if not routers:
        return None
    counts = all_reduce(torch.stack([router.tokens_per_expert for router in routers]))
    for router in routers:
        router.tokens_per_expert.zero_()
    return counts / counts.sum(dim=1, keepdim=True)


@torch.no_grad()
def balance_experts(routers: Sequence[Router], load: Tensor, rate: float) -> None:
    """Move the biases of the routers by `rate`: up for experts whose load is below the mean, else down."""
    for router, shares in zip(routers, load, strict=True):
        router.e_score_correction_bias += rate * torch.sign(shares.mean() - shares)


def average_expert_gradients(experts: Sequence[Experts]) -> None:
    """Divide the gradients of split experts, which expert parallelism sums, by the number of ranks that split them."""
    for module in experts:
        if module.dispatcher is not None:
            grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
            torch._foreach_div_(
                [plain for grad in grads for plain in list_plain_tensors(grad)], module.dispatcher.num_ranks
            )

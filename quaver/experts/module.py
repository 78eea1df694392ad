"""`Float8Experts`: a module of experts whose grouped matmuls run in float8, and which modules can be converted.

Experts are recognized by the attributes that transformers gives them (`use_experts_implementation`):

    num_experts                        E
    gate_up_proj, down_proj            [E, 2 F, D] and [E, D, F]; with `is_transposed` [E, D, 2 F] and [E, F, D]
    up_proj                            [E, F, D], instead of gate_up_proj unless `has_gate`
    gate_up_proj_bias, ..              [E, 2 F], .., with `has_bias`
    _apply_gate(gate_up) or act_fn     between the two matmuls; gate and up may be interleaved
    post_expert_norm                   after them, with `has_post_expert_norm`
    forward(hidden_states, top_k_index, top_k_weights)    [T, D], [T, k], [T, k] -> [T, D]

An index of E or more refers to an expert of another rank (`_is_expert_parallel`) and contributes nothing on this rank,
as does a negative index (DeepEP's -1).
Llama 4's experts have only the weights. Their input is [E * T, D]: T tokens of the first expert, then T of the second,
and so on.

A conversion changes the class of the module, as for a linear (class_change.py). It ignores the name of an experts
implementation in transformers' config, which is for the whole model: it cannot describe the recipe of one layer, and
`save_pretrained` would write it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from quaver.experts.function import (
    explain_config_obstacle,
    get_frozen_operands,
    get_quantized_operands,
    multiply_by_weight,
)
from quaver.experts.grouped_module import Float8GroupedModule
from quaver.experts.token_exchange import TokenDispatcher, TokenExchange, send_back
from quaver.foreign.transformers import is_llama4_experts
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.last_run import record_run
from quaver.linear.tensor import Float8Tensor
from quaver.linear.weight_form import WrapperWeight
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.scale_layout import COLUMNWISE, ROWWISE
from quaver.torch_private.tracing import disable_compile

_WEIGHT_NAMES = ("gate_up_proj", "up_proj", "down_proj")


class RoutedExperts(nn.Module):
    """The forward of experts as grouped matmuls; `_multiply_tokens` runs one of them."""

    # transformers' attributes. Annotated only, because a default would hide one of the original class.
    num_experts: int
    act_fn: Callable[[Tensor], Tensor]
    _apply_gate: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]
    dispatcher: TokenDispatcher | None = None
    """Sends tokens to the ranks of their experts under expert parallelism, else None."""
    external_dispatcher: TokenDispatcher | None = None
    """The dispatcher of experts that another library split, kept before and after a conversion."""

    def forward(
        self, hidden_states: Tensor, top_k_index: Tensor | None = None, top_k_weights: Tensor | None = None
    ) -> Tensor:
        """Return the weighted sum of its experts' outputs for each token.

        Args:
            hidden_states: [T, D]; without `top_k_index` and `top_k_weights` [E * T, D], T tokens of each expert.
            top_k_index: [T, k], the experts of each token. An index outside [0, E) selects no expert.
            top_k_weights: [T, k], ignored where `top_k_index` selects no expert.
        Returns:
            [T, D] (or [E * T, D]) in hidden_states' dtype.
        Raises:
            TypeError: only one of `top_k_index` and `top_k_weights` is given.
        """
        if top_k_index is None or top_k_weights is None:
            if top_k_index is not top_k_weights:
                raise TypeError("expected top_k_index and top_k_weights, or neither, got one of them")
            if self.dispatcher is not None:
                raise NotImplementedError(
                    "expert parallelism expects a call with top_k_index and top_k_weights, got hidden_states only"
                )
            tokens = hidden_states.view(-1, hidden_states.shape[-1])
            tokens_per_expert, remainder = divmod(tokens.shape[0], self.num_experts)
            if remainder:
                raise ValueError(
                    f"expected the same number of tokens for each of {self.num_experts} experts, grouped by expert; "
                    f"got {tokens.shape[0]} rows"
                )
            ends = torch.arange(1, self.num_experts + 1, device=tokens.device, dtype=torch.int32) * tokens_per_expert
            return self._run_sorted(tokens, ends, None)
        num_experts = self.num_experts if self.dispatcher is None else self.dispatcher.num_experts
        pair_experts, order = torch.sort(top_k_index.masked_fill(top_k_index < 0, num_experts).reshape(-1), stable=True)
        indices = torch.arange(num_experts, device=order.device)
        ends = torch.searchsorted(pair_experts, indices, right=True).to(torch.int32)
        tokens = hidden_states[order // top_k_index.shape[-1]]
        if self.dispatcher is None:
            results = self._run_sorted(tokens, ends, pair_experts.clamp(max=num_experts - 1))
        else:
            results = self._run_dispatched(tokens, ends, self.dispatcher)
        weights = top_k_weights.reshape(-1)[order].masked_fill(pair_experts >= num_experts, 0)
        results = results * weights.unsqueeze(-1)
        inverse = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
        by_token = results[inverse].view(*top_k_index.shape, results.shape[-1])
        return by_token.sum(dim=1).to(hidden_states.dtype)

    @disable_compile
    def _run_dispatched(self, tokens: Tensor, ends: Tensor, dispatcher: TokenDispatcher) -> Tensor:
        """Run `_run_sorted` with the experts of all ranks, where `ends` counts them all. A collective."""
        trained = {
            name: tensor.requires_grad for name, tensor in {"tokens": tokens, **get_expert_weights(self)}.items()
        }
        gradients = trained if torch.is_grad_enabled() else "none"
        precision = self.float8_config.short_str() if isinstance(self, Float8Experts) else "high precision"
        description = f"{precision}: [tokens, {tokens.shape[1]}] in {tokens.dtype}, gradients: {gradients}"
        exchange = dispatcher(tokens, ends, description)
        return self._run_sorted(tokens, exchange.ends, exchange.row_experts, exchange)

    def _run_sorted(
        self, tokens: Tensor, ends: Tensor, row_experts: Tensor | None, exchange: TokenExchange | None = None
    ) -> Tensor:
        """Run the experts on sorted tokens.

        `row_experts`: the expert of each token, with an `exchange` of each received token; None for experts without
        biases.
        """
        has_gate = getattr(self, "has_gate", True)
        name = "gate_up_proj" if has_gate else "up_proj"
        inner = self._multiply_and_add_bias(name, tokens, ends, row_experts, input_exchange=exchange)
        if has_gate and hasattr(self, "_apply_gate"):
            inner = self._apply_gate(inner)
        elif has_gate:
            gate, up = inner.chunk(2, dim=-1)
            inner = up * self.act_fn(gate)
        else:
            inner = self.act_fn(inner)
        has_norm = getattr(self, "has_post_expert_norm", False)
        if not has_norm and not getattr(self, "has_bias", False):
            return self._multiply_and_add_bias("down_proj", inner, ends, row_experts, output_exchange=exchange)
        out = self._multiply_and_add_bias("down_proj", inner, ends, row_experts)
        out = self.post_expert_norm(out) if has_norm else out
        return out if exchange is None else send_back(out, exchange)

    def _multiply_and_add_bias(
        self, name: str, tokens: Tensor, ends: Tensor, row_experts: Tensor | None, **exchanges: TokenExchange | None
    ) -> Tensor:
        out = self._multiply_tokens(name, tokens, ends, **exchanges)
        if row_experts is None or not getattr(self, "has_bias", False):
            return out
        return out + self._get_local(f"{name}_bias")[row_experts].to(out.dtype)

    def _get_local(self, name: str) -> Tensor:
        parameter: Tensor = getattr(self, name)
        return parameter if self.dispatcher is None else self.dispatcher.to_local(parameter)

    def _multiply_tokens(
        self,
        name: str,
        tokens: Tensor,
        ends: Tensor,
        *,
        input_exchange: TokenExchange | None = None,
        output_exchange: TokenExchange | None = None,
    ) -> Tensor:
        """Multiply sorted tokens by the weight `name` in a grouped matmul."""
        raise NotImplementedError


class Float8Experts(Float8GroupedModule, RoutedExperts):
    """Experts whose matmuls run in float8. Parameters, buffers and state_dict do not change.

    `convert_to_float8_training` converts a module of experts in place.
    """

    _float8_attributes = (*Float8GroupedModule._float8_attributes, "dispatcher")

    def _init_float8(self, config: Float8LinearConfig) -> None:
        super()._init_float8(config)
        self.dispatcher = self.external_dispatcher

    def _multiply_tokens(self, name: str, tokens: Tensor, ends: Tensor, **exchanges: TokenExchange | None) -> Tensor:
        weight, operands, has_row_codes_only = self._get_local(name), None, False
        config, transposed = self.float8_config, is_transposed(self)
        if isinstance(weight, Float8Tensor) and not torch.compiler.is_compiling():
            weight.check_casts(config.casts.weight, transposed=transposed)
        if isinstance(weight, FrozenFloat8Weight):
            operands, has_row_codes_only = get_frozen_operands(weight), weight.scale_layout in (ROWWISE, COLUMNWISE)
        elif isinstance(weight, Float8Tensor):
            operands = get_quantized_operands(weight, transposed)
        else:
            weight = (weight.get_plain() if isinstance(weight, WrapperWeight) else weight).contiguous()
        cast_once = self.get_cast_once_operands(name)
        operands = operands if cast_once is None else cast_once
        record_run(self, tokens.device, has_row_codes_only=has_row_codes_only)
        probe = self.get_probe(name)
        return multiply_by_weight(
            tokens, weight, ends, config, transposed=transposed, operands=operands, **exchanges, probe=probe
        )


def is_transposed(experts: nn.Module) -> bool:
    """Return whether weights are stored [E, inputs, outputs]. Llama 4's are, without the attribute `is_transposed`."""
    return bool(getattr(experts, "is_transposed", not hasattr(experts, "_apply_gate")))


def get_expert_weights(experts: nn.Module) -> dict[str, nn.Parameter]:
    """Return the 3-D weights of a module of experts, by name."""
    return {name: weight for name, weight in experts.named_parameters(recurse=False) if name in _WEIGHT_NAMES}


def is_experts(module: nn.Module) -> bool:
    """Return whether `module` has the attributes of transformers' experts, by which a conversion recognizes experts.

    They are `num_experts`, `has_gate`, `_apply_gate(gate_up)` and the 3-D parameters `gate_up_proj` (`up_proj` without
    a gate) and `down_proj`. Llama 4's experts lack two of them, and are recognized by their class.
    """
    if isinstance(module, Float8Experts):
        return True
    if not isinstance(getattr(module, "num_experts", None), int):
        return False
    has_protocol = hasattr(module, "_apply_gate") and hasattr(module, "has_gate")
    if not has_protocol and not is_llama4_experts(type(module)):
        return False
    names = {"gate_up_proj" if getattr(module, "has_gate", True) else "up_proj", "down_proj"}
    weights = get_expert_weights(module)
    return set(weights) == names and all(weight.dim() == 3 for weight in weights.values())


def explain_experts_obstacle(module: nn.Module, config: Float8LinearConfig) -> str:
    """Return why experts cannot be converted to `config`, or "" if they can."""
    is_external = getattr(module, "external_dispatcher", None) is not None
    if "forward" in vars(module) and not is_external and getattr(module, "_is_expert_parallel", False):
        return (
            "transformers' expert parallelism runs them: import quaver.integrations.transformers, and load the model "
            'with DistributedConfig(ep_implementation="float8")'
        )
    if "forward" in vars(module) and not is_external:
        return "their forward was replaced on the instance, for example by an Accelerate hook: convert before that"
    return explain_config_obstacle(config)


def check_not_split(module: Float8Experts) -> None:
    """Raise ValueError if `Float8ExpertParallel` split the experts, which the original class does not support."""
    if module.dispatcher is not module.external_dispatcher:
        raise ValueError(
            "expected all experts on this rank, got experts that Float8ExpertParallel split; convert a model back "
            "before it is parallelized"
        )

"""Counts the active experts of a token, from the router, the block or the config of the model."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import nn

_ACTIVE_COUNT_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "moe_top_k",
    "moe_k",
    "top_k_experts",
    "num_selected_experts",
    "n_expert_per_token",
    "n_activated_experts",
    "moe_router_topk",
)
"""Names of the number of active experts in configs of Hugging Face models, litgpt, DeepSeek and Megatron."""

_SHARED_NAME = re.compile("shared", re.IGNORECASE)
_EXPERTS_NAME = re.compile("expert|moe", re.IGNORECASE)
_ROUTER_NAME = re.compile("router|gate$", re.IGNORECASE)


class ActiveExperts:
    """Counts the matrices of each weight that multiply a token.

    Experts are linears in a ModuleList or ModuleDict whose name contains "expert" or "moe", or 3-D parameters
    [E, rows, columns]. Every shared expert counts. If a model has no experts, no router and no number of active
    experts, all matrices of its 3-D parameters count, for example the heads of XLNet's attention.

    Attributes:
        unknown: the weights whose number of active experts is unknown; they count as one.
    """

    def __init__(self, model: nn.Module) -> None:
        self.unknown: list[str] = []
        self._model = model
        self._active_shares: dict[str, float] = {}
        """The share of active experts by the name of the list of experts."""
        leaves = [(name.rpartition(".")[2], type(module).__name__) for name, module in model.named_modules()]
        self._has_experts = any(
            _ROUTER_NAME.search(leaf) or _EXPERTS_NAME.search(f"{leaf} {class_name}") for leaf, class_name in leaves
        ) or any(
            type(getattr(config, count, None)) is int
            for config in _iter_configs(getattr(model, "config", None))
            for count in _ACTIVE_COUNT_NAMES
        )
        for name, module in model.named_modules():
            leaf = name.rpartition(".")[2]
            is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1
            if is_list and _EXPERTS_NAME.search(leaf) and not _SHARED_NAME.search(leaf):
                experts = len(module)
                self._active_shares[name] = self._count_active(name, name, experts) / experts

    def count_linear(self, name: str) -> float:
        """Return 1, or the mean k / E for a linear in one of E experts with k active."""
        parts = name.split(".")
        owners = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((self._active_shares[owner] for owner in owners if owner in self._active_shares), 1.0)

    def count_stack(self, name: str, module: nn.Module, num_matrices: int) -> float:
        """Return how many matrices of a 3-D parameter of `module` multiply a token. `name`: its full name."""
        owner = name.rpartition(".")[0]
        if isinstance(module, nn.Bilinear) or _SHARED_NAME.search(owner):
            return float(num_matrices)
        if not _EXPERTS_NAME.search(f"{name} {type(module).__name__}"):
            if not self._has_experts:
                return float(num_matrices)
            self.unknown.append(name)
            return 1.0
        return self._count_active(name, owner, num_matrices)

    def _count_active(self, name: str, path: str, num_experts: int) -> float:
        parts = path.split(".") if path else []
        for length in range(len(parts), -1, -1):
            module = self._model.get_submodule(".".join(parts[:length]))
            for source, names in _iter_sources(module):
                for count in (getattr(source, attribute, None) for attribute in names):
                    if type(count) is int and 0 < count <= num_experts:
                        return float(count)
        self.unknown.append(name)
        return 1.0


def _iter_sources(module: nn.Module) -> Iterator[tuple[object, tuple[str, ...]]]:
    with_top_k = (*_ACTIVE_COUNT_NAMES, "top_k")
    yield module, with_top_k
    for name, child in module.named_children():
        if _ROUTER_NAME.search(name):
            yield child, with_top_k
    for config in _iter_configs(getattr(module, "config", None)):
        # `top_k` in a config of transformers is a setting of generation (50 by default before release 5).
        yield config, (_ACTIVE_COUNT_NAMES if hasattr(config, "model_type") else with_top_k)


def _iter_configs(config: Any) -> Iterator[object]:
    """Yield `config` and the configs inside, such as `text_config`."""
    if config is None or not hasattr(config, "__dict__"):
        return
    yield config
    for value in vars(config).values():
        if type(value).__name__.endswith("Config"):
            yield from _iter_configs(value)

"""Param groups for an optimizer with states in float8: embeddings keep moments in float32."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from quaver.runtime.errors import check_is_module

FLOAT32_MOMENTS = {"exp_avg": "float32", "exp_avg_sq": "float32"}
"""The options of a param group with moments in float32."""


def find_embedding_weights(model: nn.Module) -> set[Tensor]:
    """Return the weights of embeddings, including heads that are tied to them."""
    return {module.weight for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}


def make_param_groups(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Make param groups of a model's trained parameters in which embeddings have float32 moments.

    Most rows of an embedding rarely get a gradient, because their tokens rarely occur.

    Args:
        options: the options of both groups, such as `weight_decay`.
    """
    check_is_module(model, argument="model")
    embeddings = find_embedding_weights(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [p for p in trained if p not in embeddings], **options},
        {"params": [p for p in trained if p in embeddings], **options, **FLOAT32_MOMENTS},
    ]
    return [group for group in groups if group["params"]]


def fill_options(loaded: list[dict[str, Any]], current: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fill in the missing options of loaded param groups that have no parameters, from the `current` groups.

    torch.distributed.checkpoint.state_dict loses their options unless the group is the last one (torch 2.13).
    """
    pairs = zip(loaded, current, strict=False)
    filled = [group if group["params"] else {**current_group, **group} for group, current_group in pairs]
    return filled + loaded[len(current) :]

"""The names of linears that stay in high precision: output heads, and routers, which choose experts."""

from __future__ import annotations

from torch import nn

LM_HEAD = "lm_head"
HEAD_NAMES = (LM_HEAD, "lm_heads", "embed_out")
"""Names of output heads."""

ROUTER_NAMES = ("gate", "router")
"""Names of linears that choose experts."""


def is_router(parent: nn.Module, name: str) -> bool:
    """Return whether the child `name` of `parent` is a router. The gate of a gated MLP has no experts beside it."""
    return name == "router" or (name in (*ROUTER_NAMES, "shared_expert_gate") and hasattr(parent, "experts"))

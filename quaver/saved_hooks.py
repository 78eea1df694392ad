"""Tells whether what autograd saves now goes through hooks that look at it, such as an offload to the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""With True: the innermost hooks for saved tensors, which are those that autograd calls, or None."""

_Pack = TypeVar("_Pack", bound=Callable[..., Any])


def only_keeps(pack_hook: _Pack) -> _Pack:
    """Mark a hook that keeps the tensors that it is given, or forgets them, and does not look at their values."""
    pack_hook.only_keeps = True  # type: ignore[attr-defined]
    return pack_hook


def values_are_read() -> bool:
    """Whether hooks that are not known to leave values alone would be given what is saved now."""
    hooks = top_saved_tensors_hooks(True)
    if hooks is None:
        return False
    pack_hook = hooks[0]
    is_checkpoint = getattr(pack_hook, "__module__", None) == "torch.utils.checkpoint"  # saves nothing at all
    return not (is_checkpoint or getattr(pack_hook, "only_keeps", False))

"""Tells what hooks do with what autograd saves now: an offload looks at it, a checkpoint computes it again."""

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


def nothing_is_recomputed() -> bool:
    """Whether no checkpoint is around what runs now, nor hooks that are not known to keep what is saved as it is."""
    hooks = top_saved_tensors_hooks(True)
    if hooks is None:
        return True
    if not getattr(hooks[0], "only_keeps", False):
        return False
    torch._C._autograd._pop_saved_tensors_default_hooks()  # to see the hooks around these
    try:
        return nothing_is_recomputed()
    finally:
        torch._C._autograd._push_saved_tensors_default_hooks(*hooks)

"""Selective activation checkpoints.

- `without_policies()`: torch.utils.checkpoint._CachingTorchDispatchMode and _CachedTorchDispatchMode, the modes of
  `create_selective_checkpoint_contexts` in a forward and in its recomputation, and the stack of modes that they are on:
  torch.utils._python_dispatch._get_current_dispatch_mode_stack, _pop_mode, _push_mode. Goes with the bypass that
  https://github.com/pytorch/pytorch/pull/196862 proposes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode, _push_mode
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode


@contextmanager
def without_policies() -> Iterator[None]:
    """Inside the block no policy of a selective checkpoint sees an operator; other modes see all of them."""
    policies = _CachingTorchDispatchMode, _CachedTorchDispatchMode
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    first = next((index for index, mode in enumerate(modes) if isinstance(mode, policies)), len(modes))
    others = [mode for mode in modes[first:] if not isinstance(mode, policies)]
    for _ in modes[first:]:  # after those of tracers and fake tensors, which have a place of their own
        _pop_mode()
    for mode in others:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in others:
            _pop_mode()
        for mode in modes[first:]:
            _push_mode(mode)

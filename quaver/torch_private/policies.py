"""Selective activation checkpoints.

- `POLICIES`: torch.utils.checkpoint._CachingTorchDispatchMode and _CachedTorchDispatchMode, the modes of
  `create_selective_checkpoint_contexts` in a forward and in its recomputation. No replacement.
- `without_policies()`: the stack of modes that they are on, torch.utils._python_dispatch
  ._get_current_dispatch_mode_stack, _pop_mode, _push_mode. Goes with the bypass that
  https://github.com/pytorch/pytorch/pull/196862 proposes.
- `policy_contexts(policy)`: `create_selective_checkpoint_contexts` that copies what it saved before a write to it, in
  _CachingTorchDispatchMode.storage. No replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    _VersionWrapper,
    create_selective_checkpoint_contexts,
)

from quaver.torch_private.memory import storage_key

POLICIES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


@contextmanager
def without_policies() -> Iterator[None]:
    """Inside the block no policy of a selective checkpoint sees an operator; other modes see all of them."""
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else []
    first = next((index for index, mode in enumerate(modes) if isinstance(mode, POLICIES)), len(modes))
    others = [mode for mode in modes[first:] if not isinstance(mode, POLICIES)]
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


def policy_contexts(policy: Callable[..., Any]) -> tuple[Any, Any]:
    """`create_selective_checkpoint_contexts(policy)` of a region that may write in place to a result that it saves.

    PyTorch's raises in the backward that such a tensor "has been mutated". Here the saved result becomes a copy, made
    before the write, to which the recomputation writes again.
    """
    forward, recomputation = create_selective_checkpoint_contexts(policy)
    forward.__class__ = _Copying
    return forward, recomputation


class _Copying(_CachingTorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)  # operators that take functions have none
        traces = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        if schema is not None and schema.is_mutable and not traces:
            self._copy(self._written_to(schema, args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy(self, storages: set[Any]) -> None:
        for of_operator in self.storage.values():
            for entry in of_operator.values() if isinstance(of_operator, dict) else of_operator:
                if type(entry) is object:  # a result that is recomputed
                    continue
                for saved in tree_leaves(entry):
                    is_tensor = isinstance(saved, _VersionWrapper) and isinstance(saved.val, Tensor)
                    if is_tensor and storages & self._storages_of(saved.val):
                        saved.val = saved.val.clone()
                        saved.version = saved.val._version

    def _written_to(self, schema: Any, args: Any, kwargs: dict[str, Any]) -> set[Any]:
        named = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
        written = [named.get(each.name) for each in schema.arguments if each.alias_info and each.alias_info.is_write]
        return {one for each in tree_leaves(written) if isinstance(each, Tensor) for one in self._storages_of(each)}

    def _storages_of(self, tensor: Tensor) -> set[Any]:
        if is_traceable_wrapper_subclass(tensor):
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # a DTensor names its mesh, too
            return {each for part in parts if isinstance(part, Tensor) for each in self._storages_of(part)}
        return {storage_key(tensor.untyped_storage())}

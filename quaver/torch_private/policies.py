"""Selective activation checkpoints.

- `POLICY_MODES`: torch.utils.checkpoint._CachingTorchDispatchMode and _CachedTorchDispatchMode, the modes of
  `create_selective_checkpoint_contexts` in a forward and in its recomputation. No replacement.
- `without_policies()`: torch.utils._python_dispatch._pop_mode and _push_mode, the stack of modes. Remove when
  https://github.com/pytorch/pytorch/pull/196862 provides a bypass.
- `make_policy_contexts(policy)`: `create_selective_checkpoint_contexts` that copies a saved result before a write to
  it, in _CachingTorchDispatchMode.storage. No replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _pop_mode, _push_mode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    _CachingTorchDispatchMode,
    _VersionWrapper,
    create_selective_checkpoint_contexts,
)

from quaver.torch_private.dispatch import count_dispatch_modes, dispatch_modes
from quaver.torch_private.memory import storage_key

POLICY_MODES = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)


@contextmanager
def without_policies() -> Iterator[None]:
    """Hide operators from the policies of selective checkpoints inside the block; other modes see them."""
    modes = dispatch_modes() if count_dispatch_modes() else []
    first = next((index for index, mode in enumerate(modes) if isinstance(mode, POLICY_MODES)), len(modes))
    remaining = [mode for mode in modes[first:] if not isinstance(mode, POLICY_MODES)]
    for _ in modes[first:]:  # infra modes (tracers, fake tensors) come first in the list and are kept
        _pop_mode()
    for mode in remaining:
        _push_mode(mode)
    try:
        yield
    finally:
        for _ in remaining:
            _pop_mode()
        for mode in modes[first:]:
            _push_mode(mode)


def make_policy_contexts(policy: Callable[..., Any]) -> tuple[Any, Any]:
    """Run `create_selective_checkpoint_contexts(policy)` for a region that may write in place to saved results.

    PyTorch raises in the backward that such a tensor "has been mutated". Here the saved result is copied before the
    write, and the recomputation writes to the copy.
    """
    forward, recomputation = create_selective_checkpoint_contexts(policy)
    forward.__class__ = _CopyOnWriteMode
    return forward, recomputation


class _CopyOnWriteMode(_CachingTorchDispatchMode):
    """Copies a saved result before an op writes to its storage."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = getattr(func, "_schema", None)  # operators that take functions have none
        traces = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None
        if schema is not None and schema.is_mutable and not traces:
            self._copy_saved_results(self._find_written_storages(schema, args, kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _copy_saved_results(self, storages: set[Any]) -> None:
        for entries in self.storage.values():
            for entry in entries.values() if isinstance(entries, dict) else entries:
                if type(entry) is object:  # a result that is recomputed
                    continue
                for saved in tree_leaves(entry):
                    is_tensor = isinstance(saved, _VersionWrapper) and isinstance(saved.val, Tensor)
                    if is_tensor and storages & self._list_storages(saved.val):
                        saved.val = saved.val.clone()
                        saved.version = saved.val._version

    def _find_written_storages(self, schema: Any, args: Any, kwargs: dict[str, Any]) -> set[Any]:
        named = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | kwargs
        names = [argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write]
        written = [leaf for leaf in tree_leaves([named.get(name) for name in names]) if isinstance(leaf, Tensor)]
        return {storage for tensor in written for storage in self._list_storages(tensor)}

    def _list_storages(self, tensor: Tensor) -> set[Any]:
        if is_traceable_wrapper_subclass(tensor):
            parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]  # a DTensor also has a mesh
            return {storage for part in parts if isinstance(part, Tensor) for storage in self._list_storages(part)}
        return {storage_key(tensor.untyped_storage())}

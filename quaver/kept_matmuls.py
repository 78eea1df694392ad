"""Tells a linear whether its matmul's result is kept, for a recomputation to look up.

Then nobody multiplies its operands for that result again, and a weight need not be gathered for it
(distributed/gather_passes.py). A policy (activation_checkpointing.py) decides of each matmul in the eager forward of
its module, and what it decides is good for its own recomputation only. So nothing is said where

    a checkpoint around the module may compute the whole forward again;
    a checkpoint inside the module computes its part again, which no policy watches then;
    other hooks are around or inside, which may do what they like with what is saved;
    the matmul has read a copy, such as a padded one: to make that copy, a recomputation reads the operand.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.formats import FORMATS
from quaver.saved_hooks import nothing_is_recomputed, top_saved_tensors_hooks


class KeptMatmuls:
    """The matmuls in one forward of a module under a policy. Made before its checkpoint begins."""

    def __init__(self) -> None:
        self._is_outermost = nothing_is_recomputed()
        # held weakly, because a checkpoint's hooks and modes hold all that it keeps, and are asked for by what it holds
        self._hook: weakref.ref[Any] | None = None
        self._recomputation: weakref.ref[TorchDispatchMode] | None = None

    def will_be_recomputed_in(self, mode: TorchDispatchMode) -> None:
        """Called with the mode that looks up, in the recomputation, what the policy keeps."""
        self._recomputation = weakref.ref(mode)

    def begin(self) -> None:
        """Called within the checkpoint, before the module runs, in its forward and in its recomputation."""
        hooks = top_saved_tensors_hooks(True)
        if self._is_outermost and hooks is not None and torch._C._current_graph_task_id() == -1:
            self._hook = weakref.ref(hooks[0])

    def made(self, operands: tuple[Any, ...], *, is_kept: bool) -> None:
        """Called by the policy after each matmul of the forward."""
        _last.made = None
        hooks = top_saved_tensors_hooks(True)
        if not is_kept or self._hook is None or hooks is None or hooks[0] is not self._hook():
            return
        b = operands[1]
        if isinstance(b, Tensor) and b.dtype in FORMATS:
            _last.made = _storage(b), self._recomputation


class _Last(threading.local):
    made: tuple[int, weakref.ref[TorchDispatchMode] | None] | None = None
    """Of the last matmul, if its result is kept: the storage of its second operand, and who looks the result up."""


_last = _Last()


def recomputation_that_looks_up(codes: Tensor) -> TorchDispatchMode | None:
    """The mode under which the last matmul is looked up instead of computed again, if it has read `codes` last.

    Args:
        codes: the second operand, float8, or another view of its memory.
    Returns:
        None where the matmul was another, its result is not kept, or it may be computed again in another way.
    """
    made, _last.made = _last.made, None
    if made is None or made[1] is None or made[0] != _storage(codes):
        return None
    return made[1]()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

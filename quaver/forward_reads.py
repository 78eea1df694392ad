"""Tells when nobody will read a gathered weight's cast for the output again before the next gather.

A backward gathers that cast for recomputations only (distributed/gather_passes.py). So each eager forward that reads it
leaves a token with the linear's graph, and the backward of that linear takes the token back: to begin, it has unpacked
what the forward saved, so whatever computes that forward again has done so. When no token is left, the cast is not read
again, and its memory is free to go. A token lasts longer where

    the backward keeps its graph, for another backward;
    a forward has not been differentiated yet, such as another microbatch's, or another call's of the same linear.

It dies with its graph. Not every forward that may be computed again has a token in a graph that lives:

    a reentrant checkpoint runs its forward without gradients;
    in any checkpoint, a result may need no gradient, or be let go, and is computed again together with the others;
    compiled code leaves none.

Each of these is noticed, and then nothing is let go until the next step.

[Note: what need not be gathered] A recomputation that finds the result of a linear's matmul kept (kept_matmuls.py) does
not read the weight, and if that is so of all, the backward need not gather that cast at all. That is a decision of all
ranks together, and a graph that waits for the garbage collector is dropped at another moment on each. So it follows
from what was called, and not from who is alive: from forwards that began, less backwards that began. The forward of a
graph that was dropped counts for ever, and then everything is gathered, as before.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakMethod, WeakSet

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from quaver.kept_matmuls import recomputation_that_looks_up
from quaver.saved_hooks import top_saved_tensors_hooks


class ForwardReads:
    """The forwards that have read one gathered weight and may be computed again.

    Args:
        when_over: a method, called in the backward of a linear when none is left. Held weakly, because its object holds
            this, and gathered memory that waits for the garbage collector would be taken for held by a graph.
    """

    def __init__(self, when_over: Callable[[], None]) -> None:
        self._when_over = WeakMethod(when_over)
        self._pending: WeakSet[ForwardRead] = WeakSet()
        self._is_unsure = False
        self._was_backward = False
        self._open = {False: 0, True: 0}
        """Forwards whose backwards have not begun, by whether their results are kept; the next two are of the note."""
        self._is_read_unseen = False
        self._recomputations: WeakSet[TorchDispatchMode] = WeakSet()
        """Those that look the results up."""

    @property
    def are_kept(self) -> bool:
        """Whether all forwards whose backwards are to come leave results that are kept; the same on all ranks."""
        return self._open[True] > 0 and self._open[False] == 0 and not self._is_read_unseen

    @property
    def are_looked_up(self) -> bool:
        """Whether what runs now is a recomputation that finds the results kept."""
        return any(mode in self._recomputations for mode in _get_current_dispatch_mode_stack())

    def begin(self) -> ForwardRead | None:
        """Called by an eager forward that reads the weight; the graph of its linear has to hold what is returned."""
        if torch._C._current_graph_task_id() != -1:
            return None  # a recomputation, which is over when the linear that it is for begins its backward
        if torch.is_grad_enabled():
            read = ForwardRead(self, may_be_recomputed=top_saved_tensors_hooks(True) is not None)
            self._pending.add(read)
            self._open[False] += 1
            return read
        if top_saved_tensors_hooks(True) is not None or _is_in_function():
            self.read_unseen()
        return None

    def read_unseen(self) -> None:
        """Called where a forward has read the weight, or might, that no token stands for."""
        self._is_unsure = self._is_read_unseen = True

    def gather(self, *, in_backward: bool) -> None:
        """Called when the weight is gathered, inside a backward or outside."""
        if self._was_backward and not in_backward:  # what was unseen belonged to steps that are over
            self._is_unsure = self._is_unsure and len(self._pending) > 0
            self._is_read_unseen = self._is_read_unseen and any(self._open.values())
        self._was_backward = in_backward

    def drop(self) -> None:
        """Called by a token that dies with its graph, at a moment that ranks need not share."""
        self._is_unsure = True

    def keep(self, recomputation: TorchDispatchMode) -> None:
        """Called by a token whose result `recomputation` will look up."""
        self._recomputations.add(recomputation)
        self._open[False] -= 1
        self._open[True] += 1

    def end(self, read: ForwardRead, *, is_kept: bool) -> None:
        """Called by a token that is taken back."""
        self._open[is_kept] -= 1
        self._pending.discard(read)
        when_over = self._when_over()
        if when_over is not None and not self._pending and not self._is_unsure:
            when_over()


class ForwardRead:
    """The token of one forward."""

    __slots__ = ("__weakref__", "_is_kept", "_is_over", "_may_be_recomputed", "_reads")

    def __init__(self, reads: ForwardReads, *, may_be_recomputed: bool) -> None:
        self._reads = reads
        self._may_be_recomputed = may_be_recomputed
        self._is_kept = self._is_over = False

    def has_multiplied(self, codes: Tensor) -> None:
        """Called by the forward just after its matmul, whose second operand were the weight's `codes`."""
        recomputation = recomputation_that_looks_up(codes)
        if recomputation is not None:
            self._is_kept = True
            self._reads.keep(recomputation)

    def backward_begins(self) -> None:
        """Called in the backward of the linear, when it has what the forward saved."""
        if not (self._is_over or torch._C._autograd._get_current_graph_task_keep_graph()):
            self._is_over = True
            self._reads.end(self, is_kept=self._is_kept)

    def __del__(self) -> None:
        if self._may_be_recomputed and not self._is_over:
            self._reads.drop()


def _is_in_function() -> bool:
    """Whether this is called from the forward of a `torch.autograd.Function`, as in a reentrant checkpoint."""
    return not (torch._C._is_fwd_grad_enabled() or torch.is_inference_mode_enabled())

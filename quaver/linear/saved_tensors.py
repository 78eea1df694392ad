"""Saves tensors for backward in the middle of an `autograd.Function`'s forward, where a checkpoint can stop early.

A non-reentrant checkpoint ends its recomputation as soon as everything that its forward saved has been saved again: its
hook for saved tensors raises. PyTorch's own linear saves its operands before it multiplies, so the last matmul of a
checkpointed block is not recomputed. `save_for_backward` hands its tensors to the hooks only after the forward of a
Python Function has returned, so that matmul would run, and its result take memory at the peak of the block's backward.
Measured on this package's eager linears: docs/design/0008-what-earns-its-place.md.

So under a checkpoint's hooks, `save` calls them itself. Everywhere else it is `ctx.save_for_backward`.

`save` and `saved` can go when PyTorch packs the tensors of `save_for_backward` at the call.

A recomputation must save, and dispatch, what its forward did, though a `cast_weights_once` may have been closed or
opened between the two. So a forward inside the scope leaves its operands with the checkpoint's frame, and the
recomputation multiplies by those of its forward (`prepared_now`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from quaver.linear.quantize import PreparedOperands
from quaver.torch_private.autograd import backward_keeps_graph, frame_of, top_saved_tensors_hooks
from quaver.torch_private.versions import version_of


class PackHook:
    """A pack hook that `save` tells what an autograd function is about to save, to be left as it is."""

    def leave(self, tensors: Sequence[Tensor | None]) -> None:
        """Leave these as they are."""
        raise NotImplementedError


def are_of_checkpoint(hooks: Any) -> bool:
    """Whether these hooks, or None, are those of an activation checkpoint."""
    return hooks is not None and getattr(hooks[0], "__module__", None) == "torch.utils.checkpoint"


_prepared_in: WeakKeyDictionary[Any, dict[tuple[int, str], PreparedOperands]] = WeakKeyDictionary()
"""By the frame of a checkpoint: the operands that its forward found, by the id of their module and by name."""


def prepared_now(prepared: PreparedOperands | None, module: Module, name: str) -> PreparedOperands | None:
    """The operands by which an eager forward multiplies in place of the weight `name` of `module`, checked.

    They are `prepared`, those of the `cast_weights_once` that is open; in a recomputation those of its forward.
    """
    hooks: Any = top_saved_tensors_hooks(True)
    found = frame_of(hooks) if are_of_checkpoint(hooks) else None
    if found is not None:
        frame, is_recomputed = found
        if is_recomputed:
            return _prepared_in.get(frame, {}).get((id(module), name))
        if prepared is not None:
            _prepared_in.setdefault(frame, {})[id(module), name] = prepared
    if prepared is not None:
        prepared.check(getattr(module, name))
    return prepared


def save(ctx: Any, tensors: Sequence[Tensor | None]) -> None:
    """Save `tensors` for backward; under a checkpoint that recomputes and needs no more, this raises to stop it."""
    hooks: Any = None if torch.compiler.is_compiling() else top_saved_tensors_hooks(True)
    if not are_of_checkpoint(hooks):
        ctx.holds_packed = False
        if hooks is not None and isinstance(hooks[0], PackHook):
            hooks[0].leave(tensors)
        ctx.save_for_backward(*tensors)
        return
    ctx.holds_packed = True
    pack, ctx.unpack = hooks
    ctx.packed = [None if tensor is None else pack(tensor) for tensor in tensors]


def saved(ctx: Any) -> Sequence[Any]:
    """The tensors that `save` saved; to be called once in a backward."""
    if not ctx.holds_packed:
        tensors: Sequence[Any] = ctx.saved_tensors
        return tensors
    if ctx.packed is None:
        raise RuntimeError("the first backward freed this graph; give it retain_graph=True to go backward again")
    tensors = [None if packed is None else ctx.unpack(packed) for packed in ctx.packed]
    # The hooks hold the checkpoint's inputs, and autograd holds ctx until the whole backward ends.
    if not backward_keeps_graph():
        ctx.packed = ctx.unpack = None
    return tensors


class HeldTensor:
    """A saved tensor that hooks hold as it is, with the check of its version that autograd makes only without hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # A node that saves its own output would keep itself alive. A leaf is saved as it is, as autograd does.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = version_of(tensor) if _counts_versions(tensor) else None

    def unpack(self) -> Tensor:
        """The saved tensor.

        Raises:
            RuntimeError: it was written to in place.
        """
        if self.version is not None and version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {version_of(self.tensor)}; "
                f"expected version {self.version} instead"
            )
        return self.tensor


def _counts_versions(tensor: Tensor) -> bool:
    """A detached wrapper subclass has a version counter of its own; an inference tensor has none."""
    return type(tensor) in (Tensor, Parameter) and not tensor.is_inference()

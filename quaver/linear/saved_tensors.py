"""Saves tensors for backward in the middle of an `autograd.Function`'s forward, where a checkpoint can stop early.

A non-reentrant checkpoint ends its recomputation as soon as everything that its forward saved has been saved again: its
hook for saved tensors raises. PyTorch's own linear saves its operands before it multiplies, so the last matmul of a
checkpointed block is not recomputed. `save_for_backward` hands its tensors to the hooks only after the forward of a
Python Function has returned. That matmul would then run, and its result would take memory at the peak of the
block's backward. docs/design/0008-what-earns-its-place.md has the measurement.

So under a checkpoint's hooks, `save` calls them itself. Otherwise it calls `ctx.save_for_backward`. `save` and
`load_saved` can go when PyTorch packs the tensors of `save_for_backward` at the call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from quaver.kernels.operands import Operand
from quaver.torch_private.autograd import backward_keeps_graph, is_checkpoint_hook, top_saved_tensors_hooks
from quaver.torch_private.versions import get_version


class PackHook:
    """A pack hook that must not convert what a float8 function saves; `save` names the tensors beforehand."""

    def skip(self, tensors: Sequence[Tensor | None]) -> None:
        """Do not convert these tensors when autograd packs them."""
        raise NotImplementedError


def save(ctx: Any, operands: Sequence[Operand | None], *others: Tensor) -> None:
    """Save operands and other tensors for backward. A checkpoint's hook may raise here, to end its recomputation."""
    ctx.layouts = []
    tensors: list[Tensor | None] = []
    for operand in operands:
        if operand is None:
            ctx.layouts.append(None)
            tensors += [None] * 4
        else:
            ctx.layouts.append(operand.layout)
            tensors += [operand.data, operand.dequant_scale, operand.quant_scale, operand.outer_scale]
    tensors += others
    hooks: Any = None if torch.compiler.is_compiling() else top_saved_tensors_hooks(True)
    if not is_checkpoint_hook(hooks):
        ctx.holds_packed = False
        if hooks is not None and isinstance(hooks[0], PackHook):
            hooks[0].skip(tensors)
        ctx.save_for_backward(*tensors)
        return
    ctx.holds_packed = True
    pack, ctx.unpack = hooks
    ctx.packed = [None if tensor is None else pack(tensor) for tensor in tensors]


def load_saved(ctx: Any) -> tuple[list[Operand | None], list[Tensor]]:
    """Return the operands and the other tensors that `save` saved. Call it once in a backward.

    Eager autograd then holds none of them, unless the graph is retained.
    """
    tensors = list(_unpack(ctx))
    if not torch.compiler.is_compiling():
        ctx.maybe_clear_saved_tensors()
    operands: list[Operand | None] = []
    for layout in ctx.layouts:
        data, dequant_scale, quant_scale, outer_scale = tensors[:4]
        del tensors[:4]
        operands.append(None if layout is None else Operand(data, dequant_scale, layout, quant_scale, outer_scale))
    return operands, tensors


def _unpack(ctx: Any) -> Sequence[Any]:
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
    """A saved tensor that hooks hold unconverted, with the version check that autograd makes only without hooks."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # Detached, since a node that saves its own output would keep itself alive. Autograd saves leaves themselves.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        # A detached wrapper subclass has its own version counter, and an inference tensor has none.
        is_counted = type(tensor) in (Tensor, Parameter) and not tensor.is_inference()
        self.version = get_version(tensor) if is_counted else None

    def unpack(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if it was written to in place."""
        if self.version is not None and get_version(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {get_version(self.tensor)}; "
                f"expected version {self.version} instead"
            )
        return self.tensor

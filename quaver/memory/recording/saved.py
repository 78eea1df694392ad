"""Tells what autograd keeps for the backward, by the hooks that torch has for it, and changes nothing about it.

Only the innermost hooks are called, so inside a checkpointed module, whose checkpoint has hooks of its own and keeps
nothing, nothing is told: which is right. What it computes again is kept by the checkpoint, not by autograd.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from quaver.memory.recording.recorder import Recorder
from quaver.memory.recording.storages import plain_parts


class _Kept:
    """What autograd keeps instead of a tensor: the same storage, and the moment when it lets go."""

    __slots__ = ("keys", "recorder", "tensor", "version")

    def __init__(self, tensor: Tensor, recorder: Recorder) -> None:
        # A node that keeps its own result would keep itself. What has no history is kept as the object that it is, as
        # autograd does.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = tensor._version if _counts_versions(tensor) else None
        self.recorder = recorder
        self.keys = [recorder.keep(part) for part in plain_parts(self.tensor)]

    def unpack(self) -> Tensor:
        """The tensor, if it is as it was.

        Raises:
            RuntimeError: it was written to since; autograd checks this itself where it has no hooks.
        """
        if self.version is not None and self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {self.tensor._version}; "
                f"expected version {self.version} instead"
            )
        return self.tensor

    def __del__(self) -> None:
        for key in self.keys:
            self.recorder.release(key)


def tell_what_is_saved(recorder: Recorder) -> AbstractContextManager[None]:
    """Tell `recorder` of all that autograd keeps, and lets go, of graphs that are made inside the block."""

    def keep(tensor: Tensor) -> _Kept:
        return _Kept(tensor, recorder)

    return saved_tensors_hooks(keep, lambda kept: kept.unpack())


def _counts_versions(tensor: Tensor) -> bool:
    """A detached wrapper is another object with a counter of its own, and an inference tensor has none."""
    return type(tensor) in (Tensor, Parameter) and not tensor.is_inference()

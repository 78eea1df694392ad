"""Records what autograd saves for backward, through torch's saved-tensor hooks; numbers do not change.

Only the innermost hooks run. Inside an activation checkpoint those are the checkpoint's own, which save nothing, so
nothing is recorded there: a recomputed tensor is not saved by autograd.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter

from quaver.recorder.recorder import Recorder
from quaver.recorder.storages import plain_parts
from quaver.torch_private.versions import version_of


class _Saved:
    """Stands in for a saved tensor: holds the same storage, and releases it in the record when autograd drops it."""

    __slots__ = ("allocations", "recorder", "tensor", "version")

    def __init__(self, tensor: Tensor, recorder: Recorder) -> None:
        # A node that saves its own output would keep itself alive. A leaf is saved as it is, as autograd does.
        self.tensor = tensor if tensor.grad_fn is None else tensor.detach()
        self.version = version_of(tensor) if _counts_versions(tensor) else None
        self.recorder = recorder
        self.allocations = [recorder.save(part) for part in plain_parts(self.tensor)]

    def unpack(self) -> Tensor:
        """The saved tensor.

        Raises:
            RuntimeError: it was written to in place; autograd checks this itself only without hooks.
        """
        if self.version is not None and version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{self.tensor.type()} {list(self.tensor.shape)}] is at version {version_of(self.tensor)}; "
                f"expected version {self.version} instead"
            )
        return self.tensor

    def __del__(self) -> None:
        for allocation in self.allocations:
            self.recorder.release(allocation)


def record_saved_tensors(recorder: Recorder) -> AbstractContextManager[None]:
    """Record what autograd saves and drops, for graphs that are built inside the block."""
    # between compiled frames torch.compile would otherwise compile the hooks
    pack = torch.compiler.disable(lambda tensor: _Saved(tensor, recorder))
    return saved_tensors_hooks(pack, torch.compiler.disable(_Saved.unpack))


def _counts_versions(tensor: Tensor) -> bool:
    """A detached wrapper subclass has a version counter of its own; an inference tensor has none."""
    return type(tensor) in (Tensor, Parameter) and not tensor.is_inference()

"""Records which tensors autograd saves for backward, through torch's saved-tensor hooks.

Autograd runs the innermost hooks only. Inside an activation checkpoint they are the checkpoint's, which save nothing,
so nothing is recorded there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from quaver.lab.recorder.recorder import Recorder
from quaver.lab.recorder.storages import iter_plain_parts
from quaver.linear.saved_tensors import HeldTensor
from quaver.torch_private.dispatch import without_dispatch_modes


class _SavedTensor(HeldTensor):
    """Holds a saved tensor, and records its release when autograd drops it."""

    __slots__ = ("allocations", "recorder")

    def __init__(self, tensor: Tensor, recorder: Recorder) -> None:
        with without_dispatch_modes():  # DTensor's first detach also runs on a fake tensor of the whole
            super().__init__(tensor)
        self.recorder = recorder
        self.allocations = [recorder.record_saved(part) for part in iter_plain_parts(self.tensor)]

    def __del__(self) -> None:
        for allocation in self.allocations:
            self.recorder.record_dropped(allocation)


def record_saved_tensors(recorder: Recorder) -> AbstractContextManager[None]:
    """Record the tensors that autograd saves and drops, for graphs that are built inside the block."""
    # Disabled, since torch.compile would otherwise compile the hooks between compiled frames.
    pack = torch.compiler.disable(lambda tensor: _SavedTensor(tensor, recorder))
    return saved_tensors_hooks(pack, torch.compiler.disable(_SavedTensor.unpack))

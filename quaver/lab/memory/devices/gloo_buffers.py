"""Simulates the buffers that gloo, the CPU's process group, allocates inside FSDP2's collectives.

    all_gather_into_tensor   a second copy of the gathered tensor
    reduce_scatter_tensor    a second copy of the input, which gloo reduces in place

torch's fake process group allocates nothing, so these buffers are allocated here for the duration of the call. gloo's
threads may free theirs a little later. NCCL has fixed buffers instead. The sizes were observed in torch.profiler's log
of the CPU allocator, torch 2.13, in `gloo:all_gather` and `c10d::_reduce_scatter_base_`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.lab.recorder.callers import allocate_collective_buffer

_COPIED_ARGUMENT = {torch.ops.c10d._allgather_base_.default: 0, torch.ops.c10d._reduce_scatter_base_.default: 1}
"""The position of the argument that the collective copies: the gathered tensor, or the tensor to reduce."""


class GlooBuffers(TorchDispatchMode):
    """Allocates gloo's buffers while it is on. Enter it after the modes that must see them."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: Dynamo may run compiled code while the mode is on."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        position = _COPIED_ARGUMENT.get(func)
        if position is None or not isinstance(args[position], Tensor):
            return func(*args, **(kwargs or {}))
        buffer = allocate_collective_buffer(args[position])
        result = func(*args, **(kwargs or {}))
        del buffer
        return result

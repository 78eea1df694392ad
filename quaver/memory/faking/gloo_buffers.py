"""What gloo, the process group of CPUs, allocates for a collective of FSDP2, and frees before the collective is done.

    all_gather_into_tensor   a second copy of the gathered tensor, from which gloo copies into the caller's
    reduce_scatter_tensor    a second copy of what is to be reduced, in which gloo reduces

A process group that is pretended (torch's "fake") allocates nothing. So these are made by hand, for as long as the
call lasts: gloo's threads may free them a little later, and do so when they get to it. NCCL has buffers of its own of a
fixed size, and no such copies.

Seen with torch.profiler's log of the CPU allocator, torch 2.13: in `gloo:all_gather` and `c10d::_reduce_scatter_base_`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_COPIED = {torch.ops.c10d._allgather_base_.default: 0, torch.ops.c10d._reduce_scatter_base_.default: 1}
"""Of which argument a collective makes a copy: the gathered tensor, the tensor to reduce."""


class GlooBuffers(TorchDispatchMode):
    """Allocates what gloo would, while it is on; enter it after what is to see that."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        position = _COPIED.get(func)
        if position is None or not isinstance(args[position], Tensor):
            return func(*args, **(kwargs or {}))
        copied = copy_of(args[position])
        result = func(*args, **(kwargs or {}))
        del copied
        return result


def copy_of(tensor: Tensor) -> Tensor:
    """A buffer of a tensor's size; whoever looks at the frames of Python knows it by this function."""
    return tensor.new_empty(tensor.shape)

"""Pairs of zeros for the kernels that look for an amax and count: a thousand from one fill, not one launch for each."""

from __future__ import annotations

import torch
from torch import Tensor

PAIRS = 1024
_ROW = 4
"""Numbers from the beginning of one pair to that of the next: 16 bytes."""

_pools: dict[tuple[torch.device, int], list[Tensor]] = {}


def zero_pair(like: Tensor) -> Tensor:
    """float32 [2], zeros, on the device of `like`, for the current stream; no other call gets the same memory.

    It begins on 16 bytes: compiled code refuses results of an operation that do not.
    While a CUDA graph is captured each pair is filled in the graph: a replay needs zeros again.
    """
    stream = 0
    if like.is_cuda:
        if torch.cuda.is_current_stream_capturing():
            return like.new_zeros(2, dtype=torch.float32)
        stream = torch.cuda.current_stream(like.device).cuda_stream
    key = (like.device, stream)
    try:
        return _pools[key].pop()
    except (KeyError, IndexError):
        with torch.inference_mode(False):
            rows = torch.zeros(PAIRS, _ROW, dtype=torch.float32, device=like.device)
            pool = _pools[key] = list(rows[:, :2].unbind())
        return pool.pop()

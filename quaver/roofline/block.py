"""The time of a Llama block between its matmuls, predicted from bytes: norms, RoPE, SwiGLU, the residual.

Bytes for each token, of D features of the residual stream in r bytes, Q and K of queries and keys, H of the
feed-forward, all others in bfloat16. A kernel reads and writes each tensor once:

    forward     input norm                  reads the stream, writes                          (r + 2) D
                RoPE                        reads and writes queries and keys                 4 (Q + K)
                second norm                 reads the stream and o_proj's output, writes      (r + 4) D
                SwiGLU                      reads gate and up, writes                         6 H
                block's output              reads the stream and two outputs, writes          (2 r + 4) D
    backward    SwiGLU                      reads the gradient, gate and up, writes two       10 H
                RoPE                        as forward                                        4 (Q + K)
                each norm                   reads its inputs and gradients, writes one        (3 r + 6) D

As compiled code does it; eager code moves more. Compiled casts read what a norm or SwiGLU computes without storing it,
and find amaxes in its kernel; against that, they compute it again. `quaver bench ledger` counts both, and
tests/library/roofline/test_block.py holds these bytes and those of casts within 13% of its counts (rowwise_with_gw_hp:
20%, blockwise: 30%).
"""

from __future__ import annotations

from typing import NamedTuple

from quaver.roofline.cost import KERNEL_LAUNCH_S
from quaver.roofline.device_specs import DeviceSpec
from quaver.roofline.matmul import moved_s

ATTENTION_MATMULS = {False: 2, True: 5}
"""Matmuls of queries with keys, or of scores with values: forward, and backward with the recomputed scores."""

_KERNELS = (6, 5)
"""Kernels of norms, RoPE (queries and keys apart), SwiGLU and the block's output; a backward has none for the last."""


class BlockShape(NamedTuple):
    """The widths of a block: features of the residual stream, of all queries, of all keys, and of the feed-forward."""

    stream: int
    queries: int
    keys: int
    hidden: int


class Both(NamedTuple):
    """Something of the forward, and of the backward."""

    forward: float
    backward: float


def bytes_between_matmuls(shape: BlockShape, residual_bytes: int = 2) -> Both:
    """The bytes that one token takes in a block outside of its matmuls, attention and casts.

    Args:
        residual_bytes: of an element of the residual stream: 2, or 4 in float32.
    """
    stream, queries, keys, hidden = shape
    rotated = 4 * (queries + keys)
    return Both(
        forward=(4 * residual_bytes + 10) * stream + rotated + 6 * hidden,
        backward=2 * (3 * residual_bytes + 6) * stream + rotated + 10 * hidden,
    )


def seconds_between_matmuls(shape: BlockShape, tokens: float, spec: DeviceSpec, residual_bytes: int = 2) -> Both:
    """The seconds of `bytes_between_matmuls` for so many tokens, launches included."""
    both = zip(bytes_between_matmuls(shape, residual_bytes), _KERNELS, strict=True)
    return Both(*(moved_s(tokens * each, spec) + kernels * KERNEL_LAUNCH_S for each, kernels in both))

"""Predicts the time of a Llama block between its matmuls from bytes: norms, RoPE, SwiGLU, the residual.

The table has the bytes per token, for D features of the residual stream in r bytes, Q and K features of queries and
keys, and H of the feed-forward, in bfloat16. A kernel reads and writes each tensor once:

    forward     input norm                  reads the stream, writes                          (r + 2) D
                RoPE                        reads and writes queries and keys                 4 (Q + K)
                second norm                 reads the stream and o_proj's output, writes      (r + 4) D
                SwiGLU                      reads gate and up, writes                         6 H
                block's output              reads the stream and two outputs, writes          (2 r + 4) D
    backward    SwiGLU                      reads the gradient, gate and up, writes two       10 H
                RoPE                        as forward                                        4 (Q + K)
                each norm                   reads its inputs and gradients, writes one        (3 r + 6) D

These are the bytes of compiled code; eager code moves more. Compiled casts are fused with the norm or SwiGLU, which
saves a read and computes amaxes in the same kernel, but computes the input again.
tests/library/roofline/test_block.py checks that the bytes of this table and of casts are within 13% of counted ones
(rowwise_with_gw_hp: 20%, blockwise: 30%).
"""

from __future__ import annotations

from typing import NamedTuple

from quaver.roofline.cost import KERNEL_LAUNCH_S
from quaver.roofline.device_specs import DeviceSpec
from quaver.roofline.matmul import predict_move_seconds

ATTENTION_MATMULS = {False: 2, True: 5}
"""The number of matmuls in attention: False for the forward, True for the backward, which recomputes the scores."""

_KERNELS_PER_PASS = (6, 5)
"""The number of kernels in forward and backward: norms, RoPE of queries and of keys, SwiGLU; forward: the output."""


class BlockShape(NamedTuple):
    """The widths of a block: features of the residual stream, of all queries, of all keys, of the feed-forward."""

    stream: int
    queries: int
    keys: int
    hidden: int


class PerPass(NamedTuple):
    """A quantity for the forward and for the backward."""

    forward: float
    backward: float


def count_bytes_between_matmuls(shape: BlockShape, residual_bytes: int = 2) -> PerPass:
    """Count the bytes per token that a block moves outside of its matmuls, attention and casts.

    Args:
        shape: the widths of the block.
        residual_bytes: bytes per element of the residual stream: 2, or 4 in float32.
    """
    stream, queries, keys, hidden = shape
    rotated = 4 * (queries + keys)
    return PerPass(
        forward=(4 * residual_bytes + 10) * stream + rotated + 6 * hidden,
        backward=2 * (3 * residual_bytes + 6) * stream + rotated + 10 * hidden,
    )


def predict_seconds_between_matmuls(
    shape: BlockShape, tokens: float, spec: DeviceSpec, residual_bytes: int = 2
) -> PerPass:
    """Predict the seconds between the matmuls of a block for `tokens`, including kernel launches."""
    passes = zip(count_bytes_between_matmuls(shape, residual_bytes), _KERNELS_PER_PASS, strict=True)
    return PerPass(
        *(predict_move_seconds(tokens * count, spec) + kernels * KERNEL_LAUNCH_S for count, kernels in passes)
    )

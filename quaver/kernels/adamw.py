"""An AdamW step on a CPU in one pass over memory (csrc/adamw.h); quaver/optim/update.py is the oracle.

`torch.ops.quaver.adamw_` writes to a parameter and its moments. It is an operation so that dispatch modes and tensor
subclasses see the write: a weight that caches something about its values drops the cache.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from quaver.kernels.cpu import HAS_EXTENSION, HP_KIND, MIN_THREADED_ELEMENTS, check_memory, extension, is_plain
from quaver.kernels.operation import library
from quaver.runtime.devices import is_cpu

MOMENT_BLOCK_ELEMENTS = 256
"""Consecutive elements of a row that share a scale."""

_MOMENT_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 3}


library.define(
    "adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!)? exp_avg_scale, Tensor(d!) exp_avg_sq, "
    "Tensor(e!)? exp_avg_sq_scale, Tensor scalars, Tensor(f!) skipped, int[] grid, int key) -> ()"
)


def _adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_scale: Tensor | None,
    exp_avg_sq: Tensor,
    exp_avg_sq_scale: Tensor | None,
    scalars: Tensor,
    skipped: Tensor,
    grid: list[int],
    key: int,
) -> None:
    """`grid` is the `BlockGrid` of the shard (quaver/optim/blocks.py)."""
    rows, columns, lane, *_ = grid
    elements, blocks = rows * columns, rows * -(-(lane + columns) // MOMENT_BLOCK_ELEMENTS)
    _prepare_argument("param", param, elements, HP_KIND.keys() - {torch.float16})
    for name, moment, scale in (
        ("exp_avg", exp_avg, exp_avg_scale),
        ("exp_avg_sq", exp_avg_sq, exp_avg_sq_scale),
    ):
        _prepare_argument(name, moment, elements, _MOMENT_KIND.keys())
        if (scale is None) == (moment.dtype is torch.uint8):
            raise ValueError(f"{name}: expected a scale with uint8 codes and with no other dtype, got {moment.dtype}")
        if scale is not None:
            _prepare_argument(f"{name}_scale", scale, blocks, {torch.float32})
    _prepare_argument("skipped", skipped, 1, {torch.int64})
    grad = _prepare_argument("grad", grad, elements, HP_KIND.keys(), is_read=True)
    scalars = _prepare_argument("scalars", scalars, 8, {torch.float32}, is_read=True)
    tensors = param, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, scalars, skipped
    extension.adamw(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        *grid,
        key,
        HP_KIND[param.dtype],
        HP_KIND[grad.dtype],
        _MOMENT_KIND[exp_avg.dtype],
        _MOMENT_KIND[exp_avg_sq.dtype],
        1 if param.numel() < MIN_THREADED_ELEMENTS else torch.get_num_threads(),
    )
    if not param.is_inference():
        torch.autograd.graph.increment_version(param)  # so that a backward that saved it raises


def _prepare_argument(
    name: str, tensor: Tensor, elements: int, dtypes: Collection[torch.dtype], *, is_read: bool = False
) -> Tensor:
    """Return `tensor`, or a contiguous copy if it is only read. Raises ValueError if C would exceed its memory."""
    if tensor.numel() != elements or tensor.dtype not in dtypes:
        raise ValueError(f"{name}: expected {elements} elements, got {tensor.dtype} {list(tensor.shape)}")
    check_memory(tensor)
    if is_plain(tensor) and tensor.is_contiguous():
        return tensor
    if not is_read:
        raise ValueError(f"{name}: expected a plain, contiguous tensor, got strides {tensor.stride()}")
    return tensor.clone(memory_format=torch.contiguous_format)


library.impl("adamw_", _adamw, "CPU")
torch.library.register_fake("quaver::adamw_", lambda *arguments: None, lib=library)


def supports(param: Tensor, grad: Tensor) -> bool:
    """Return whether `adamw_` supports these contiguous tensors in this process and outside of compiled code."""
    return HAS_EXTENSION and is_cpu(param) and is_cpu(grad) and not torch.compiler.is_compiling()


adamw_ = torch.ops.quaver.adamw_

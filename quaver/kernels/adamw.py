"""A step of AdamW on a CPU in one pass over memory; csrc/adamw.h, of which quaver/optim/update.py is the oracle.

`torch.ops.quaver.adamw_` writes to a parameter and its moments. As an operation it is seen by dispatch modes and by
subclasses: a weight that remembers something of its values learns of the write.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels.cpu import AVAILABLE, HP_KIND, THREADS_PAY_FROM, extension
from quaver.kernels.operation import library

_MOMENT_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 3}


library.define(
    "adamw_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!)? exp_avg_scale, Tensor(d!) exp_avg_sq, "
    "Tensor(e!)? exp_avg_sq_scale, Tensor scalars, Tensor(f!) skipped, int[] place, int key) -> ()"
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
    place: list[int],
    key: int,
) -> None:
    tensors = param, grad, exp_avg, exp_avg_scale, exp_avg_sq, exp_avg_sq_scale, scalars, skipped
    extension.adamw(
        *(0 if tensor is None else tensor.data_ptr() for tensor in tensors),
        *place,
        key,
        HP_KIND[param.dtype],
        HP_KIND[grad.dtype],
        _MOMENT_KIND[exp_avg.dtype],
        _MOMENT_KIND[exp_avg_sq.dtype],
        1 if param.numel() < THREADS_PAY_FROM else torch.get_num_threads(),
    )


library.impl("adamw_", _adamw, "CPU")
torch.library.register_fake("quaver::adamw_", lambda *arguments: None, lib=library)


def takes(param: Tensor, grad: Tensor) -> bool:
    """Whether `adamw_` takes these contiguous tensors, here and now."""
    return AVAILABLE and param.is_cpu and grad.is_cpu and not torch.compiler.is_compiling()


adamw_ = torch.ops.quaver.adamw_

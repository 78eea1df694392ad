"""An order for a compiler: what is computed only when something else has been.

A compiler puts operations that do not depend on each other into any order, and merges those that read the same tensors.
`make_wait` makes one depend on another, by an operation that does nothing: it only says that it writes to its first
argument and reads its second, so that what reads the first has to wait for the second. Nothing is copied, since nobody
reads the first as it was before, and nothing runs on a device.

In the backward of a float8 linear grad_input waits for grad_weight (linear_gemms.py), the last to read the input. Where
the input is computed again, as SwiGLU's product is under a checkpoint, a compiler would merge that computation with the
one of the gradients of gate and up, which follow from grad_input. Gate, up, product and the gradients of all three
would then be alive at once; but nobody needs the product any more when grad_input is made. One block of the memory
table (benchmarks/memory.py), compiled, in one process, with checkpointing "full": 0.75 of bfloat16, 0.90 without it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("quaver", "FRAGMENT")
_library.define("wait_for(Tensor(a!) waiting, Tensor computed) -> ()")
_library.impl("wait_for", lambda waiting, computed: None, "CompositeExplicitAutograd")


@torch.library.register_fake("quaver::wait_for")
def _fake_wait_for(waiting: Tensor, computed: Tensor) -> None:
    return None


def make_wait(waiting: Tensor, computed: Tensor) -> None:
    """Have a compiler compute what reads `waiting` from here on after `computed`. Eager code keeps its order anyway.

    Args:
        waiting: a small tensor that was made in the graph and that nobody reads later as it is now.
        computed: any tensor.
    """
    if torch.compiler.is_compiling():
        torch.ops.quaver.wait_for(waiting, computed)


def keep_stored(tensor: Tensor, waiting: Tensor) -> None:
    """Have a compiler store `tensor` as it is, for what reads it, rather than compute it again wherever it is read.

    Casts read grad_output two to four times. Left to itself, a compiler for GPUs merges SwiGLU's gradient into each of
    them, and where that makes an expression too long it stores what lies between: float32, as large as two of `tensor`.
    On a CPU casts are operations, for which it is stored anyway; to wait for it would only have it live longer.

    Args:
        tensor: any tensor.
        waiting: a small tensor, as `make_wait` wants it.
    """
    if not tensor.is_cpu:
        make_wait(waiting, tensor)

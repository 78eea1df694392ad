"""Hints to Inductor about the order of a linear's backward. Eager code keeps its order and ignores them.

A compiler may run independent operations in any order, and merges those that read the same tensors. `add_dependency`
makes one depend on another through an operation that does nothing: its schema says that it writes to the first argument
and reads the second, so whatever reads the first must wait for the second. Nothing is copied, because nothing reads the
first as it was before, and nothing runs on a device.

In the backward of a float8 linear, grad_input depends on grad_weight, the last reader of the input. Under a checkpoint
that recomputes the input, as SwiGLU's product is, Inductor would otherwise merge that recomputation with the gradients
of gate and up, which follow from grad_input: gate, up, the product and the three gradients would be alive at once. Peak
memory of one compiled block under full checkpointing: 0.75 of bfloat16 with the hint, 0.90 without
(`python -m benchmarks.memory`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.runtime.devices import is_cpu
from quaver.torch_private.tracing import current_tracing_context

_library = torch.library.Library("quaver", "FRAGMENT")
# Inductor would give an operation that constrains layouts a copy of a pointwise result, and each later reader another.
_library.define("wait_for(Tensor(a!) waiting, Tensor computed) -> ()", tags=torch.Tag.flexible_layout)
_library.impl("wait_for", lambda waiting, computed: None, "CompositeExplicitAutograd")
torch.library.register_fake("quaver::wait_for", lambda waiting, computed: None, lib=_library)


def is_compiling() -> bool:
    """Whether a compiler traces this code: Dynamo, or AOTAutograd where Dynamo does not look into a function.

    Of the latter torch.compiler.is_compiling knows in PyTorch 2.13, and not in 2.11.
    """
    return torch.compiler.is_compiling() or current_tracing_context() is not None


def add_dependency(waiting: Tensor, computed: Tensor) -> None:
    """Make everything that reads `waiting` from here on depend on `computed`.

    Args:
        waiting: a small tensor that was made in the graph and is not read later in its present state.
        computed: any tensor.
    """
    if is_compiling():
        torch.ops.quaver.wait_for(waiting, computed)


def materialize(tensor: Tensor, waiting: Tensor) -> None:
    """Make Inductor store `tensor` once instead of recomputing it in each of its readers. Does nothing on a CPU.

    Casts read grad_output two to four times. Inductor for GPUs would merge SwiGLU's gradient into each read, and where
    that makes an expression too long, store an intermediate result in float32, as large as two of `tensor`. On a CPU
    casts are operations, so their input is stored anyway.

    Args:
        tensor: any tensor.
        waiting: as for `add_dependency`, or a result of a matmul, which lies in memory anyway.
    """
    if not is_cpu(tensor):
        add_dependency(waiting, tensor)


def apart(scale: Tensor, codes: Tensor) -> Tensor:
    """`scale`, for a second conversion of what was converted to `codes` with it.

    In code compiled for a GPU the second waits until `codes` are stored. Inductor would merge both conversions into one
    and store that twice; see [Note: ptxas before 13] in triton_blocks.py.

    Args:
        scale: made in the graph.
    """
    if not is_cpu(scale):
        add_dependency(scale, codes)
    return scale

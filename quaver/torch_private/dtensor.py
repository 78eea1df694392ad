"""DTensors, for code that must also work without an import of torch.distributed.tensor.

- `get_local_tensor(tensor)`: DTensor._local_tensor. The public DTensor.to_local() returns a view of a parameter, or
  with gradients the result of an autograd function. No replacement.
- `wait_for_local_tensor(tensor)`: the same, after waiting for a functional collective that writes it.
- `set_local_tensor(tensor, local)`: assigns DTensor._local_tensor. No replacement.
- `compute_local_shape_and_offset(tensor)`: torch.distributed.tensor._utils.compute_local_shape_and_global_offset, for
  this rank's part. No replacement.
- `cache_fake_shapes()`: replaces torch.distributed.tensor._dispatch._are_we_tracing of torch 2.11. Remove with it;
  torch 2.13 has no such function.
- `is_dtensor(tensor)`, `make_dtensor_like(local, like)`: public API, without the import of torch.distributed.tensor.

[Note: import time] torch.distributed.tensor, torch.distributed.fsdp and torch._dynamo together take longer to import
than torch, which does not import them. `import quaver` and the conversion of a model must not import them either
(tests/library/test_import.py). A class that nothing has imported has no instances, so a check need not import it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quaver.torch_private.replacing import replace_attribute

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Return whether `tensor` is a DTensor, without importing the class; see [Note: import time]."""
    module = getattr(torch.distributed, "tensor", None)
    return module is not None and isinstance(tensor, module.DTensor)


def make_dtensor_like(local: Tensor, like: DTensor) -> DTensor:
    """Make a DTensor with this rank's part `local`, and the mesh, placements, shape and strides of `like`."""
    layout = like.device_mesh, like.placements
    return like.from_local(local, *layout, run_check=False, shape=like.shape, stride=like.stride())


def get_local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; other tensors are returned unchanged."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def wait_for_local_tensor(tensor: Tensor) -> Tensor:
    """Return `get_local_tensor`, after waiting for the collective that writes it."""
    part = get_local_tensor(tensor)
    if is_traceable_wrapper_subclass(part):
        from quaver.torch_private.functional_collectives import AsyncCollectiveTensor  # [Note: import time]

        if isinstance(part, AsyncCollectiveTensor):
            return part.trigger_wait()
    return part


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Replace this rank's part by a tensor of the same shape."""
    tensor._local_tensor = local


def compute_local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's part of a DTensor, and its offset in the global tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def cache_fake_shapes() -> AbstractContextManager[None]:
    """Let DTensors of fake tensors use the cache of shapes inside the block, as those of real tensors do.

    Torch 2.11 takes fake tensors as a sign of tracing and skips the cache. Each operator, also of the optimizer, would
    then allocate its unsharded operands.
    """
    from torch.distributed.tensor import _dispatch

    module: Any = _dispatch
    has_tracing_check = hasattr(module, "_are_we_tracing")
    return replace_attribute(module, "_are_we_tracing", lambda: False) if has_tracing_check else nullcontext()

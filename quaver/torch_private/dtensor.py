"""DTensors, for code that must work where there are none.

- `local_tensor(tensor)`: DTensor._local_tensor. The public DTensor.to_local() returns a view of a parameter, and with
  gradients the result of an autograd function. No replacement.
- `waited_local_tensor(tensor)`: the same, of a result of a functional collective, too, which is waited for.
- `set_local_tensor(tensor, local)`: assigns it. No replacement.
- `local_shape_and_offset(tensor)`: torch.distributed.tensor._utils.compute_local_shape_and_global_offset, of
  this rank's part. No replacement.
- `is_dtensor(tensor)`, `distributed_like(local, whole)`: public, without the import of torch.distributed.tensor.

[Note: import time] torch.distributed.tensor, torch.distributed.fsdp and torch._dynamo take together longer to import
than torch, which does not import them. `import quaver` and the conversion of a model must not either
(tests/library/test_import.py). A class that nothing has imported has no instances, so a check need not import it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_dtensor(tensor: object) -> TypeIs[DTensor]:
    """Whether this is a DTensor; see [Note: import time]."""
    module = getattr(torch.distributed, "tensor", None)
    return module is not None and isinstance(tensor, module.DTensor)


def distributed_like(local: Tensor, whole: DTensor) -> DTensor:
    """This rank's part `local` as a DTensor with the mesh, placements, shape and strides of `whole`."""
    layout = whole.device_mesh, whole.placements
    return whole.from_local(local, *layout, run_check=False, shape=whole.shape, stride=whole.stride())


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which other tensors are themselves."""
    return tensor._local_tensor if is_dtensor(tensor) else tensor


def waited_local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, once the collective that writes it has ended."""
    part = local_tensor(tensor)
    if is_traceable_wrapper_subclass(part):
        from quaver.torch_private.collectives import AsyncCollectiveTensor  # [Note: import time]

        if isinstance(part, AsyncCollectiveTensor):
            return part.trigger_wait()
    return part


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Replace this rank's part by another tensor of its shape."""
    tensor._local_tensor = local


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part of a DTensor, and where in the whole it begins."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)

"""The local tensor of a DTensor: the object itself.

- `local_tensor(tensor)`: DTensor._local_tensor. The public DTensor.to_local() returns a view of a parameter, and with
  gradients the result of an autograd function. No replacement.
- `set_local_tensor(tensor, local)`: assigns it. No replacement.
- `local_shape_and_offset(tensor)`: torch.distributed.tensor._utils.compute_local_shape_and_global_offset, of
  this rank's part. No replacement.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def local_tensor(tensor: Tensor) -> Tensor:
    """This rank's part of a DTensor, which other tensors are themselves."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def set_local_tensor(tensor: DTensor, local: Tensor) -> None:
    """Replace this rank's part by another tensor of its shape."""
    tensor._local_tensor = local


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of this rank's part of a DTensor, and where in the whole it begins."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)

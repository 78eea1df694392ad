"""`torchao.float8.distributed_utils`."""

from torch import Tensor

from quaver.linear.tensor import Float8Tensor
from quaver.torch_private.dtensor import get_local_tensor


def tensor_already_casted_to_fp8(tensor: Tensor) -> bool:
    """Return whether `tensor`, or the local part of a DTensor, is a `Float8Tensor`."""
    return isinstance(get_local_tensor(tensor), Float8Tensor)


__all__ = ["tensor_already_casted_to_fp8"]

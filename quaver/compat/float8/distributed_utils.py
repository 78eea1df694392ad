"""`torchao.float8.distributed_utils`."""

from torch import Tensor
from torch.distributed.tensor import DTensor

from quaver.tensor import Float8Tensor


def tensor_already_casted_to_fp8(tensor: Tensor) -> bool:
    """Whether `tensor`, or the local part of a DTensor, is a `Float8Tensor`."""
    return isinstance(tensor._local_tensor if isinstance(tensor, DTensor) else tensor, Float8Tensor)


__all__ = ["tensor_already_casted_to_fp8"]

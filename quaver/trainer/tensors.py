"""What a rank really holds of a tensor that stands for more."""

from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside `tensor`: of a DTensor this rank's part, of a float8 weight codes and scales."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return plain_tensors(tensor.trigger_wait())  # a collective may still be writing into it
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [plain for part in parts if isinstance(part, Tensor) for plain in plain_tensors(part)]

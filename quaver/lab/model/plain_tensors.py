"""Unwraps tensor subclasses: DTensor, float8 weights and the results of asynchronous collectives."""

from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quaver.torch_private.functional_collectives import AsyncCollectiveTensor


def list_plain_tensors(tensor: Tensor) -> list[Tensor]:
    """Return the plain tensors inside `tensor`: a DTensor's shard on this rank, a float8 weight's codes and scales."""
    if isinstance(tensor, AsyncCollectiveTensor):
        return list_plain_tensors(tensor.trigger_wait())  # a collective may still write into it
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    parts = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [plain for part in parts if isinstance(part, Tensor) for plain in list_plain_tensors(part)]

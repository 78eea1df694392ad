"""Counts the operations of one rank, its collectives among them, and the bytes that a step saves for backward."""

from collections import Counter

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from quaver.linear.tensor import Float8Tensor

_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


class CollectiveCounter(TorchDispatchMode):
    """Counts operations while it is the active dispatch mode.

    Attributes:
        collectives: (kind, dtype, bytes) of each collective, in order. An all_gather has the bytes from all ranks.
        operations: how often each other operation ran.
        kernels: how often each of them ran that makes or writes a tensor, so no views.
    """

    def __init__(self):
        super().__init__()
        self.collectives, self.operations, self.kernels = [], Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor | Float8Tensor) for kind in types):
            return NotImplemented  # the mode sees the operations on the inner tensors later
        out = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        name = name.replace("allgather", "all_gather").replace("allreduce", "all_reduce").lstrip("_")
        kind = next((kind for kind in _KINDS if name.startswith(kind)), None)
        if kind is not None and "c10d" in namespace:
            in_place = namespace == "c10d"  # the first argument is the output
            tensor = _first(args if in_place or kind != "all_gather" else out)
            self.collectives.append((kind, tensor.dtype, tensor.numel() * tensor.itemsize))
        else:
            self.operations[str(func)] += 1
            returns = func._schema.returns
            if func._schema.is_mutable or not returns or returns[0].alias_info is None:
                self.kernels[str(func)] += 1
        return out

    def of(self, kind):
        """Return (dtype, bytes) of each collective of this kind, in order."""
        return [collective[1:] for collective in self.collectives if collective[0] == kind]

    @property
    def calls(self):
        """The number of collectives of each kind."""
        return Counter(kind for kind, *_ in self.collectives)

    @property
    def bytes(self):
        """The bytes of all collectives of each kind."""
        return Counter({kind: sum(size for _, size in self.of(kind)) for kind in self.calls})


def _first(value):
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value


def count_saved_bytes(step):
    """Return the bytes of the distinct storages that `step` saves for backward, by dtype."""
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = step()  # noqa: F841 - keeps the graph alive
    by_dtype = Counter()
    for tensor in saved.values():
        by_dtype[tensor.dtype] += tensor.untyped_storage().nbytes()
    return by_dtype

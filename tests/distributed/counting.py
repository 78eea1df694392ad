"""Counts collectives and the bytes that one rank receives or sends by them."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_KINDS = ("all_gather", "allgather", "reduce_scatter", "all_reduce", "allreduce")


class CollectiveCounter(TorchDispatchMode):
    """`calls` and `bytes` by kind: all_gather (bytes from all ranks), reduce_scatter and all_reduce (bytes in).

    `dtypes` holds those of the tensors gathered; `operations` counts everything else that ran.
    """

    def __init__(self):
        super().__init__()
        self.calls, self.bytes, self.dtypes, self.operations = Counter(), Counter(), Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        kind = next((kind for kind in _KINDS if kind in name), None)
        if kind is not None and "c10d" in func._schema.name:
            kind = kind.replace("allg", "all_g").replace("allr", "all_r")
            tensor = _gathered(name, args, out) if kind == "all_gather" else _first(args)
            self.calls[kind] += 1
            self.bytes[kind] += tensor.numel() * tensor.itemsize
            if kind == "all_gather":
                self.dtypes[tensor.dtype] += 1
        else:
            self.operations[str(func)] += 1
        return out


def _first(value):
    while not isinstance(value, torch.Tensor):
        value = value[0]
    return value


def _gathered(name, args, out):
    return args[0] if name.startswith("_allgather_base") else _first(out)

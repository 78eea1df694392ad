"""The kernels that an operation of quaver's launches: it runs on fake tensors, and PyTorch's dispatcher is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quaver.lab.memory.compiling.launches import Access
from quaver.lab.memory.faking.fakes import Fakes
from quaver.lab.memory.faking.gpu import as_on_a_gpu

_KERNELS = {"aten.constant_pad_nd": 2}
"""Kernels of an operator that launches several: one fills, one copies (aten/src/ATen/native/PadNd.cpp)."""
_NONE = ("aten.empty", "aten.new_empty", "prim.")


class Called(NamedTuple):
    """An operator that launches kernels: its name, how many, and the tensors that it reads and writes."""

    name: str
    kernels: int
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]

    @property
    def read_bytes(self) -> int:
        """The bytes of all arguments."""
        return sum(each.numel() * each.element_size() for each in self.reads)

    @property
    def written_bytes(self) -> int:
        """The bytes of all results."""
        return sum(each.numel() * each.element_size() for each in self.writes)


def called_inside(function: Callable[..., Any], accesses: Sequence[Access], *arguments: Any) -> list[Called]:
    """Return the operators that `function` calls for tensors like these buffers, but views and empty memory."""
    with as_on_a_gpu(), Fakes(), torch.no_grad():
        tensors = [torch.empty_strided(each.size, each.stride, dtype=each.dtype) for each in accesses]
        with _Recording() as recording:
            function(*tensors, *arguments)
    return recording.calls


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Called] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = str(operator).removesuffix(".default")
        if not (operator.is_view or name.startswith(_NONE)):
            reads, writes = (
                tuple(each for each in tree_leaves(part) if isinstance(each, Tensor)) for part in (args, result)
            )
            self.calls.append(Called(name, _KERNELS.get(name, 1), reads, writes))
        return result

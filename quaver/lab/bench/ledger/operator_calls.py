"""Finds the operators that an operation of quaver calls, by running it on fake tensors under a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quaver.lab.bench.ledger.launches import BufferAccess
from quaver.lab.memory.devices.gpu import simulate_float8_gpu
from quaver.lab.memory.faking.fakes import FakeMode

_KERNELS_OF_OPERATOR = {"aten.constant_pad_nd": 2}
"""The number of kernels of an operator that launches several: a fill and a copy (aten/src/ATen/native/PadNd.cpp)."""
_OPERATORS_WITHOUT_KERNELS = ("aten.empty", "aten.new_empty", "prim.")


class OperatorCall(NamedTuple):
    """A call of an operator: its name, the number of its kernels, and the tensors that it reads and writes."""

    name: str
    kernels: int
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]

    @property
    def read_bytes(self) -> int:
        """The bytes of all arguments."""
        return sum(tensor.nbytes for tensor in self.reads)

    @property
    def written_bytes(self) -> int:
        """The bytes of all results."""
        return sum(tensor.nbytes for tensor in self.writes)


def record_calls(function: Callable[..., Any], accesses: Sequence[BufferAccess], *arguments: Any) -> list[OperatorCall]:
    """Return the operators that `function` calls for tensors like `accesses`, without views and allocations."""
    with simulate_float8_gpu(), FakeMode(), torch.no_grad():
        tensors = [torch.empty_strided(access.size, access.stride, dtype=access.dtype) for access in accesses]
        with _CallRecorder() as recording:
            function(*tensors, *arguments)
    return recording.calls


class _CallRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = str(operator).removesuffix(".default")
        if not (operator.is_view or name.startswith(_OPERATORS_WITHOUT_KERNELS)):
            reads, writes = (
                tuple(leaf for leaf in tree_leaves(part) if isinstance(leaf, Tensor)) for part in (args, result)
            )
            self.calls.append(OperatorCall(name, _KERNELS_OF_OPERATOR.get(name, 1), reads, writes))
        return result

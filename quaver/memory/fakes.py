"""Fake tensors for a step of training: shapes, dtypes and storages are real, numbers are not there.

[Note: numbers that are read] Code may read a number back: whether a norm is finite, whether ranks agree, which step an
optimizer is at. It is then told 1, or True: finite, agreed, known. What a step allocates hardly ever depends on such a
number; a result whose very shape does is refused. How many reads were answered so is counted.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from quaver.scaling import PLAIN_TYPES

Module = TypeVar("Module", bound=nn.Module)

_READ = torch.ops.aten._local_scalar_dense.default


class Fakes(FakeTensorMode):
    """Makes every tensor fake while it is on.

    Attributes:
        reads: how many numbers were read and answered by 1; see the note.
    """

    stands_for_real = True
    """Casts are one operation, as they are to real tensors (quaver/kernels/cpu.py)."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # constants that a module made when it was imported
        self.reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        except DataDependentOutputException:
            if func is not _READ:
                raise
            self.reads += 1
            return _one(args[0].dtype)


class _Lists(TorchFunctionMode):
    """`tolist` of a fake tensor, which torch refuses, number by number."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.tolist and isinstance(args[0], FakeTensor):
            return _listed(args[0])
        return func(*args, **(kwargs or {}))


def _listed(tensor: Tensor) -> Any:
    return tensor.item() if tensor.dim() == 0 else [_listed(each) for each in tensor.unbind()]


def _one(dtype: torch.dtype) -> Any:
    if dtype is torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


@contextmanager
def fake_tensors() -> Iterator[Fakes]:
    """Make every tensor fake inside the block, and run what is compiled as eager code.

    Raises:
        NotImplementedError: an operator is not known without numbers: one of its results has a shape that depends on
            them, or nobody has told torch what it returns.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        fakes = stack.enter_context(Fakes())
        stack.enter_context(_Lists())
        try:
            yield fakes
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise NotImplementedError(
                f"expected operators whose results have shapes that do not depend on numbers, got {error.args[0]}; "
                "memory can only be predicted without it"
            ) from error
        except UnsupportedOperatorException as error:
            raise NotImplementedError(
                f"expected operators that tell what they return, got {error.args[0]}, which has no fake "
                "implementation; give it one with torch.library.register_fake"
            ) from error


def fake_copy(model: Module, fakes: Fakes, device: torch.device) -> Module:
    """A copy of `model` with fake parameters and buffers on `device`; what is on the meta device included.

    Nothing of the model's size is allocated, and the model is left as it is.
    """
    tensors = [each for each in (*model.parameters(), *model.buffers()) if type(each) in PLAIN_TYPES]
    memo: dict[int, Any] = {id(each): _fake(each, fakes, device) for each in tensors}
    with FakeCopyMode(fakes):  # for tensors of any other kind, or in other places
        return copy.deepcopy(model, memo)


def fake_copies(values: Any, fakes: Fakes, device: torch.device) -> Any:
    """The same nest of lists, tuples and dicts, with fake tensors on `device` in the place of tensors."""
    return tree_map_only(Tensor, lambda tensor: _fake(tensor, fakes, device), values)


def _fake(tensor: Tensor, fakes: Fakes, device: torch.device) -> Tensor:
    with fakes, torch.no_grad():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)

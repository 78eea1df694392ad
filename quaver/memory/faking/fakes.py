"""Fake tensors for a training step: real shapes, dtypes and storages, no values.

[Note: values that are read] Code may read a value from a tensor: whether a norm is finite, whether ranks agree, the
optimizer's step count. The answer is 1, or True, and the reads are counted. A result whose shape depends on values is
refused, or assumed for an estimate. Sizes may depend on an integer that was read, so `predict_step` then repeats the
step with 2 as the answer and compares (integers.py).
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

from quaver.memory.compiling.compiled import kernels_left_out
from quaver.memory.faking.assumptions import Assumptions
from quaver.memory.faking.gpu_like import as_on_a_gpu
from quaver.memory.faking.libraries import as_if_not_fake
from quaver.memory.faking.places import place_here
from quaver.memory.faking.refusals import depends_on, refusal
from quaver.memory.faking.target import is_for_a_gpu
from quaver.scaling import PLAIN_TYPES

Module = TypeVar("Module", bound=nn.Module)

_READ = torch.ops.aten._local_scalar_dense.default
_DEVICE = torch.ops.prim.device.default


class Fakes(FakeTensorMode):
    """Makes every tensor fake while it is on.

    Attributes:
        reads: the number of values that were read ([Note: values that are read]).
        integer_reads: the places where integers were read.
        integer: the answer to those.
        assumptions: results for an estimate; None to refuse.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)  # tensors that a module created on import
        self.reads = 0
        self.integer_reads: set[str] = set()
        self.integer = 1
        self.assumptions: Assumptions | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and not self.in_kernel_invocation:
            return args[0].fake_device  # as super() does, but fast: the most frequent call
        try:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        except DataDependentOutputException:
            if func is not _READ:
                raise
            return self._read(args[0].dtype)
        except (DynamicOutputShapeException, UnsupportedOperatorException) as error:
            answer = self._assumed(error, func, args, kwargs or {})
            if answer is None:
                raise
            return answer

    def _read(self, dtype: torch.dtype) -> Any:
        self.reads += 1
        if dtype is torch.bool:
            return True
        if dtype.is_floating_point:
            return 1.0
        self.integer_reads.add(place_here())
        return self.integer

    def _assumed(self, error: Exception, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.assumptions is None:
            return None
        with self:
            if isinstance(error, UnsupportedOperatorException):
                return self.assumptions.like_first_tensor(func, args, kwargs)
            return self.assumptions.largest_result(func, args, kwargs)


class _Lists(TorchFunctionMode):
    """Reads `tolist` of a fake tensor element by element; torch refuses it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is Tensor.tolist and isinstance(args[0], FakeTensor):
            return _listed(args[0])
        return func(*args, **(kwargs or {}))


def _listed(tensor: Tensor) -> Any:
    return tensor.item() if tensor.dim() == 0 else [_listed(each) for each in tensor.unbind()]


@contextmanager
def fake_tensors(*, compiled: bool = False, estimate: bool = False) -> Iterator[Fakes]:
    """Make every tensor fake inside the block.

    Args:
        compiled: run compiled modules as compiled code without kernels (quaver/memory/compiling), not as eager code.
        estimate: assume results that depend on values (assumptions.py).
    Raises:
        NotImplementedError: an operator's result has a shape that depends on values, or it has no fake implementation.
    """
    with ExitStack() as stack:
        stack.enter_context(kernels_left_out() if compiled else torch.compiler.set_stance("force_eager"))
        if is_for_a_gpu():
            stack.enter_context(as_on_a_gpu())
        fakes = stack.enter_context(Fakes())
        if not compiled:  # Dynamo would compile the mode into the graph
            stack.enter_context(_Lists())
        stack.enter_context(as_if_not_fake())
        fakes.assumptions = Assumptions() if estimate else None
        try:
            yield fakes
        except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException) as error:
            raise refusal(error) from error
        except (RuntimeError, IndexError) as error:
            if isinstance(error, NotImplementedError) or not fakes.integer_reads:
                raise
            raise depends_on(fakes.integer_reads, error) from error


def fake_copy(model: Module, fakes: Fakes, device: torch.device) -> Module:
    """A copy of `model` with fake parameters and buffers on `device`, also of those on the meta device.

    Nothing of the model's size is allocated, and the model does not change.
    """
    tensors = [each for each in (*model.parameters(), *model.buffers()) if type(each) in PLAIN_TYPES]
    memo: dict[int, Any] = {id(each): _fake(each, fakes, device) for each in tensors}
    with FakeCopyMode(fakes):  # for subclasses, and tensors that are neither parameter nor buffer
        return copy.deepcopy(model, memo)


def fake_copies(values: Any, fakes: Fakes, device: torch.device) -> Any:
    """The same nest of lists, tuples and dicts with fake tensors on `device`."""
    return tree_map_only(Tensor, lambda tensor: _fake(tensor, fakes, device), values)


def _fake(tensor: Tensor, fakes: Fakes, device: torch.device) -> Tensor:
    with fakes, torch.no_grad():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)

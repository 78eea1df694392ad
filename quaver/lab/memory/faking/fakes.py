"""Fake tensors for a training step: real shapes, dtypes and storages, no values.

[Note: values that are read] Code may read a value from a tensor: whether a norm is finite, whether ranks agree, the
optimizer's step count. The answer is 1, or True, and the reads are counted. A result whose shape depends on values is
refused, or assumed for an estimate (values.py). An integer that is read as a loop count or in a check does no harm, but
one that is read as a length makes tensors too small. So `check_integers` repeats the step with 2 as the answer and
compares the sizes of its tensors.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed.tensor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_map_only

from quaver.lab.memory.compiling.compiled import kernels_left_out
from quaver.lab.memory.faking.gpu import as_on_a_gpu, is_for_a_gpu
from quaver.lab.memory.faking.values import Assumptions, depends_on, place_here, refusal
from quaver.lab.recorder.storages import StorageWatch
from quaver.recipes.scaling import PLAIN_TYPES

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


@contextmanager
def fake_tensors(*, compiled: bool = False, estimate: bool = False) -> Iterator[Fakes]:
    """Make every tensor fake inside the block.

    Args:
        compiled: run compiled modules as compiled code without kernels (quaver/lab/memory/compiling), not as eager.
        estimate: assume results that depend on values (values.py).
    Raises:
        NotImplementedError: an operator's result has a shape that depends on values, or it has no fake implementation.
    """
    with ExitStack() as stack:
        stack.enter_context(kernels_left_out() if compiled else torch.compiler.set_stance("force_eager"))
        if is_for_a_gpu():
            stack.enter_context(as_on_a_gpu())
        fakes = stack.enter_context(Fakes())
        stack.enter_context(_without_tracing_in_transformers())
        stack.enter_context(_without_tracing_in_dtensors())
        fakes.assumptions = Assumptions() if estimate else None
        try:
            yield fakes
        except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException) as error:
            raise refusal(error) from error
        except (RuntimeError, IndexError) as error:
            if isinstance(error, NotImplementedError) or not fakes.integer_reads:
                raise
            raise depends_on(fakes.integer_reads, error) from error


def _without_tracing_in_transformers() -> AbstractContextManager[Any]:
    """If transformers is imported, have it take fake tensors for real ones inside the block.

    transformers (5.23) takes fake tensors for tracing, and then builds attention masks that a training step does not
    have. It has no hook for that. This can go when `is_tracing` in transformers.utils.import_utils no longer asks.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):
        return nullcontext()
    return patch.object(module, "is_fake_tensor", lambda tensor: False)


def _without_tracing_in_dtensors() -> AbstractContextManager[Any]:
    """Have DTensors of torch 2.11 take fake tensors for real ones inside the block.

    They take them for tracing, which skips the cache of shapes: each operator, and so the optimizer's, would allocate
    its unsharded operands. This can go with torch 2.11; torch 2.13 asks no more.
    """
    if not hasattr(torch.distributed.tensor._dispatch, "_are_we_tracing"):
        return nullcontext()
    return patch.object(torch.distributed.tensor._dispatch, "_are_we_tracing", lambda: False)


def fake_copy(model: Module, fakes: Fakes) -> Module:
    """A copy of `model` with fake parameters and buffers on the CPU (gpu.py), also of those on the meta device.

    Nothing of the model's size is allocated, and the model does not change.
    """
    tensors = [each for each in (*model.parameters(), *model.buffers()) if type(each) in PLAIN_TYPES]
    memo: dict[int, Any] = {id(each): _fake(each, fakes) for each in tensors}
    with FakeCopyMode(fakes):  # for subclasses, and tensors that are neither parameter nor buffer
        return copy.deepcopy(model, memo)


def fake_copies(values: Any, fakes: Fakes) -> Any:
    """The same nest of lists, tuples and dicts with fake tensors on the CPU."""
    return tree_map_only(Tensor, lambda tensor: _fake(tensor, fakes), values)


def _fake(tensor: Tensor, fakes: Fakes) -> Tensor:
    with fakes, torch.no_grad():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


# ---- integers that are read ------------------------------------------------------------------------------------------


class _Sizes(StorageWatch):
    """The bytes of the storages that operators allocate, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes_bytes: list[int] = []

    def storage_appeared(self, key: int, size_bytes: int, tensor: Tensor | None, operator: str | None) -> None:
        if operator is not None:
            self.sizes_bytes.append(size_bytes)


def check_integers(step: Callable[[], None], fakes: Fakes) -> list[str]:
    """If integers were read, run two more steps and compare their allocations ([Note: values that are read]).

    Returns:
        Notes for an estimate; none if sizes do not depend on the integers.
    Raises:
        NotImplementedError: sizes depend on an integer, and no estimate was asked for.
    """
    if not fakes.integer_reads:
        return []
    sizes = []
    for fakes.integer in (2, 1):
        with _Sizes() as watch:
            step()
        sizes.append(watch.sizes_bytes)
    if sizes[0] == sizes[1]:
        return []
    if fakes.assumptions is None:
        raise depends_on(fakes.integer_reads)
    return [
        f"estimate: sizes depend on an integer that was assumed to be 1, read in {each}" for each in fakes.integer_reads
    ]

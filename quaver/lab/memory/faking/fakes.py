"""Fake tensors for a training step, with real shapes, dtypes and storages but no values.

[Note: values that are read] Code may read a value from a tensor: whether a norm is finite, whether ranks agree, the
optimizer's step count. The answer is 1, or True, and the reads are counted. An operator whose result's shape depends on
values raises, or its result is assumed for an estimate (values.py). The answer 1 is harmless for an integer that is a
loop count or is checked, but a length of 1 makes tensors too small. So `check_sizes_ignore_integers` repeats
the step with 2 as the answer and compares the sizes of its tensors.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from quaver.lab.memory.compiling.compiled import leave_out_kernels
from quaver.lab.memory.devices.gpu import DEVICES, simulate_float8_gpu
from quaver.lab.memory.faking.values import Assumptions, describe_caller, make_dependence_error, make_unsupported_error
from quaver.lab.recorder.storages import StorageTracker
from quaver.recipes.scaling import PLAIN_TYPES
from quaver.torch_private.dtensor import cache_fake_shapes
from quaver.torch_private.replacing import replace_attribute
from quaver.torch_private.tracing import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensorMode,
    UnsupportedOperatorException,
)

Module = TypeVar("Module", bound=nn.Module)

_READ_OPERATOR = torch.ops.aten._local_scalar_dense.default
_DEVICE_OPERATOR = torch.ops.prim.device.default


class FakeMode(FakeTensorMode):
    """Makes every tensor fake while it is on.

    Args:
        device: the device whose memory is predicted, one of DEVICES. Tensors are on the CPU for each.
        runs_compiled_code: whether compiled modules run as compiled code, inside `leave_out_kernels`.
    """

    def __init__(self, device: str = "cpu", *, runs_compiled_code: bool = False) -> None:
        if device not in DEVICES:
            raise ValueError(f"expected a device to predict for, {' or '.join(DEVICES)}, got {device!r}")
        super().__init__(allow_non_fake_inputs=True)  # tensors that a module created on import
        self.device, self.runs_compiled_code = device, runs_compiled_code
        self.num_reads = 0
        """The number of values that were read ([Note: values that are read])."""
        self.integer_reads: set[str] = set()
        """The locations where integers were read."""
        self.integer_answer = 1
        """The answer to reads of integers."""
        self.assumptions: Assumptions | None = None
        """The assumptions of an estimate; None to raise instead."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE_OPERATOR and not self.in_kernel_invocation:
            return args[0].fake_device  # the same as super(), but faster: it is the most frequent call
        try:
            return super().__torch_dispatch__(func, types, args, kwargs or {})
        except DataDependentOutputException:
            if func is not _READ_OPERATOR:
                raise
            return self._read(args[0].dtype)
        except (DynamicOutputShapeException, UnsupportedOperatorException) as error:
            assumed = self._assume(error, func, args, kwargs or {})
            if assumed is None:
                raise
            return assumed

    def _read(self, dtype: torch.dtype) -> Any:
        self.num_reads += 1
        if dtype is torch.bool:
            return True
        if dtype.is_floating_point:
            return 1.0
        self.integer_reads.add(describe_caller())
        return self.integer_answer

    def _assume(self, error: Exception, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self.assumptions is None:
            return None
        with self:
            if isinstance(error, UnsupportedOperatorException):
                return self.assumptions.make_like_first_tensor(func, args, kwargs)
            return self.assumptions.make_largest_result(func, args, kwargs)


@contextmanager
def fake_tensors(device: str = "cpu", *, compiled: bool = False, estimate: bool = False) -> Iterator[FakeMode]:
    """Make every tensor fake inside the block.

    Args:
        device: "cpu", or "cuda" to run the code of a GPU (gpu.py).
        compiled: run compiled modules as compiled code without kernels (quaver/lab/memory/compiling), not as eager
            code.
        estimate: assume results that depend on values (values.py).
    Raises:
        NotImplementedError: the shape of an operator's result depends on values, the operator has no fake
            implementation, or the block fails after it has read an integer.
        ValueError: the device is unknown.
    """
    fake_mode = FakeMode(device, runs_compiled_code=compiled)
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(simulate_float8_gpu())
        stack.enter_context(leave_out_kernels() if compiled else torch.compiler.set_stance("force_eager"))
        stack.enter_context(fake_mode)
        stack.enter_context(_disable_tracing_in_transformers())
        stack.enter_context(cache_fake_shapes())
        fake_mode.assumptions = Assumptions() if estimate else None
        try:
            yield fake_mode
        except (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException) as error:
            raise make_unsupported_error(error) from error
        except (RuntimeError, IndexError) as error:
            if isinstance(error, NotImplementedError) or not fake_mode.integer_reads:
                raise
            raise make_dependence_error(fake_mode.integer_reads, error) from error


def _disable_tracing_in_transformers() -> AbstractContextManager[Any]:
    """Let transformers, if it is imported, treat fake tensors as real ones inside the block.

    transformers (5.23) takes fake tensors as a sign of tracing, and then builds attention masks that a training step
    does not have. It has no hook for that. This can go when `is_tracing` in transformers.utils.import_utils no longer
    checks for fake tensors.
    """
    module = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_fake_tensor"):
        return nullcontext()
    return replace_attribute(module, "is_fake_tensor", lambda tensor: False)


def make_fake_copy(model: Module, fake_mode: FakeMode) -> Module:
    """Return a copy of `model` with fake parameters and buffers on the CPU (gpu.py), whatever their device.

    Nothing of the model's size is allocated, and the model does not change.
    """
    plain = [tensor for tensor in (*model.parameters(), *model.buffers()) if type(tensor) in PLAIN_TYPES]
    memo: dict[int, Any] = {id(tensor): _make_fake(tensor, fake_mode) for tensor in plain}
    with FakeCopyMode(fake_mode):  # copies subclasses, and tensors that are neither parameters nor buffers
        return copy.deepcopy(model, memo)


def make_fake_copies(values: Any, fake_mode: FakeMode) -> Any:
    """Replace the tensors in nested lists, tuples and dicts by fake ones on the CPU."""
    return tree_map_only(Tensor, lambda tensor: _make_fake(tensor, fake_mode), values)


def _make_fake(tensor: Tensor, fake_mode: FakeMode) -> Tensor:
    with fake_mode, torch.no_grad():
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake.requires_grad_(tensor.requires_grad)


class AllocationSizes(StorageTracker):
    """Lists the bytes of each storage that an operator allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes_bytes: list[int] = []

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def on_storage_appeared(self, key: int, size_bytes: int, tensor: Tensor | None, operator: str | None) -> None:
        if operator is not None:
            self.sizes_bytes.append(size_bytes)


def check_sizes_ignore_integers(run_step: Callable[[], None], fake_mode: FakeMode) -> list[str]:
    """Run two more steps if integers were read, and compare their allocations ([Note: values that are read]).

    Returns:
        Notes for an estimate; empty if sizes do not depend on the integers.
    Raises:
        NotImplementedError: sizes depend on an integer, and this is not an estimate.
    """
    if not fake_mode.integer_reads:
        return []
    sizes = []
    for integer in (2, 1):
        fake_mode.integer_answer = integer
        with AllocationSizes() as tracker:
            run_step()
        sizes.append(tracker.sizes_bytes)
    if sizes[0] == sizes[1]:
        return []
    if fake_mode.assumptions is None:
        raise make_dependence_error(fake_mode.integer_reads)
    note = "estimate: sizes depend on an integer that was assumed to be 1, read in"
    return [f"{note} {location}" for location in fake_mode.integer_reads]

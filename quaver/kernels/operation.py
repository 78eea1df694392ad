"""Registers an operation and makes the function that callers use: one row of the tables of casts and matmuls.

    cast_tensorwise = operation(reference, cpu=..., gpu="cast_tensorwise", phase="quaver::cast")

registers `torch.ops.quaver.cast_tensorwise`, with a schema from the reference's annotations, and returns a function of
the same arguments. The reference is traceable PyTorch. It is the oracle of the kernels, the fake kernel where none is
named, and what runs where no kernel takes the tensor: other dtypes, strides or devices.

                        eager                 under a dispatch mode, fake      compiled
    CPU                 kernel or reference   the operation                    the operation
    GPU                 kernel or reference   the operation                    reference, or `in_graphs` the operation

[Note: operations] Eager code on plain tensors calls the kernel directly, which spares the dispatcher. Under a dispatch
mode, on a fake tensor and on any other subclass it calls the operation, so that a mode sees one operation whatever runs
below it, and only the implementation reads memory.

[Note: compiled code] On a CPU a cast stays one operation: compiled C++ casts along columns slowly, and the operation
reads the tensor that eager code reads, so codes are eager's even where Inductor keeps the producer's float32. On a GPU
Inductor is given PyTorch, which it fuses with the producer of the matrix.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from quaver.kernels.cpu import check_memory, runs_directly
from quaver.kernels.operands import FLAT, Operands, flattened, unflattened
from quaver.recipes.scale_layout import ScaleLayout
from quaver.recipes.scaling import PLAIN_TYPES
from quaver.runtime import phases
from quaver.runtime.devices import is_cpu, is_cuda
from quaver.runtime.slow_paths import say_once

is_dynamo_compiling = torch.compiler.is_dynamo_compiling

library = torch.library.Library("quaver", "FRAGMENT")

_SCHEMA_TYPES = {"torch.dtype": "ScalarType", "Tensor | None": "Tensor?", "Sequence[int]": "int[]"}


def operation(
    reference: Callable[..., Any],
    *,
    results: int | None = None,
    cpu: Callable[..., Any] | None = None,
    gpu: str | None = None,
    fake: Callable[..., Any] | None = None,
    in_graphs: bool = False,
    phase: str = "",
    layout: Callable[..., ScaleLayout] | None = None,
) -> Callable[..., Any]:
    """Register `torch.ops.quaver.<name>` and return the function that calls the kernel, the reference or the operation.

    Args:
        reference: named as the operation, with an underscore before. Takes a tensor, then other arguments; the casts
            take a float8 dtype second. Returns `results` tensors, None for those that do not apply; a cast `Operands`.
        results: how many tensors. With more than one, the operation returns empty tensors of shape (0,) for None.
            Results have no autograd history. None for a cast: the operation returns the tensors of `flattened`, and
            its function `Operands`.
        cpu: as `reference`, or None as its result where it does not take the tensor.
        gpu: the name of such a function in triton_cast.py. The function says which tensors its kernel takes.
        fake: computes results on fake tensors; None for the reference.
        in_graphs: whether code compiled for a GPU calls the operation, instead of the reference.
        layout: of a cast, from its arguments the layout of the scales of row codes.
        phase: the name of the range that a call is while a profiler or a recorder runs (runtime/phases.py).
    """
    name = reference.__name__.removeprefix("_")

    def run(first: Tensor, *args: Any) -> Any:
        """For tensors that have memory."""
        kernel = cpu
        if not is_cpu(first):
            kernels = None if gpu is None else triton_kernels(first)
            kernel = None if kernels is None else getattr(kernels, str(gpu))
        made = None if kernel is None else kernel(first, *args)
        return reference(first, *args) if made is None else made

    def as_operation(function: Callable[..., Any]) -> Callable[..., Any]:
        @torch.no_grad()
        def implementation(first: Tensor, *args: Any) -> Any:
            check_memory(first, *(arg for arg in args if isinstance(arg, Tensor)))
            made = function(first, *args)
            if results == 1:
                return made
            flat = flattened(made) if results is None else made
            return tuple(first.new_empty(0) if each is None else each for each in flat)

        return implementation

    parameters = list(inspect.signature(reference).parameters.values())
    arguments = ", ".join(_argument(each) for each in parameters)
    tensors_of_schema = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * (results or FLAT))})"
    library.define(f"{name}({arguments}) -> {tensors_of_schema}")
    library.impl(name, as_operation(run), "CompositeExplicitAutograd")
    torch.library.register_fake(f"quaver::{name}", as_operation(fake or reference), lib=library)
    registered = getattr(torch.ops.quaver, name)
    if layout is not None:
        registered = returning_operands(registered, layout)

    def call(first: Tensor, *args: Any) -> Any:
        # As `phases.phase`, without a call of its own: casts and matmuls are small where a host is too slow.
        if phase and not is_dynamo_compiling() and (profiler._is_profiler_enabled or phases.watched is not None):
            with phases.opened(phase, (first, *args)):
                return (registered if runs_as_operation(first, in_graphs) else run)(first, *args)
        return (registered if runs_as_operation(first, in_graphs) else run)(first, *args)

    call.__name__, call.__doc__ = name, reference.__doc__
    return call


def _argument(parameter: inspect.Parameter) -> str:
    given = '""' if parameter.default == "" else parameter.default
    default = "" if parameter.default is inspect.Parameter.empty else f"={given}"
    return f"{_SCHEMA_TYPES.get(parameter.annotation, parameter.annotation)} {parameter.name}{default}"


def returning_operands(registered: Any, layout: Callable[..., ScaleLayout]) -> Callable[..., Operands]:
    """The function that calls a registered cast, which returns tensors, and returns `Operands`; `layout` as above."""
    names = [each.name for each in registered.default._schema.arguments]
    row, column = names.index("row"), names.index("column")

    def call(*args: Any) -> Operands:
        return unflattened(registered(*args), args[row], args[column], layout(*args))

    return call


def runs_as_operation(tensor: Tensor, in_graphs: bool = False) -> bool:
    """Whether code on `tensor` must call a registered operation; see the notes at the top."""
    if torch.compiler.is_dynamo_compiling():
        return in_graphs or is_cpu(tensor)
    return not runs_directly() or type(tensor) not in PLAIN_TYPES


def triton_kernels(hp: Tensor) -> Any:
    """The module of the Triton kernels on a GPU that runs them, else None; a GPU that does not is said once."""
    if not is_cuda(hp) or torch.compiler.is_dynamo_compiling():
        return None
    from quaver.kernels import triton_blocks, triton_cast  # import triton, which PyTorch for CPUs comes without

    obstacle = triton_blocks.obstacle_of(hp.device.index)
    if obstacle is None:
        return triton_cast
    say_once(
        f"casts on {hp.device}",
        f"float8 casts on {hp.device} run in PyTorch, in several passes over memory: {obstacle}",
    )
    return None

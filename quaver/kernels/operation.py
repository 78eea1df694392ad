"""Registers a cast or a matmul as an operation, and returns the function that the rest of the package calls.

    cast_tensorwise = register_operation(reference, cpu=..., gpu="cast_tensorwise", phase="quaver::cast")

registers `torch.ops.quaver.cast_tensorwise`, with a schema from the reference's annotations, and returns a function of
the same arguments. The reference is traceable PyTorch. It is the oracle of the kernels, and runs if no kernel supports
the dtype, strides or device of the tensor. It is also the fake kernel, unless `fake` is given.

                        eager                 under a dispatch mode, fake      compiled
    CPU                 kernel or reference   the operation                    the operation
    GPU                 kernel or reference   the operation                    reference, or `in_graphs` the operation

Eager code on plain tensors calls the kernel directly, which saves the dispatcher's time. Under a dispatch mode, and on
fake tensors and other subclasses, it calls the operation. So a mode sees one operation, whichever kernel runs, and only
the implementation reads memory.

On a CPU a cast stays one operation in a graph, because compiled C++ casts along columns slowly. The operation also
reads the stored tensor, as eager code does, where Inductor would keep the producer's float32; so codes are
bit-identical to eager. On a GPU Inductor gets the reference, which it fuses with the producer of the matrix.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from quaver.kernels.cpu import check_memory, runs_directly
from quaver.kernels.operands import FlatOperands, Operands, flatten_operands, unflatten_operands
from quaver.recipes.formats import get_format
from quaver.recipes.scale_layout import ScaleLayout
from quaver.recipes.scale_rules import check_rule
from quaver.recipes.scaling import PLAIN_TYPES
from quaver.runtime import phases
from quaver.runtime.devices import is_cpu, is_cuda
from quaver.runtime.slow_paths import report_slow_path

is_dynamo_compiling = torch.compiler.is_dynamo_compiling

library = torch.library.Library("quaver", "FRAGMENT")

_ARGUMENT_CHECKS: dict[str, Callable[[Any], object]] = {"float8_dtype": get_format, "rule": check_rule}
"""Functions that raise ValueError for a bad value of an argument, by its name, which only callers of
`torch.ops.quaver` can give. The function of `register_operation` calls a kernel without them."""

_SCHEMA_TYPES = {"torch.dtype": "ScalarType", "Tensor | None": "Tensor?", "Sequence[int]": "int[]"}


def register_operation(
    reference: Callable[..., Any],
    *,
    arguments: type[tuple[Any, ...]] | None = None,
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
        reference: named like the operation, with a leading underscore. Its first argument is a tensor, and a cast's
            second one a float8 dtype. It returns `results` tensors, None for tensors that were not requested; a cast
            returns `Operands`.
        arguments: a `NamedTuple` of the arguments after the first. The reference and the kernels then take it as their
            second parameter, and its fields give the schema. None if they take each argument.
        results: the number of tensors. With more than one, the operation returns empty tensors of shape (0,) for None.
            Results have no autograd history. None for a cast: the operation returns the tensors of `flatten_operands`,
            and its function `Operands`.
        cpu: the kernel for CPUs, with the arguments of `reference`; it returns None for unsupported tensors.
        gpu: the name of the kernel for GPUs in triton_cast.py, which also returns None for such tensors.
        fake: computes results on fake tensors; None to use the reference.
        in_graphs: whether code compiled for a GPU calls the operation instead of the reference.
        layout: for a cast, the function that returns the layout of row codes from the cast's arguments, by keyword.
        phase: the profiler range of a call (runtime/phases.py).
    """
    name = reference.__name__.removeprefix("_")
    run_kernel = _with_kernels(reference, cpu, gpu, arguments)
    outputs = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * (results or len(FlatOperands._fields)))})"
    library.define(f"{name}({_format_parameters(reference, arguments)}) -> {outputs}")
    registered = getattr(torch.ops.quaver, name)
    checks = [_ARGUMENT_CHECKS.get(argument.name) for argument in registered.default._schema.arguments[1:]]
    library.impl(name, _make_implementation(run_kernel, results, checks), "CompositeExplicitAutograd")
    run_fake = _with_kernels(fake or reference, None, None, arguments)
    torch.library.register_fake(f"quaver::{name}", _make_implementation(run_fake, results, checks), lib=library)
    if layout is not None:
        registered = wrap_registered_cast(registered, layout)

    def dispatch(first: Tensor, *args: Any) -> Any:
        # Inlines `phases.phase`: the host's time limits small casts and matmuls.
        if phase and not is_dynamo_compiling() and (profiler._is_profiler_enabled or phases.tracked_phases is not None):
            with phases.open_phase(phase, (first, *args)):
                return (registered if runs_as_operation(first, in_graphs) else run_kernel)(first, *args)
        return (registered if runs_as_operation(first, in_graphs) else run_kernel)(first, *args)

    dispatch.__name__, dispatch.__doc__ = name, reference.__doc__
    return dispatch


def _with_kernels(
    reference: Callable[..., Any],
    cpu: Callable[..., Any] | None,
    gpu: str | None,
    arguments: type[tuple[Any, ...]] | None,
) -> Callable[..., Any]:
    """Return a function that runs the kernel for a tensor's device, or the reference if none supports the tensor."""

    def run_kernel(first: Tensor, *args: Any) -> Any:
        if arguments is not None:
            args = (arguments(*args),)
        kernel = cpu
        if not is_cpu(first):
            kernels = None if gpu is None else find_triton_kernels(first)
            kernel = None if kernels is None else getattr(kernels, str(gpu))
        result = None if kernel is None else kernel(first, *args)
        return reference(first, *args) if result is None else result

    return run_kernel


def _make_implementation(
    function: Callable[..., Any], results: int | None, checks: Sequence[Callable[[Any], object] | None]
) -> Callable[..., Any]:
    """Return `function` with results that the operation's schema can express: tensors, neither `Operands` nor None.

    `checks`: for each argument after the first, a function that raises for a bad value, or None.
    """
    checks_by_index = [(index, check) for index, check in enumerate(checks) if check is not None]

    @torch.no_grad()
    def implementation(first: Tensor, *args: Any) -> Any:
        for index, check in checks_by_index:
            check(args[index])
        check_memory(first, *(arg for arg in args if isinstance(arg, Tensor)))
        result = function(first, *args)
        if results == 1:
            return result
        tensors = flatten_operands(result) if results is None else result
        return tuple(first.new_empty(0) if tensor is None else tensor for tensor in tensors)

    return implementation


def _format_parameters(reference: Callable[..., Any], arguments: type[tuple[Any, ...]] | None) -> str:
    if arguments is None:
        return format_parameters(reference)
    first = next(iter(inspect.signature(reference).parameters.values()))
    return f"{_format_parameter(first)}, {format_parameters(arguments)}"


def format_parameters(function: Callable[..., Any], first: int = 0) -> str:
    """Return the parameters of `function` from number `first` on as the arguments of an operation's schema."""
    return ", ".join(map(_format_parameter, list(inspect.signature(function).parameters.values())[first:]))


def _format_parameter(parameter: inspect.Parameter) -> str:
    value = '""' if parameter.default == "" else parameter.default
    default = "" if parameter.default is inspect.Parameter.empty else f"={value}"
    annotation = getattr(parameter.annotation, "__forward_arg__", parameter.annotation)  # of a `NamedTuple`
    return f"{_SCHEMA_TYPES.get(annotation, annotation)} {parameter.name}{default}"


def wrap_registered_cast(registered: Any, layout: Callable[..., ScaleLayout]) -> Callable[..., Operands]:
    """Call a registered cast, which returns flat tensors, and return `Operands`.

    `layout`: as for `register_operation`.
    """
    names = [argument.name for argument in registered.default._schema.arguments]

    def cast(*args: Any) -> Operands:
        named = dict(zip(names, args, strict=True))
        return unflatten_operands(FlatOperands(*registered(*args)), named["row"], named["column"], layout(**named))

    return cast


def runs_as_operation(tensor: Tensor, in_graphs: bool = False) -> bool:
    """Return whether a call on `tensor` goes through the registered operation; see the notes at the top."""
    if torch.compiler.is_dynamo_compiling():
        return in_graphs or is_cpu(tensor)
    return not runs_directly() or type(tensor) not in PLAIN_TYPES


def find_triton_kernels(hp: Tensor) -> Any:
    """Return the module of the Triton kernels if the GPU of `hp` runs them, else None, which is reported once."""
    if not is_cuda(hp) or torch.compiler.is_dynamo_compiling():
        return None
    from quaver.kernels import triton_blocks, triton_cast  # they import triton, which PyTorch for CPUs lacks

    obstacle = triton_blocks.explain_kernel_obstacle(hp.device.index)
    if obstacle is None:
        return triton_cast
    report_slow_path(
        f"casts on {hp.device}",
        f"float8 casts on {hp.device} run in PyTorch, in several passes over memory: {obstacle}",
    )
    return None

"""The Triton code that torch.compile writes for a Hopper GPU, on a machine without one.

Dynamo and AOTAutograd run on fake tensors of a CPU that quaver takes for a GPU's (quaver/memory/faking/gpu_like.py).
The graphs that they make, forward and backward, are then said to be on `cuda:0`, and Inductor lowers, fuses and writes
code as it does for an H100, whose properties it is told. Nothing is loaded or run: results are empty tensors.

Decisions that Inductor leaves to a measurement on the GPU are not made here: which of several tiles a kernel takes, and
all of max-autotune. The passes before the graphs are divided see a CPU, as those of memory predictions do.
"""

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.runtime.triton_helpers
import torch._inductor.scheduler
import triton
from torch import Tensor, fx
from torch._inductor import compile_fx
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._pytree import tree_map
from triton.backends.compiler import GPUTarget

from quaver.memory.compiling.compiled import COMPILES_FOR_A_GPU
from quaver.memory.compiling.inductor import without_caches
from quaver.memory.faking.fakes import Fakes
from quaver.memory.faking.gpu_like import as_on_a_gpu
from quaver.memory.faking.target import predicting_for

GPU = torch.device("cuda", 0)
HOPPER = GPUTarget("cuda", 90, 32)
_PROPERTIES = {
    "multi_processor_count": 132,
    "major": 9,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "warp_size": 32,
}
_KERNEL = "async_compile.triton("


@dataclass(frozen=True)
class Operator:
    """An operator of the graph that is quaver's, and that Inductor therefore calls."""

    name: str
    read: tuple[Tensor, ...]
    made: tuple[Tensor, ...]
    """Fake tensors: shapes and dtypes."""
    given: tuple[Any, ...]
    """All positional arguments, tensors as fake tensors."""


@dataclass(frozen=True)
class Code:
    """What Inductor wrote for one graph."""

    is_backward: bool
    source: str
    kernels: dict[str, str]
    """The source of each Triton kernel, as Inductor would compile it, by name."""
    launches: tuple[str, ...]
    """The kernels in the order in which they are launched, by name."""
    operators: tuple[Operator, ...]


@contextmanager
def written_for_a_gpu() -> Iterator[tuple[Fakes, Callable[..., Any], list[Code]]]:
    """Inside the block tensors are fake, and compiled code is written for a GPU.

    Yields:
        The fake tensors' mode; a backend for `torch.compile`; and what was written, a list that grows.
    Raises:
        NotImplementedError: torch is too old.
    """
    if not COMPILES_FOR_A_GPU:
        raise NotImplementedError(f"code for a GPU is written with torch 2.13 or newer, this is {torch.__version__}")
    written: list[Code] = []
    torch.compiler.reset()
    with ExitStack() as stack:
        stack.enter_context(predicting_for("cuda"))
        stack.enter_context(as_on_a_gpu())
        stack.enter_context(without_caches())
        stack.enter_context(patch.object(FakeTensorMode, "ignore_compile_internals", classmethod(lambda cls: True)))
        stack.callback(torch.compiler.reset)
        backend = partial(compile_fx.compile_fx, inner_compile=partial(_write, written))
        yield stack.enter_context(Fakes()), backend, written


@contextmanager
def as_hopper() -> Iterator[None]:
    """Inside the block Inductor and Triton find a Hopper GPU, for which they write and compile, and which runs nothing.

    For a process that runs nothing else: Triton's driver stays, and Inductor remembers what it was told.
    """
    triton.runtime.driver.set_active(_Driver())
    hints = DeviceProperties(type="cuda", index=0, cc=90, **_PROPERTIES)
    found = SimpleNamespace(name="H100", minor=0, shared_memory_per_block_optin=232448, **_PROPERTIES)
    with ExitStack() as stack:
        for owner, name, value in (
            (DeviceProperties, "create", lambda device: hints),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "get_device_properties", lambda device=None: found),
            (torch.cuda, "current_device", lambda: 0),
            (torch.version, "cuda", torch.version.cuda or "12.8"),
            (compile_fx, "_check_triton_bf16_support", lambda graph: None),
            (torch._inductor.scheduler, "has_triton", lambda device=None: True),
            (torch._inductor.runtime.triton_helpers, "set_driver_to_gpu", lambda: None),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


class _Driver:
    """What Triton asks of a driver to compile."""

    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return GPU


class _Written(Exception):
    """Ends Inductor's work when the code is there."""

    def __init__(self, source: str) -> None:
        self.source = source


def _write(written: list[Code], graph: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Callable[..., Any]:
    """Stands for `compile_fx_inner`: has Inductor write the code, and returns a function that returns empty tensors."""
    on_gpu, inputs_on_gpu = _moved(graph, inputs)
    try:
        with as_hopper(), patch.object(GraphLowering, "_compile_to_module_lines", _end_here):
            compile_fx.compile_fx_inner(on_gpu, inputs_on_gpu, **options)
    except InductorError as error:
        if not isinstance(error.inner_exception, _Written):
            raise
        source = error.inner_exception.source
    written.append(_read(source, options.get("is_backward", False), graph))
    results = next(node for node in graph.graph.nodes if node.op == "output").args[0]

    def run(arguments: list[Any]) -> list[Any]:
        arguments.clear()
        return [_empty(result) for result in results]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _end_here(graph: GraphLowering, wrapper_code: Any) -> None:
    raise _Written(wrapper_code.value)


def _empty(result: Any) -> Any:
    value = result.meta["val"] if isinstance(result, fx.Node) else result
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _moved(graph: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any]]:
    """A copy of the graph whose tensors are said to be on the GPU, and of its inputs."""
    moved = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    with unset_fake_temporarily():
        for node, original in zip(moved.graph.nodes, graph.graph.nodes, strict=True):
            node.meta = {
                name: tree_map(_on_gpu, value) if name == "val" else value for name, value in original.meta.items()
            }
            node.args, node.kwargs = tree_map(_gpu_for_cpu, (node.args, node.kwargs))
        return moved, [_on_gpu(each) for each in inputs]


def _on_gpu(value: Any) -> Any:
    if not isinstance(value, FakeTensor):
        return value
    meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    return FakeTensor(value.fake_mode, meta, GPU)


def _gpu_for_cpu(value: Any) -> Any:
    return GPU if isinstance(value, torch.device) else value


def _read(source: str, is_backward: bool, graph: fx.GraphModule) -> Code:
    tree = ast.parse(source)
    assigned = [each for each in tree.body if isinstance(each, ast.Assign)]
    kernels = {
        each.targets[0].id: each.value.args[1].value  # type: ignore[attr-defined]
        for each in assigned
        if ast.unparse(each.value).startswith(_KERNEL)
    }
    calls = (
        node.func for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    )
    launched = [call for call in calls if call.attr == "run" and ast.unparse(call.value) in kernels]
    launched.sort(key=lambda call: call.lineno)
    return Code(
        is_backward, source, kernels, tuple(ast.unparse(each.value) for each in launched), tuple(_operators(graph))
    )


def _operators(graph: fx.GraphModule) -> Iterator[Operator]:
    for node in graph.graph.nodes:
        name = str(node.target)
        if node.op == "call_function" and name.startswith("quaver."):
            given = tuple(each.meta["val"] if isinstance(each, fx.Node) else each for each in node.args)
            made = node.meta.get("val")
            made = made if isinstance(made, (tuple, list)) else (made,)
            yield Operator(
                name.removeprefix("quaver.").removesuffix(".default"),
                tuple(each for each in given if isinstance(each, Tensor)),
                tuple(each for each in made if isinstance(each, Tensor)),
                given,
            )

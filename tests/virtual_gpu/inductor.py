"""Runs the Triton code that Inductor writes for a GPU: kernels in the interpreter, the wrapper on CPU tensors.

    with virtual_gpu("h100") as card, inductor(card) as launches:
        torch.compile(block)(input).sum().backward()

Inductor lowers each graph for the GPU, as for `quaver bench ledger`, with its fusions, layouts, splits of reductions
and grids. The first config of each kernel runs. Allocations are filled with NaN, which shows reads of memory that was
not written. Not simulated: attention, which runs the CPU's kernel; ptxas; and the device's arithmetic. libdevice's
functions are NumPy's, and FMAs round twice.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
import triton.language as tl
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime import triton_helpers, triton_heuristics
from triton.runtime import interpreter

from quaver.kernels import triton_blocks
from quaver.lab.bench.ledger import gpu_code
from quaver.lab.memory.compiling.inductor import disable_caches

if TYPE_CHECKING:
    from tests.virtual_gpu import Card

_TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "fp8e4nv": torch.float8_e4m3fn,
    "fp8e5": torch.float8_e5m2,
}
MAX_PROGRAMS = 2**31 - 1, 65535, 65535
"""The largest grid in x, y and z (CUDA C++ Programming Guide, compute capabilities)."""


@contextlib.contextmanager
def compile_for_card(card: Card) -> Iterator[Counter[str]]:
    """Let torch.compile compile for `card` inside the block, and run the code that Inductor writes.

    Enter it within `virtual_gpu`. Yields the number of launches of each Triton kernel, by name.

    Raises:
        RuntimeError: Triton's interpreter is off.
        ValueError: the card is not in `gpu_code.GPU_PROPERTIES`.
    """
    if not triton_blocks.INTERPRETED:
        raise RuntimeError("expected Triton to interpret: set TRITON_INTERPRET=1 before the first import of triton")
    if card.name.upper() not in gpu_code.GPU_PROPERTIES:
        raise ValueError(f"expected one of {', '.join(gpu_code.GPU_PROPERTIES).lower()}, got {card.name!r}")
    launches: Counter[str] = Counter()
    attention = F.scaled_dot_product_attention
    gpu = gpu_code.GPU_PROPERTIES[card.name.upper()]
    torch.compiler.reset()
    with contextlib.ExitStack() as stack:
        stack.enter_context(disable_caches())
        stack.enter_context(gpu_code.compile_for_gpu(gpu))
        replace = lambda owner, name, value: stack.enter_context(mock.patch.object(owner, name, value))  # noqa: E731
        replace(F, "scaled_dot_product_attention", attention)
        replace(GraphLowering, "_compile_to_module_lines", functools.partialmethod(_load_module, launches))
        replace(triton_heuristics, "cached_autotune", _interpret)
        replace(triton_helpers, "set_driver_to_gpu", lambda: None)
        replace(triton_helpers, "libdevice", Libdevice())
        replace(interpreter, "_convert_float", _convert_float)
        replace(interpreter, "_patch_lang_tensor", functools.partial(_patch_tensor, interpreter._patch_lang_tensor))
        try:
            yield launches
        finally:
            torch.compiler.reset()


_REPLACED_DEVICE_CODE = {
    "from torch._C import _cuda_getCurrentRawStream as get_raw_stream": "get_raw_stream = lambda index: 0",
    "torch._C._dynamo.guards._empty_strided_cuda": "_empty_strided",
    "torch.cuda._DeviceGuard(0)": "_nullcontext()",
    "device(type='cuda', index=0)": "device(type='cpu')",
    "async_compile = AsyncCompile()": "async_compile = _Kernels()",
}
"""Replacements of the device functions in Inductor's wrapper code."""

_numbers = itertools.count()


def _load_module(graph: GraphLowering, launches: Counter[str], wrapper_code: Any) -> ModuleType:
    source = wrapper_code.value
    for device_code, replacement in _REPLACED_DEVICE_CODE.items():
        source = source.replace(device_code, replacement)
    module = ModuleType(f"inductor_on_a_virtual_gpu_{next(_numbers)}")
    module.__file__ = f"<{module.__name__}>"
    names = {"_empty_strided": _empty_strided, "_nullcontext": contextlib.nullcontext}
    vars(module).update(graph.constants, _Kernels=functools.partial(Kernels, launches), **names)
    exec(_compile(source, module.__file__), vars(module))
    return module


def _compile(source: str, name: str) -> Any:
    """Compile `source` so that `inspect`, which Triton's interpreter uses, finds it."""
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    return compile(source, name, "exec")


def _empty_strided(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty_strided(size, stride, dtype=dtype)
    tensor.untyped_storage().fill_(255)  # NaN in each floating-point format
    return tensor


class Kernels:
    """Replaces Inductor's AsyncCompile."""

    def __init__(self, launches: Counter[str]) -> None:
        self._launches = launches

    def triton(self, name: str, source: str, device_str: str) -> InterpretedKernel:
        namespace: dict[str, Any] = {}
        file = f"<{name}_{next(_numbers)}>"
        namespace["__file__"] = file
        exec(_compile(source, file), namespace)
        kernel: InterpretedKernel = namespace[name]
        kernel.launches, kernel.name = self._launches, name
        return kernel

    def wait(self, scope: dict[str, Any]) -> None:
        pass


class InterpretedKernel:
    """A kernel of Inductor that Triton interprets, with the first of its configs."""

    launches: Counter[str]
    name: str

    def __init__(self, function: Any, config: dict[str, int], inductor_meta: dict[str, Any]) -> None:
        self._function, self._config = function, config
        self._grid = triton_heuristics.GridExpr.from_meta(inductor_meta, config)

    def run(self, *args: Any, stream: int) -> None:
        """Launch the kernel; the wrapper calls this."""
        self.launches[self.name] += 1
        names = self._function.arg_names
        sizes = {name: value for name, value in zip(names, args, strict=False) if isinstance(value, int)}
        grid = self._grid.eval_slow({**sizes, **self._config})
        if any(programs > most for programs, most in zip(grid, MAX_PROGRAMS, strict=True)):
            raise RuntimeError(f"CUDA error: invalid configuration argument: a grid of {grid}")
        self._function[grid](*args, **self._config)


def _interpret(
    size_hints: Any, configs: list[Any], triton_meta: Any, heuristic_type: Any, *args: Any, **options: Any
) -> Callable[[Any], InterpretedKernel]:
    def decorate(function: Any) -> InterpretedKernel:
        config = {name: value for name, value in configs[0].kwargs.items() if name in function.arg_names}
        return InterpretedKernel(function, config, options["inductor_meta"])

    return decorate


class Libdevice:
    """libdevice's functions in NumPy and float64, rounded once."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)
        function = _NAMED.get(name) or getattr(np, name)

        def call(*args: Any) -> Any:
            wide = [tensor.handle.data.astype(np.float64) for tensor in args]
            with np.errstate(all="ignore"):
                result = np.asarray(function(*wide))
            first = args[0]
            dtype = np.bool_ if result.dtype == np.bool_ else first.handle.data.dtype
            kind = tl.int1 if result.dtype == np.bool_ else first.dtype
            handle = interpreter.TensorHandle(result.astype(dtype), kind)
            return tl.tensor(handle, tl.block_type(kind, list(result.shape)) if result.shape else kind)

        return call


_NAMED: dict[str, Callable[..., Any]] = {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "pow": np.power,
    "floor": np.floor,
    "erf": np.vectorize(lambda x: float(torch.erf(torch.tensor(x, dtype=torch.float64)))),
}


def _patch_tensor(patch: Callable[..., None], tensor: Any, scope: Any) -> None:
    """Patch as the interpreter does, but with `__index__` of a scalar: Triton 3.6 gives NumPy 2.4 arrays of one dim."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _convert_float(input: np.ndarray, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> np.ndarray:
    """Replaces the interpreter's conversion, whose rounding loses the carry; rounds to nearest even."""
    bits = np.ascontiguousarray(input).view(f"int{input_dtype.primitive_bitwidth}")
    numbers = torch.from_numpy(bits.copy()).view(_TORCH_DTYPES[input_dtype.name])
    converted = numbers.to(_TORCH_DTYPES[output_dtype.name])
    integer = f"int{output_dtype.primitive_bitwidth}"
    return converted.view(getattr(torch, integer)).numpy().view(f"u{integer}").reshape(input.shape)

"""What the tests of Triton kernels share: inputs, comparison, an interpreter in another process, and compiled code.

The interpreter must be chosen before triton is first imported, so it runs in a process of its own.
"""

import multiprocessing
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CONVERSION = {E4M3: "cvt.rn.satfinite.e4m3x2.f32", E5M2: "cvt.rn.satfinite.e5m2x2.f32"}
TRITON_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    E4M3: "fp8e4nv",
    E5M2: "fp8e5",
}


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit dtype; for float32 those of bfloat16, with noise below."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    if dtype is torch.float32:
        return bits.view(torch.bfloat16).float() * (1 + torch.rand(2**16) * 2**-8)
    return bits.view(dtype)


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Every bit, but those of NaNs."""
    got = got.cpu()
    assert got.dtype is expected.dtype
    assert got.shape == expected.shape
    nan = expected.float().isnan()
    assert got.float().isnan().equal(nan)
    assert got[~nan].view(torch.uint8).equal(expected[~nan].view(torch.uint8)), (got.dtype, got.shape)


@contextmanager
def interpreting_process() -> Iterator[Callable]:
    """Calls a function in a process whose Triton interprets."""
    with process(TRITON_INTERPRET="1") as call:
        yield call


@contextmanager
def process(**environment: str) -> Iterator[Callable]:
    """Calls a function in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, spawn) as pool:
        for name, value in ({"OMP_NUM_THREADS": "1"} | environment).items():
            patch.setenv(name, value)
        yield lambda function, *args: pool.submit(function, *args).result()


class _Hopper:
    """What Triton asks of a driver to compile a launch."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_launches() -> Counter[str]:
    """From now on launches on CPU tensors compile for a GPU, just as there, and run nothing. Counts them by kernel.

    For a process of its own: it replaces Triton's driver.
    """
    launched: Counter[str] = Counter()

    def launch(kernel, grid):
        def compile_only(*args, **options) -> None:
            kernel.run(*args, grid=grid, warmup=True, **options)
            launched[kernel.__name__] += 1

        return compile_only

    triton.runtime.driver.set_active(_Hopper())
    triton.runtime.jit.JITFunction.__getitem__ = launch
    return launched


@contextmanager
def counting_bytes() -> Iterator[Counter[str]]:
    """Counts the bytes that interpreted kernels load and store, by the dtypes of what they point to.

    Atomics count as stores.
    """
    from triton.runtime import interpreter

    moved: Counter[str] = Counter()
    builder = interpreter.InterpreterBuilder

    def counted(name: str, pointers_at: int, mask_at: int) -> Callable:
        original = getattr(builder, name)

        def run(self, *args):
            element = args[pointers_at].get_element_ty()
            moved[str(element)] += int(args[mask_at].data.sum()) * element.primitive_bitwidth // 8
            return original(self, *args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name, *positions in (
            ("create_masked_load", 0, 1),
            ("create_masked_store", 0, 2),
            ("create_atomic_rmw", 1, 3),
        ):
            patch.setattr(builder, name, counted(name, *positions))
        yield moved


def compile_kernel(kernel, pointers, integers, constants, *, warps, narrow=(), capability=90):
    """Triton IR ("ttir") and assembly ("ptx") of `kernel`, as if launched on a GPU.

    Args:
        pointers: dtypes by the names of arguments, which start on 16 bytes as PyTorch's allocations do.
        integers: Triton types by name, of numbers that are divisible by 16.
        constants: the other arguments; None is missing.
        narrow: names of arguments that have no such divisor.
    """
    types = {name: "*" + TRITON_NAMES[dtype] for name, dtype in pointers.items()} | integers
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={name: constants.get(name) for name in kernel.arg_names if name not in types},
        attrs={
            (i,): [["tt.divisibility", 16]]
            for i, name in enumerate(kernel.arg_names)
            if name in types and name not in narrow
        },
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}).asm


def instructions(ptx: str) -> Counter[str]:
    return Counter(re.findall(r"^[ \t]*(?:@!?%p\d+ )?([a-z]\w*(?:\.\w+)*)[ \t]", ptx, re.MULTILINE))


def resources(ptx: str, folder) -> dict[str, int]:
    """What NVIDIA's assembler says of the kernel: registers of a thread, bytes of spills."""
    file = folder / "kernel.ptx"
    file.write_text(ptx)
    gpu = re.search(r"^\.target (\w+)", ptx, re.MULTILINE).group(1)
    for tool in ("ptxas", "ptxas_blackwell"):  # the first may be too old for this PTX
        path = getattr(triton.knobs.nvidia, tool).path
        command = [path, "-v", f"--gpu-name={gpu}", str(file), "-o", str(folder / "kernel.cubin")]
        assembled = subprocess.run(command, capture_output=True, text=True)
        if assembled.returncode == 0:
            break
    patterns = {
        "registers": r"Used (\d+) registers",
        "stores": r"(\d+) bytes spill st",
        "loads": r"(\d+) bytes spill l",
    }
    return {name: int(re.search(pattern, assembled.stderr).group(1)) for name, pattern in patterns.items()}

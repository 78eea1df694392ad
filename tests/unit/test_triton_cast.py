"""The Triton cast without a GPU: run in Triton's interpreter against the oracle, and compiled for GPUs to be read.

The interpreter must be chosen before triton is first imported, so it runs in a process of its own. Two conversions are
the only steps that it takes by other instructions than a GPU (see the end of triton_cast.py): bfloat16 to float32, and
float32 to float8. What a GPU is told to do there is read from the compiled code.
"""

import itertools
import math
import multiprocessing
import re
import subprocess
from collections import Counter
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from quaver import scaling
from quaver.formats import FORMATS
from quaver.kernels import triton_cast

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = pytest.mark.parametrize("float8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
HP = pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
NAN, INF = math.nan, math.inf
TILE_BYTES = triton_cast.TILE_BYTES

needs_compiler = pytest.mark.skipif(triton_cast.INTERPRETED, reason="TRITON_INTERPRET is set: kernels do not compile")


def every_value(dtype: torch.dtype) -> torch.Tensor:
    """Every value of a 16-bit dtype; for float32 those of bfloat16, with noise below."""
    bits = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    if dtype is torch.float32:
        return bits.view(torch.bfloat16).float() * (1 + torch.rand(2**16) * 2**-8)
    return bits.view(dtype)


def assert_is_the_oracle(hp, scale, float8_dtype, power_of_2=False):
    """Every bit, but those of NaNs."""
    assert triton_cast.takes(hp, float8_dtype)
    quant_scale = torch.tensor(scale)
    with np.errstate(all="ignore"):  # the interpreter's infinities and NaNs are wanted
        got = triton_cast.cast_with_kept_scale(hp, quant_scale, float8_dtype, power_of_2=power_of_2)
    expected = scaling.cast_with_kept_scale(hp, quant_scale, float8_dtype, power_of_2=power_of_2)
    for g, e in zip(got, expected, strict=True):
        assert g.dtype is e.dtype
        assert g.shape == e.shape
        nan = e.float().isnan()
        assert g.float().isnan().equal(nan)
        assert g[~nan].view(torch.uint8).equal(e[~nan].view(torch.uint8)), (hp.dtype, hp.shape, scale)
    return got


# What runs in the interpreter's process.


def _every_value(hp_dtype, float8_dtype):
    triton_cast.TILE_BYTES = 1 << 16  # the interpreter pays for each program
    hp = every_value(hp_dtype)
    for scale in (1.0, 0.37, 2.0**20, 448e12, 1e-30, 3e38, 1e-42, INF):
        assert_is_the_oracle(hp, scale, float8_dtype)
    assert_is_the_oracle(hp[hp.isfinite()], 0.0, float8_dtype)


def _unknown_scales(hp_dtype, float8_dtype):
    tensors = [torch.zeros(3, 5), torch.full((2, 2), 1e-20), torch.tensor(0.7), torch.randn(33, 7) * 1e-6]
    tensors += [torch.tensor([1.0, bad, -2.0]) for bad in (NAN, INF, -INF)]
    tensors += [torch.tensor([INF, NAN]), torch.tensor([1e-40, 0.0]), torch.tensor([3.0e4, -6.0e4])]
    for hp, scale, power_of_2 in itertools.product(tensors, (0.0, -0.0, -3.0, NAN), (False, True)):
        assert_is_the_oracle(hp.to(hp_dtype), scale, float8_dtype, power_of_2)


def _sizes(hp_dtype, float8_dtype):
    triton_cast.TILE_BYTES = TILE_BYTES
    tile = triton_cast.TILE_BYTES // hp_dtype.itemsize
    for size in (0, 1, 2, 15, 16, 17, tile - 1, tile, tile + 1, 3 * tile + 5):
        hp = torch.randn(size).to(hp_dtype)
        if size:
            hp[-1] = -7.25  # the last element matters
        for scale in (0.0, 16.0, 100.0, 2.0**14):
            observed = assert_is_the_oracle(hp, scale, float8_dtype)[3]
            assert observed[0] == (7.25 if size else 0)
    assert_is_the_oracle(torch.randn(2, 0, 3).to(hp_dtype), 1.0, float8_dtype)
    assert_is_the_oracle(torch.randn(2, 5, 7).to(hp_dtype)[1:], 1.0, float8_dtype)  # starts off 16 bytes


def _few_programs_see_every_tile():
    triton_cast.AMAX_PROGRAMS, triton_cast.TILE_BYTES = 2, TILE_BYTES
    tile = triton_cast.TILE_BYTES // 4
    for position in (0, 2 * tile - 1, 3 * tile, 5 * tile + 3):
        hp = torch.zeros(5 * tile + 4)
        hp[position] = -3.0
        assert assert_is_the_oracle(hp, 0.0, E4M3)[3].tolist() == [3.0, 0.0]


def _saturated_elements_are_counted():
    for float8_dtype, limit in ((E4M3, 464.0), (E5M2, 61440.0)):  # halfway from 448 to 480, from 57344 to 65536
        above = np.nextafter(np.float32(limit), np.float32(INF))
        values = torch.tensor([limit, -limit, above, -above, INF, NAN, 0.0])
        hp = torch.cat([values, torch.zeros(TILE_BYTES), values])  # in several tiles
        assert assert_is_the_oracle(hp, 1.0, float8_dtype)[3][1] == 4


def _elements_moved(scale):
    """How many elements of tiles the kernels load and store for 5000 elements."""
    from triton.runtime import interpreter

    triton_cast.TILE_BYTES = TILE_BYTES
    moved = Counter()
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def counted_load(self, ptrs, mask, *rest):
        moved["loads"] += int(mask.data.sum()) if mask.data.size > 1 else 0
        return load(self, ptrs, mask, *rest)

    def counted_store(self, ptrs, value, mask, *rest):
        moved["stores"] += int(mask.data.sum()) if mask.data.size > 1 else 0
        return store(self, ptrs, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = counted_load, counted_store
    try:
        assert_is_the_oracle(torch.randn(5000), scale, E4M3)
    finally:
        builder.create_masked_load, builder.create_masked_store = load, store
    return moved["loads"], moved["stores"]


@pytest.fixture(scope="module")
def interpreter():
    """Calls a function of this file in a process whose Triton interprets."""
    spawn = multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch, ProcessPoolExecutor(1, spawn) as pool:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        yield lambda function, *args: pool.submit(function, *args).result()


@FLOAT8
@HP
def test_every_value(interpreter, hp_dtype, float8_dtype):
    interpreter(_every_value, hp_dtype, float8_dtype)


@FLOAT8
@HP
def test_an_unknown_scale_is_the_tensors_own(interpreter, hp_dtype, float8_dtype):
    interpreter(_unknown_scales, hp_dtype, float8_dtype)


@FLOAT8
@HP
def test_sizes(interpreter, hp_dtype, float8_dtype):
    interpreter(_sizes, hp_dtype, float8_dtype)


def test_few_programs_see_every_tile(interpreter):
    interpreter(_few_programs_see_every_tile)


def test_saturated_elements_are_counted(interpreter):
    interpreter(_saturated_elements_are_counted)


def test_a_known_scale_costs_one_read(interpreter):
    assert interpreter(_elements_moved, 2.0) == (5000, 5000)
    assert interpreter(_elements_moved, 0.0) == (10_000, 5000)


def test_what_it_takes(interpreter):
    for hp, float8_dtype, takes in (
        (torch.ones(4, 6), E4M3, True),
        (torch.nn.Parameter(torch.ones(4, 6)), E5M2, True),
        (torch.ones(4, 6).t(), E4M3, False),
        (torch.ones(4, 6).double(), E4M3, False),
        (torch.ones(4, 6), torch.float8_e4m3fnuz, False),
        (torch.ones(4, 6, device="meta"), E4M3, False),
    ):
        assert interpreter(triton_cast.takes, hp, float8_dtype) is takes
        if not triton_cast.INTERPRETED:
            assert not triton_cast.takes(hp, float8_dtype)  # without the interpreter a CPU's tensors are not taken


# What a GPU would run.

TRITON_NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    E4M3: "fp8e4nv",
    E5M2: "fp8e5",
}
CONVERSION = {E4M3: "cvt.rn.satfinite.e4m3x2.f32", E5M2: "cvt.rn.satfinite.e5m2x2.f32"}


def compiled(kernel, hp_dtype, float8_dtype=E4M3, *, numel="i32", numel_divides_by_16=True, capability=90):
    """Triton IR ("ttir") and assembly ("ptx"), for arguments that start on 16 bytes as PyTorch's allocations do."""
    fmt = FORMATS[float8_dtype]
    types = {
        "hp_ptr": "*" + TRITON_NAMES[hp_dtype],
        "quant_scale_ptr": "*fp32",
        "codes_ptr": "*" + TRITON_NAMES[float8_dtype],
        "quant_ptr": "*fp32",
        "dequant_ptr": "*fp32",
        "observed_ptr": "*fp32",
        "numel": numel,
    }
    constants = {
        "MAX": fmt.max,
        "SATURATES_ABOVE": fmt.saturates_above,
        "LARGEST_QUANT_SCALE": fmt.max / scaling.EPS,
        "POWER_OF_2": False,
        "TILE": triton_cast.TILE_BYTES // hp_dtype.itemsize,
        "INTERPRETED": False,
    }
    aligned = set(types) - {"quant_scale_ptr"} - (set() if numel_divides_by_16 else {"numel"})
    source = ASTSource(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={name: constants[name] for name in kernel.arg_names if name in constants},
        attrs={(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": triton_cast.WARPS}).asm


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


@pytest.fixture
def fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@needs_compiler
@pytest.mark.usefixtures("fresh_cache")
@FLOAT8
@HP
def test_the_cast_reads_16_bytes_at_a_time_and_rounds_once(hp_dtype, float8_dtype, tmp_path):
    ptx = compiled(triton_cast._cast, hp_dtype, float8_dtype)["ptx"]
    found = instructions(ptx)
    elements = triton_cast.TILE_BYTES // hp_dtype.itemsize // (32 * triton_cast.WARPS)  # of a thread
    assert found["ld.global.v4.b32"] == elements * hp_dtype.itemsize // 16
    assert found["ld.global.b32"] == 2  # the scale, and the amax recorded so far
    assert found[CONVERSION[float8_dtype]] == elements // 2
    if hp_dtype is torch.float32:
        assert found["st.global.b32"] == elements // 4 + 2  # and the two scales
    else:
        assert found["st.global.v2.b32"] == elements // 8
        assert found["st.global.b32"] == 2
    assert found["fma.rn.f32"] == elements
    assert found["min.NaN.xorsign.abs.f32"] == elements  # the clamp keeps NaN
    assert found["div.rn.f64"] == 2
    assert ".ftz" not in ptx
    used = resources(ptx, tmp_path)
    assert used["stores"] == used["loads"] == 0
    assert used["registers"] <= 72  # 7 programs on a multiprocessor: 56 KiB of loads under way


@needs_compiler
@pytest.mark.usefixtures("fresh_cache")
@HP
def test_the_amax_reads_16_bytes_at_a_time(hp_dtype, tmp_path):
    ptx = compiled(triton_cast._amax_if_unknown, hp_dtype)["ptx"]
    found = instructions(ptx)
    assert found["ld.global.v4.b32"] == 4
    assert found["ld.global.b32"] == 1
    assert sum(found[f"{kind}.global.gpu.relaxed.max.s32"] for kind in ("atom", "red")) == 1
    used = resources(ptx, tmp_path)
    assert used["stores"] == used["loads"] == 0
    assert used["registers"] <= 64


@needs_compiler
@pytest.mark.usefixtures("fresh_cache")
def test_odd_sizes_do_not_spill(tmp_path):
    used = resources(compiled(triton_cast._cast, torch.bfloat16, numel_divides_by_16=False)["ptx"], tmp_path)
    assert used["stores"] == used["loads"] == 0


@needs_compiler
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize("numel", ["i32", "i64"])
def test_positions_are_64_bit(numel):
    for kernel in (triton_cast._cast, triton_cast._amax_if_unknown):
        ir = compiled(kernel, torch.bfloat16, numel=numel)["ttir"]
        assert set(re.findall(r"arith\.muli .* : (\w+)", ir)) == {"i64"}  # a tile's number times its size
        assert set(re.findall(r"tt\.addptr %(?:hp|codes)_ptr, .*, (\w+)", ir)) == {"i64"}


@needs_compiler
@pytest.mark.usefixtures("fresh_cache")
@FLOAT8
@pytest.mark.parametrize("capability", [100, 120])
def test_later_gpus_round_once_too(float8_dtype, capability):
    ptx = compiled(triton_cast._cast, torch.bfloat16, float8_dtype, capability=capability)["ptx"]
    found = instructions(ptx)
    assert found[CONVERSION[float8_dtype]] == 16
    assert found["ld.global.v4.b32"] == 4
    assert ".ftz" not in ptx

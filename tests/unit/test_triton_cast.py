"""The Triton cast without a GPU: run in Triton's interpreter against the oracle, and compiled for GPUs to be read.

Two conversions are the only steps that the interpreter takes by other instructions than a GPU (see the end of
triton_blocks.py): bfloat16 to float32, and float32 to float8. What a GPU is told to do is read from the compiled code.
"""

import itertools
import math
import re

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quaver import scaling
from quaver.formats import FORMATS
from quaver.kernels import cast, triton_cast
from tests.triton_kernels import (
    CONVERSION,
    E4M3,
    E5M2,
    assert_same_bits,
    compile_kernel,
    counting_bytes,
    every_value,
    instructions,
    interpreting_process,
    resources,
)

FLOAT8 = pytest.mark.parametrize("float8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
HP = pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
NAN, INF = math.nan, math.inf
TILE_BYTES = triton_cast.TILE_BYTES

needs_compiler = pytest.mark.skipif(triton_cast.INTERPRETED, reason="TRITON_INTERPRET is set: kernels do not compile")


def assert_is_the_oracle(hp, scale, float8_dtype, power_of_2=False):
    """Every bit, but those of NaNs."""
    assert triton_cast.takes(hp, float8_dtype)
    quant_scale = torch.tensor(scale)
    with np.errstate(all="ignore"):  # the interpreter's infinities and NaNs are wanted
        got = triton_cast.cast_with_persistent_scale(hp, quant_scale, float8_dtype, power_of_2=power_of_2)
    expected = scaling.cast_with_persistent_scale(hp, quant_scale, float8_dtype, power_of_2=power_of_2)
    for g, e in zip(got, expected, strict=True):
        assert_same_bits(g, e)
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


def _shared_amaxes(hp_dtype):
    for shape in ((1, 1), (5, 700), (300, 33), (64, 64)):
        hp = torch.randn(shape).to(hp_dtype)
        for value in (None, INF, NAN):
            if value is not None:
                hp[0, -1] = value
            for dim in (None, 0, 1):
                with np.errstate(all="ignore"):
                    got = cast.shared_amax(hp, dim)
                assert triton_cast.takes(hp, E4M3)  # else this would compare PyTorch with itself
                assert_same_bits(got, scaling.amax(hp, dim).float())


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


def _bytes_moved(scale):
    """The bytes of hp (float32) and codes that the kernels load and store for 5000 elements."""
    triton_cast.TILE_BYTES = TILE_BYTES
    with counting_bytes() as moved:
        assert_is_the_oracle(torch.randn(5000).bfloat16(), scale, E4M3)
    return moved["bf16"], moved["fp8e4nv"]


@pytest.fixture(scope="module")
def interpreter():
    with interpreting_process() as call:
        yield call


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


@HP
def test_amaxes_that_ranks_share(interpreter, hp_dtype):
    interpreter(_shared_amaxes, hp_dtype)


def test_few_programs_see_every_tile(interpreter):
    interpreter(_few_programs_see_every_tile)


def test_saturated_elements_are_counted(interpreter):
    interpreter(_saturated_elements_are_counted)


def test_a_known_scale_costs_one_read(interpreter):
    assert interpreter(_bytes_moved, 2.0) == (10_000, 5000)
    assert interpreter(_bytes_moved, 0.0) == (20_000, 5000)


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


def compiled(kernel, hp_dtype, float8_dtype=E4M3, *, kept=True, numel="i32", numel_divides_by_16=True, capability=90):
    """See `compile_kernel`."""
    fmt = FORMATS[float8_dtype]
    pointers = {"hp_ptr": hp_dtype, "codes_ptr": float8_dtype}
    pointers |= dict.fromkeys(("quant_ptr", "dequant_ptr", "observed_ptr"), torch.float32)
    pointers |= {"quant_scale_ptr": torch.float32} if kept else {}
    constants = {
        "MAX": fmt.max,
        "SATURATES_ABOVE": fmt.saturates_above,
        "LARGEST_QUANT_SCALE": fmt.max / scaling.EPS,
        "POWER_OF_2": False,
        "SCALE": "kept" if kept else "amax",
        "TILE": triton_cast.TILE_BYTES // hp_dtype.itemsize,
        "INTERPRETED": False,
    }
    narrow = ["quant_scale_ptr"] if numel_divides_by_16 else ["quant_scale_ptr", "numel"]
    options = {"warps": triton_cast.WARPS, "narrow": narrow, "capability": capability}
    return compile_kernel(kernel, pointers, {"numel": numel}, constants, **options)


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
    assert ".NaN" not in ptx  # see to_float8
    assert found["div.rn.f32"] == 1  # of the amax
    assert found["div.rn.f64"] == 1  # of any scale that was kept
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
def test_a_dynamic_scale_asks_for_no_kept_one():
    amax = instructions(compiled(triton_cast._amax_if_unknown, torch.bfloat16, kept=False)["ptx"])
    assert (amax["ld.global.v4.b32"], amax["ld.global.b32"]) == (4, 0)
    cast = instructions(compiled(triton_cast._cast, torch.bfloat16, kept=False)["ptx"])
    assert (cast["ld.global.v4.b32"], cast["ld.global.b32"]) == (4, 1)  # the amax
    assert not any(name.startswith(("atom", "red")) for name in cast)


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

"""SwiGLU and RMSNorm in float8 as a GPU would run them, read from the compiled code: accesses, conversions, registers.

None of it needs a GPU.
"""

import re

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from quaver import scaling
from quaver.formats import FORMATS
from quaver.kernels import (
    triton_blocks,
    triton_produced,
    triton_producer_grads,
    triton_rms_norm,
    triton_rows,
    triton_swiglu,
)
from quaver.kernels.triton_produced import TRITON_HP, Produced
from tests.triton_kernels import CONVERSION, E4M3, E5M2, compile_kernel, instructions, resources

pytestmark = pytest.mark.skipif(triton_blocks.INTERPRETED, reason="TRITON_INTERPRET is set: kernels do not compile")

HP = pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16], ids=str)
F32, BF16 = torch.float32, torch.bfloat16
SIZES = {"rows": "i32", "columns": "i32"}
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
TURNS_CODES = VERSION >= (3, 7)
"""Triton 3.6 turns a tile of hp instead, and scales and converts it twice: more registers, the same accesses."""

NEW_ASSEMBLER = VERSION >= (3, 9)
"""Before, that for Hopper takes more registers, and here and there it spills a few bytes."""

TRITON_FLOAT8 = {E4M3: tl.float8e4nv, E5M2: tl.float8e5}


@pytest.fixture(autouse=True)
def _fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def compiled(kernel, pointers, integers, constants, *, warps, float8_dtype=E4M3, hp_dtype=BF16, narrow=(), **options):
    """See `compile_kernel`; with the constants that casts share."""
    fmt = FORMATS[float8_dtype]
    shared = {
        "MAX": fmt.max,
        "SATURATES_ABOVE": fmt.saturates_above,
        "LARGEST_QUANT_SCALE": fmt.max / scaling.EPS,
        "POWER_OF_2": False,
        "HP": TRITON_HP[hp_dtype],
        "FLOAT8": TRITON_FLOAT8[float8_dtype],
        "NORM_EPS": 1e-5,
        "INTERPRETED": False,
    }
    wanted = {name: value for name, value in (shared | constants).items() if name in kernel.arg_names}
    return compile_kernel(
        kernel, pointers, integers, wanted, warps=warps, narrow=["quant_scale_ptr", *narrow], **options
    )


def swiglu_inputs(hp_dtype):
    return {"gate_ptr": hp_dtype, "up_ptr": hp_dtype}


def of_producer(producer, first_dtype, size):
    """The pointers of a kernel of triton_produced.py, and the matrix whose tile it takes."""
    pointers = {"first_ptr": first_dtype, "second_ptr": first_dtype if producer == "swiglu" else BF16}
    first = torch.empty(size, dtype=first_dtype)
    if producer == "swiglu":
        return pointers, Produced(first, first, None, first_dtype)
    return pointers | {"inverse_rms_ptr": F32}, Produced(first, torch.empty(size[1]), torch.empty(size[0]), BF16)


def tiles(producer, first_dtype, *, scale="kept", columns=True, float8_dtype=E4M3, size=(128, 128), **options):
    pointers, produced = of_producer(producer, first_dtype, size)
    pointers |= dict.fromkeys(("observed_ptr", "quant_ptr", "dequant_ptr"), F32) | {"row_codes_ptr": float8_dtype}
    pointers |= {"column_codes_ptr": float8_dtype} if columns else {}
    pointers |= {"quant_scale_ptr": F32} if scale == "kept" else {}
    tile = produced.tile(columns=columns)
    if producer == "swiglu" and not columns:
        tile = triton_produced.FLAT_BYTES // first_dtype.itemsize
        tile = triton_produced.Tile(1, tile, 1, triton_produced.FLAT_WARPS)
    constants = tile.constants() | {"SCALE": scale, "INTERPRETED": False}
    narrow = [name for name, length in zip(SIZES, size, strict=True) if length % 16]
    return tile, compiled(
        triton_produced._cast_tiles,
        pointers,
        SIZES,
        constants,
        warps=tile.warps,
        float8_dtype=float8_dtype,
        hp_dtype=produced.hp_dtype,
        narrow=narrow,
        **options,
    )


def axes(producer, first_dtype, *, float8_dtype=E4M3, size=(128, 128), **options):
    pointers, produced = of_producer(producer, first_dtype, size)
    for axis in ("row", "column"):
        pointers |= dict.fromkeys((f"{axis}_amax_ptr", f"{axis}_quant_ptr", f"{axis}_dequant_ptr"), F32)
        pointers |= {f"{axis}_codes_ptr": float8_dtype}
    tile = produced.tile(columns=True)
    narrow = [name for name, length in zip(SIZES, size, strict=True) if length % 16]
    return tile, compiled(
        triton_produced._cast_axes,
        pointers,
        SIZES,
        tile.constants() | {"INTERPRETED": False},
        warps=tile.warps,
        float8_dtype=float8_dtype,
        hp_dtype=produced.hp_dtype,
        narrow=narrow,
        **options,
    )


def swiglu_amax(hp_dtype):
    return compiled(
        triton_swiglu._amax_if_unknown,
        swiglu_inputs(hp_dtype) | {"quant_scale_ptr": F32, "observed_ptr": F32},
        {"numel": "i32"},
        {"TILE": triton_produced.FLAT_BYTES // hp_dtype.itemsize},
        warps=triton_produced.FLAT_WARPS,
        hp_dtype=hp_dtype,
    )


def swiglu_amaxes(hp_dtype, **options):
    constants = {name: getattr(triton_swiglu, name) for name in ("BLOCK_ROWS", "TILE_ROWS")}
    return compiled(
        triton_swiglu._axis_amaxes,
        swiglu_inputs(hp_dtype) | {"row_amax_ptr": F32, "column_amax_ptr": F32},
        SIZES,
        constants | {"TILE_COLUMNS": 512 // hp_dtype.itemsize},
        warps=triton_swiglu.AXES_WARPS,
        hp_dtype=hp_dtype,
        **options,
    )


def swiglu_rows(hp_dtype, width, **options):
    tile_rows, tile_columns, warps = triton_rows.tile_of(width, sums=False)
    return compiled(
        triton_swiglu._cast_rows,
        swiglu_inputs(hp_dtype) | {"codes_ptr": E4M3, "quant_ptr": F32, "dequant_ptr": F32},
        SIZES,
        {"TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns},
        warps=warps,
        hp_dtype=hp_dtype,
        **options,
    )


def swiglu_grads(hp_dtype, **options):
    names = ("grad_ptr", "gate_ptr", "up_ptr", "grad_gate_ptr", "grad_up_ptr")
    return compiled(
        triton_producer_grads._swiglu,
        dict.fromkeys(names, hp_dtype),
        {"numel": "i32"},
        {"TILE": triton_producer_grads.TILE_BYTES // hp_dtype.itemsize},
        warps=triton_producer_grads.WARPS,
        hp_dtype=hp_dtype,
        **options,
    )


def norm_rows(hidden_dtype, width, *, kept=False, **options):
    tile_rows, tile_columns, warps = triton_rows.tile_of(width, sums=False)
    pointers = {"hidden_ptr": hidden_dtype, "weight_ptr": BF16, "codes_ptr": E4M3}
    pointers |= dict.fromkeys(("quant_ptr", "dequant_ptr", "inverse_rms_ptr"), F32)
    pointers |= {"quant_scale_ptr": F32, "observed_ptr": F32} if kept else {}
    constants = {"TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns}
    return compiled(triton_rms_norm._cast_rows, pointers, SIZES, constants, warps=warps, **options)


def norm_statistics(
    hidden_dtype, width, names=("inverse_rms", "observed", "row_amax", "column_amax"), *, narrow=(), **options
):
    tile_rows, tile_columns, warps = triton_rows.tile_of(width, sums=True)
    pointers = {"hidden_ptr": hidden_dtype, "weight_ptr": BF16} | {f"{name}_ptr": F32 for name in names}
    constants = {"TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns}
    constants |= {"AHEAD": triton_produced.load_ahead(width) and not narrow}
    return compiled(triton_rms_norm._row_statistics, pointers, SIZES, constants, warps=warps, narrow=narrow, **options)


def norm_grads(hidden_dtype, width, *, narrow=(), **options):
    tile_rows, tile_columns, warps = triton_rows.tile_of(width, sums=True)
    pointers = {"grad_ptr": BF16, "hidden_ptr": hidden_dtype, "weight_ptr": BF16, "grad_hidden_ptr": hidden_dtype}
    pointers |= {"inverse_rms_ptr": F32, "sums_ptr": F32}
    constants = {"TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns}
    constants |= {"AHEAD": triton_produced.load_ahead(width) and not narrow}
    integers = SIZES | {"block_rows": "i32"}
    return compiled(
        triton_producer_grads._rms_norm,
        pointers,
        integers,
        constants,
        warps=warps,
        narrow=["block_rows", *narrow],
        **options,
    )


def rounded_products(found):
    """How many numbers are rounded to bfloat16; a rounded product of two bfloat16 numbers may be one instruction."""
    both = found["cvt.rn.bf16x2.f32"] * 2 + found["cvt.rn.bf16.f32"]
    return both + found["mul.bf16x2"] * 2 + found["mul.bf16"]


def assert_whole_accesses(found, tile, dtype, *, matrices, columns, conversions=1):
    """16 bytes a load; 16 column codes a store; 8 row codes a store, or 4 where a load is of 4 elements."""
    elements = tile.rows * tile.columns // (32 * tile.warps)  # of a thread
    assert found["ld.global.v4.b32"] >= matrices * elements * dtype.itemsize // 16  # and weights, scales of columns
    assert found["st.global.v4.b32"] == (elements // 16 if columns else 0)
    if dtype is not F32:
        assert found["st.global.v2.b32"] == elements // 8
    assert not any(re.search(r"(global|shared)\.[bu](8|16)$", name) for name in found)
    if TURNS_CODES:
        assert sum(found[name] for name in CONVERSION.values()) == elements // 2 * conversions


def assert_fits(asm, folder, registers):
    used = resources(asm["ptx"], folder)
    assert max(used["stores"], used["loads"]) <= (0 if NEW_ASSEMBLER else 16)
    assert used["registers"] <= (registers if NEW_ASSEMBLER else 255)
    assert ".ftz" not in asm["ptx"]


@HP
@pytest.mark.parametrize("producer", ["swiglu", "rms_norm"])
@pytest.mark.parametrize(("scale", "columns"), [("kept", True), ("kept", False), ("amax", True)])
def test_one_scale(producer, hp_dtype, scale, columns, tmp_path):
    tile, asm = tiles(producer, hp_dtype, scale=scale, columns=columns)
    matrices = 2 if producer == "swiglu" else 1
    assert_whole_accesses(instructions(asm["ptx"]), tile, hp_dtype, matrices=matrices, columns=columns)
    assert_fits(asm, tmp_path, 80)  # 3 programs of 8 warps on a multiprocessor
    assert ".NaN" not in asm["ptx"]  # triton-lang/triton#11111


@HP
@pytest.mark.parametrize("producer", ["swiglu", "rms_norm"])
def test_scales_of_axes(producer, hp_dtype, tmp_path):
    tile, asm = axes(producer, hp_dtype)
    matrices = 2 if producer == "swiglu" else 1
    assert_whole_accesses(instructions(asm["ptx"]), tile, hp_dtype, matrices=matrices, columns=True, conversions=2)
    assert_fits(asm, tmp_path, 80)
    assert ".NaN" not in asm["ptx"]


def test_swiglu_rounds_as_pytorch_does():
    for scale in ("kept", "amax"):
        tile, asm = tiles("swiglu", BF16, scale=scale)
        assert rounded_products(instructions(asm["ptx"])) == 2 * tile.rows * tile.columns // (32 * tile.warps)
    assert rounded_products(instructions(swiglu_rows(BF16, 4096)["ptx"])) == 2 * 32


@HP
def test_amaxes_of_swiglu(hp_dtype, tmp_path):
    for asm, registers in ((swiglu_amax(hp_dtype), 72), (swiglu_amaxes(hp_dtype), 96)):
        found = instructions(asm["ptx"])
        assert found["ld.global.v4.b32"] == 8  # of gate and up together
        assert found["ld.global.b16"] == 0
        assert_fits(asm, tmp_path, registers)


@HP
def test_whole_rows_of_swiglu(hp_dtype, tmp_path):
    for width in (100, 4096, triton_swiglu.WIDEST_BYTES // hp_dtype.itemsize):
        asm = swiglu_rows(hp_dtype, width)
        found = instructions(asm["ptx"])
        elements = 2 * found[CONVERSION[E4M3]]
        assert elements == triton_rows.ELEMENTS_OF_THREAD
        assert found["ld.global.v4.b32"] == 2 * elements * hp_dtype.itemsize // 16
        assert found["st.global.b8"] == 0
        assert_fits(asm, tmp_path, 96)


@HP
@pytest.mark.parametrize("kept", [False, True])
def test_whole_rows_of_rms_norm(hp_dtype, kept, tmp_path):
    for width in (4096, 8192, triton_rms_norm.WIDEST):
        asm = norm_rows(hp_dtype, width, kept=kept)
        found = instructions(asm["ptx"])
        elements = 2 * found[CONVERSION[E4M3]]
        assert elements == triton_rows.ELEMENTS_OF_THREAD
        assert found["ld.global.v4.b32"] >= elements * hp_dtype.itemsize // 16
        assert found["st.global.b8"] == found["ld.global.b16"] == 0
        assert found["sqrt.rn.f32"] == 1
        assert_fits(asm, tmp_path, 112)


@HP
def test_statistics_of_rms_norm(hp_dtype, tmp_path):
    for width in (4096, 8192, triton_rms_norm.WIDEST):
        for names, registers in ((("inverse_rms", "observed"), 72), (("inverse_rms", "row_amax", "column_amax"), 96)):
            asm = norm_statistics(hp_dtype, width, names)
            found = instructions(asm["ptx"])
            assert found["ld.global.v4.b32"] >= 2 * 16 * hp_dtype.itemsize // 16  # the first tile, and the next
            assert found["ld.global.b16"] == 0
            assert_fits(asm, tmp_path, registers)


@HP
def test_gradients(hp_dtype, tmp_path):
    asm = swiglu_grads(hp_dtype)
    found = instructions(asm["ptx"])
    assert (found["ld.global.v4.b32"], found["st.global.v4.b32"]) == (6, 4)
    assert_fits(asm, tmp_path, 56)
    for width in (100, 4096, 8192, triton_rms_norm.WIDEST):
        asm = norm_grads(hp_dtype, width)
        found = instructions(asm["ptx"])
        assert found["st.global.v4.b32"] >= 16 * hp_dtype.itemsize // 16
        assert found["st.global.b16"] == 0
        assert_fits(asm, tmp_path, 128)  # 2 programs of 8 warps on a multiprocessor


def test_odd_sizes_do_not_spill(tmp_path):
    narrow = tuple(SIZES)
    for asm in (
        *(tiles(producer, BF16, size=(129, 129))[1] for producer in ("swiglu", "rms_norm")),
        *(axes(producer, BF16, size=(129, 129))[1] for producer in ("swiglu", "rms_norm")),
        swiglu_amaxes(BF16, narrow=narrow),
        swiglu_rows(BF16, 4096, narrow=narrow),
        swiglu_grads(BF16, narrow=["numel"]),
        norm_rows(BF16, triton_rms_norm.WIDEST // 2, kept=True, narrow=narrow),
        norm_statistics(BF16, triton_rms_norm.WIDEST // 2, narrow=narrow),
        norm_grads(BF16, 4096, narrow=narrow),
    ):
        assert_fits(asm, tmp_path, 200)


def test_positions_are_64_bit():
    for asm in (
        tiles("swiglu", BF16)[1],
        axes("rms_norm", F32)[1],
        swiglu_rows(BF16, 4096),
        swiglu_amaxes(BF16),
        norm_rows(F32, 4096),
        norm_statistics(F32, 4096),
        norm_grads(F32, 4096),
    ):
        offsets = re.findall(
            r"tt\.addptr %\w+, %\w+ : tensor<\d+x\d+x!tt\.ptr<\w+>>, tensor<\d+x\d+x(\w+)>", asm["ttir"]
        )
        assert set(offsets) == {"i64"}
    for asm in (swiglu_amax(BF16), swiglu_grads(BF16)):
        assert set(re.findall(r"arith\.muli .* : (\w+)", asm["ttir"])) == {"i64"}  # a tile's number times its size


@pytest.mark.parametrize("capability", [100, 120])
def test_later_gpus_round_once_too(capability):
    tile, asm = tiles("swiglu", BF16, float8_dtype=E5M2, capability=capability)
    assert_whole_accesses(instructions(asm["ptx"]), tile, BF16, matrices=2, columns=True)
    assert norm_rows(F32, 4096, capability=capability)["cubin"]


@pytest.mark.parametrize("length", SIZES)
def test_lengths_of_1_compile(length, monkeypatch):
    """Triton makes a constant of an integer that is 1."""
    real = compile_kernel

    def with_a_constant(kernel, pointers, integers, constants, **options):
        integers = {name: kind for name, kind in integers.items() if name != length}
        return real(kernel, pointers, integers, constants | {length: 1}, **options)

    monkeypatch.setitem(globals(), "compile_kernel", with_a_constant)
    for asm in (
        tiles("swiglu", BF16, columns=False)[1],
        tiles("rms_norm", F32)[1],
        axes("swiglu", BF16)[1],
        swiglu_amaxes(BF16),
        swiglu_rows(BF16, 1),
        norm_rows(F32, 1),
        norm_statistics(F32, 1),
        norm_grads(F32, 1),
    ):
        assert asm["cubin"]

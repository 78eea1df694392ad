"""Casts into both layouts as a GPU would run them, read from the compiled code: accesses, conversions, registers.

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
from quaver.kernels import triton_axes, triton_blocks, triton_layouts, triton_reduce, triton_rows, triton_tiles
from tests.triton_kernels import (
    CONVERSION,
    E4M3,
    E5M2,
    compile_kernel,
    compile_launches,
    instructions,
    process,
    resources,
)

pytestmark = pytest.mark.skipif(triton_blocks.INTERPRETED, reason="TRITON_INTERPRET is set: kernels do not compile")

HP = pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16], ids=str)
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
TURNS_CODES = VERSION >= (3, 7)
"""Triton 3.6 turns a tile of hp instead, and scales and converts it twice: more registers, the same accesses."""

NEW_ASSEMBLER = VERSION >= (3, 9)
"""Before, that for Hopper takes more registers, and here and there it spills a few bytes."""

SIZES = {"rows": "i32", "columns": "i32"}
TRITON_FLOAT8 = {E4M3: tl.float8e4nv, E5M2: tl.float8e5}


@pytest.fixture(autouse=True)
def _fresh_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


def constants_of(float8_dtype):
    fmt = FORMATS[float8_dtype]
    return {
        "MAX": fmt.max,
        "SATURATES_ABOVE": fmt.saturates_above,
        "LARGEST_QUANT_SCALE": fmt.max / scaling.EPS,
        "POWER_OF_2": False,
        "FLOAT8": TRITON_FLOAT8[float8_dtype],
    }


def tiles(hp_dtype, float8_dtype=E4M3, *, scale="kept", sums=True, size=(128, 128), capability=90):
    tile = triton_tiles.tile_for(torch.empty(size, dtype=hp_dtype), columns=True)
    pointers = dict.fromkeys(("observed_ptr", "quant_ptr", "dequant_ptr"), torch.float32)
    pointers |= {"hp_ptr": hp_dtype, "row_codes_ptr": float8_dtype, "column_codes_ptr": float8_dtype}
    pointers |= {"sums_ptr": torch.float32} if sums else {}
    pointers |= {"quant_scale_ptr": torch.float32} if scale == "kept" else {}
    narrow = [name for name, length in zip(SIZES, size, strict=True) if length % 16]
    options = {"warps": tile.warps, "narrow": ["quant_scale_ptr", *narrow], "capability": capability}
    every = constants_of(float8_dtype) | tile.constants() | {"SCALE": scale, "INTERPRETED": False}
    return tile, compile_kernel(triton_tiles._cast_tiles, pointers, SIZES, every, **options)


def axes(hp_dtype, float8_dtype=E4M3, *, given=False, sums=True, size=(128, 128), capability=90):
    tile = triton_tiles.tile_for(torch.empty(size, dtype=hp_dtype), columns=True)
    pointers = {"hp_ptr": hp_dtype}
    for axis in ("row", "column"):
        pointers |= {f"{axis}_codes_ptr": float8_dtype, f"{axis}_scales_ptr": torch.float32}
        pointers |= {} if given else {f"{axis}_quant_ptr": torch.float32, f"{axis}_dequant_ptr": torch.float32}
    pointers |= {"sums_ptr": torch.float32} if sums else {}
    narrow = [name for name, length in zip(SIZES, size, strict=True) if length % 16]
    options = {"warps": tile.warps, "narrow": narrow, "capability": capability}
    every = constants_of(float8_dtype) | tile.constants() | {"GIVEN": given, "INTERPRETED": False}
    every |= {"ONE_FOR_ROWS": False, "ONE_FOR_COLUMNS": False}
    return tile, compile_kernel(triton_axes._cast_axes, pointers, SIZES, every, **options)


def rows(hp_dtype, width, float8_dtype=E4M3, *, sums=False, narrow=()):
    tile_rows, tile_columns, warps = triton_rows.tile_of(width, sums=sums)
    pointers = {"hp_ptr": hp_dtype, "codes_ptr": float8_dtype, "quant_ptr": torch.float32, "dequant_ptr": torch.float32}
    pointers |= {"sums_ptr": torch.float32} if sums else {}
    every = constants_of(float8_dtype) | {"INTERPRETED": False, "TILE_ROWS": tile_rows, "TILE_COLUMNS": tile_columns}
    integers = SIZES | {"block_rows": "i32"}
    options = {"warps": warps, "narrow": ["block_rows", *narrow]}
    return compile_kernel(triton_rows._cast_rows, pointers, integers, every, **options)


def amaxes(hp_dtype, *, narrow=()):
    pointers = {"hp_ptr": hp_dtype, "row_amax_ptr": torch.float32, "column_amax_ptr": torch.float32}
    every = {name: getattr(triton_reduce, name) for name in ("BLOCK_ROWS", "TILE_ROWS")}
    every |= {"TILE_COLUMNS": 512 // hp_dtype.itemsize, "INTERPRETED": False}
    return compile_kernel(triton_reduce._axis_amaxes, pointers, SIZES, every, warps=triton_reduce.WARPS, narrow=narrow)


def assert_whole_accesses(found, tile, hp_dtype, conversions):
    """16 bytes a load; 16 column codes a store; 8 row codes a store, or 4 where a load is of 4 elements."""
    elements = tile.rows * tile.columns // (32 * tile.warps)  # of a thread
    assert found["ld.global.v4.b32"] >= elements * hp_dtype.itemsize // 16  # and scales of columns
    assert found["st.global.v4.b32"] == elements // 16
    if hp_dtype is not torch.float32:
        assert found["st.global.v2.b32"] == elements // 8
    assert not any(re.search(r"global.*\.[bu](8|16)$", name) for name in found)
    assert found["ld.shared.b8"] == found["st.shared.b8"] == 0  # [Note: turning a tile]
    if TURNS_CODES:
        assert sum(found[name] for name in CONVERSION.values()) == elements // 2 * conversions


def assert_fits(asm, folder, registers):
    used = resources(asm["ptx"], folder)
    assert max(used["stores"], used["loads"]) <= (0 if NEW_ASSEMBLER else 8)
    assert used["registers"] <= (registers if NEW_ASSEMBLER else 200)


@pytest.mark.parametrize(
    ("hp_dtype", "float8_dtype"), [(torch.float32, E4M3), (torch.bfloat16, E5M2), (torch.float16, E4M3)], ids=str
)
def test_one_scale_in_tiles(hp_dtype, float8_dtype, tmp_path):
    tile, asm = tiles(hp_dtype, float8_dtype)
    assert_whole_accesses(instructions(asm["ptx"]), tile, hp_dtype, conversions=1)
    assert_fits(asm, tmp_path, 128)  # 128: 64 KiB of loads under way on a multiprocessor


@HP
def test_dynamic_scale_in_tiles(hp_dtype, tmp_path):
    tile, asm = tiles(hp_dtype, scale="amax", sums=False)
    assert_whole_accesses(instructions(asm["ptx"]), tile, hp_dtype, conversions=1)
    assert_fits(asm, tmp_path, 96)


@HP
@pytest.mark.parametrize("given", [False, True])
def test_scales_of_axes_in_tiles(hp_dtype, given, tmp_path):
    tile, asm = axes(hp_dtype, given=given, sums=not given)
    assert_whole_accesses(instructions(asm["ptx"]), tile, hp_dtype, conversions=2)
    assert_fits(asm, tmp_path, 128)


@HP
def test_whole_rows(hp_dtype, tmp_path):
    for width, sums, registers in (
        (100, False, 96),
        (4096, False, 64),
        (triton_rows.WIDEST, False, 64),
        (100, True, 128),
        (triton_rows.WIDEST_BYTES_WITH_SUMS // hp_dtype.itemsize, True, 96),
    ):
        asm = rows(hp_dtype, width, sums=sums)
        found = instructions(asm["ptx"])
        elements = 2 * found[CONVERSION[E4M3]]
        assert found["ld.global.v4.b32"] == elements * hp_dtype.itemsize // 16 * (2 if sums else 1)
        if hp_dtype is not torch.float32:
            assert found["st.global.v2.b32"] == elements // 8
        assert found["st.global.b8"] == 0
        assert_fits(asm, tmp_path, registers)


@HP
def test_amaxes_of_both_axes(hp_dtype, tmp_path):
    asm = amaxes(hp_dtype)
    found = instructions(asm["ptx"])
    assert found["ld.global.v4.b32"] == 8  # a tile, and the next
    assert found["ld.global.b16"] == found["ld.global.b32"] == 0
    assert_fits(asm, tmp_path, 128)


def test_odd_sizes_do_not_spill(tmp_path):
    narrow = tuple(SIZES)
    for asm in (
        tiles(torch.bfloat16, size=(129, 129))[1],
        axes(torch.bfloat16, size=(129, 129))[1],
        rows(torch.bfloat16, triton_rows.WIDEST, narrow=narrow),
        rows(torch.bfloat16, triton_rows.WIDEST_BYTES_WITH_SUMS // 4, sums=True, narrow=narrow),
        amaxes(torch.bfloat16, narrow=narrow),
    ):
        assert_fits(asm, tmp_path, 200)


def test_positions_are_64_bit():
    for asm in (tiles(torch.bfloat16)[1], axes(torch.bfloat16)[1], rows(torch.bfloat16, 4096), amaxes(torch.bfloat16)):
        offsets = re.findall(
            r"tt\.addptr %\w+, %\w+ : tensor<\d+x\d+x!tt\.ptr<\w+>>, tensor<\d+x\d+x(\w+)>", asm["ttir"]
        )
        assert set(offsets) == {"i64"}


@pytest.mark.parametrize("capability", [100, 120])
def test_later_gpus_round_once_too(capability):
    for kernel, float8_dtype, conversions in ((tiles, E5M2, 1), (axes, E4M3, 2)):
        tile, asm = kernel(torch.bfloat16, float8_dtype, capability=capability)
        assert_whole_accesses(instructions(asm["ptx"]), tile, torch.bfloat16, conversions)


def test_nothing_that_corrupts_turned_codes():
    """NaN-propagating minima and maxima before a transposed store of bytes (triton-lang/triton#11111)."""
    for asm in (tiles(torch.bfloat16, E5M2)[1], axes(torch.bfloat16, E5M2)[1]):
        assert ".NaN" not in asm["ptx"]
        assert ".ftz" not in asm["ptx"]


def _launches():
    """Every kernel, launched as on a GPU, for matrices of one row and of one column."""
    launched = compile_launches()
    for rows, columns in ((1, 40), (33, 1)):
        hp, one = torch.empty(rows, columns, dtype=torch.bfloat16), torch.ones(())
        triton_layouts.cast_layouts(hp, E4M3, True, True, False, True)
        triton_layouts.cast_with_persistent_scale(hp, one, E5M2, True, False, False, False)
        triton_layouts.cast_axes(hp, E4M3, True, True, True, False)
        triton_layouts.cast_axes(hp, E4M3, True, False, True, True)
        triton_layouts.cast_with_scales(hp, E4M3, one, torch.ones(1, columns))
    return launched


def test_launches_compile(tmp_path):
    """Triton makes a constant of an integer that is 1, and of a missing pointer."""
    with process(TRITON_CACHE_DIR=str(tmp_path)) as call:
        assert call(_launches) == {
            "_amax_if_unknown": 4,
            "_cast": 2,
            "_cast_tiles": 2,
            "_axis_amaxes": 2,
            "_cast_axes": 4,
            "_cast_rows": 2,
            "_add_partials": 4,
        }

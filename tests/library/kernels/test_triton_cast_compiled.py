"""Reads vector widths, conversions and registers from casts compiled for a GPU, without one.

Launches on CPU tensors compile for a GPU, with the arguments and sizes of a real launch, and run nothing.
"""

import itertools
import re
import subprocess
from collections import Counter, defaultdict

import pytest
import torch

pytest.importorskip("triton")

import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend

from quaver.kernels import triton_blocks, triton_cast
from quaver.kernels.operands import BlockCast
from tests.library.kernels.triton_kernels import BOTH, COLUMNS, E4M3, E5M2, ROWS
from tests.thinned import at_night

pytestmark = pytest.mark.skipif(triton_blocks.INTERPRETED, reason="TRITON_INTERPRET is set: kernels do not compile")

HP = pytest.mark.parametrize(
    "hp_dtype", [pytest.param(torch.float32, marks=pytest.mark.nightly), torch.bfloat16], ids=str
)
CONVERSION = {E4M3: "cvt.rn.satfinite.e4m3x2.f32", E5M2: "cvt.rn.satfinite.e5m2x2.f32"}
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
TRANSPOSES_CODES = VERSION >= (3, 7)
"""Triton 3.6 transposes a tile of hp instead, and scales and converts it twice: more registers, the same accesses."""
NEW_ASSEMBLER = VERSION >= (3, 9)
"""Before, ptxas for Hopper takes more registers, and here and there it spills a few bytes."""


class _Driver:
    """The methods of a driver that Triton calls to compile a launch."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # each device has its own cache of kernels

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(autouse=True)
def compiled(monkeypatch, tmp_path):
    """Return the code of each launch, in order, by the kernel's name."""
    launches = defaultdict(list)

    def launch(kernel, grid):
        def compile_only(*args, **options) -> None:
            launches[kernel.__name__].append(kernel.run(*args, grid=grid, warmup=True, **options).asm)

        return compile_only

    monkeypatch.setattr(triton_blocks, "INTERPRETED", True)  # launchers take CPU tensors, as for the interpreter
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(triton.runtime.jit.JITFunction, "__getitem__", launch)
    monkeypatch.setattr(CUDABackend, "make_cubin", lambda *args: b"")  # assert_fits assembles
    triton.runtime.driver.set_active(_Driver())
    yield launches
    triton.runtime.driver.set_active(None)


def make_hp(hp_dtype, rows=128, columns=128):
    return torch.empty(rows, columns, dtype=hp_dtype)


def count_instructions(asm):
    return Counter(re.findall(r"^[ \t]*(?:@!?%p\d+ )?([a-z]\w*(?:\.\w+)*)[ \t]", asm["ptx"], re.MULTILINE))


def assert_fits(asm, folder, registers):
    """Assert that the kernel takes at most so many registers of a thread by NVIDIA's assembler, and spills none.

    Also that subnormal numbers are kept, and that no pair of codes has a separate register, which ptxas 12.8 and 12.9
    read once, where two instructions do (triton-lang/triton#11111).
    """
    assert not re.search(r"cvt\.rn\.satfinite\.\w+\.f32\s+%", asm["ptx"])
    assert ".ftz" not in asm["ptx"]  # subnormal numbers are not flushed to zero
    file, binary = folder / "kernel.ptx", folder / "kernel.cubin"
    file.write_text(asm["ptx"])
    for tool in ("ptxas", "ptxas_blackwell"):  # the first may be too old for this PTX
        command = [getattr(triton.knobs.nvidia, tool).path, "-v", "--gpu-name=sm_90a", str(file), "-o", str(binary)]
        assembled = subprocess.run(command, capture_output=True, text=True)
        if assembled.returncode == 0:
            break
    spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembled.stderr)
    assert max(map(int, spilled.groups())) <= (0 if NEW_ASSEMBLER else 8)
    used = int(re.search(r"Used (\d+) registers", assembled.stderr).group(1))
    assert used <= (registers if NEW_ASSEMBLER else 200)


def count_machine_instructions(folder):
    """Return the number of instructions of the kernel that `assert_fits` assembled, without NOPs."""
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(folder / "kernel.cubin")]
    disassembly = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return len(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?!NOP)[A-Z]", disassembly))


def assert_whole_accesses(asm, hp_dtype, conversions):
    """Assert loads of 16 bytes, stores of 16 column codes, and of 8 row codes, or 4 where a load is of 4 elements."""
    counts = count_instructions(asm)
    tile = triton_blocks.choose_tile(make_hp(hp_dtype), column_codes=True)
    elements = tile.rows * tile.columns // (32 * tile.warps)  # of a thread
    assert counts["ld.global.v4.b32"] >= elements * hp_dtype.itemsize // 16  # and scales of columns
    assert counts["st.global.v4.b32"] >= elements // 16  # likewise
    if hp_dtype is not torch.float32:
        assert counts["st.global.v2.b32"] == elements // 8
    assert_no_narrow_accesses(counts)
    assert counts["ld.shared.b8"] == counts["st.shared.b8"] == 0  # [Note: transposing a tile]
    if TRANSPOSES_CODES:
        assert sum(counts[name] for name in CONVERSION.values()) == elements // 2 * conversions


def assert_no_narrow_accesses(counts):
    assert not any(re.search(r"global.*\.[bu](8|16)$", name) for name in counts)


@pytest.mark.parametrize(
    ("hp_dtype", "float8_dtype"),
    [(torch.bfloat16, E5M2), *at_night([(torch.float32, E4M3), (torch.float16, E4M3)])],
    ids=str,
)
def test_casts_with_one_scale_access_whole_vectors_in_few_registers(compiled, hp_dtype, float8_dtype, tmp_path):
    for scale in (None, torch.ones(())):
        triton_cast.cast_with_persistent_scale(make_hp(hp_dtype), float8_dtype, *BOTH, False, scale)
    for asm in compiled["_cast_tensorwise"]:
        assert_whole_accesses(asm, hp_dtype, conversions=1)
        assert_fits(asm, tmp_path, 96)  # 80 KiB of loads under way on a multiprocessor


@HP
def test_rowwise_casts_access_whole_vectors_in_few_registers(compiled, hp_dtype, tmp_path):
    triton_cast.cast_rowwise(make_hp(hp_dtype), E4M3, *BOTH, False)
    triton_cast.cast_with_scale(make_hp(hp_dtype), E4M3, torch.ones(128, 1), torch.ones(1, 128))
    for asm in compiled["_cast_rowwise"]:
        assert_whole_accesses(asm, hp_dtype, conversions=2)
        assert_fits(asm, tmp_path, 128)


@HP
@pytest.mark.parametrize(("width", "registers"), [(112, 96), (triton_cast.WIDEST_ROW, 64), *at_night([(4096, 64)])])
def test_whole_rows_are_read_16_bytes_at_a_time_into_registers(compiled, hp_dtype, width, registers, tmp_path):
    triton_cast.cast_rowwise(make_hp(hp_dtype, columns=width), E4M3, *ROWS, False)
    [asm] = compiled["_cast_whole_rows"]
    counts = count_instructions(asm)
    assert counts[CONVERSION[E4M3]] == 16
    assert counts["ld.global.v4.b32"] == 32 * hp_dtype.itemsize // 16
    assert counts["st.global.b8"] == 0
    assert_fits(asm, tmp_path, registers)


@HP
def test_amaxes_read_16_bytes_at_a_time(compiled, hp_dtype, tmp_path):
    for dim in (None, 0, 1):
        triton_cast.compute_amax(make_hp(hp_dtype), dim)
    for asm in compiled["_amax"]:
        counts = count_instructions(asm)
        assert counts["ld.global.v4.b32"] == 8
        assert counts["ld.global.b16"] == 0
        assert_fits(asm, tmp_path, 128)


@HP
def test_amaxes_of_groups_read_16_bytes_at_a_time(compiled, hp_dtype, tmp_path):
    triton_cast.group_amax(make_hp(hp_dtype), torch.zeros(len(make_hp(hp_dtype)), dtype=torch.int64), 3)
    [asm] = compiled["_group_amax"]
    assert count_instructions(asm)["ld.global.v4.b32"] == 8
    assert_fits(asm, tmp_path, 128)


DIRECTIONS = [((1, 128), ROWS), ((1, 32), COLUMNS), ((128, 128), BOTH)]
DIRECTIONS += at_night([((1, 128), COLUMNS), ((1, 32), ROWS), ((32, 32), BOTH), ((1, 128), BOTH), ((1, 32), BOTH)])


@HP
@pytest.mark.parametrize(("block_size", "directions"), DIRECTIONS)
def test_casts_of_blocks_do_not_spill(compiled, hp_dtype, block_size, directions, tmp_path):
    """Blocks of 128 x 128 spill up to 200 bytes where the width is no multiple of 16, and accesses are narrow."""
    mode = "" if 128 in block_size else "rceil"  # as the recipes have them
    cast = BlockCast(E4M3, directions[0], directions[1], True, *block_size, rule=mode)
    triton_cast.cast_blockwise(make_hp(hp_dtype, 144, 304), cast)
    [[asm]] = compiled.values()
    assert CONVERSION[E4M3] in asm["ptx"]
    assert_fits(asm, tmp_path, 208 if "_cast_rows_and_columns" in compiled else 200)


BF16, F32 = torch.bfloat16, torch.float32
BLOCKS = [(BF16, 128, "", True, 128, 13, 22), (BF16, 32, "rceil", True, 128, 15, 22)]
BLOCKS += at_night([(BF16, 128, "", False, 128, 13, 32), (F32, 128, "", True, 128, 21, 24)])
BLOCKS += at_night([(F32, 32, "rceil", True, 208, 9, 24)])


@pytest.mark.parametrize(("hp_dtype", "length", "mode", "power_of_2", "registers", "barriers", "most"), BLOCKS)
def test_two_way_blocks_fit_twice(compiled, hp_dtype, length, mode, power_of_2, registers, barriers, most, tmp_path):
    """Two programs share a multiprocessor, and issue at most so many instructions an element.

    An H200 moves the bytes of an element in bfloat16 in the time of 26: 4.1 bytes at 4.8 TB/s; 132 multiprocessors
    issue 4 x 32 instructions of a thread at 1.83 GHz.
    """
    triton_cast.cast_blockwise(make_hp(hp_dtype, 256, 4096), BlockCast(E4M3, *BOTH, power_of_2, 1, length, mode))
    [asm] = compiled["_cast_rows_and_columns"]
    counts = count_instructions(asm)
    assert counts["ld.global.v4.b32"] == 64 * hp_dtype.itemsize // 16
    assert_no_narrow_accesses(counts)
    assert_fits(asm, tmp_path, registers)
    if NEW_ASSEMBLER:
        assert counts["bar.sync"] <= barriers
        assert count_machine_instructions(tmp_path) / 64 <= most


def test_a_transposing_copy_moves_16_bytes_at_a_time(compiled, tmp_path):
    """It converts nothing, so that no assembler can lose a code: [Note: ptxas before 13]."""
    for shape in ((256, 128), (129, 129)):
        triton_cast.to_column_major(torch.empty(shape, dtype=E4M3))
    whole, odd = compiled["_column_major"]
    counts = count_instructions(whole)
    assert counts["ld.global.v4.b32"] == counts["st.global.v4.b32"] == 8
    assert counts["ld.shared.b8"] == counts["st.shared.b8"] == 0
    assert not any(name.startswith("cvt") and "x2" in name for name in counts)
    assert_fits(whole, tmp_path, 72)
    assert_fits(odd, tmp_path, 128)


def launch_casts(hp, float8_dtype=E4M3):
    triton_cast.cast_with_persistent_scale(hp, float8_dtype, *BOTH, True, torch.ones(()))
    triton_cast.cast_rowwise(hp, float8_dtype, *ROWS, True)
    triton_cast.cast_rowwise(hp, float8_dtype, *BOTH, True)


def assert_addresses_of_64_bits(asm):
    offsets = r"tt\.addptr %\w+, %\w+ : tensor<\d+x\d+x!tt\.ptr<\w+>>, tensor<\d+x\d+x(\w+)>"
    assert set(re.findall(offsets, asm["ttir"])) == {"i64"}


def test_odd_sizes_do_not_spill(compiled, tmp_path):
    launch_casts(make_hp(torch.bfloat16, 129, 129))
    triton_cast.cast_rowwise(make_hp(torch.bfloat16, 3, triton_cast.WIDEST_ROW - 1), E4M3, *ROWS, False)
    assert set(compiled) == {"_amax", "_cast_tensorwise", "_cast_rowwise", "_cast_whole_rows"}
    for asm in itertools.chain(*compiled.values()):
        assert_addresses_of_64_bits(asm)
        assert_fits(asm, tmp_path, 200)


@pytest.mark.parametrize(("length", "mode"), [(128, ""), *at_night([(32, "rceil")])])
def test_two_way_odd_blocks_do_not_spill(compiled, length, mode, tmp_path):
    triton_cast.cast_blockwise(make_hp(torch.bfloat16, 129, 129), BlockCast(E4M3, *BOTH, True, 1, length, mode))
    for asm in itertools.chain(*compiled.values()):
        assert_fits(asm, tmp_path, 200)


@pytest.mark.nightly
@pytest.mark.parametrize("capability", [90, 100, 120])
def test_code_for_other_gpus_has_the_same_properties(compiled, capability, monkeypatch):
    monkeypatch.setattr(_Driver, "capability", capability)
    launch_casts(make_hp(torch.bfloat16, 128, 4096), E5M2)
    for asm in itertools.chain(*compiled.values()):
        assert_addresses_of_64_bits(asm)
        assert ".ftz" not in asm["ptx"]
    assert count_instructions(compiled["_cast_whole_rows"][0])[CONVERSION[E5M2]] == 16
    assert_whole_accesses(compiled["_cast_tensorwise"][0], torch.bfloat16, conversions=1)
    assert_whole_accesses(compiled["_cast_rowwise"][0], torch.bfloat16, conversions=2)


@pytest.mark.parametrize("shape", [(1, 40), *at_night([((33, 1),)])], ids=str)
def test_integers_of_1_and_missing_pointers_compile(compiled, shape):
    """Triton makes constants of both."""
    hp, scale = make_hp(torch.bfloat16, *shape), torch.ones(())
    triton_cast.cast_with_persistent_scale(hp, E4M3, *BOTH, True, scale)
    triton_cast.cast_rowwise(hp, E4M3, *ROWS, True)
    triton_cast.cast_tensorwise(hp, E5M2, *COLUMNS, False)
    triton_cast.cast_with_scale(hp, E4M3, scale, None)
    expected = {"_amax": 2, "_cast_tensorwise": 2, "_cast_rowwise": 1, "_cast_whole_rows": 1}
    assert {name: len(launches) for name, launches in compiled.items()} == expected

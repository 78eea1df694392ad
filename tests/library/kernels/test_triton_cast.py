"""Tests the Triton casts in Triton's interpreter, without a GPU: bits of the oracle, and bytes moved.

Two conversions are all that the interpreter does by other instructions than a GPU (see the end of triton_blocks.py):
bfloat16 to float32, and float32 to float8. test_triton_cast_compiled.py reads the code that a GPU would run.
"""

import functools
import itertools
import math

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quaver.kernels import triton_blocks, triton_cast
from quaver.kernels.operands import BlockCast
from quaver.recipes import scaling
from quaver.recipes.config import BLOCK_SIZES
from quaver.recipes.scale_rules import SCALE_RULES
from tests.library.kernels import triton_kernels
from tests.library.kernels.triton_kernels import BOTH, COLUMNS, E4M3, E5M2, ROWS, UNUSUAL, assert_casts, varied
from tests.reference import assert_same_bits, every_value, reference_amax
from tests.thinned import at_night

INF, NAN = math.inf, math.nan


# These run in the interpreter's process.


def _every_value(hp_dtype, float8_dtype):
    """A row, or a column, has the values that share their upper 8 bits: all magnitudes of an amax, and all kinds."""
    hp = every_value(hp_dtype).view(256, 256)
    scales = (0.37, 448e12, 3e38, 1e-42, INF)
    assert_casts(
        hp, float8_dtype, persistent=scales, given=[(torch.tensor(3.7), torch.tensor(1e-42))], directions=[BOTH]
    )
    assert_casts(hp.t().contiguous(), float8_dtype, power_of_2=True, directions=[BOTH, ROWS])
    assert_casts(hp[hp.isfinite().all(1)], float8_dtype, directions=[BOTH])


def _unusual_amaxes(hp_dtype, float8_dtype):
    unknown = itertools.cycle((0.0, -0.0, -3.0, NAN, -0.0, 0.0, NAN, -3.0))
    for values, power_of_2 in itertools.product(UNUSUAL, (False, True)):
        hp = torch.tensor(values).repeat(2, 1).to(hp_dtype)
        assert_casts(hp, float8_dtype, persistent=[next(unknown)], power_of_2=power_of_2, directions=[BOTH, ROWS])


def _shapes(hp_dtype, float8_dtype):
    for shape in ((1, 40), (33, 1), (70, 45), (144, 80)):
        row_scale, column_scale = torch.rand(shape[0], 3)[:, 1:2] * 9, torch.rand(1, shape[1]) * 9  # one has strides
        given = [(row_scale, column_scale), (None, torch.tensor(0.7)), (row_scale, None)]
        assert_casts(varied(*shape, hp_dtype), float8_dtype, persistent=[100.0], given=given, power_of_2=True)
    assert_casts(varied(6, 16, hp_dtype).view(-1)[1:81].view(5, 16), float8_dtype)  # starts off 16 bytes


def _blocks(hp_dtype, float8_dtype, power_of_2, rule):
    """Ragged shapes, a block of zeros, and every magnitude of an amax; then unusual amaxes, with NaN and inf."""
    assert_blocks = functools.partial(triton_kernels.assert_block_casts, power_of_2=power_of_2, rule=rule)
    for block_size in BLOCK_SIZES:
        assert_blocks(varied(144, 144, hp_dtype), float8_dtype, block_size)
    assert_blocks(varied(130, 140, hp_dtype), float8_dtype, (128, 128))
    assert_blocks(varied(130, 48, hp_dtype), float8_dtype, (1, 128))
    assert_blocks(varied(70, 45, hp_dtype), float8_dtype, (1, 32), directions=[ROWS, COLUMNS])
    assert_blocks(varied(1, 1, hp_dtype), float8_dtype, (32, 32), directions=[ROWS, COLUMNS])
    assert_blocks(every_value(hp_dtype).view(256, 256), float8_dtype, (1, 128), directions=[ROWS])
    for values in UNUSUAL:
        assert_blocks(torch.tensor(values).repeat(16, 8).to(hp_dtype), float8_dtype, (1, 32))


def _rules(hp_dtype):
    """Every rule that kernels have, with rows of unusual amaxes."""
    hp = varied(48, 144, hp_dtype)
    hp[: len(UNUSUAL), :2] = torch.tensor(UNUSUAL, dtype=hp_dtype)
    for rule in SCALE_RULES:
        if rule == "compressed-tensors":
            assert not triton_cast.supports(hp, E4M3, rule)
        else:
            triton_kernels.assert_casts_by_rule(hp, rule)


@np.errstate(all="ignore")
def _rows_of_every_width():
    """Tiles of many rows, of one row, rows that do not fill their tile, and rows too wide for one read."""
    default = triton_cast.WIDEST_ROW
    for width, widest in ((7, default), (64, default), (100, default), (4096, default), (5000, default), (80, 64)):
        hp = varied(6 if width < 4096 else 3, width, torch.bfloat16)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(triton_cast, "WIDEST_ROW", widest)
            operands = triton_cast.cast_rowwise(hp, E4M3, *ROWS, False)
        expected = scaling.dynamic_cast(hp, E4M3, 1)
        triton_kernels.assert_operands(operands, expected, expected, *ROWS)


def _saturated_elements_are_counted():
    for float8_dtype, limit in ((E4M3, 464.0), (E5M2, 61440.0)):  # halfway from 448 to 480, from 57344 to 65536
        above = np.nextafter(np.float32(limit), np.float32(INF))
        hp = torch.zeros(200, 100)
        hp[::50, ::99] = torch.tensor([[limit, -limit], [above, -above], [INF, NAN], [above, 0.0]])
        assert_casts(hp, float8_dtype, persistent=[1.0], directions=[BOTH])
        assert scaling.cast_with_persistent_scale(hp, torch.tensor(1.0), float8_dtype)[3][1] == 3


def _copies():
    """Every byte lands where it belongs, in tiles that are whole, cut, and narrow; each is read and written once."""
    shapes = (1, 40), (33, 1), (3, 5), (70, 45), (144, 80), (272, 160)
    every_byte = torch.arange(272 * 160).to(torch.uint8)
    for source in (
        *(every_byte[: rows * columns].view(rows, columns) for rows, columns in shapes),
        every_byte[1:81].view(5, 16),
        every_byte[:3960].view(3, 33, 40),
        every_byte[: 2 * 144 * 80].view(2, 144, 80),
    ):
        codes = (source * 7).view(E5M2)
        with triton_kernels.counting_bytes() as counted:
            copy = triton_cast.to_column_major(codes)
        assert (copy.dtype, copy.shape, copy.stride()[-2:]) == (E5M2, codes.shape, (1, codes.shape[-2]))
        assert copy.mT.is_contiguous()
        assert torch.equal(copy.mT.view(torch.uint8), codes.view(torch.uint8).mT)
        assert counted.total() == 2 * codes.numel()
    refused = codes.mT, codes[:0], codes.float(), codes.bfloat16(), codes[0, 0], codes.new_zeros(70_000, 1, 1)
    assert all(triton_cast.to_column_major(matrix) is None for matrix in refused)


@np.errstate(all="ignore")
def _groups():
    """Rows of a group in one tile, over several, in a tile with others, and apart; empty groups, NaN, inf, 0."""
    shapes = (1, 40), (33, 1), (70, 45), (300, 80)
    for dtype, (rows, columns) in itertools.product((torch.bfloat16, torch.float32), shapes):
        hp = varied(rows, columns, dtype)
        sizes = torch.tensor([rows // 2, 0, rows // 3, rows - rows // 2 - rows // 3])
        for group in (torch.arange(4).repeat_interleave(sizes), torch.randperm(rows) % 3, torch.zeros(rows).long()):
            with triton_kernels.counting_bytes() as counted:
                amaxes = triton_cast.group_amax(hp, group, 5)
            for amax, index in zip(amaxes, range(5), strict=True):
                assert_same_bits(amax, reference_amax(hp[group == index].float(), 0).flatten())
            assert counted[{torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]] >= hp.nbytes


def _bytes(cast):
    """Return the bytes per element of hp and codes, and of the rest, for row codes, column codes and both."""
    hp = varied(256, 512, torch.bfloat16)
    persistent = triton_cast.cast_with_persistent_scale
    casts = {
        "tensorwise": lambda rows, columns: triton_cast.cast_tensorwise(hp, E4M3, rows, columns, False),
        "known": lambda rows, columns: persistent(hp, E4M3, rows, columns, False, torch.tensor(2.0)),
        "unknown": lambda rows, columns: persistent(hp, E4M3, rows, columns, False, torch.tensor(0.0)),
        "rowwise": lambda rows, columns: triton_cast.cast_rowwise(hp, E4M3, rows, columns, False),
        "blocks": lambda rows, columns: triton_cast.cast_blockwise(
            hp, BlockCast(E4M3, rows, columns, True, 1, 128, "")
        ),
        "given": lambda rows, columns: triton_cast.cast_with_scale(
            hp, E4M3, torch.tensor(2.0) if rows else None, torch.ones(1, 512) if columns else None
        ),
    }
    moved = []
    for directions in (ROWS, COLUMNS, BOTH):
        with triton_kernels.counting_bytes() as counted:
            casts[cast](*directions)
        hp_and_codes = counted.pop("bf16") + counted.pop("fp8e4nv")
        moved.append((hp_and_codes / hp.numel(), counted.total() / hp.numel()))
    return moved


DTYPES = list(itertools.product((torch.float32, torch.bfloat16, torch.float16), (E4M3, E5M2)))
CHECKS = [(_every_value, torch.bfloat16, E5M2), (_unusual_amaxes, torch.float32, E5M2), (_shapes, torch.float32, E5M2)]
CHECKS += [(_blocks, torch.bfloat16, E4M3, True, ""), (_blocks, torch.float32, E4M3, False, "")]
CHECKS += [(_blocks, torch.bfloat16, E4M3, True, "rceil"), (_blocks, torch.float16, E5M2, True, "floor")]
CHECKS += [(_rules, torch.bfloat16), *((check,) for check in (_rows_of_every_width, _saturated_elements_are_counted))]
CHECKS += [(_copies,), (_groups,)]
AT_NIGHT = [(check, *dtypes) for check in (_every_value, _unusual_amaxes, _shapes) for dtypes in DTYPES]


@pytest.mark.parametrize(
    "check",
    [*CHECKS, *at_night((check,) for check in AT_NIGHT if check not in CHECKS)],
    ids=lambda check: "-".join(str(getattr(part, "__name__", part)) for part in check),
)
def test_casts_have_the_oracles_bits(interpreter, check):
    interpreter(*check)


BYTES = {"tensorwise": [5, 5, 6], "rowwise": [3, 5, 6], "blocks": [3, 3, 4]}
BYTES_AT_NIGHT = {"known": [3, 3, 4], "unknown": [5, 5, 6], "given": [3, 3, 4]}


@pytest.mark.parametrize(("cast", "expected"), [*BYTES.items(), *at_night(BYTES_AT_NIGHT.items())])
def test_casts_move_the_documented_bytes_per_element(interpreter, cast, expected):
    moved = interpreter(_bytes, cast)
    assert [hp_and_codes for hp_and_codes, _ in moved] == expected
    assert max(rest for _, rest in moved) < 0.3  # scales and amaxes, of a small matrix


def test_kernels_take_contiguous_matrices_only(interpreter):
    hp = torch.ones(4, 6)
    taken = [(hp, E4M3), (torch.nn.Parameter(hp), E5M2)]
    refused = [(hp, torch.float8_e4m3fnuz), *((other, E4M3) for other in (hp.t(), hp[:0], hp.double(), hp.to("meta")))]
    for cases, are_taken in ((taken, True), (refused, False)):
        for case in cases:
            assert interpreter(triton_cast.supports, *case) is are_taken
            # Without the interpreter no CPU tensor is taken.
            assert triton_blocks.INTERPRETED or not triton_cast.supports(*case)

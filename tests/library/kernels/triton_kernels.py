"""Provides the tests of Triton kernels with inputs, the oracle, and an interpreter in another process.

TRITON_INTERPRET must be set before triton is first imported, so the interpreter runs in a separate process.
"""

import contextlib
import math
import multiprocessing
import os
import types
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from unittest import mock

import numpy as np
import pytest
import torch

from quaver.kernels import triton_amax, triton_blocks, triton_cast, triton_copy
from quaver.kernels import triton_cast_blocks as cast_blocks
from quaver.kernels.operands import BlockCast
from quaver.recipes import scaling
from tests.recipes import E4M3, E5M2
from tests.reference import assert_same_bits

FLOAT8 = pytest.mark.parametrize("float8_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
HP = pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
DIRECTIONS = BOTH, ROWS, COLUMNS = (True, True), (True, False), (False, True)
"""Whether a cast returns row codes and column codes."""
NAN, INF = math.nan, math.inf
UNUSUAL = [0.0, -0.0], [1e-20, 0.0], [1e-40, 0.0], [1.0, NAN], [1.0, INF], [-INF, NAN], [3e4, -6e4]
"""Rows that make unusual amaxes."""


def varied(rows, columns, dtype):
    """Return rows and columns of different magnitudes, some of zeros, with an outlier in the last element."""
    hp = torch.randn(rows, columns) * torch.exp2(torch.randint(-6, 6, (rows, 1)).float())
    hp = hp * torch.exp2(torch.randint(-6, 6, (1, columns)).float())
    hp[rows // 2] = 0
    hp[:, columns // 2] = -0.0
    hp[-1, -1] = -7.25e3
    return hp.to(dtype)


def assert_equal(tensors, expected):
    """Assert the expected bits, except of NaNs, the expected strides, and None where it is expected."""
    for actual, oracle in zip(tensors, expected, strict=True):
        if oracle is None:
            assert actual is None
            continue
        assert actual.stride() == oracle.stride()
        assert_same_bits(actual.cpu(), oracle)


def laid_out(row_codes, column_codes, rows=True, columns=True):
    """Return the oracle's codes as row codes and column codes, None for those that are not requested."""
    transposed = None if column_codes is None else column_codes.t().clone(memory_format=torch.contiguous_format).t()
    return row_codes if rows else None, transposed if columns else None


def assert_operands(operands, row, column, rows, columns):
    """Assert the codes, quant_scale and dequant_scale of the oracle's casts `row` and `column`, where requested."""
    codes = laid_out(row[0], column[0], rows, columns)
    for operand, expected, (_, quant, dequant) in zip(operands, codes, (row, column), strict=True):
        assert (operand is None) == (expected is None)
        if operand is not None:
            assert_equal((operand.data, operand.dequant_scale, operand.quant_scale), (expected, dequant, quant))
            assert dequant.shape == operand.layout.get_scale_shape(*expected.shape)


@np.errstate(all="ignore")  # the interpreter's infinities and NaNs are intended
def assert_casts(hp, float8_dtype, *, persistent=(), given=(), power_of_2=False, rule="", directions=DIRECTIONS):
    """Assert the oracle's casts: dynamic, with each `persistent` scale, and with each pair of `given` scales."""
    assert triton_cast.supports(hp, float8_dtype)
    host, device = hp.cpu(), hp.device
    by_matrix, by_row, by_column = (
        scaling.dynamic_cast(host, float8_dtype, dim, power_of_2=power_of_2, rule=rule) for dim in (None, 1, 0)
    )
    if not rule:  # no rule changes the amax
        for dim in (None, 0, 1):
            assert_equal([triton_cast.compute_amax(hp, dim)], [scaling.compute_amax(host, dim).float()])
    for rows, columns in directions:
        args = (float8_dtype, rows, columns, power_of_2)
        assert_operands(triton_cast.cast_tensorwise(hp, *args, rule), by_matrix, by_matrix, rows, columns)
        assert_operands(triton_cast.cast_rowwise(hp, *args, rule), by_row, by_column, rows, columns)
        for scale in map(torch.tensor, persistent):
            codes, *rest = scaling.cast_with_persistent_scale(host, scale, float8_dtype, power_of_2=power_of_2)
            row_codes, column_codes = laid_out(codes, codes, rows, columns)
            expected = (row_codes, *rest[:2], column_codes, rest[2])
            assert_equal(triton_cast.cast_with_persistent_scale(hp, *args, scale.to(device)), expected)
    for scales in given:
        cast = partial(scaling.cast_to_float8, host, float8_dtype=float8_dtype, rule=rule)
        expected = [scale if scale is None else cast(scale) for scale in scales]
        on_device = [scale if scale is None else scale.to(device) for scale in scales]
        assert_equal(triton_cast.cast_with_scale(hp, float8_dtype, *on_device, rule=rule), laid_out(*expected))


def assert_casts_by_rule(hp, rule):
    """Assert the casts by a rule of serving engines: of tensors, rows and blocks, and with a given scale."""
    finite = hp[hp.isfinite().all(1)]
    assert_casts(finite, E4M3, given=[(torch.rand(len(finite), 1) + 0.1, None)], rule=rule, directions=[BOTH, ROWS])
    for block_size in ((1, 128), (128, 128)):
        assert_block_casts(hp, E4M3, block_size, False, rule)


@np.errstate(all="ignore")
def assert_block_casts(hp, float8_dtype, block_size, power_of_2, rule, directions=(BOTH,)):
    """Assert the oracle's bits of the cast in blocks, along rows and along columns.

    The dequant_scale of row codes along 1 x n, and of column codes alone in square blocks, is column-major.
    """
    assert triton_cast.supports(hp, float8_dtype)
    for rows, columns in directions:
        expected = []
        for size in (block_size, block_size[::-1]):
            options = {"power_of_2": power_of_2, "block_size": size, "rule": rule}
            codes, quant, dequant = scaling.dynamic_cast_blocks(hp.cpu(), float8_dtype, **options)
            if size[0] == 1 or (size[0] == size[1] and not rows):
                dequant = torch.empty(dequant.shape[::-1]).t().copy_(dequant)
            expected.append((codes, quant, dequant))
        operands = triton_cast.cast_blockwise(
            hp, BlockCast(float8_dtype, rows, columns, power_of_2, *block_size, rule=rule)
        )
        assert_operands(operands, *expected, rows=rows, columns=columns)


@contextmanager
def interpreting_process() -> Iterator[Callable]:
    """Yield a function that calls another one in a process whose Triton interprets."""
    with process(TRITON_INTERPRET="1") as call:
        call(patch_the_language_once)
        yield call


def patch_the_language_once() -> None:
    """Patch triton.language once, which the interpreter does at each call of a device function: half of its time.

    Kernels of the process must be interpreted.
    """
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):  # 3.6 also takes what it patched back elsewhere
        return
    # device functions of Triton's own and of Inductor call tl.core by its name
    interpreter._patch_lang(types.SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda function: types.SimpleNamespace(restore=lambda: None)


@contextmanager
def process(**environment: str) -> Iterator[Callable]:
    """Yield a function that calls another one in a new process with these environment variables."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        # Only this process inherits the variables, not the fork server of tests/isolated.py.
        with mock.patch.dict(os.environ, {"OMP_NUM_THREADS": "1"} | environment):
            pool.submit(os.getpid).result()
        yield lambda function, *args: pool.submit(function, *args).result()


@contextmanager
def counting_bytes() -> Iterator[Counter[str]]:
    """Count the bytes that interpreted kernels load and store, by the dtypes that their pointers point to.

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
        positions = {"create_masked_load": (0, 1), "create_masked_store": (0, 2), "create_atomic_rmw": (1, 3)}
        for name, (pointers_at, mask_at) in positions.items():
            patch.setattr(builder, name, counted(name, pointers_at, mask_at))
        yield moved


@contextmanager
def counting_launches():
    """Count the launches of each kernel by name, and assert the tiles that [Note: transposing a tile] describes."""
    names = Counter()

    def launch(kernel, matrix, tile, *args, **constants):
        names[kernel.fn.__name__] += 1
        elements_of_load = 1 if tile[:2] == (64, 32) else 16 // matrix.itemsize
        if tile.rows_of_thread > 1:
            elements = 32 * tile.warps * elements_of_load * tile.rows_of_thread
            assert tile.rows * tile.columns == elements, (names, tile)
        return triton_blocks.launch(kernel, matrix, tile, *args, **constants)

    with contextlib.ExitStack() as stack:
        for module in (triton_amax, triton_cast, cast_blocks, triton_copy):
            stack.enter_context(mock.patch.object(module, "launch", launch))
        yield names

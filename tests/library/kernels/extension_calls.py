"""Calls the C extension in every way, for test_no_crash.py."""

import contextlib

import torch

import quaver.kernels.persistent_cast  # noqa: F401 - registers operations
from quaver.kernels import cpu
from quaver.kernels.exact_mm import exact_float8_mm
from quaver.kernels.widen import widen
from quaver.recipes.scale_layout import TENSORWISE, ScaleLayout
from tests.recipes import E4M3

ROWS, COLUMNS = 600, 400  # enough bytes that a wrong address is not mapped by chance
ones = torch.ones(ROWS, COLUMNS)
LAYOUTS = TENSORWISE, TENSORWISE
codes, scale, recorded_amax = ones.to(E4M3), torch.tensor(1.0), torch.zeros(2)


def iter_casts(hp=ones, scale=scale, recorded_amax=recorded_amax):
    """Yield calls of the functions of cpu.py that read `hp`."""
    for dim in (None, 0, 1):
        yield lambda dim=dim: cpu.dynamic_cast(hp, E4M3, dim)
    yield lambda: cpu.dynamic_cast_both_dims(hp, E4M3)
    yield lambda: cpu.compute_block_amax(hp, ScaleLayout(1, 128))
    yield lambda: cpu.cast_with_scale(hp, scale, E4M3)
    yield lambda: cpu.cast_and_record_amax(hp, scale, E4M3, False, recorded_amax)


def iter_calls(hp=ones, codes=codes, scale=scale, recorded_amax=recorded_amax):
    """Yield calls of all functions and operations that run the extension."""
    yield from iter_casts(hp, scale, recorded_amax)
    yield lambda: cpu.widen(codes, torch.bfloat16, scale)
    yield lambda: widen(codes, torch.bfloat16)
    yield lambda: cpu.mm(codes, codes.t(), scale, scale, None, torch.float32)
    yield lambda: exact_float8_mm(codes, codes.t(), scale, scale, None, torch.bfloat16, True, *LAYOUTS)
    yield lambda: torch.ops.quaver.cast_tensorwise(hp, E4M3, True, False, False, "")
    yield lambda: torch.ops.quaver.cast_rowwise(hp, E4M3, True, True, False, "")
    yield lambda: torch.ops.quaver.cast_with_scale(hp, E4M3, scale, None, "")
    yield lambda: torch.ops.quaver.cast_with_persistent_scale(hp, E4M3, True, False, False, scale)
    rest = None, torch.bfloat16, False, *LAYOUTS
    yield lambda: torch.ops.quaver.exact_float8_mm(codes, codes.t(), scale, scale, *rest)


def run_calls(**tensors):
    """Check that every call ends, in a result or an error."""
    for call in iter_calls(**tensors):
        with contextlib.suppress(Exception):
            call()


def check_is_refused(function, *args, error=ValueError):
    """Check that `function` raises `error`, or returns None for tensors that the extension does not support."""
    try:
        if function(*args) is None:
            return
    except error:
        return
    raise AssertionError(f"not refused: {function}{args}")

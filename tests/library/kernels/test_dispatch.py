"""Tests which kernel an operation runs on a GPU, by dtype and layout, and that it gives the reference's bits.

The tensors are a CPU's that take a GPU's code (`simulate_gpu`), and the kernels run in Triton's interpreter.
"""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

pytest.importorskip("triton")

from quaver.experts import gpu_gemm
from quaver.experts.cast import group_amax
from quaver.experts.groups import ExpertMatmul
from quaver.kernels import cast, persistent_cast, triton_blocks, triton_cast
from quaver.kernels.operands import Operand
from quaver.recipes.scale_layout import ScaleLayout
from quaver.recipes.scaling import PersistentScale
from quaver.runtime.devices import simulate_gpu
from tests.library.kernels.triton_kernels import E4M3, E5M2, counting_launches, varied
from tests.reference import assert_same_bits

HP_DTYPES = torch.float32, torch.bfloat16, torch.float16
DTYPES = *HP_DTYPES, E4M3, E5M2, torch.uint8, torch.float64
H100, A100 = (9, 0), (8, 0)


def cast_with_persistent_scale(hp, scale):
    recorded_amax = torch.full((2,), -1.0)
    quant_scale = PersistentScale(torch.tensor(scale), recorded_amax, torch.tensor(scale > 0))
    return persistent_cast.cast_with_persistent_scale(hp, quant_scale, E5M2, True, True, False), recorded_amax


OPERATIONS = {
    "cast_tensorwise": lambda hp: cast.cast_tensorwise(hp, E4M3, True, True, False, ""),
    "cast_rowwise": lambda hp: cast.cast_rowwise(hp, E5M2, True, True, True, ""),
    "cast_rowwise, rows": lambda hp: cast.cast_rowwise(hp, E4M3, True, False, True, ""),
    "cast_blockwise": lambda hp: cast.cast_blockwise(hp, E4M3, True, True, True, 1, 32, ""),
    "cast_blockwise, square": lambda hp: cast.cast_blockwise(hp, E4M3, True, True, True, 128, 128, ""),
    "cast_with_scale": lambda hp: cast.cast_with_scale(hp, E4M3, torch.tensor(3.0), torch.rand(1, hp.shape[1]), ""),
    "cast_with_persistent_scale": lambda hp: cast_with_persistent_scale(hp, 2.0),
    "cast_with_persistent_scale, unknown": lambda hp: cast_with_persistent_scale(hp, 0.0),
    "compute_matrix_amax": lambda hp: cast.compute_matrix_amax(hp, 1),
    "group_amax": lambda hp: group_amax(hp, torch.arange(hp.shape[0]) // 5, 4),
    "to_column_major": cast.to_column_major,
    "to_row_major": lambda codes: cast.to_row_major(codes.mT),
}
LAYOUTS = {
    "contiguous": lambda matrix: matrix,
    "off 16 bytes": lambda matrix: matrix.new_empty(matrix.numel() + 1)[1:].view(matrix.shape).copy_(matrix),
    "transposed": lambda matrix: matrix.t().contiguous().t(),
    "part of wider rows": lambda matrix: matrix.repeat(1, 2)[:, : matrix.shape[1]],
    "two matrices": lambda matrix: matrix.repeat(2, 1, 1),
}
CASES = [(dtype, "contiguous") for dtype in DTYPES]
CASES += [(dtype, layout) for dtype in (torch.bfloat16, E4M3) for layout in LAYOUTS if layout != "contiguous"]
SUPPORTED = dict.fromkeys(OPERATIONS, (HP_DTYPES, ("contiguous", "off 16 bytes")))
COPIED = (E4M3, E5M2), ("contiguous", "off 16 bytes", "two matrices")
SUPPORTED |= {"to_column_major": COPIED, "to_row_major": COPIED}
"""The dtypes and the layouts that the kernel of an operation takes; the reference computes the others."""


@np.errstate(all="ignore")
def run_table(capability, cases):
    """Return (operation, dtype, layout) of every case that launched a kernel.

    Asserts in each case the reference's results, and that those of fake tensors have the same layout.
    """
    launched = set()
    for (name, call), (dtype, layout) in itertools.product(OPERATIONS.items(), cases):
        matrix = LAYOUTS[layout](varied(17, 48, torch.float32).to(dtype))
        with simulate_gpu(capability), counting_launches() as kernels:
            result = call_or_error(call, matrix)
        # The reference of a cast lays codes out with the kernel of a copy.
        if (kernels and name.endswith("_major")) or set(kernels) - {"_column_major"}:
            launched.add((name, dtype, layout))
        with simulate_gpu(capability), mock.patch.object(triton_blocks, "INTERPRETED", False):
            expected = call_or_error(call, matrix)
        assert type(result) is type(expected), (name, dtype, layout, result, expected)
        if matrix.dim() == 2:
            with simulate_gpu(capability), FakeTensorMode() as mode:
                faked = call_or_error(call, mode.from_tensor(matrix))
        if isinstance(result, str):
            assert result == expected, (name, dtype, layout)
            assert matrix.dim() != 2 or result == faked, (name, dtype, layout)
            continue
        assert describe(result) == describe(expected), (name, dtype, layout)
        for actual, reference in zip(flatten(result), flatten(expected), strict=True):
            assert_same_bits(actual, reference)
        if matrix.dim() == 2:
            assert describe(faked) == describe(result), (name, dtype, layout)
    return launched


def call_or_error(call, matrix):
    """Return what `call` returns, or the name of the class of its error where it refuses a dtype or a shape."""
    torch.manual_seed(0)
    try:
        return call(matrix)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        return type(error).__name__


def describe(result):
    """Return dtype, shape and strides of each tensor."""
    return [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in flatten(result)]


def flatten(result):
    """Return the tensors in nested tuples."""
    if isinstance(result, torch.Tensor):
        return [result]
    return [] if result is None or isinstance(result, ScaleLayout) else [*itertools.chain(*map(flatten, result))]


def run_grouped_matmuls():
    """Return the relative errors of torch's grouped matmul in high precision, by form and layout of weights."""
    ends = torch.tensor([1, 1, 18, 35], dtype=torch.int32)  # each group takes the most padding
    tokens, gradients, weights = torch.randn(37, 24), torch.randn(37, 16), torch.randn(4, 16, 24)
    errors = {}
    for form, transposed in itertools.product(ExpertMatmul, (False, True)):
        stored = weights.transpose(1, 2).contiguous() if transposed else weights
        left = tokens if form is ExpertMatmul.OUTPUT else gradients
        right = tokens if form is ExpertMatmul.GRAD_WEIGHT else stored.flatten(0, 1)
        with simulate_gpu(H100), counting_launches() as kernels:
            operands = Operand(left.bfloat16()), Operand(right.bfloat16())
            actual = gpu_gemm.multiply_widened(*operands, ends, form, transposed).float()
        expected = torch.zeros_like(actual)
        for group, (start, stop) in enumerate(((0, 1), (1, 1), (1, 18), (18, 35))):
            if form is ExpertMatmul.GRAD_WEIGHT:
                product = gradients[start:stop].t() @ tokens[start:stop]
                expected[group] = product.t() if transposed else product
            else:
                weight = weights[group].t() if form is ExpertMatmul.OUTPUT else weights[group]
                expected[start:stop] = left[start:stop] @ weight
        errors[form, transposed] = ((actual - expected).norm() / expected.norm()).item()
        assert not kernels  # this matmul reads either layout
    return errors


def test_an_operation_gives_a_kernel_what_it_takes_and_the_rest_to_the_reference(interpreter):
    expected = {
        (name, dtype, layout)
        for name, (dtypes, layouts) in SUPPORTED.items()
        for dtype, layout in CASES
        if dtype in dtypes and layout in layouts
    }
    assert interpreter(run_table, H100, CASES) == expected
    assert interpreter(run_table, A100, [(torch.bfloat16, "contiguous"), (E4M3, "contiguous")]) == set()


def test_the_grouped_matmul_of_high_precision_is_near_the_sum(interpreter):
    assert all(error < 2**-8 for error in interpreter(run_grouped_matmuls).values())


def test_the_table_has_every_operation_with_a_kernel():
    assert {name.partition(",")[0] for name in OPERATIONS} >= set(triton_cast.__all__) - {"compute_amax", "supports"}

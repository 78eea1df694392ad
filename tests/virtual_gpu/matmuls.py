"""Models torch's matmuls of float8 matrices on NVIDIA GPUs: what they refuse, and an exact product.

The contracts are those of aten/src/ATen/native/cuda/ScaledBlas.cpp and of cuBLASLt 12.9, in PyTorch 2.11 to 2.15:

    operands     e4m3 or e5m2, not both e5m2; K and N multiples of 16; on Hopper a row-major and b column-major
    scales       float32 (); [M, 1] and [1, N]; blocks of 1 x 128 and 128 x 128 on Hopper alone, column-major
                 E8M0 of 1 x 32 on Blackwell, in tiles of 128 x 4
    results      bfloat16, float16 or float32; rowwise bfloat16 only: CUTLASS's kernels write no other in 2.11
    addresses    multiples of 16 bytes, scales included
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

if TYPE_CHECKING:
    from tests.virtual_gpu import Card

FLOAT8 = torch.float8_e4m3fn, torch.float8_e5m2


def check(condition: bool, message: str) -> None:
    """Raise RuntimeError, as the device does for a violated contract, unless `condition`."""
    if not condition:
        raise RuntimeError(f"the device refuses: {message}")


def check_operands(card: Card, a: Tensor, b: Tensor) -> None:
    """Check the contracts of the matrices, which do not depend on the scales."""
    check(card.capability >= (8, 9), f"float8 matmuls need sm_89 or newer, this is sm_{card.capability[0]}0")
    check(a.dim() == b.dim() == 2 and a.shape[1] == b.shape[0], f"matrices [M, K] and [K, N], got {a.shape}, {b.shape}")
    check(a.dtype in FLOAT8 and b.dtype in FLOAT8, f"float8 matrices, got {a.dtype} and {b.dtype}")
    check(not a.dtype is b.dtype is torch.float8_e5m2, "one operand in e4m3")
    check(a.shape[1] % 16 == b.shape[1] % 16 == 0, f"K and N multiples of 16, got {a.shape[1]} and {b.shape[1]}")
    if card.capability[0] == 9:
        check(is_row_major(a), f"a row-major, got strides {a.stride()} of {list(a.shape)}")
        check(is_row_major(b.t()), f"b column-major, got strides {b.stride()} of {list(b.shape)}")
    for matrix in (a, b):
        check(matrix.data_ptr() % 16 == 0, "a matrix at a multiple of 16 bytes")


def is_row_major(matrix: Tensor) -> bool:
    """Whether cuBLAS reads the matrix row by row. torch copies a matrix in neither order to row-major."""
    if matrix.stride(-1) == 1 and matrix.stride(-2) >= max(1, matrix.shape[-1]):
        return True
    return not (matrix.stride(-2) == 1 and matrix.stride(-1) >= max(1, matrix.shape[-2]))


def check_bias(bias: Tensor | None, out_dtype: torch.dtype, columns: int) -> None:
    """Check a bias, which is added to the sums before the result is rounded."""
    if bias is not None:
        check(bias.numel() == columns, f"a bias for {columns} columns, got {bias.numel()}")
        check(out_dtype is not torch.float32, "no bias with a float32 result")
        check(bias.dtype is out_dtype, f"a bias in {out_dtype}, got {bias.dtype}")


def scaled_mm(
    card: Card,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """aten::_scaled_mm with scales of matrices, or of rows and columns."""
    check_operands(card, a, b)
    check(scale_result is None, "no scale of the result, which is not float8")
    check(scale_a.dtype is scale_b.dtype is torch.float32, f"float32 scales, got {scale_a.dtype}, {scale_b.dtype}")
    out_dtype = out_dtype or torch.bfloat16
    rows, columns = a.shape[0], b.shape[1]
    kind = "tensorwise"
    if not scale_a.numel() == scale_b.numel() == 1:
        kind = "rowwise"
        shapes = tuple(scale_a.shape), tuple(scale_b.shape)
        check(shapes == ((rows, 1), (1, columns)), f"scales [{rows}, 1] and [1, {columns}], got {shapes}")
        check(scale_a.is_contiguous() and scale_b.t().is_contiguous(), "contiguous scales")
        check(card.capability < (12, 0), "no rowwise scales on sm_120")
        check(out_dtype is torch.bfloat16, f"a bfloat16 result with rowwise scales, got {out_dtype}")
    for scale in (scale_a, scale_b):
        check(scale.data_ptr() % 16 == 0, "a scale at a multiple of 16 bytes")
    check_bias(bias, out_dtype, columns)
    card.calls["_scaled_mm", kind] += 1
    return multiply_and_round(a.double() * scale_a, b.double() * scale_b, bias, out_dtype)


def multiply_and_round(a: Tensor, b: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Return the product of float64 matrices, rounded once."""
    out = a @ b
    return (out if bias is None else out + bias.double()).to(out_dtype)


def scaled_mm_v2(
    card: Card,
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    recipe_a: list[int],
    swizzle_a: list[int],
    scale_b: list[Tensor],
    recipe_b: list[int],
    swizzle_b: list[int],
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
    contraction_dim: list[int] | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """aten::_scaled_mm_v2 with scales of blocks."""
    check_operands(card, a, b)
    check(len(scale_a) == len(scale_b) == 1, "one scale tensor for each operand")
    recipes = ScalingType(recipe_a[0]), ScalingType(recipe_b[0])
    out_dtype = out_dtype or torch.bfloat16
    check_bias(bias, out_dtype, b.shape[1])
    swizzles = SwizzleType(swizzle_a[0]), SwizzleType(swizzle_b[0])
    if ScalingType.BlockWise1x32 in recipes:
        check(card.capability[0] == 10, "scales of 1 x 32 need sm_100")
        check(set(recipes) == {ScalingType.BlockWise1x32}, f"1 x 32 for both operands, got {recipes}")
        check(set(swizzles) == {SwizzleType.SWIZZLE_32_4_4}, f"scales in tiles of 32 x 4 x 4, got {swizzles}")
        scales = [undo_tiling(scale[0], matrix) for scale, matrix in ((scale_a, a), (scale_b, b.t()))]
        length = 32
    else:
        check(card.capability[0] == 9, "scales of 1 x 128 and 128 x 128 need sm_90")
        scales = [spread_over_rows(scale_a[0], a, recipes[0]), spread_over_rows(scale_b[0], b.t(), recipes[1])]
        check(recipes != (ScalingType.BlockWise128x128,) * 2, "1 x 128 for one operand at least")
        length = 128
    card.calls["_scaled_mm_v2", " x ".join(recipe.name for recipe in recipes)] += 1
    wide = [
        matrix.double() * scale.double().repeat_interleave(length, 1)[:, : matrix.shape[1]]
        for matrix, scale in zip((a, b.t()), scales, strict=True)
    ]
    return multiply_and_round(wide[0], wide[1].t(), bias, out_dtype)


def undo_tiling(scale: Tensor, matrix: Tensor) -> Tensor:
    """Return the E8M0 scales of a matrix [rows, K] from tiles of 128 x 4: float32 [rows, K / 32]."""
    rows, blocks = matrix.shape[0], -(-matrix.shape[1] // 32)
    down, along = -(-rows // 128), -(-blocks // 4)
    check(scale.dtype is torch.float8_e8m0fnu, f"E8M0 scales, got {scale.dtype}")
    check(scale.numel() == down * along * 512, f"{down} x {along} tiles of 512 scales, got {scale.numel()}")
    check(scale.is_contiguous() and scale.data_ptr() % 16 == 0, "contiguous scales at a multiple of 16 bytes")
    tiles = scale.float().view(down, along, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(down * 128, along * 4)[:rows, :blocks]


def spread_over_rows(scale: Tensor, matrix: Tensor, recipe: ScalingType) -> Tensor:
    """Return the float32 scales of a matrix [rows, K] for blocks of 128 along K: [rows, K / 128]."""
    rows, blocks = matrix.shape[0], -(-matrix.shape[1] // 128)
    check(scale.dtype is torch.float32, f"float32 scales, got {scale.dtype}")
    if recipe == ScalingType.BlockWise1x128:
        expected, across = (rows, blocks), scale
    else:
        check(recipe == ScalingType.BlockWise128x128, f"scales of 1 x 128 or 128 x 128, got {recipe}")
        expected = -(-blocks // 4) * 4, -(-rows // 128)
        across = scale[:blocks].t().repeat_interleave(128, 0)[:rows]
    check(tuple(scale.shape) == expected, f"scales {expected} for {recipe.name}, got {tuple(scale.shape)}")
    strides = {(1, expected[0]), *([(1, 1)] if expected[1] == 1 else [])}
    check(scale.stride() in strides, f"scales with strides (1, {expected[0]}), got {scale.stride()}")
    check(
        expected[1] == 1 or expected[0] % 4 == 0, f"columns of scales at multiples of 16 bytes, got {expected[0]} rows"
    )
    check(scale.data_ptr() % 16 == 0, "a scale at a multiple of 16 bytes")
    return across


def mm_with_dtype(card: Card, a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """aten::mm.dtype: operands in 16 bits, a result in float32 or in their dtype."""
    check(a.dtype is b.dtype and a.dtype.itemsize == 2, f"operands of one dtype of 16 bits, got {a.dtype}, {b.dtype}")
    check(out_dtype in (torch.float32, a.dtype), f"a result in float32 or {a.dtype}, got {out_dtype}")
    return multiply_and_round(a.double(), b.double(), None, out_dtype)


def make_out_variant(model: Any) -> Any:
    """Return the overload of an operator that writes to `out`."""

    def write(card: Card, *args: Any, out: Tensor, **options: Any) -> Tensor:
        return out.copy_(model(card, *args, **options))

    return write


OPERATOR_MODELS = {
    "_scaled_mm": scaled_mm,
    "_scaled_mm.out": make_out_variant(scaled_mm),
    "_scaled_mm_v2": scaled_mm_v2,
    "_scaled_mm_v2.out": make_out_variant(scaled_mm_v2),
    "mm.dtype": mm_with_dtype,
    "mm.dtype_out": make_out_variant(mm_with_dtype),
}

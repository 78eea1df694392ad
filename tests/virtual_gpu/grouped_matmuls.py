"""Models torch's grouped matmuls on NVIDIA GPUs, like matmuls.py, after GroupedBlas.cpp and GroupedMMUtils.h.

    _grouped_mm           bfloat16; either order of strides, at multiples of 16 bytes
    _scaled_grouped_mm    e4m3 with float32 scales of rows and columns; sm_90 and sm_100; a row-major, b column-major

Groups are rows of a [T, K] with matrices b [E, K, N], or ranges of the contracted dim of a [M, T] and b [T, N]. The
device does not write elements outside all groups; they are NaN here. The rows of a result begin at multiples of 16
bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.virtual_gpu.matmuls import check, is_row_major, multiply_and_round

if TYPE_CHECKING:
    from tests.virtual_gpu import Card


def check_strides(name: str, matrix: Tensor) -> None:
    """Check that one of the last two dims is contiguous and the other has a stride of a multiple of 16 bytes."""
    rows, columns = matrix.shape[-2:]
    down, across = matrix.stride()[-2:]
    check(matrix.data_ptr() % 16 == 0, f"{name} at a multiple of 16 bytes")
    in_order = (across == 1 and down >= max(1, columns)) or (down == 1 and across >= max(1, rows))
    check(
        in_order, f"{name}: strides of a matrix or of a transposed one, got {matrix.stride()} of {list(matrix.shape)}"
    )
    leading = max(down, across)
    check(leading * matrix.itemsize % 16 == 0, f"{name}: a stride at a multiple of 16 bytes, got {matrix.stride()}")


def check_groups(a: Tensor, b: Tensor, offs: Tensor | None) -> list[tuple[int, int]]:
    """Return the begin and the end of each group. The device does not read them on the host; this model does."""
    check(
        a.dim() == 2 and b.dim() in (2, 3), f"a matrix, with a matrix or a stack; got {list(a.shape)}, {list(b.shape)}"
    )
    check(b.dim() == 2 or a.shape[1] == b.shape[1], f"one contracted dim, got {list(a.shape)} and {list(b.shape)}")
    check(offs is not None and offs.dim() == 1 and offs.dtype is torch.int32, "int32 ends of the groups")
    stops = [int(stop) for stop in offs.numpy()]  # not tolist(), which `refuse_host_reads` refuses
    check(b.dim() == 2 or len(stops) == b.shape[0], f"an end for each of {b.shape[0]} matrices, got {len(stops)}")
    return list(zip([0, *stops[:-1]], stops, strict=True))


def multiply(a: Tensor, b: Tensor, groups: list[tuple[int, int]], out_dtype: torch.dtype) -> Tensor:
    """Return the products of float64 matrices by group; NaN outside all groups."""
    columns = b.shape[-1]
    padded = -(-columns // (16 // out_dtype.itemsize)) * (16 // out_dtype.itemsize)
    shape = (a.shape[0], columns) if b.dim() == 3 else (len(groups), a.shape[0], columns)
    out = torch.full((*shape[:-1], padded), torch.nan, dtype=out_dtype)[..., :columns]
    for group, (start, stop) in enumerate(groups):
        if b.dim() == 3:
            out[start:stop] = multiply_and_round(a[start:stop], b[group], None, out_dtype)
        elif stop > start:  # the device does not write the result of an empty range
            out[group] = multiply_and_round(a[:, start:stop], b[start:stop], None, out_dtype)
    return out


def grouped_mm(
    card: Card,
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """aten::_grouped_mm. Before sm_90 torch multiplies group by group, which waits for the ends of the groups."""
    check(a.dtype is b.dtype is torch.bfloat16, f"bfloat16 matrices, got {a.dtype} and {b.dtype}")
    check(bias is None and out_dtype in (None, torch.bfloat16), "no bias, and a bfloat16 result")
    check_strides("a", a)
    check_strides("b", b)
    groups = check_groups(a, b, offs)
    card.calls["_grouped_mm", "bfloat16"] += 1
    return multiply(a.double(), b.double(), groups, torch.bfloat16)


def scaled_grouped_mm(
    card: Card,
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """aten::_scaled_grouped_mm with scales of rows and columns; of each group if groups split the contracted dim."""
    check(card.capability in ((9, 0), (10, 0)), "scaled grouped matmuls need sm_90 or sm_100")
    check(a.dtype is b.dtype is torch.float8_e4m3fn, f"e4m3 matrices, got {a.dtype} and {b.dtype}")
    check(bias is None and scale_result is None, "no bias, and no scale of the result")
    check(out_dtype in (None, torch.bfloat16), f"a bfloat16 result, got {out_dtype}")
    check_strides("a", a)
    check_strides("b", b)
    check(is_row_major(a) and is_row_major(b.mT), f"a row-major and b column-major, got {a.stride()} and {b.stride()}")
    sizes = a.shape[-1], *b.shape[-2:]
    check(
        all(size % 16 == 0 for size in sizes), f"sizes that are multiples of 16, got {list(a.shape)}, {list(b.shape)}"
    )
    groups = check_groups(a, b, offs)
    check(scale_a.dtype is scale_b.dtype is torch.float32, "float32 scales")
    count = len(groups)
    expected = (a.shape[0], (count, b.shape[2])) if b.dim() == 3 else (count * a.shape[0], (count * b.shape[1],))
    check(tuple(scale_a.shape) == (expected[0],) and scale_a.is_contiguous(), f"scale_a [{expected[0]}], contiguous")
    check(tuple(scale_b.shape) == expected[1] and scale_b.stride(-1) == 1, f"scale_b {expected[1]}, contiguous")
    check(b.dim() == 3 or all(stop % 16 == 0 for _, stop in groups), "ends of ranges at multiples of 16")
    card.calls["_scaled_grouped_mm", "rowwise"] += 1
    if b.dim() == 3:
        return multiply(a.double() * scale_a[:, None], b.double() * scale_b[:, None, :], groups, torch.bfloat16)
    group = torch.bucketize(torch.arange(a.shape[1]), offs, right=True).clamp(max=count - 1)
    a_wide = a.double() * scale_a.view(count, -1)[group].t()
    return multiply(a_wide, b.double() * scale_b.view(count, -1)[group], groups, torch.bfloat16)


OPERATOR_MODELS = {"_grouped_mm": grouped_mm, "_scaled_grouped_mm": scaled_grouped_mm}

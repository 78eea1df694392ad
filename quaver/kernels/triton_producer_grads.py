"""The backwards of SwiGLU and RMSNorm, each in one pass, on an NVIDIA GPU, in Triton.

    grad_up     = RNh(RNh(silu(gate)) * grad)                               silu(x) = x * sigmoid(x)
    grad_gate   = RNh(g * sigmoid(gate) * (1 + gate * (1 - sigmoid(gate))))          g = RNh(grad * up)

with the roundings to gate's dtype, RNh, of PyTorch's gradients (quaver/producers.py); and

    grad_hidden = RNh((g - rows * mean(g * rows)) * inverse_rms)    g = grad * weight, rows = hidden * inverse_rms
    grad_weight = sum over rows of grad * rows

in float32 until they are written, as there. Everything is read once and written once: 10 bytes an element of SwiGLU in
bfloat16; 10 of RMSNorm with a float32 hidden and a bfloat16 grad.

Grid and tile: `_swiglu` has one program for each flat tile. `_rms_norm` has blocks of rows, and walks down them by
tiles of a few whole rows with the next one under way; each block leaves a row of float32 partial sums of grad_weight,
which triton_reduce.py adds up. Which program adds which rows depends on the shape alone, so grad_weight is the same in
every run.
Mask: what lies outside is read as 0, and not written. Positions are 64-bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver.kernels import triton_reduce, triton_rows
from quaver.kernels.triton_blocks import INTERPRETED, dealt_offsets, jit, load_tile, widen
from quaver.kernels.triton_produced import TRITON_HP, load_ahead, load_rows, narrowed, rounded

try:
    import triton
    import triton.language as tl
except ImportError:  # PyTorch for CPUs comes without it
    triton = None

TILE_BYTES = 4096
"""Of each of SwiGLU's three matrices in a tile: two loads of 16 bytes for each thread."""
WARPS = 4


def swiglu(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """grad_gate and grad_up, of three tensors of one shape and dtype that are not empty and `takes` accepts."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    tile = TILE_BYTES // gate.element_size()
    with torch.cuda.device_of(gate):
        _swiglu[(triton.cdiv(gate.numel(), tile),)](
            grad,
            gate,
            up,
            grad_gate,
            grad_up,
            gate.numel(),
            HP=TRITON_HP[gate.dtype],
            TILE=tile,
            INTERPRETED=INTERPRETED,
            num_warps=WARPS,
        )
    return grad_gate, grad_up


def rms_norm(grad: Tensor, hidden: Tensor, weight: Tensor, inverse_rms: Tensor) -> tuple[Tensor, Tensor]:
    """grad_hidden [R, D] and grad_weight [D], in the dtypes of hidden and weight."""
    height, width = hidden.shape
    tile_rows, tile_columns, warps = triton_rows.tile_of(width, sums=True)
    fewest = triton_rows.SUM_BLOCKS * triton_rows.SUM_ROWS
    block_rows = tile_rows * triton.cdiv(max(height, fewest), triton_rows.SUM_BLOCKS * tile_rows)
    blocks = triton.cdiv(height, block_rows)
    grad_hidden = torch.empty_like(hidden)
    partial_sums = hidden.new_empty(blocks, width, dtype=torch.float32)
    with torch.cuda.device_of(hidden):
        _rms_norm[(blocks,)](
            grad,
            hidden,
            weight,
            inverse_rms,
            grad_hidden,
            partial_sums,
            height,
            width,
            block_rows,
            AHEAD=load_ahead(width),
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            INTERPRETED=INTERPRETED,
            num_warps=warps,
        )
    return grad_hidden, triton_reduce.add_partials(partial_sums).to(weight.dtype)


@jit
def _swiglu(
    grad_ptr: tl.tensor,
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    grad_gate_ptr: tl.tensor,
    grad_up_ptr: tl.tensor,
    numel: tl.tensor,
    HP: tl.constexpr,
    TILE: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    tile = tl.program_id(0)
    grad = load_tile(grad_ptr, tile, numel, TILE, INTERPRETED)
    gate = load_tile(gate_ptr, tile, numel, TILE, INTERPRETED)
    up = load_tile(up_ptr, tile, numel, TILE, INTERPRETED)
    divisor = 1.0 + tl.exp(-gate)
    sigmoid = 1.0 / divisor
    of_silu = rounded(grad * up, HP, INTERPRETED)
    grad_gate = of_silu * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    grad_up = rounded(gate / divisor, HP, INTERPRETED) * grad
    at = tile.to(tl.int64) * TILE + dealt_offsets(gate_ptr, TILE)
    tl.store(grad_gate_ptr + at, narrowed(grad_gate, HP, INTERPRETED), mask=at < numel)
    tl.store(grad_up_ptr + at, narrowed(grad_up, HP, INTERPRETED), mask=at < numel)


@jit
def _rms_norm(
    grad_ptr: tl.tensor,
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    inverse_rms_ptr: tl.tensor,
    grad_hidden_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    block_rows: tl.tensor,
    AHEAD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * block_rows
    end = tl.minimum(row + block_rows, rows)
    down = tl.arange(0, TILE_ROWS)
    c = dealt_offsets(hidden_ptr, TILE_COLUMNS)
    in_tile = down.to(tl.int64)[:, None] * columns + c[None, :]
    across = (c < columns)[None, :]
    weight = _wide_weight(weight_ptr, c, columns, INTERPRETED)
    grad = load_rows(grad_ptr, row, in_tile, down, end, across, columns)
    hidden = load_rows(hidden_ptr, row, in_tile, down, end, across, columns)
    sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    while row < end:
        following = row + TILE_ROWS
        if AHEAD:
            grad_ahead = load_rows(grad_ptr, following, in_tile, down, end, across, columns)
            hidden_ahead = load_rows(hidden_ptr, following, in_tile, down, end, across, columns)
        inverse_rms = tl.load(inverse_rms_ptr + row + down, mask=row + down < end, other=0.0)[:, None]
        normed_rows = widen(hidden, INTERPRETED) * inverse_rms
        wide = widen(grad, INTERPRETED)
        sums += wide * normed_rows
        if not AHEAD:
            weight = _wide_weight(weight_ptr, c, columns, INTERPRETED)  # to keep it would take registers, too
        grad_rows = wide * weight
        projection = (tl.sum(grad_rows * normed_rows, 1) / columns)[:, None]
        grad_hidden = narrowed(
            (grad_rows - normed_rows * projection) * inverse_rms, hidden_ptr.dtype.element_ty, INTERPRETED
        )
        tl.store(grad_hidden_ptr + row * columns + in_tile, grad_hidden, mask=(row + down < end)[:, None] & across)
        if AHEAD:
            grad = grad_ahead
            hidden = hidden_ahead
        if not AHEAD:
            grad = load_rows(grad_ptr, following, in_tile, down, end, across, columns)
            hidden = load_rows(hidden_ptr, following, in_tile, down, end, across, columns)
        row = following
    tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * columns + c, tl.sum(sums, 0), mask=c < columns)


@jit
def _wide_weight(weight_ptr: tl.tensor, c: tl.tensor, columns: tl.tensor, INTERPRETED: tl.constexpr) -> tl.tensor:
    """float32 [1, TILE_COLUMNS]."""
    return widen(tl.load(weight_ptr + c, mask=c < columns, other=0.0), INTERPRETED)[None, :]

"""Predicts the time of one matmul from its FLOPs, its shape and its bytes.

[r, c] x [c, s]    max(2 r c s / (FLOP/s * share), (b (r c + c s) + 2 r s) / bandwidth)    b = 1 in float8, else 2

share of the best rate = rate * used * filled * pipelined / MEASURED_SHARE, at most 1, of the tile with the largest
rate         of a tile of this size (TILE_RATES)
used         the part of the tiles' elements that lies in the result
filled       tiles / (waves * multiprocessors), each multiprocessor computing a tile per wave
pipelined    c / (c + HALF_SPEED_LENGTH): each tile begins with empty pipelines
"""

from __future__ import annotations

import functools
from math import ceil
from typing import NamedTuple

from quaver.roofline.device_specs import DeviceSpec


class MatmulShares(NamedTuple):
    """The shares of the data sheets' matmul rates that the best matmuls reach."""

    bfloat16: float
    float8: float


MATMUL_SHARES = {
    "B200": MatmulShares(1745.0 / 2250, 3432.5 / 4500),
    "H200": MatmulShares(794.5 / 989.4, 1453.4 / 1978.9),
    "H100": MatmulShares(794.5 / 989.4, 1402.6 / 1978.9),
    "A100": MatmulShares(271.2 / 312, 271.2 / 312),
    "L40S": MatmulShares(0.80, 0.80),
    "MI300X": MatmulShares(668.4 / 1307.4, 668.4 / 1307.4),
}
_SAME_CHIP = {"GB200": "B200", "H100-NVL": "H100", "H100-PCIe": "H100", "A100-40GB": "A100", "A100-PCIe": "A100"}
MATMUL_SHARES |= {name: MATMUL_SHARES[chip] for name, chip in _SAME_CHIP.items()}
"""TFLOP/s measured with PyTorch 2.5 to 2.7, over the TFLOP/s of the data sheet. From Stas Bekman, "Machine Learning
Engineering", table "Maximum Achievable Matmul FLOPS" (github.com/stas00/ml-engineering, compute/accelerator): the best
of many shapes, so real layers reach less. Assumed, not measured: both shares of L40S; the float8 share of MI300X, which
is its bfloat16 share; the shares of cards with the same chip (_SAME_CHIP). A100's float8 matmuls run in bfloat16."""

DEFAULT_MATMUL_SHARES = MATMUL_SHARES["H100"]
"""Assumed for devices with unknown shares."""

MEMORY_SHARE = 0.85
"""Share of the data sheet's bandwidth that casts reach. Copies reach 0.90 on an H200 (4.3 of 4.8 TB/s), and torchao's
roofline (torchao/testing/training/roofline_utils.py) assumes 0.92 for pointwise kernels. Casts write one of two layouts
transposed, which is slower; how much slower is an assumption."""

TILE_RATES = ((128, 256, 1.0), (256, 128, 1.0), (128, 192, 0.95), (192, 128, 0.95), (128, 128, 0.85), (64, 128, 0.7))
"""Rows and columns of a tile, and its rate: a small tile reads more per multiplication. CUTLASS's Hopper
kernels have these sizes. The rates are assumed, and compared with bfloat16 rates of an sm_90 (tests/library/roofline).
"""

HALF_SPEED_LENGTH = {False: 250, True: 400}
"""The contracted dim at which a bfloat16 (False) or float8 (True) matmul has half of the rate of a long one.
bfloat16 is fitted to XLA's table for sm_90, 392 TFLOP/s at 4096 x 4096 x 256 and 783 at 4096^3 (xla/service/gpu/model/
matmul_interpolator_data.h). float8 is fitted to tilelang's 8192 x 8192 x K on an H800: 569 TFLOP/s at K = 256, 1129 at
1024, 1541 at 16384 (github.com/tile-ai/tilelang, benchmark/matmul_fp8)."""

MEASURED_SHARE = 0.95
"""`filled * pipelined` of the shapes at which MATMUL_SHARES were measured, such as 2048 x 2048 x 13312."""


def predict_move_seconds(moved_bytes: float, spec: DeviceSpec) -> float:
    """Predict the seconds of a kernel that only moves bytes, without its launch."""
    return moved_bytes / (spec.memory_gb_per_s * 1e9 * MEMORY_SHARE)


@functools.cache
def compute_shape_share(rows: int, contracted: int, columns: int, multiprocessors: int, *, in_float8: bool) -> float:
    """Return the share of the best rate that a matmul of this shape reaches."""
    filled = 0.0
    for height, width, rate in TILE_RATES:
        tiles = ceil(rows / height) * ceil(columns / width)
        waves = ceil(tiles / multiprocessors)
        used = rows * columns / (tiles * height * width)
        filled = max(filled, rate * used * tiles / (waves * multiprocessors))
    return min(1.0, filled * contracted / (contracted + HALF_SPEED_LENGTH[in_float8]) / MEASURED_SHARE)


def get_best_tflops(spec: DeviceSpec, *, in_float8: bool) -> float:
    """Return the rate of the best matmuls; the bfloat16 rate if the device does not multiply float8."""
    shares = MATMUL_SHARES.get(spec.name, DEFAULT_MATMUL_SHARES)
    if in_float8 and spec.float8_tflops is not None:
        return spec.float8_tflops * shares.float8
    return spec.bfloat16_tflops * shares.bfloat16


def predict_matmul_seconds(
    rows: int,
    contracted: int,
    columns: int,
    spec: DeviceSpec,
    *,
    in_float8: bool,
    by_shape: bool = True,
    scales_share: float = 1.0,
) -> float:
    """Predict the seconds of one matmul to bfloat16, without its launch.

    Args:
        rows, contracted, columns: the sizes of [rows, contracted] x [contracted, columns].
        spec: the device.
        in_float8: whether the operands are in float8; if not, or if the device does not multiply float8, in bfloat16.
        by_shape: use the rate of its shape; else the best rate.
        scales_share: the share of this rate with the scales of float8 operands (scaled_matmul.py).
    """
    in_float8 = in_float8 and spec.float8_tflops is not None
    tflops = get_best_tflops(spec, in_float8=in_float8) * (scales_share if in_float8 else 1.0)
    if by_shape:
        tflops *= compute_shape_share(rows, contracted, columns, spec.multiprocessors, in_float8=in_float8)
    moved_bytes = (rows + columns) * contracted * (1 if in_float8 else 2) + 2 * rows * columns
    return max(2 * rows * contracted * columns / (tflops * 1e12), predict_move_seconds(moved_bytes, spec))

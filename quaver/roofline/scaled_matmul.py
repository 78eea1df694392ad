"""The rate of float8 matmuls with each kind of scales, as a share of the rate with one scale per operand.

torch has two kernels for operands with a scale per row (`_scaled_mm`, aten/src/ATen/native/cuda/ScaledBlas.cpp).
cuBLAS's runs on compute capability 9.x with cuBLAS of CUDA 12.9 or later, which PyTorch 2.11's default wheels have.
CUTLASS's runs on others (8.9, 10.x). PyTorch 2.8 and older have only CUTLASS's.

rowwise, cuBLAS        1/1.07: the matmuls of Llama 3 8B on an H200 with PyTorch 2.11 and 16,384 tokens took 18.6 ms
                       instead of 17.4 (benchmarks/results/gpu_gemm.json; single rounds beside other work). A single
                       weight took 1.05 to 1.06 times as long. The weights of k and v, 1,024 wide, took 1.41 times
rowwise, CUTLASS       0.8: fitted to torchao's Llama 3 8B on 8 H100s (torchao/float8/README.md, March 2025), which
                       uses it in the forward. With fast accumulation most shapes reach 0.9 to 1.0 of the tensorwise
                       rate and some 0.5; without fast accumulation it is slower (pytorch/pytorch#147971)
the same, B200         0.6: fitted to torchao's Llama 3 8B on 8 B200s (August 2025), power-limited. The kernel's
                       "template is not optimal" (pytorch/pytorch#153555)
1 x 128                0.95: DeepGEMM's best against cuBLAS's with one scale, on H800s and H100s at 4,096 tokens: 1,168
                       of 1,197 TFLOP/s (7168 x 2048), 1,265 of 1,364 (4096 x 7168), 1,009 of 1,180 (2112 x 7168).
                       No rate of cuBLAS's kernel was found; it is assumed to be the same
1 x 32                 0.9: fitted to torchao's Llama 3 8B on 8 B200s: mxfp8 has 0.96 of tensorwise's tokens/s

An L40S is assumed to reach CUTLASS's rate, and GPUs of other vendors cuBLAS's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping

from quaver.kernels.native_mm import ScaleKind
from quaver.linear.backends import predict_scale_kind
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.linear_casts import MATMULS
from quaver.roofline.device_specs import DeviceSpec

CUBLAS_ROWWISE_SHARE = 1 / 1.07
CUTLASS_ROWWISE_SHARE = 0.8
_CUTLASS_BLACKWELL_SHARE = 0.6
_SHARES = {ScaleKind.TENSORWISE: 1.0, ScaleKind.BLOCKS_OF_128: 0.95, ScaleKind.BLOCKS_OF_32: 0.9}


def get_cutlass_rowwise_share(spec: DeviceSpec) -> float:
    """Return the share of CUTLASS's kernel for rowwise scales."""
    return _CUTLASS_BLACKWELL_SHARE if (spec.compute_capability or 0) >= 100 else CUTLASS_ROWWISE_SHARE


def get_scales_share(kind: ScaleKind | None, spec: DeviceSpec) -> float:
    """Return the share of the rate with one scale per operand; 1 for scales that no hardware multiplies (None)."""
    if kind in (ScaleKind.ROWWISE, ScaleKind.GROUPS):
        takes_cublas = spec.compute_capability is None or spec.compute_capability // 10 == 9
        return CUBLAS_ROWWISE_SHARE if takes_cublas else get_cutlass_rowwise_share(spec)
    return 1.0 if kind is None else _SHARES[kind]


@functools.cache
def find_scale_kinds(recipe: str) -> Mapping[str, ScaleKind | None]:
    """Return the kinds of scales of a recipe's float8 matmuls, by name in MATMULS; None if no hardware has them."""
    casts = Float8LinearConfig.from_recipe_name(recipe).casts
    pairs = {name: (casts.get(*left), casts.get(*right)) for name, (left, right) in MATMULS.items()}
    return {name: predict_scale_kind(*pair) for name, pair in pairs.items() if not pair[0].is_disabled}

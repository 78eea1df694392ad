"""Provides oracles that share no code with the package: float64 arithmetic, NumPy and ml_dtypes."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

BACKEND = pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.nightly)])
"""Backends of torch.compile for tests of what is traced. aot_eager skips code generation, which takes over 10 s."""
ML_DTYPE = {torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn, torch.float8_e5m2: ml_dtypes.float8_e5m2}
MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
SMALLEST_EXPONENT = {torch.float32: -126, torch.bfloat16: -126, torch.float16: -14}
MANTISSA_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}


def every_value(dtype: torch.dtype) -> Tensor:
    """Return all 65536 values of a 16-bit dtype, NaNs and infinities included; for float32 bfloat16's, with noise."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    if dtype is torch.float32:
        return bits.view(torch.bfloat16).float() * (1 + torch.rand(1 << 16) * 2.0**-8)
    return bits.view(dtype)


def sqnr_db(reference: Tensor, actual: Tensor) -> float:
    """Return the signal-to-quantization-noise ratio in dB."""
    reference, actual = reference.detach().double(), actual.detach().double()
    return 20 * math.log10(float(reference.norm() / (reference - actual).norm()))


def lowest_sqnr_db(*mantissa_bits: int) -> float:
    """Return a bound on the SQNR of a result with one rounding to each of these numbers of mantissa bits.

    The error of a rounding is uniform, so its mean square is ulp^2 / 12, and ulp <= 2^-mantissa_bits * |value|. The
    errors of several roundings are independent.
    """
    return -10 * math.log10(sum(4.0**-bits / 12 for bits in mantissa_bits))


def reference_linear(input: Tensor, weight: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, grad_input and grad_weight of a linear, in float64."""
    input, weight, grad_output = input.double(), weight.double(), grad_output.double()
    return input @ weight.t(), grad_output @ weight, grad_output.t() @ input


def reference_codes(hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype) -> np.ndarray:
    """Return the codes of a saturating cast, by ml_dtypes; NaN for an infinity."""
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = np.where(hp.isinf().numpy(), np.float32(np.nan), hp.float().numpy() * quant_scale.numpy())
    clamped = np.clip(scaled, -MAX[float8_dtype], MAX[float8_dtype])
    return clamped.astype(ML_DTYPE[float8_dtype]).view(np.uint8)


def reference_amax(hp: Tensor, dim: int | None = None) -> Tensor:
    """Return the amax, of all elements or along `dim`: NaN if an element is NaN, 0 without elements."""
    if hp.numel() == 0:
        return hp.sum(dim, keepdim=dim is not None)
    return hp.abs().amax() if dim is None else hp.abs().amax(dim, keepdim=True)


def reference_scales(amax: Tensor, float8_dtype: torch.dtype, *, power_of_2: bool = False) -> tuple[Tensor, Tensor]:
    """Return the quant_scale and the dequant_scale of each amax: float32, each rounded once from float64."""
    largest = MAX[float8_dtype]
    quant_scale = (largest / amax.double()).clamp(max=largest / 1e-12).float()
    if power_of_2:
        below = torch.exp2(torch.frexp(quant_scale)[1].double() - 1).float()
        quant_scale = torch.where((quant_scale > 0) & quant_scale.isfinite(), below, quant_scale)
    return quant_scale, (1.0 / quant_scale.double()).float()


def reference_cast(hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype) -> Tensor:
    """Return a saturating cast, whose product with the scale is rounded to float32; NaN for an infinity."""
    scaled = torch.where(hp.isinf(), torch.nan, hp.float() * quant_scale)
    return scaled.clamp(-MAX[float8_dtype], MAX[float8_dtype]).to(float8_dtype)


def assert_same_bits(actual: Tensor, expected: Tensor, *, nan_bits: bool = False) -> None:
    """Assert equal shapes, dtypes and bits.

    Without `nan_bits` all NaNs are equal: NaN * NaN may have the sign of either.
    """
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[expected.itemsize]
    nan = expected.float().isnan()
    assert actual.float().isnan().equal(nan)
    wrong = (actual.view(bits) != expected.view(bits)) & (nan_bits or ~nan)
    assert not wrong.any(), f"{int(wrong.sum())} differ, first at {wrong.nonzero()[0].tolist()}"


def ulp(reference: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the spacing of `dtype` at each value of a float64 tensor; for subnormals that of the smallest normal."""
    exponent = torch.frexp(reference.abs())[1] - 1
    return torch.exp2((exponent.clamp(min=SMALLEST_EXPONENT[dtype]) - MANTISSA_BITS[dtype]).double())


def assert_matmul_exact(out: Tensor, a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor) -> None:
    """Assert that `out` is within 1 ulp plus the float32 accumulation bound of the float64 matmul of the operands.

    The bound K * 2^-24 * (|A| @ |B|) holds for any order of summation of K exact products in float32.
    """
    a64, b64 = a.double() * a_scale.double(), b.double() * b_scale.double()
    reference = a64 @ b64
    bound = a.shape[1] * 2.0**-24 * (a64.abs() @ b64.abs()) + ulp(reference, out.dtype)
    excess = (out.double() - reference).abs() - bound
    assert out.shape == reference.shape
    assert not (excess > 0).any(), f"off by {excess.max():.3g} more than the bound"


def draw_samples(dtype):
    """Yield rows of different magnitudes, of zeros, of the smallest numbers; then with an inf and a NaN."""
    torch.manual_seed(0)
    hp = (torch.randn(140, 260) * torch.exp2(torch.randint(-20, 12, (140, 1)).float())).to(dtype)
    hp[3], hp[130:] = 0, 0
    hp[7] = torch.randn(260).mul(torch.finfo(dtype).smallest_normal / 64).to(dtype)
    yield hp
    hp = hp.clone()
    hp[20, 5], hp[21, 200] = torch.inf, torch.nan
    yield hp

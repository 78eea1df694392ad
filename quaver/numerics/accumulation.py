"""Emulates the sums of a GPU's float8 matmuls on any device, with the bits that its tensor cores keep.

A tensor core multiplies `products_per_step` pairs of codes exactly, and adds them to the running sum in one step:

    largest  the largest exponent among the products and the sum, where a product has the sum of its codes' exponents.
    terms    every product and the sum, truncated toward zero to a multiple of 2^(largest - fraction_bits).
    sum      the exact sum of the terms, truncated to `fraction_bits` below its leading bit

One large term therefore cuts the low bits of all other terms. Truncation is toward zero, so terms of one sign lose in
one direction, step after step. With `use_fast_accum` a whole dot product is one chain of these steps. Without it, a new
chain starts every `products_per_chain` products, and the chains add up in float32, rounded to nearest.

Fasi et al. (PeerJ Computer Science 7:e330, 2021) found that tensor cores align and truncate. Khattak and Mikaitis (ACM
TACO 23(3), 2026) found 13 fraction bits below the leading bit in Hopper's float8 units. DeepSeek-V3 (arXiv:2412.19437)
promotes every 128 products. docs/design/0019 says how this file was checked. cuBLAS splits the sum of a small result
over several thread blocks. This is not emulated, because the split depends on the library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quaver.recipes.formats import get_format


@dataclass(frozen=True)
class Accumulation:
    """How one kind of tensor core adds products of float8 codes."""

    products_per_step: int
    fraction_bits: int
    """Bits kept below the leading bit of terms and of sums."""
    products_per_chain: int
    """Without fast accumulation; a multiple of `products_per_step`."""


HOPPER = Accumulation(products_per_step=32, fraction_bits=13, products_per_chain=128)

ACCUMULATION_BY_GPU = {"h100": HOPPER, "h200": HOPPER}
"""The accumulations by the lower-case names of quaver/roofline/device_specs.py."""

_LOWEST_EXPONENT = -64
"""Lower than the exponent of any nonzero product of codes, -32, and of any sum, -32 - fraction_bits."""
_MANTISSA_BITS = 23
_EXPONENT_BIAS = 127
_CHUNK_PRODUCTS = 1 << 21
"""Products in memory at a time."""


def get_accumulation(gpu: str) -> Accumulation:
    """Return how a GPU accumulates, by its name, such as "h100".

    Raises:
        ValueError: the GPU's accumulation is unknown.
    """
    accumulation = ACCUMULATION_BY_GPU.get(gpu.lower()) if isinstance(gpu, str) else None
    if accumulation is None:
        raise ValueError(
            f"emulate_sums_of: expected a GPU whose sums are known ({', '.join(ACCUMULATION_BY_GPU)}), got {gpu!r}"
        )
    return accumulation


def accumulate(a: Tensor, b: Tensor, accumulation: Accumulation, *, use_fast_accum: bool) -> Tensor:
    """Compute a @ b.t() with the GPU's accumulation, before scales.

    Args:
        a, b: float8 [M, K] and [N, K], any strides.
        accumulation: how the GPU adds products.
        use_fast_accum: add all products of a dot product in one chain.
    Returns:
        float32 [M, N]; NaN or infinite where the exact result is.
    """
    chain_length = max(a.shape[1], 1) if use_fast_accum else accumulation.products_per_chain
    total = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for chain_sum in accumulate_chains(a, b, accumulation, chain_length).unbind(2):
        total += chain_sum
    return total


def accumulate_chains(a: Tensor, b: Tensor, accumulation: Accumulation, length: int) -> Tensor:
    """Accumulate a @ b.t() in chains of `length` products, each from zero. Returns float32 [M, N, chains]."""
    count = -(-a.shape[1] // length)
    step = accumulation.products_per_step
    (left, left_exponents), right = (_split_chains(codes, count, length, step) for codes in (a, b))
    rows = max(_CHUNK_PRODUCTS // max(right[0].numel(), 1), 1)
    chunks = zip(left.split(rows), left_exponents.split(rows), strict=True)
    sums = torch.cat([_run_chains(values, exponents, *right, accumulation) for values, exponents in chunks])
    finite = a.float().isfinite().all(1)[:, None] & b.float().isfinite().all(1)
    return sums if finite.all() else torch.where(finite[:, :, None], sums, (a.float() @ b.float().t())[:, :, None])


def _split_chains(codes: Tensor, count: int, length: int, products_per_step: int) -> tuple[Tensor, Tensor]:
    """Return codes [R, K] as values and exponents [R, chains, steps, products]; zeros fill the last steps."""
    values = codes.float().nan_to_num(0, 0, 0)
    padded_length = -(-length // products_per_step) * products_per_step
    values = torch.nn.functional.pad(values, (0, count * length - codes.shape[1])).unflatten(1, (count, length))
    values = torch.nn.functional.pad(values, (0, padded_length - length)).unflatten(2, (-1, products_per_step))
    smallest = 1 - get_format(codes.dtype).bias
    return values, _get_exponents(values).clamp_(min=smallest).masked_fill_(values == 0, 2 * _LOWEST_EXPONENT)


def _run_chains(a: Tensor, a_exponents: Tensor, b: Tensor, b_exponents: Tensor, accumulation: Accumulation) -> Tensor:
    """Return the sums [M, N, chains] of operands [M, chains, steps, products] and [N, chains, steps, products]."""
    total = torch.zeros(a.shape[0], b.shape[0], a.shape[1], dtype=torch.float32, device=a.device)
    for step in range(a.shape[2]):
        products = a[:, None, :, step] * b[:, :, step]
        largest = (a_exponents[:, None, :, step] + b_exponents[:, :, step]).amax(-1)
        total_exponents = _get_exponents(total).masked_fill_(total == 0, _LOWEST_EXPONENT)
        unit = _exp2(torch.maximum(largest, total_exponents).clamp_(min=_LOWEST_EXPONENT) - accumulation.fraction_bits)
        terms = products.div_(unit[..., None]).trunc_().sum(-1)  # integers below 2^24, so float32 adds them exactly
        total = _truncate((terms + (total / unit).trunc_()) * unit, accumulation.fraction_bits)
    return total


def _get_exponents(values: Tensor) -> Tensor:
    """Return floor(log2 |value|) of float32 as int32; undefined for zeros."""
    return torch.frexp(values)[1] - 1


def _exp2(exponents: Tensor) -> Tensor:
    """Return 2^exponent as float32 for exponents of normal numbers. torch.exp2 is not exact on every device."""
    return (exponents + _EXPONENT_BIAS).bitwise_left_shift(_MANTISSA_BITS).view(torch.float32)


def _truncate(values: Tensor, fraction_bits: int) -> Tensor:
    """Keep `fraction_bits` bits below the leading bit of float32 values. A zero becomes positive."""
    cut = -1 << (_MANTISSA_BITS - fraction_bits)
    return values.view(torch.int32).bitwise_and(cut).view(torch.float32) + 0.0

"""The sums of a GPU's float8 matmuls, computed on any device: which bits its tensor cores keep.

A tensor core multiplies `products` pairs of codes exactly, and adds them to the sum so far in one step:

    top     the largest exponent among the products and the sum; a product's is the sum of its codes' exponents
    terms   every product and the sum, truncated toward zero to a multiple of 2^(top - fraction_bits)
    sum     of the terms, exactly; then truncated to `fraction_bits` below its own leading bit

So one large term takes the low bits of all others, and what is cut off has the sign of the term: terms of one sign lose
in one direction, step after step. With `use_fast_accum` a whole dot product is one chain of such steps. Without, a
chain starts anew every `promoted_every` products, and chains add up in float32, rounded to nearest.

The rule of Hopper's float8 units: Fasi et al. (PeerJ Computer Science 7:e330, 2021) found alignment and truncation,
Khattak and Mikaitis (ACM TACO 23(3), 2026) 13 fraction bits below the leading one; DeepSeek-V3 (arXiv:2412.19437)
promotes every 128. docs/design/0019 says how this file was checked. cuBLAS splits the sum of a small result over
several blocks of threads; that is not modelled, because the split depends on the library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quaver.recipes.formats import format_of


@dataclass(frozen=True)
class Accumulation:
    """How one kind of tensor core adds products of float8 codes."""

    products: int
    """Products of one step."""
    fraction_bits: int
    """Kept below the leading bit, of terms and of sums."""
    promoted_every: int
    """Products of a chain without fast accumulation; a multiple of `products`."""


HOPPER = Accumulation(products=32, fraction_bits=13, promoted_every=128)

HARDWARE = {"h100": HOPPER, "h200": HOPPER}
"""By the names of quaver/roofline/device_specs.py, in small letters."""

_LOWEST_EXPONENT = -64
"""Below that of every nonzero product of codes, 2^-32, and of every sum, a multiple of 2^(-32 - fraction_bits)."""
_MANTISSA_BITS = 23
_BIAS = 127
_CHUNK = 1 << 21
"""Products that are in memory at a time."""


def accumulation_of(hardware: str) -> Accumulation:
    """The rule of a GPU by its name, "h100" say. Raises ValueError for one whose rule is not known."""
    found = HARDWARE.get(hardware.lower()) if isinstance(hardware, str) else None
    if found is None:
        raise ValueError(f"hardware: expected a GPU whose sums are known ({', '.join(HARDWARE)}), got {hardware!r}")
    return found


def accumulate(a: Tensor, b: Tensor, rule: Accumulation, *, use_fast_accum: bool) -> Tensor:
    """The sums of a @ b.t() as hardware keeps them, before scales.

    Args:
        a, b: float8 [M, K] and [N, K], any strides.
    Returns:
        float32 [M, N]; NaN or infinite where the products are.
    """
    chain = max(a.shape[1], 1) if use_fast_accum else rule.promoted_every
    total = torch.zeros(a.shape[0], b.shape[0], device=a.device)
    for partial in chains(a, b, rule, chain).unbind(2):
        total += partial
    return total


def chains(a: Tensor, b: Tensor, rule: Accumulation, length: int) -> Tensor:
    """The chains of `length` products that a @ b.t() consists of, each begun at zero: float32 [M, N, chains]."""
    count = -(-a.shape[1] // length)
    (left, left_exponents), right = (_in_chains(each, count, length, rule.products) for each in (a, b))
    rows = max(_CHUNK // max(right[0].numel(), 1), 1)
    parts = zip(left.split(rows), left_exponents.split(rows), strict=True)
    made = [_chains(values, exponents, *right, rule) for values, exponents in parts]
    found = torch.cat(made)
    finite = a.float().isfinite().all(1)[:, None] & b.float().isfinite().all(1)
    return found if finite.all() else torch.where(finite[:, :, None], found, (a.float() @ b.float().t())[:, :, None])


def _in_chains(codes: Tensor, count: int, length: int, products: int) -> tuple[Tensor, Tensor]:
    """Codes [R, K] as values and exponents, [R, chains, steps, products] each; zeros fill the last steps."""
    values = codes.float().nan_to_num(0, 0, 0)
    step = -(-length // products) * products
    values = torch.nn.functional.pad(values, (0, count * length - codes.shape[1])).unflatten(1, (count, length))
    values = torch.nn.functional.pad(values, (0, step - length)).unflatten(2, (-1, products))
    smallest = 1 - format_of(codes.dtype).bias
    return values, _exponents(values).clamp_(min=smallest).masked_fill_(values == 0, 2 * _LOWEST_EXPONENT)


def _chains(a: Tensor, a_exponents: Tensor, b: Tensor, b_exponents: Tensor, rule: Accumulation) -> Tensor:
    """[M, chains, steps, products] and [N, ...] -> [M, N, chains]."""
    total = torch.zeros(a.shape[0], b.shape[0], a.shape[1], device=a.device)
    for step in range(a.shape[2]):
        products = a[:, None, :, step] * b[:, :, step]
        largest = (a_exponents[:, None, :, step] + b_exponents[:, :, step]).amax(-1)
        own = _exponents(total).masked_fill_(total == 0, _LOWEST_EXPONENT)
        unit = _power_of_2(torch.maximum(largest, own).clamp_(min=_LOWEST_EXPONENT) - rule.fraction_bits)
        terms = products.div_(unit[..., None]).trunc_().sum(-1)  # integers below 2^24, so float32 adds them exactly
        total = _truncated((terms + (total / unit).trunc_()) * unit, rule.fraction_bits)
    return total


def _exponents(values: Tensor) -> Tensor:
    """floor(log2 |value|) of float32, as int32; that of zeros means nothing."""
    return torch.frexp(values)[1] - 1


def _power_of_2(exponents: Tensor) -> Tensor:
    """2^exponent as float32, for exponents of normal numbers; torch.exp2 is not exact everywhere."""
    return (exponents + _BIAS).bitwise_left_shift(_MANTISSA_BITS).view(torch.float32)


def _truncated(values: Tensor, fraction_bits: int) -> Tensor:
    """float32 with so many bits below the leading one; a zero has no sign."""
    cut = -1 << (_MANTISSA_BITS - fraction_bits)
    return values.view(torch.int32).bitwise_and(cut).view(torch.float32) + 0.0

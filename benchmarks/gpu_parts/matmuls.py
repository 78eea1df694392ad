"""Times matmuls: rowwise kernels, and tensorwise kernels with scales applied afterwards, by kind of accumulation.

Two decisions depend on it: whether `use_fast_accum` pays off for each kind of scales, and whether matmuls with rowwise
scales should run the tensorwise kernel and multiply by powers of two afterwards, which is exact. The last rows compare
the sums of this card with quaver/numerics/accumulation.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.gpu_parts.part_context import Call, PartContext, Row, catch_failures, make_timing_row
from quaver.linear.gemm import float8_mm
from quaver.numerics.accumulation import HOPPER, accumulate
from quaver.torch_private.hardware import scaled_mm

E4M3 = torch.float8_e4m3fn


def list_shapes(context: PartContext) -> list[tuple[int, int, int]]:
    """Return M, K, N of the forward (k or v, both, q or o, gate or up, down), then of the backward."""
    dim, hidden, kv = context.model.dim, context.model.hidden_dim, context.model.n_kv_heads * context.model.head_dim
    tokens = context.tokens
    forward = [
        (tokens, dim, kv),
        (tokens, dim, 2 * kv),
        (tokens, dim, dim),
        (tokens, dim, hidden),
        (tokens, hidden, dim),
    ]
    return [*forward, (hidden, tokens, dim), (dim, tokens, hidden), (kv, tokens, dim)]


def time_matmuls(context: PartContext) -> Iterator[Row]:
    """Yield a row for each shape and kernel, then one for each kind of accumulation."""
    named = [({"size": f"{m} x {k} x {n}"}, partial(_time_shape, context, m, k, n)) for m, k, n in list_shapes(context)]
    yield from catch_failures(named)
    yield from catch_failures(
        ({"what": f"sums, {'fast' if fast else 'exact'} accumulation"}, partial(_compare_sums, context, fast))
        for fast in (True, False)
    )


def _time_shape(context: PartContext, m: int, k: int, n: int) -> Iterator[Row]:
    a, b = context.randn(m, k), context.randn(n, k)
    calls: dict[str, Call] = {"bfloat16": partial(torch.mm, a, b.t())}
    codes = a.to(E4M3), b.to(E4M3).t()
    scales = torch.ones(m, 1, device=context.device), torch.ones(1, n, device=context.device)
    one = torch.ones((), device=context.device)
    for fast in (False, True):
        of_sums = "fast" if fast else "exact"
        multiply = partial(
            float8_mm, *codes, out_dtype=torch.bfloat16, use_fast_accum=fast, scales_are_powers_of_2=True
        )
        tensorwise = partial(multiply, a_dequant_scale=one, b_dequant_scale=one)
        calls[f"tensorwise, {of_sums}"] = tensorwise
        calls[f"rowwise, {of_sums}"] = partial(multiply, a_dequant_scale=scales[0], b_dequant_scale=scales[1])
        calls[f"tensorwise, {of_sums}, scales afterwards"] = partial(_scale_after, tensorwise, *scales)
    of_a, of_rows = (torch.ones(size, -(-k // 128), device=context.device) for size in (m, n))
    of_squares = torch.ones(-(-k // 128), -(-n // 128), device=context.device)
    multiply = partial(float8_mm, *codes, out_dtype=torch.bfloat16, a_dequant_scale=of_a, scales_are_powers_of_2=True)
    calls["1 x 128 by 128 x 128"] = partial(multiply, b_dequant_scale=of_squares)
    calls["1 x 128 by 1 x 128"] = partial(multiply, b_dequant_scale=of_rows.t())
    for name, measured in context.time(calls, rounds=10).items():
        yield {"what": name, "timing": make_timing_row(measured), "tflops": 2e-6 * m * k * n / measured.median_us}


def _scale_after(multiply: Call, a_scale: Tensor, b_scale: Tensor) -> Tensor:
    """Apply the scales after the matmul. Powers of two change no mantissa, so only subnormal results can differ."""
    product = multiply()
    assert isinstance(product, Tensor)
    return product.mul_(a_scale).mul_(b_scale)


def _compare_sums(context: PartContext, fast: bool) -> Iterator[Row]:
    """Compare the card's float32 sums of a few rows with the rule's and with exact sums; K is not split."""
    rows, columns, k = (16, 16, 256) if context.dry else (4096, 4096, 4096)
    a, b = context.randn(rows, k).abs(), context.randn(columns, k).abs()
    left, right = a.to(E4M3), b.to(E4M3)
    if context.dry:
        hardware_sums = accumulate(left, right, HOPPER, use_fast_accum=fast)
    else:
        one = torch.ones((), device=context.device)
        hardware_sums = scaled_mm(left, right.t(), one, one, out_dtype=torch.float32, use_fast_accum=fast)
    few = slice(0, 64)
    rule_sums = accumulate(left[few], right[few], HOPPER, use_fast_accum=fast)
    exact = left[few].double() @ right[few].double().t()
    card = hardware_sums[few, few]
    same = (card == rule_sums).float().mean().item()
    yield {
        "equal_to_the_rule": same,
        "card_db": _compute_sqnr_db(exact, card),
        "rule_db": _compute_sqnr_db(exact, rule_sums),
    }


def _compute_sqnr_db(expected: Tensor, found: Tensor) -> float:
    return float(20 * torch.log10(expected.norm() / (expected - found.double()).norm().clamp(min=1e-300)))

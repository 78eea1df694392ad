"""Tests the error, bits and bytes of gradients that FSDP2 and DDP send as float8, and unusual elements."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from quaver import reduce_gradients_in_float8
from quaver.fsdp.gradients import (
    BLOCK_ELEMENTS,
    Float8ReduceScatter,
    dequantize_gradients,
    quantize_gradients,
    sum_over_ranks,
)
from quaver.recipes.sqnr import compute_sqnr_db
from tests.ranks import get_cached_mesh, on_ranks, refusal, run
from tests.steps import draw, to_plain

FLOAT32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)
SAMPLE = draw(1 << 16) * 64
CAST_DB = compute_sqnr_db(SAMPLE, SAMPLE.to(torch.float8_e4m3fn).float())
"""The SQNR of Gaussian numbers after a cast to e4m3, 31.5 dB."""


def make_model():
    """Return linears of 65 x 130 and 130 x 65 with biases, whose shards and blocks end anywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(65, 130), nn.Tanh(), nn.Linear(130, 65))


def compute_gradients(model, *, scale=1.0):
    """Return the whole gradients of a step as a vector."""
    model.zero_grad()
    (model(draw(64, 65, seed=dist.get_rank())).square().mean() * scale).backward()
    return torch.cat([to_plain(parameter.grad).flatten() for parameter in model.parameters()])


def shard(*, in_float8=True):
    model = fully_shard(make_model(), mesh=get_cached_mesh((2,), ("shard",)), mp_policy=FLOAT32)
    if in_float8:
        reduce_gradients_in_float8(model)
    return model


def replicate(*, in_float8=True):
    model = DistributedDataParallel(make_model())
    if in_float8:
        reduce_gradients_in_float8(model)
    return model


@on_ranks(2)
def test_gradients_differ_from_high_precision_by_one_cast_or_two():
    exact = compute_gradients(replicate(in_float8=False))
    assert torch.allclose(compute_gradients(shard(in_float8=False)), exact, rtol=1e-4, atol=1e-7)
    cast_once, cast_twice = compute_gradients(shard()), compute_gradients(replicate())
    # The errors of two ranks are independent: their sum has up to 3 dB less noise, if both gradients are equal.
    once_db = compute_sqnr_db(exact, cast_once)
    assert CAST_DB - 0.5 < once_db < CAST_DB + 10 * math.log10(2) + 0.5
    twice_db = -10 * math.log10(10 ** (-once_db / 10) + 10 ** (-CAST_DB / 10))
    assert compute_sqnr_db(exact, cast_twice) == pytest.approx(twice_db, abs=0.5)
    on_ranks = [torch.empty_like(cast_twice) for _ in range(2)]
    dist.all_gather(on_ranks, cast_twice)
    assert torch.equal(*on_ranks)


@on_ranks(2)
def test_the_sum_is_in_float32_in_the_order_of_ranks_and_codes_travel():
    columns = 3 * BLOCK_ELEMENTS + 5
    gradients = [draw(2, columns, seed=rank) for rank in range(2)]
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        total = sum_over_ranks(gradients[dist.get_rank()], dist.group.WORLD)
    expected = torch.zeros(columns)
    for rows in gradients:
        for first in range(0, columns, BLOCK_ELEMENTS):
            block = rows[dist.get_rank(), first : first + BLOCK_ELEMENTS]
            scale = (448 / block.abs().amax().double()).float()
            expected[first : first + BLOCK_ELEMENTS] += (block * scale).to(torch.float8_e4m3fn).float() * (1 / scale)
    assert torch.equal(total, expected)
    (_, sent), _ = exchange.call_args
    assert exchange.call_count == 1
    assert (sent.dtype, sent.numel()) == (torch.uint8, 2 * (columns + 4 * 4))


@pytest.mark.parametrize("ranks", [1, 9])
def test_rows_of_any_length_and_number_are_decoded(ranks):
    rows = draw(ranks, BLOCK_ELEMENTS + 3)
    parts = [dequantize_gradients(payload, BLOCK_ELEMENTS + 3) for payload in quantize_gradients(rows).split(8)]
    assert compute_sqnr_db(rows, torch.cat(parts)) == pytest.approx(CAST_DB, abs=1)  # of a few hundred numbers


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@on_ranks(2)
def test_gradients_that_are_not_finite_on_one_rank_are_nan_on_all(bad):
    for model in (shard(), replicate()):
        assert compute_gradients(model, scale=bad if dist.get_rank() == 1 else 1.0).isnan().all()
        assert compute_gradients(model).isfinite().all()


@on_ranks(2)
def test_only_the_block_of_an_inf_is_lost():
    rows = torch.ones(2, 3 * BLOCK_ELEMENTS)
    rows[0, BLOCK_ELEMENTS] = float("inf")
    total = sum_over_ranks(rows, dist.group.WORLD)
    lost = slice(BLOCK_ELEMENTS, 2 * BLOCK_ELEMENTS) if dist.get_rank() == 0 else slice(0, 0)
    assert total[lost].isnan().all()
    assert total.nan_to_num(nan=2.0).eq(2.0).all()


@on_ranks(2)
def test_models_that_cannot_reduce_in_float8_are_refused():
    assert "ValueError: expected a model of fully_shard" in refusal(reduce_gradients_in_float8, make_model())
    fsdp1 = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"))
    assert "ValueError: expected a model of fully_shard" in refusal(reduce_gradients_in_float8, fsdp1)
    small = nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100))
    fully_shard(small[1])
    fully_shard(small)
    message = refusal(reduce_gradients_in_float8, small)
    assert "ValueError: the FSDP2 group of 1 has 100 gradients for each of 2 ranks; expected at least 4,096" in message
    tiny = DistributedDataParallel(nn.Linear(10, 10))
    assert "the model has 55 gradients for each of 2 ranks" in refusal(reduce_gradients_in_float8, tiny)
    wide = fully_shard(make_model().double())
    assert "group of FSDPSequential has gradients in torch.float64" in refusal(reduce_gradients_in_float8, wide)
    wide = DistributedDataParallel(make_model().double())
    assert "the model has gradients in torch.float64; expected" in refusal(reduce_gradients_in_float8, wide)
    reduce_gradients_in_float8(fully_shard(make_model().double(), mp_policy=FLOAT32))
    again = refusal(reduce_gradients_in_float8, replicate())
    assert "RuntimeError: this DistributedDataParallel has a communication hook already" in again
    again = refusal(reduce_gradients_in_float8, shard())
    assert "RuntimeError: the FSDP2 group of FSDPSequential has a custom reduce-scatter already" in again
    rows = torch.ones(4)
    maximum = refusal(Float8ReduceScatter(), rows[:2], rows, dist.group.WORLD, dist.ReduceOp.MAX)
    assert "NotImplementedError: float8 gradients: expected a synchronous SUM or AVG" in maximum


def _reduce_alone(make):
    model = make(in_float8=False)
    message = refusal(reduce_gradients_in_float8, model) if dist.get_rank() == 1 else ""
    dist.barrier()
    compute_gradients(model)  # the model is unchanged
    return message


@pytest.mark.parametrize("make", [shard, replicate])
def test_a_rank_that_calls_alone_raises(make):
    _, message = run(2, _reduce_alone, make, collective_timeout=4)
    assert message == (
        "RuntimeError: reduce_gradients_in_float8 was called on rank 1, and not every rank reported it: call it on all "
        "ranks"
    )


@on_ranks(2)
def test_gradients_are_divided_by_the_factor_that_is_set():
    model, plain = shard(), shard(in_float8=False)
    model.set_gradient_divide_factor(3.0)
    model.set_force_sum_reduction_for_comms(True)
    torch.testing.assert_close(compute_gradients(model), compute_gradients(plain) * 2 / 3, rtol=0.2, atol=1e-3)

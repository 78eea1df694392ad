"""Gradients that FSDP2 and DDP send as float8: their error, bits and bytes, and non-finite and very small elements.

A cast of Gaussian numbers to e4m3 in blocks has 31.5 dB. Independent errors of two ranks whose gradients are alike add
up to 3 dB less noise; the second cast of DDP has 31.5 dB of its own.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from quaver import reduce_gradients_in_float8
from quaver.fsdp.gradients import BLOCK, Float8ReduceScatter, dequantize_gradients, quantize_gradients, sum_over_ranks
from quaver.recipes.sqnr import compute_sqnr_db
from tests.ranks import mesh_of, on_ranks, refusal

FLOAT32 = MixedPrecisionPolicy(reduce_dtype=torch.float32)


def make_model():
    """Weights of 65 x 130 and 130 x 65 with biases: shards and blocks end anywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(65, 130), nn.Tanh(), nn.Linear(130, 65))


def gradients_of(model, *, scale=1.0):
    generator = torch.Generator().manual_seed(dist.get_rank())
    (model(torch.randn(64, 65, generator=generator)).square().mean() * scale).backward()
    grads = [each.grad for each in model.parameters()]
    return torch.cat([(g.full_tensor() if hasattr(g, "full_tensor") else g).flatten() for g in grads])


def sharded(model, mesh, *, in_float8=True):
    fully_shard(model, mesh=mesh, mp_policy=FLOAT32)
    if in_float8:
        reduce_gradients_in_float8(model)
    return model


@on_ranks(2)
def test_gradients_are_those_of_high_precision_but_for_a_cast():
    exact = gradients_of(DistributedDataParallel(make_model()))
    mesh = mesh_of((2,), ("shard",))
    assert torch.allclose(gradients_of(sharded(make_model(), mesh, in_float8=False)), exact, rtol=1e-4, atol=1e-7)
    once = gradients_of(sharded(make_model(), mesh))
    replicated = DistributedDataParallel(make_model())
    reduce_gradients_in_float8(replicated)
    twice = gradients_of(replicated)
    assert 31.0 < compute_sqnr_db(exact, once) < 36.0
    assert 28.0 < compute_sqnr_db(exact, twice) < compute_sqnr_db(exact, once)
    everyones = [torch.empty_like(twice) for _ in range(2)]
    dist.all_gather(everyones, twice)
    assert torch.equal(*everyones)


@on_ranks(2)
def test_the_sum_is_in_float32_in_the_order_of_ranks_and_codes_travel():
    columns = 3 * BLOCK + 5
    everyones = [torch.randn(2, columns, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    sent = []
    exchange = dist.all_to_all_single
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            dist, "all_to_all_single", lambda out, rows, group: (sent.append(rows), exchange(out, rows, group=group))
        )
        total = sum_over_ranks(everyones[dist.get_rank()], dist.group.WORLD)
    expected = torch.zeros(columns)
    for rows in everyones:
        for first in range(0, columns, BLOCK):
            block = rows[dist.get_rank(), first : first + BLOCK]
            scale = (448 / block.abs().amax().double()).float()
            expected[first : first + BLOCK] += (block * scale).to(torch.float8_e4m3fn).float() * (1 / scale)
    assert torch.equal(total, expected)
    assert [(rows.dtype, rows.numel()) for rows in sent] == [(torch.uint8, 2 * (columns + 4 * 4))]


@pytest.mark.parametrize("ranks", [1, 9])
def test_rows_of_any_length_and_number_are_decoded(ranks):
    rows = torch.randn(ranks, BLOCK + 3, generator=torch.Generator().manual_seed(0))
    parts = [dequantize_gradients(each, BLOCK + 3) for each in quantize_gradients(rows).split(8)]
    assert 30 < compute_sqnr_db(rows, torch.cat(parts)) < 33


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
@on_ranks(2)
def test_what_is_not_finite_arrives_so(bad):
    for model in (sharded(make_model(), mesh_of((2,), ("shard",))), DistributedDataParallel(make_model())):
        if isinstance(model, DistributedDataParallel):
            reduce_gradients_in_float8(model)
        grads = gradients_of(model, scale=bad if dist.get_rank() == 1 else 1.0)
        assert grads.isnan().all()
        for parameter in model.parameters():
            parameter.grad = None
        assert gradients_of(model).isfinite().all()


@on_ranks(2)
def test_only_the_block_of_an_inf_is_lost():
    rows = torch.ones(2, 3 * BLOCK)
    rows[0, BLOCK] = float("inf")
    total = sum_over_ranks(rows, dist.group.WORLD)
    lost = slice(BLOCK, 2 * BLOCK) if dist.get_rank() == 0 else slice(0, 0)
    assert total[lost].isnan().all()
    assert total.nan_to_num(nan=2.0).eq(2.0).all()


@on_ranks(2)
def test_what_is_refused():
    mesh = mesh_of((2,), ("shard",))
    assert "ValueError: expected a model of fully_shard" in refusal(reduce_gradients_in_float8, make_model())
    fsdp1 = FullyShardedDataParallel(make_model(), device_id=torch.device("cpu"))
    assert "ValueError: expected a model of fully_shard" in refusal(reduce_gradients_in_float8, fsdp1)
    small = nn.Sequential(nn.Linear(100, 100), nn.LayerNorm(100))
    fully_shard(small[1], mesh=mesh)
    fully_shard(small, mesh=mesh)
    message = refusal(reduce_gradients_in_float8, small)
    assert "ValueError: the FSDP2 group of 1 has 100 gradients for each of 2 ranks; expected at least 4,096" in message
    tiny = DistributedDataParallel(nn.Linear(10, 10))
    assert "the model has 55 gradients for each of 2 ranks" in refusal(reduce_gradients_in_float8, tiny)
    rows = torch.ones(4)
    maximum = refusal(Float8ReduceScatter(), rows[:2], rows, dist.group.WORLD, dist.ReduceOp.MAX)
    assert "NotImplementedError: float8 gradients: expected a synchronous SUM or AVG" in maximum
    model = sharded(make_model(), mesh)
    model.set_gradient_divide_factor(3.0)
    model.set_force_sum_reduction_for_comms(True)
    plain = sharded(make_model(), mesh, in_float8=False)
    torch.testing.assert_close(gradients_of(model), gradients_of(plain) * 2 / 3, rtol=0.2, atol=1e-3)

"""Tests that stored activations under tensor and sequence parallelism have the codes of one process."""

import copy
import math
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from quaver.activations import activation_report, store_activations_in_float8
from tests.ranks import get_cached_mesh, on_ranks
from tests.reference import sqnr_db
from tests.steps import draw, to_plain

FLOAT32_SUMS_DB = 20 * math.log10(2**24 / 512)
"""Adding up to 512 float32 terms in another order may change a sum by 512 x 2^-24 of its terms: 90 dB."""


class FeedForward(nn.Module):
    """A feed-forward whose 512 hidden features are two blocks on each of two ranks."""

    def __init__(self):
        super().__init__()
        self.up, self.activation, self.down = nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)

    def forward(self, x):
        return self.down(self.activation(self.up(x)))


def compute_gradients(model):
    model(draw(2, 32, 128, seed=1).requires_grad_()).square().sum().backward()
    return {name: to_plain(parameter.grad) for name, parameter in model.named_parameters()}


@on_ranks(2)
def test_the_report_is_that_of_one_process_where_a_block_is_parallel_in_part():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.LayerNorm(128), FeedForward()))
    store_activations_in_float8(model)
    expected = activation_report(model, lambda: compute_gradients(model)).gradient_sqnr_db
    parallelize_module(model, get_cached_mesh((2,)), {"0.1.up": ColwiseParallel(), "0.1.down": RowwiseParallel()})
    sqnr = activation_report(model, lambda: compute_gradients(model)).gradient_sqnr_db
    assert sqnr == pytest.approx(expected, abs=0.01)
    assert sqnr["0"] < FLOAT32_SUMS_DB


@on_ranks(2)
def test_each_rank_stores_its_part_of_what_one_process_stores():
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(128, 128), nn.LayerNorm(128), FeedForward())
    stored, parallel = copy.deepcopy(plain), copy.deepcopy(plain)
    for model in (stored, parallel):
        assert store_activations_in_float8(model) == ["1", "2", "2.activation"]
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(),
        "2": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate()),
        "2.up": ColwiseParallel(),
        "2.down": RowwiseParallel(),
    }
    parallelize_module(parallel, get_cached_mesh((2,)), plan)
    exact, expected, gradients = (compute_gradients(model) for model in (plain, stored, parallel))
    for name in exact:
        assert sqnr_db(expected[name], gradients[name]) > FLOAT32_SUMS_DB, name
    assert sqnr_db(exact["0.weight"], gradients["0.weight"]) < FLOAT32_SUMS_DB
    for model in (stored, parallel):
        report = activation_report(model, lambda model=model: compute_gradients(model))
        assert [tensor.module for tensor in report.saved if tensor.sqnr_db is not None] == ["1", "2.activation"]


@on_ranks(2)
def test_a_rank_that_stores_nothing_raises_and_leaves_the_other_no_collective_to_wait_for():
    model = parallelize_module(
        nn.Sequential(nn.Linear(128, 512), nn.GELU()), get_cached_mesh((2,)), {"0": ColwiseParallel()}
    )
    store_activations_in_float8(model, modules=["1"])
    x = torch.randn(8, 128)

    def run():
        output = checkpoint(model, x, use_reentrant=False) if dist.get_rank() else model(x)
        output.square().sum().backward()

    with pytest.raises(ValueError, match="no module that stores saved anything") if dist.get_rank() else nullcontext():
        assert activation_report(model, run).saved

"""Tests a frozen float8 base under FSDP2 and DistributedDataParallel: the same numbers, and codes in one byte."""

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from quaver import Float8ColwiseParallel, convert_to_high_precision, freeze_to_float8
from quaver.export import iter_float8_weights
from quaver.linear.frozen_weight import FrozenFloat8Weight
from tests.counting import CollectiveCounter
from tests.library.distributed import models
from tests.mixture import DIM as MIXTURE_DIM
from tests.mixture import make_mixture
from tests.ranks import get_cached_mesh, on_ranks
from tests.steps import assert_same, compute_results, draw
from tests.thinned import thinned

RANKS, STEPS, DIM, HIDDEN = 2, 3, 130, 301  # a rank's 151 rows end inside a block of 128
FSDP1 = {"use_orig_params": True, "device_id": torch.device("cpu")}
CONFIGS = ("blockwise", "mxfp8", "tensorwise", "rowwise")
CONFIG = pytest.mark.parametrize("config", CONFIGS)


def build_frozen(config):
    """Return a model whose norms, biases and last linear train; the other linears are frozen."""
    model = models.make_model(layers=2, dim=DIM, hidden=HIDDEN)
    return freeze_to_float8(model, config=config, module_filter_fn=lambda module, name: "." in name)


def make_optimizer(model):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=models.LEARNING_RATE)


def train_one_process(config):
    model = build_frozen(config)
    return models.train_in_parts(model, make_optimizer(model), models.get_batches(STEPS, RANKS, DIM), RANKS)[0]


def train(model):
    """Return the losses, averaged over the ranks."""
    optimizer = make_optimizer(model)
    return [models.train_step(model, optimizer, batch) for batch in models.get_batches(STEPS, RANKS, DIM)]


def shard(model, mesh=None, **options):
    return models.shard_model(None, model=model, mesh=mesh, **options)


def copy_codes(model):
    frozen = {name: weight for name, weight in model.named_parameters() if isinstance(weight, FrozenFloat8Weight)}
    return {name: weight.data_fp8.clone() for name, weight in frozen.items()}


def count_gathered_bytes(model):
    """Return the bytes of one gather: a byte per element of a frozen weight, four of another; padded to the ranks."""
    rows = {parameter: -(-parameter.shape[0] // RANKS) * RANKS for parameter in model.parameters()}
    return sum(
        rows[parameter] * math.prod(parameter.shape[1:]) * (1 if isinstance(parameter, FrozenFloat8Weight) else 4)
        for parameter in rows
    )


@CONFIG
@on_ranks(RANKS)
def test_fsdp_computes_the_same_and_gathers_a_byte_per_element(config):
    whole = build_frozen(config)
    model, input = shard(copy.deepcopy(whole)), models.get_batches(1, 1, DIM)[0]
    with CollectiveCounter() as counter, torch.no_grad():
        assert model(input).equal(whole(input))
    assert counter.bytes["all_gather"] == count_gathered_bytes(whole)
    assert train(model) == pytest.approx(train_one_process(config), rel=1e-5)


@on_ranks(RANKS)
def test_each_variant_of_fsdp_computes_what_one_process_does():
    whole, input = build_frozen("blockwise"), models.get_batches(1, 1, DIM)[0]
    mesh = get_cached_mesh((RANKS, 1), ("a", "b"))
    with torch.no_grad():
        half = shard(copy.deepcopy(whole), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert half(input).equal(copy.deepcopy(whole).bfloat16()(input.bfloat16()))
        for variant in (mesh["b"], mesh):  # one rank alone, and replicas
            model = shard(copy.deepcopy(whole), variant)
            for _ in range(2):
                assert model(input).equal(whole(input))
        model = shard(copy.deepcopy(whole))
        model[0].unshard()
        assert model[0].up.weight.to_high_precision().equal(whole[0].up.weight.to_high_precision())


@pytest.mark.parametrize("config", ["blockwise", "tensorwise", "rowwise"])
@on_ranks(RANKS)
def test_a_rank_may_have_no_rows(config):
    """Two ranks share a linear with one row, and one expert."""
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(DIM, 1), make_mixture(layers=1, num_experts=1, dim=DIM)[0])
    freeze_to_float8(whole, config=config)
    model, input = shard(copy.deepcopy(whole)), torch.randn(16, DIM)
    for module, expected in zip(model, whole, strict=True):
        assert module(input).equal(expected(input))
    state, expected = get_model_state_dict(model), whole.state_dict()
    assert state.keys() == expected.keys()
    set_model_state_dict(model, state)
    assert model[0](input).equal(whole[0](input))


@on_ranks(RANKS)
def test_sharding_that_frozen_weights_do_not_support_is_refused():
    config = "blockwise"
    model = shard(build_frozen(config))
    with pytest.raises(RuntimeError, match="a part of a frozen float8 weight .* does not know"):
        model[0].up.weight.to_local() + 1
    with pytest.raises(RuntimeError, match="fully_shard shards its frozen float8 weight; convert back before that"):
        convert_to_high_precision(model)
    with pytest.raises(ValueError, match="is a DTensor; freeze before fully_shard"):
        freeze_to_float8(shard(models.make_model(layers=1)), config=config)
    mesh = get_cached_mesh((RANKS,))
    with pytest.raises(NotImplementedError, match="Float8ColwiseParallel: expected a weight in high precision"):
        parallelize_module(build_frozen(config)[0], mesh, {"up": Float8ColwiseParallel()})
    state = models.make_model(layers=2, dim=DIM, hidden=HIDDEN).state_dict()
    others = {name: value + 1 for name, value in state.items()}
    with pytest.raises(RuntimeError, match="these values do not fit the scales of the whole weight"):
        set_model_state_dict(shard(build_frozen(config)), others, options=StateDictOptions(full_state_dict=True))
    by_columns = {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)}
    for wrap in (functools.partial(shard, **by_columns), functools.partial(FullyShardedDataParallel, **FSDP1)):
        with pytest.raises(NotImplementedError, match="FSDP2 can shard dim 0 alone"):
            wrap(build_frozen(config))
    for write in (functools.partial(dist.broadcast, src=0), dist.all_reduce):
        with pytest.raises(NotImplementedError, match="has no high-precision memory that a collective could write to"):
            write(build_frozen(config)[0].up.weight)


@on_ranks(RANKS)
def test_sharded_state_dicts_hold_high_precision_for_others_and_codes_for_frozen_models():
    whole = build_frozen("blockwise")
    model, input = shard(copy.deepcopy(whole)), models.get_batches(1, 1, DIM)[0]
    state = model.state_dict()
    assert isinstance(state["0.up.weight"], DTensor)
    local = state["0.up.weight"].to_local()
    assert local.data_fp8.data_ptr() == model[0].up.weight.to_local().data_fp8.data_ptr()
    values = whole[0].up.weight.to_high_precision()
    assert (local * 1).equal(values.chunk(RANKS)[dist.get_rank()])
    assert (state["0.up.weight"] * 1).full_tensor().equal(values)
    for how in ("load_state_dict", "set_model_state_dict"):
        other = models.make_model(layers=2, dim=DIM, hidden=HIDDEN)
        for parameter in other.parameters():
            nn.init.normal_(parameter)
        other = shard(freeze_to_float8(other, config="blockwise", module_filter_fn=lambda module, name: "." in name))
        if how == "load_state_dict":
            other.load_state_dict(copy.deepcopy(state))
        else:
            set_model_state_dict(other, get_model_state_dict(model))
        with torch.no_grad():
            assert other(input).equal(whole(input)), how
    adapters = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    full = get_model_state_dict(model, options=adapters)
    if dist.get_rank() == 0:
        assert all(full[name].equal(weight) for name, weight in whole.named_parameters() if weight.requires_grad)
        assert not any(name in full for name in copy_codes(whole))


@on_ranks(RANKS)
def test_ddp_computes_the_same_and_leaves_the_codes():
    model = build_frozen("blockwise")
    before = copy_codes(model)
    assert train(DistributedDataParallel(model)) == pytest.approx(train_one_process("blockwise"), rel=1e-5)
    assert_same(copy_codes(model), before)


@pytest.mark.parametrize(("config", "is_transposed"), thinned(CONFIGS, [False, True], together=1))
@on_ranks(RANKS)
def test_experts_compute_the_same_and_are_gathered_at_a_byte_per_element(config, is_transposed):
    """Two ranks share three experts."""
    whole, input = freeze_to_float8(make_mixture(is_transposed=is_transposed), config=config), draw(6, MIXTURE_DIM)
    expected, model = whole(input), shard(copy.deepcopy(whole))
    with CollectiveCounter() as counter:
        results = compute_results(model, input, grad_output=1.0)[:2]
    assert_same(results, compute_results(whole, input, grad_output=1.0)[:2])
    assert counter.bytes["all_gather"] == 2 * count_gathered_bytes(whole)  # forward and backward
    state = model.state_dict()
    values = whole[0].experts.down_proj.to_high_precision()
    assert state["0.experts.down_proj"].full_tensor().equal(values)
    other = freeze_to_float8(make_mixture(is_transposed=is_transposed), config=config)
    with torch.no_grad():
        other[0].experts.down_proj.mul_(3)
    other = shard(other)
    other.load_state_dict(state)
    assert other(input).equal(expected)
    exported = dict(iter_float8_weights(model, format="high-precision"))
    if is_transposed:
        assert exported["0.experts.down_proj"].equal(values)
    else:
        assert exported["0.experts.2.down_proj.weight"].equal(values[2])

"""A frozen float8 base under FSDP2 and DistributedDataParallel: the same numbers, and codes gathered at one byte."""

import copy
import functools
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from quaver import Float8ColwiseParallel, convert_to_high_precision, freeze_to_float8
from quaver.export import iter_float8_weights
from quaver.linear.frozen_weight import FrozenFloat8Weight
from tests.counting import CollectiveCounter
from tests.library.distributed.models import LEARNING_RATE, batches, make_model, train_in_parts
from tests.library.distributed.test_fsdp import shard_model, train_step
from tests.mixture import DIM as MIXTURE_DIM
from tests.mixture import make_mixture
from tests.ranks import mesh_of, on_ranks
from tests.steps import assert_same
from tests.thinned import thinned

RANKS, STEPS, DIM, HIDDEN = 2, 3, 130, 301  # a rank's 151 rows end inside a block of 128
FSDP1 = {"use_orig_params": True, "device_id": torch.device("cpu")}
CONFIGS = ("blockwise", "mxfp8", "tensorwise", "rowwise")
CONFIG = pytest.mark.parametrize("config", CONFIGS)


def frozen_model(config):
    """Norms, biases and the last linear train; what lies between is frozen."""
    model = make_model(layers=2, dim=DIM, hidden=HIDDEN)
    return freeze_to_float8(model, config=config, module_filter_fn=lambda module, name: "." in name)


def optimizer_of(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)


def one_process(config):
    model = frozen_model(config)
    return train_in_parts(model, optimizer_of(model), batches(STEPS, RANKS, DIM), RANKS)[0]


def train(model):
    """The losses, averaged over the ranks."""
    optimizer = optimizer_of(model)
    return [train_step(model, optimizer, batch) for batch in batches(STEPS, RANKS, DIM)]


def sharded(model, mesh=None, **options):
    return shard_model(None, model=model, mesh=mesh, **options)


def codes_of(model):
    return {n: p.data_fp8.clone() for n, p in model.named_parameters() if isinstance(p, FrozenFloat8Weight)}


@CONFIG
@on_ranks(RANKS)
def test_fsdp_computes_the_same_and_gathers_a_byte_per_element(config):
    whole = frozen_model(config)
    model, input = sharded(copy.deepcopy(whole)), batches(1, 1, DIM)[0]
    with CollectiveCounter() as counter, torch.no_grad():
        assert model(input).equal(whole(input))
    rows = {name: -(-parameter.shape[0] // RANKS) * RANKS for name, parameter in whole.named_parameters()}
    assert counter.bytes["all_gather"] == sum(
        rows[name] * parameter[:1].numel() * 4 if name not in codes_of(whole) else rows[name] * parameter.shape[1]
        for name, parameter in whole.named_parameters()
    )
    assert train(model) == pytest.approx(one_process(config), rel=1e-5)


@on_ranks(RANKS)
def test_fsdp_variants():
    whole, input = frozen_model("blockwise"), batches(1, 1, DIM)[0]
    mesh = mesh_of((RANKS, 1), ("a", "b"))
    with torch.no_grad():
        half = sharded(copy.deepcopy(whole), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        assert half(input).equal(copy.deepcopy(whole).bfloat16()(input.bfloat16()))
        for mesh_of_variant in (mesh["b"], mesh):  # one rank alone, and replicas
            model = sharded(copy.deepcopy(whole), mesh_of_variant)
            for _ in range(2):
                assert model(input).equal(whole(input))
        model = sharded(copy.deepcopy(whole))
        model[0].unshard()
        assert model[0].up.weight.to_high_precision().equal(whole[0].up.weight.to_high_precision())


@pytest.mark.parametrize("config", ["blockwise", "tensorwise", "rowwise"])
@on_ranks(RANKS)
def test_a_rank_without_rows(config):
    """One row on two ranks, and one expert."""
    torch.manual_seed(0)
    whole = freeze_to_float8(
        nn.Sequential(nn.Linear(DIM, 1), make_mixture(layers=1, num_experts=1, dim=DIM)[0]), config=config
    )
    model = copy.deepcopy(whole)
    for module in model:
        fully_shard(module)
    fully_shard(model)
    input = torch.randn(16, DIM)
    for sharded_module, of_whole in zip(model, whole, strict=True):
        assert sharded_module(input).equal(of_whole(input))
    state, expected = get_model_state_dict(model), whole.state_dict()
    assert state.keys() == expected.keys()
    set_model_state_dict(model, state)
    assert model[0](input).equal(whole[0](input))


@on_ranks(RANKS)
def test_what_is_refused():
    config = "blockwise"
    model = sharded(frozen_model(config))
    with pytest.raises(RuntimeError, match="a part of a frozen float8 weight .* does not know"):
        model[0].up.weight.to_local() + 1
    with pytest.raises(RuntimeError, match="fully_shard shards its frozen float8 weight; convert back before that"):
        convert_to_high_precision(model)
    with pytest.raises(ValueError, match="is a DTensor; freeze before fully_shard"):
        freeze_to_float8(sharded(make_model(layers=1)), config=config)
    mesh = mesh_of((RANKS,))
    with pytest.raises(NotImplementedError, match="Float8ColwiseParallel: expected a weight in high precision"):
        parallelize_module(frozen_model(config)[0], mesh, {"up": Float8ColwiseParallel()})
    others = {name: value + 1 for name, value in make_model(layers=2, dim=DIM, hidden=HIDDEN).state_dict().items()}
    with pytest.raises(RuntimeError, match="these values do not fit the scales of the whole weight"):
        set_model_state_dict(sharded(frozen_model(config)), others, options=StateDictOptions(full_state_dict=True))
    by_columns = {"shard_placement_fn": lambda parameter: Shard(parameter.dim() - 1)}
    for wrap in (functools.partial(sharded, **by_columns), functools.partial(FullyShardedDataParallel, **FSDP1)):
        with pytest.raises(NotImplementedError, match="FSDP2 can shard dim 0 alone"):
            wrap(frozen_model(config))
    for write in (functools.partial(dist.broadcast, src=0), dist.all_reduce):
        with pytest.raises(NotImplementedError, match="has no high-precision memory that a collective could write to"):
            write(frozen_model(config)[0].up.weight)


@on_ranks(RANKS)
def test_sharded_state_dicts_hold_high_precision_for_others_and_codes_for_frozen_models():
    whole = frozen_model("blockwise")
    model, input = sharded(copy.deepcopy(whole)), batches(1, 1, DIM)[0]
    state = model.state_dict()
    assert isinstance(state["0.up.weight"], DTensor)
    local = state["0.up.weight"].to_local()
    assert local.data_fp8.data_ptr() == model[0].up.weight.to_local().data_fp8.data_ptr()
    values = whole[0].up.weight.to_high_precision()
    assert (local * 1).equal(values.chunk(RANKS)[dist.get_rank()])
    assert (state["0.up.weight"] * 1).full_tensor().equal(values)
    for how in ("load_state_dict", "set_model_state_dict"):
        other = make_model(layers=2, dim=DIM, hidden=HIDDEN)
        for parameter in other.parameters():
            nn.init.normal_(parameter)
        other = sharded(freeze_to_float8(other, config="blockwise", module_filter_fn=lambda module, name: "." in name))
        if how == "load_state_dict":
            other.load_state_dict(copy.deepcopy(state))
        else:
            set_model_state_dict(other, get_model_state_dict(model))
        with torch.no_grad():
            assert other(input).equal(whole(input)), how
    adapters = StateDictOptions(full_state_dict=True, ignore_frozen_params=True)
    full = get_model_state_dict(model, options=adapters)
    if dist.get_rank() == 0:
        assert all(full[name].equal(p) for name, p in whole.named_parameters() if p.requires_grad)
        assert not any(name in full for name in codes_of(whole))


@on_ranks(RANKS)
def test_ddp_computes_the_same_and_leaves_the_codes():
    model = frozen_model("blockwise")
    before = codes_of(model)
    assert train(DistributedDataParallel(model)) == pytest.approx(one_process("blockwise"), rel=1e-5)
    assert_same(codes_of(model), before)


# ---- experts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("config", "is_transposed"), thinned(CONFIGS, [False, True], together=1))
@on_ranks(RANKS)
def test_experts_compute_the_same_and_are_gathered_at_a_byte_per_element(config, is_transposed):
    """Three experts on two ranks."""
    whole, input = (
        freeze_to_float8(make_mixture(is_transposed=is_transposed), config=config),
        torch.randn(6, MIXTURE_DIM),
    )
    dist.broadcast(input, 0)
    expected, model = whole(input), shard_model(None, model=copy.deepcopy(whole))
    with CollectiveCounter() as counter:
        output = model(input.requires_grad_())
        output.sum().backward()
    assert output.equal(expected)
    again = input.detach().clone().requires_grad_()
    whole(again).sum().backward()
    assert input.grad.equal(again.grad)
    gathered = sum(
        -(-p.shape[0] // RANKS) * RANKS * math.prod(p.shape[1:]) * (1 if isinstance(p, FrozenFloat8Weight) else 4)
        for p in whole.parameters()
    )
    assert counter.bytes["all_gather"] == 2 * gathered  # forward and backward
    state = model.state_dict()
    values = whole[0].experts.down_proj.to_high_precision()
    assert state["0.experts.down_proj"].full_tensor().equal(values)
    other = freeze_to_float8(make_mixture(is_transposed=is_transposed), config=config)
    with torch.no_grad():
        other[0].experts.down_proj.mul_(3)
    other = shard_model(None, model=other)
    other.load_state_dict(state)
    assert other(input).equal(expected)
    exported = dict(iter_float8_weights(model, format="high-precision"))
    assert exported["0.experts.down_proj" if is_transposed else "0.experts.2.down_proj.weight"].equal(
        whole[0].experts.down_proj.to_high_precision()[slice(None) if is_transposed else 2]
    )

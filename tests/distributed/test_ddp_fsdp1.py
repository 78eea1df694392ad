"""DistributedDataParallel and FSDP1 around a converted model equal one process that takes the ranks' parts in turn."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from quaver import cast_weights_once, convert_to_float8_training
from tests.distributed.models import Block, config_of, make_model
from tests.distributed.ranks import RanksError, run
from tests.reference import RECIPES

RECIPE = pytest.mark.parametrize("recipe", RECIPES)
RANKS, STEPS, ACCUMULATE = 2, 3, 2


def converted(config, compiled=None):
    model = convert_to_float8_training(make_model(), config=config)
    if compiled:
        for block in model:
            block.compile(fullgraph=True, backend=compiled)
    return model


def microbatches():
    """For each step, for each accumulation, for each rank, one [6, 18]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, ACCUMULATE, RANKS, 6, 18, generator=generator)


def train(model, parts, no_sync=contextlib.nullcontext, scope=contextlib.nullcontext):
    """The losses by step; `parts` are those that this process takes, [steps, n, 6, 18]."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for step in parts:
        losses.append(0.0)
        with scope(model):
            for i, microbatch in enumerate(step):
                with no_sync() if i < len(step) - 1 else contextlib.nullcontext():
                    loss = model(microbatch).square().mean() / len(step)
                    loss.backward()
                losses[-1] += loss.item()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def one_process(config, compiled=None, accumulate=ACCUMULATE):
    model = converted(config, compiled)
    losses = train(model, microbatches()[:, :accumulate].flatten(1, 2))
    return losses, dict(model.named_parameters())


def own_part(accumulate):
    return microbatches()[:, :accumulate, dist.get_rank()]


def assert_same(losses, parameters, expected):
    """Losses and weights, within 1e-5: gradients of 2 ranks are halved, which is exact, and added in another order.

    The last bits of such a sum move no weight of this model by more; a scale of its own would move it by 1e-3.
    """
    mean = torch.tensor(losses)
    dist.all_reduce(mean)
    torch.testing.assert_close((mean / RANKS).tolist(), expected[0], rtol=1e-5, atol=0)
    expected = {name: parameter.detach() for name, parameter in expected[1].items()}
    torch.testing.assert_close(parameters, expected, rtol=1e-5, atol=1e-5)


def plain(model, prefix=""):
    return {name.removeprefix(prefix): parameter.detach() for name, parameter in model.named_parameters()}


# ---- DDP -------------------------------------------------------------------------------------------------------------


def _check_ddp(recipe, compiled, accumulate, gather_float8):
    expected = one_process(config_of(recipe), compiled, accumulate)
    config = config_of(recipe, enable_fsdp_float8_all_gather=gather_float8)
    model = DistributedDataParallel(converted(config, compiled))
    losses = train(model, own_part(accumulate), model.no_sync)
    assert_same(losses, plain(model, "module."), expected)


@RECIPE
@pytest.mark.parametrize("accumulate", [1, 2], ids=["", "no_sync"])
def test_ddp(recipe, accumulate):
    run(RANKS, _check_ddp, recipe, None, accumulate, False)


@RECIPE
def test_ddp_with_weights_to_gather(recipe):
    run(RANKS, _check_ddp, recipe, None, 2, True)


@pytest.mark.nightly
@RECIPE
@pytest.mark.parametrize("accumulate", [1, 2], ids=["", "no_sync"])
def test_ddp_of_compiled_blocks_for_all(recipe, accumulate):
    run(RANKS, _check_ddp, recipe, "inductor", accumulate, False)


def _check_ddp_in_scope(recipe):
    expected = one_process(config_of(recipe))
    model = DistributedDataParallel(converted(config_of(recipe)))
    assert_same(train(model, own_part(ACCUMULATE), model.no_sync, cast_weights_once), plain(model, "module."), expected)


@RECIPE
def test_ddp_with_weights_cast_once(recipe):
    run(RANKS, _check_ddp_in_scope, recipe)


def _check_compiled_ddp(recipe, backend):
    expected = one_process(config_of(recipe), None, 1)
    model = DistributedDataParallel(converted(config_of(recipe)))
    losses = train(torch.compile(model, backend=backend), own_part(1))
    assert_same(losses, plain(model, "module."), expected)


def test_compiled_ddp():
    """torch splits the graph into its buckets."""
    run(RANKS, _check_compiled_ddp, "rowwise", "aot_eager")


# ---- FSDP1 -----------------------------------------------------------------------------------------------------------


def _check_fsdp1(recipe, compiled, accumulate, gather_float8, scope=contextlib.nullcontext):
    expected = one_process(config_of(recipe), compiled, accumulate)
    config = config_of(recipe, enable_fsdp_float8_all_gather=gather_float8)
    model = FullyShardedDataParallel(
        converted(config, compiled),
        use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
    )
    losses = train(model, own_part(accumulate), model.no_sync, scope)
    with FullyShardedDataParallel.summon_full_params(model):
        parameters = {name.replace("_fsdp_wrapped_module.", ""): p.detach() for name, p in model.named_parameters()}
        assert_same(losses, parameters, expected)


@RECIPE
@pytest.mark.parametrize("accumulate", [1, 2], ids=["", "no_sync"])
def test_fsdp1(recipe, accumulate):
    run(RANKS, _check_fsdp1, recipe, None, accumulate, False)


def _check_fsdp1_in_scope(recipe):
    _check_fsdp1(recipe, None, ACCUMULATE, False, cast_weights_once)


@RECIPE
def test_fsdp1_with_weights_cast_once(recipe):
    """The scope leaves sharded weights alone."""
    run(RANKS, _check_fsdp1_in_scope, recipe)


def test_fsdp1_refuses_weights_to_gather():
    with pytest.raises(RanksError, match="fully_shard"):
        run(RANKS, _check_fsdp1, "tensorwise", None, 1, True)


@pytest.mark.nightly
@RECIPE
def test_fsdp1_of_compiled_blocks_for_all(recipe):
    run(RANKS, _check_fsdp1, recipe, "inductor", 1, False)

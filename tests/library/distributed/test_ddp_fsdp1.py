"""Compares DistributedDataParallel and FSDP1 with one process that takes the ranks' parts in turn."""

import contextlib

import pytest
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from quaver import cast_weights_once, convert_to_float8_training
from tests.library.distributed.delayed_training import STEPS, check_against_one_process, check_exchanges, train
from tests.library.distributed.models import Block, make_model, train_single_process
from tests.ranks import on_ranks, refusal
from tests.recipes import NON_BLOCK_RECIPES, PERSISTENT_RECIPES, make_recipe_config
from tests.thinned import at_night, first

WRAPPERS = ["DDP", "FSDP1", "DDP, weights to gather"]
COMPILED = ["DDP of compiled blocks", "compiled DDP"]


def wrap(recipe, how, layers=2):
    config = make_recipe_config(recipe, enable_fsdp_float8_all_gather="weights to gather" in how)
    model = convert_to_float8_training(make_model(layers), config=config)
    if how.startswith("FSDP1"):
        return FullyShardedDataParallel(
            model, use_orig_params=True, auto_wrap_policy=ModuleWrapPolicy({Block}), device_id=torch.device("cpu")
        )
    if how == "DDP of compiled blocks":
        for block in model:
            block.compile(fullgraph=True, backend="aot_eager")
    model = DistributedDataParallel(model)
    # torch splits the graph of the whole into its buckets.
    return torch.compile(model, backend="aot_eager") if how == "compiled DDP" else model


@pytest.mark.parametrize(
    ("recipe", "wrappers"),
    [
        ("rowwise", WRAPPERS),
        ("delayed", WRAPPERS),
        ("mxfp8", WRAPPERS[:1]),
        *at_night((recipe, WRAPPERS) for recipe in (*NON_BLOCK_RECIPES, *PERSISTENT_RECIPES, "blockwise", "mxfp8")),
    ],
)
@on_ranks(2)
def test_steps_equal_one_process(recipe, wrappers):
    expected = train_single_process(make_recipe_config(recipe), STEPS, 2)
    for how in wrappers:
        results = train(wrap(recipe, how))
        check_against_one_process(results, expected, 2, how)
        if recipe in PERSISTENT_RECIPES:
            check_exchanges(results[2], recipe, how, gathers=False)


@pytest.mark.parametrize(
    ("recipe", "wrappers"),
    [("delayed", COMPILED[1:]), *at_night((recipe, COMPILED) for recipe in (*NON_BLOCK_RECIPES, *PERSISTENT_RECIPES))],
)
@on_ranks(2)
def test_compiled_steps_equal_one_process(recipe, wrappers):
    expected = train_single_process(make_recipe_config(recipe), STEPS, 2, layers=1)
    for how in wrappers:
        check_against_one_process(train(wrap(recipe, how, layers=1), compiled=True), expected, 2, how)


SCOPES = [cast_weights_once, contextlib.nullcontext]


@pytest.mark.parametrize(("scope", "recipe"), first(2, zip(SCOPES * 2, NON_BLOCK_RECIPES, strict=True)))
@on_ranks(2)
def test_accumulated_gradients_are_those_of_one_process(scope, recipe):
    """Under FSDP1 cast_weights_once leaves sharded weights alone."""
    expected = train_single_process(make_recipe_config(recipe), STEPS, 4)
    for how in ("DDP", "FSDP1"):
        model = wrap(recipe, how)
        results = train(model, accumulate=2, no_sync=model.no_sync, scope=scope)
        check_against_one_process(results, expected, 4, how)


@on_ranks(2)
def test_fsdp1_refuses_weights_to_gather():
    assert "fully_shard" in refusal(lambda: train(wrap("tensorwise", "FSDP1, weights to gather")))

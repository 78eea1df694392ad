"""FSDP2 of experts computes what one process computes, whichever dim it shards and however it gathers."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import Shard

from quaver import convert_to_float8_training
from tests.distributed.models import LEARNING_RATE, batches, config_of, loss_of, train_in_parts
from tests.distributed.ranks import on_ranks, run
from tests.distributed.test_fsdp import part_of, shard_model, train_step
from tests.mixture import DIM, make_mixture

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
LAYOUTS = list(itertools.product((0, 1), (False, True)))
"""(the dim that is sharded, whether weights are transposed)."""


def shard_mixture(config, dim=0, is_transposed=False, **options):
    """Experts sharded along `dim`, everything else along dim 0; three experts leave the last of 2 or 4 ranks fewer."""
    by_dim = {"shard_placement_fn": lambda parameter: Shard(dim if parameter.dim() == 3 else 0)}
    return shard_model(config, model=make_mixture(is_transposed=is_transposed), **by_dim, **options)


def _losses(config, steps, layout, compiled=None):
    model = shard_mixture(config, *layout, compiled=compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return [train_step(model, optimizer, batch) for batch in batches(steps, dist.get_world_size(), DIM)]


def losses_of_one(config, steps, ranks, is_transposed):
    model = convert_to_float8_training(make_mixture(is_transposed=is_transposed), config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    return train_in_parts(model, optimizer, batches(steps, ranks, DIM), ranks)[0]


def check_losses(ranks, recipe, layout, gather, compiled=None):
    """As `check_ten_adam_steps`: ranks add gradients in another order."""
    config = config_of(recipe, enable_fsdp_float8_all_gather=gather)
    losses = run(ranks, _losses, config, 4, layout, compiled)[0]
    expected = losses_of_one(config_of(recipe), 4, ranks, layout[1])
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "recipe", "layout"),
    [
        (2, "tensorwise", LAYOUTS[0]),
        (2, "blockwise", LAYOUTS[3]),
        (4, "rowwise", LAYOUTS[1]),
        (4, "rowwise_with_gw_hp", LAYOUTS[2]),
    ],
)
def test_gathered_in_high_precision_ranks_train_as_one_process(ranks, recipe, layout):
    check_losses(ranks, recipe, layout, gather=False)


def test_compiled_blocks_train_as_one_process():
    check_losses(2, "tensorwise", LAYOUTS[0], gather=False, compiled="aot_eager")


def _results(config, layout, batch):
    """This rank's output, and whole gradients after its backward."""
    model = shard_mixture(config, *layout)
    output = model(part_of(batch))
    (loss_of(output) / dist.get_world_size()).backward()
    return output.detach(), {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gathered_in_high_precision_an_output_has_the_bits_of_one_process(layout):
    batch = batches(1, 2, DIM)[0]
    for recipe in RECIPES:
        one = convert_to_float8_training(make_mixture(is_transposed=layout[1]), config=recipe)
        results = run(2, _results, config_of(recipe), layout, batch)
        for part, (output, _) in zip(batch.chunk(2), results, strict=True):
            assert output.equal(one(part)), recipe


def _save(folder, config, layout):
    model = shard_mixture(config, *layout)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    dcp.save(get_model_state_dict(model), checkpoint_id=folder)


def _load(folder, config, layout):
    model = shard_mixture(config, *layout)
    state_dict = get_model_state_dict(model)
    dcp.load(state_dict, checkpoint_id=folder)
    set_model_state_dict(model, state_dict)
    return model(torch.ones(3, DIM)).detach(), {name: each.full_tensor() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("gather", [False])
def test_a_checkpoint_loads_on_other_ranks_and_other_dims(tmp_path, gather):
    config = config_of("blockwise", enable_fsdp_float8_all_gather=gather)
    run(2, _save, str(tmp_path), config, LAYOUTS[2])
    expected = {name: value * 1.25 for name, value in make_mixture().state_dict().items()}
    one = convert_to_float8_training(make_mixture(), config="blockwise")
    one.load_state_dict(expected)
    for ranks, layout in ((1, LAYOUTS[0]), (2, LAYOUTS[0]), (4, LAYOUTS[0]), (4, LAYOUTS[2])):
        for output, state_dict in run(ranks, _load, str(tmp_path), config, layout):
            assert output.equal(one(torch.ones(3, DIM)))
            assert all(value.equal(expected[name]) for name, value in state_dict.items())

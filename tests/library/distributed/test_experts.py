"""Tests that FSDP2 of experts computes what one process computes, whichever dim it shards and however it gathers."""

import contextlib
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import Shard

from quaver import (
    CastConfig,
    ScalingGranularity,
    cast_weights_once,
    convert_to_float8_training,
    convert_to_high_precision,
)
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from quaver.experts.function import get_quantized_operands
from quaver.experts.groups import select_group
from quaver.experts.module_weight import iter_module_weights
from quaver.fsdp import all_gather_weight
from quaver.linear.tensor import Float8Tensor
from tests.counting import CollectiveCounter
from tests.library.distributed import models
from tests.library.distributed.fsdp_models import make_gathering_config, model_by
from tests.mixture import DIM, HIDDEN, make_mixture
from tests.ranks import on_ranks, refusal, run
from tests.recipes import TORCHAO_RECIPES, make_recipe_config
from tests.steps import assert_same, to_plain
from tests.thinned import at_night

EXPERT_RECIPES = (*TORCHAO_RECIPES, "blockwise", "mxfp8", "rowwise:dequantized")
LAYOUTS = list(itertools.product((0, 1), (False, True)))
"""(the dim that is sharded, whether weights are transposed)."""
STEPS = 2


def shard_mixture(config, dim=0, is_transposed=False, dtype=None, **options):
    """Shard experts along `dim`, everything else along dim 0; three experts leave the last of 2 or 4 ranks fewer."""
    options["shard_placement_fn"] = lambda parameter: Shard(dim if parameter.dim() == 3 else 0)
    return models.shard_model(config, model=make_mixture(is_transposed=is_transposed).to(dtype), **options)


def _compute_losses(config, steps, layout, compiled=None):
    model = shard_mixture(config, *layout, compiled=compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE)
    batches = models.get_batches(steps, dist.get_world_size(), DIM)
    return [models.train_step(model, optimizer, batch) for batch in batches]


def train_one_process(config, steps, ranks, is_transposed):
    model = convert_to_float8_training(make_mixture(is_transposed=is_transposed), config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE)
    return models.train_in_parts(model, optimizer, models.get_batches(steps, ranks, DIM), ranks)[0]


@pytest.mark.parametrize(
    ("ranks", "recipe", "layout", "gather", "compiled"),
    [
        (2, "tensorwise", LAYOUTS[0], True, "aot_eager"),
        (4, "blockwise", LAYOUTS[3], True, None),
        *at_night([(4, "rowwise", LAYOUTS[1], True, None), (4, "mxfp8", LAYOUTS[2], False, None)]),
    ],
)
def test_ranks_train_as_one_process(ranks, recipe, layout, gather, compiled):
    """Ranks add gradients in another order, as in test_fsdp.py. The next test has the bits of a step."""
    config = make_recipe_config(recipe, enable_fsdp_float8_all_gather=gather)
    losses = run(ranks, _compute_losses, config, STEPS, layout, compiled)[0]
    expected = train_one_process(make_recipe_config(recipe), STEPS, ranks, layout[1])
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses == pytest.approx(expected, rel=1e-5)


def _compute_results(config, layout, batch):
    """Run a step, and return this rank's output and the whole gradients."""
    model = shard_mixture(config, *layout)
    output = model(models.get_rank_part(batch))
    (models.compute_loss(output) / dist.get_world_size()).backward()
    return output.detach(), {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("layout", "gather", "recipes"),
    [
        (LAYOUTS[3], True, EXPERT_RECIPES[::2]),
        (LAYOUTS[2], True, EXPERT_RECIPES[1::2]),
        (LAYOUTS[1], False, EXPERT_RECIPES[:2]),
        *at_night(itertools.product(LAYOUTS, [False, True], [EXPERT_RECIPES])),
    ],
)
def test_two_ranks_have_the_bits_of_one_process(layout, gather, recipes):
    """Gradients have them, too: a sum of two has one order, and the mean halves it exactly."""
    batch = models.get_batches(1, 2, DIM)[0]
    for recipe in recipes:
        one = convert_to_float8_training(make_mixture(is_transposed=layout[1]), config=recipe)
        config = make_recipe_config(recipe, enable_fsdp_float8_all_gather=gather)
        results = run(2, _compute_results, config, layout, batch)
        for part, (output, _) in zip(batch.chunk(2), results, strict=True):
            expected = one(part)
            assert output.equal(expected), recipe
            (models.compute_loss(expected) / 2).backward()
        expected = {name: parameter.grad / 2 for name, parameter in one.named_parameters()}
        assert_same(results[0][1], expected, recipe)


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
    return model(torch.ones(3, DIM)).detach(), {name: to_plain(value) for name, value in model.state_dict().items()}


@pytest.mark.parametrize("gather", [True, *at_night([(False,)])])
def test_a_checkpoint_loads_on_other_ranks_and_other_dims(tmp_path, gather):
    config = make_recipe_config("blockwise", enable_fsdp_float8_all_gather=gather)
    run(2, _save, str(tmp_path), config, LAYOUTS[2])
    expected = {name: value * 1.25 for name, value in make_mixture().state_dict().items()}
    one = convert_to_float8_training(make_mixture(), config="blockwise")
    one.load_state_dict(expected)
    for ranks in (1, 4):
        for output, state_dict in run(ranks, _load, str(tmp_path), config, LAYOUTS[0]):
            assert output.equal(one(torch.ones(3, DIM)))
            assert_same(state_dict, expected)


def assert_same_operands(model, whole):
    """Assert that the gathered codes and scales of experts are those of whole weights."""
    for block, expected_block in zip(model, whole, strict=True):
        block.unshard()
        for weight in iter_module_weights(expected_block.experts):
            unsharded = getattr(block.experts, weight.name)
            assert isinstance(unsharded, Float8Tensor)
            operands = get_quantized_operands(unsharded, expected_block.experts.is_transposed)
            for operand, expected in zip(operands, weight.quantize(), strict=True):
                assert operand.layout == expected.layout
                assert_same(operand.data.view(torch.uint8), expected.data.view(torch.uint8), weight.name)
                scales = [select_scales(quantized, unsharded.shape) for quantized in (operand, expected)]
                assert_same(*scales, where=weight.name)
        block.reshard()


def select_scales(operand, shape):
    """Return the scales of each expert. Scales of blocks begin at any row of a matrix, so some have no block."""
    experts, rows, _ = shape
    return [select_group(operand, index, index * rows, (index + 1) * rows).dequant_scale for index in range(experts)]


@pytest.mark.parametrize(
    ("ranks", "layout", "half"),
    [
        *((2, LAYOUTS[3], 0), (4, LAYOUTS[1], 1), (2, LAYOUTS[2], 1)),
        *at_night(itertools.product([2, 4, 1], LAYOUTS, [0, 1])),
    ],
)
@on_ranks()
def test_codes_and_scales_are_those_of_one_process(ranks, layout, half):
    along = CastConfig(scaling_granularity=ScalingGranularity.BLOCKWISE, block_size=(1, 32))
    recipes = *EXPERT_RECIPES, "tensorwise_power_of_2"
    configs = [make_recipe_config(recipe, enable_fsdp_float8_all_gather=True) for recipe in recipes]
    configs.append(replace(configs[4], cast_config_weight=along))
    for index, config in enumerate(configs[half::2], start=layout[0]):
        dtype = (torch.float32, torch.bfloat16)[index % 2]
        model = shard_mixture(config, *layout, dtype=dtype)
        whole = make_mixture(is_transposed=layout[1]).to(dtype)
        convert_to_float8_training(whole, config=replace(config, enable_fsdp_float8_all_gather=False))
        assert_same_operands(model, whole)
        with torch.no_grad():
            for block in (*model, *whole):
                block.experts.down_proj.mul_(1.5)
        precompute_float8_dynamic_scale_for_fsdp(model)
        assert_same_operands(model, whole)


def _count_scales(shape, recipe):
    """Return how many scales the casts of experts' weights have together."""
    experts, rows, columns = shape
    matrices = experts * rows
    blocks = {"blockwise": 128, "mxfp8": 32}
    if recipe in blocks:
        return (matrices // blocks[recipe] + experts) * -(-columns // blocks[recipe])
    return {"tensorwise": experts, "rowwise": matrices + experts * columns}.get(recipe)


@pytest.mark.parametrize(
    ("ranks", "recipe", "casts"),
    [
        (2, "rowwise", 2),
        (2, "blockwise", 1),
        *at_night([(2, "tensorwise", 1), (2, "mxfp8", 1), (4, "rowwise", 2), (4, "blockwise", 1)]),
    ],
)
@on_ranks()
def test_a_step_takes_one_collective_of_scales_and_sends_codes(ranks, recipe, casts):
    """The step follows another one, and a write to one weight of experts."""
    for dim in (0, 1):
        counters = []
        for gather in (False, True):
            model = shard_mixture(make_recipe_config(recipe, enable_fsdp_float8_all_gather=gather), dim)
            for _ in range(3):  # the ranks agree about the weights once, and about those that lack scales once more
                with CollectiveCounter() as counter:
                    model(torch.ones(3, DIM)).sum().backward()
                with torch.no_grad():
                    model[0].experts.down_proj.mul_(1.5)  # the scale of one weight is computed again
            counters.append(counter)
        in_high_precision, in_float8 = counters
        calls = dict(in_float8.calls)
        scales = _count_scales(make_mixture()[0].experts.down_proj.shape, recipe)
        assert in_float8.bytes["all_reduce"] == 4 * scales
        assert calls.pop("all_reduce") == 1
        assert calls == in_high_precision.calls
        sent = sum(
            _count_sent(parameter, dim, ranks) * (casts if parameter.dim() == 3 or name == "out.weight" else 4)
            for name, parameter in model[0].named_parameters()
        )
        assert in_float8.bytes["all_gather"] == calls["all_gather"] * sent  # each gathers a block


def _count_sent(parameter, dim, ranks):
    """Return the elements that the ranks send, with padding."""
    if dim == 1 and parameter.dim() == 3:
        return parameter.numel()
    return -(-parameter.shape[0] // ranks) * ranks * parameter[0].numel()


def _train(how, recipe, scope, precompute):
    model = model_by(how, make_gathering_config(recipe), make_mixture)
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE)
    losses = []
    for batch in models.get_batches(2, dist.get_world_size(), DIM):
        with scope(model):
            for microbatch in batch.chunk(2):
                models.compute_loss(model(models.get_rank_part(microbatch))).backward()
        losses.append(models.train_step(model, optimizer, batch))
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
    return losses


@pytest.mark.parametrize(
    ("ranks", "ways"),
    [
        (2, ["keep gathered", "meta", "checkpointed"]),
        *at_night([(2, ["plain", "always reshard", "cpu offload"]), (4, ["plain", "hsdp"])]),
    ],
)
@on_ranks()
def test_every_way_to_use_fsdp_trains_alike(ranks, ways):
    """The plain way has scales computed before, or weights cast once; the others have one of them in turn."""
    expected = _train("plain", "blockwise", contextlib.nullcontext, False)
    both = (contextlib.nullcontext, True), (cast_weights_once, False)
    for index, how in enumerate(ways):
        for scope, precompute in both if how == "plain" else [both[index % 2]]:
            losses = _train(how, "blockwise", scope, precompute)
            assert losses == (pytest.approx(expected, rel=1e-5) if how == "hsdp" else expected), how


@on_ranks(2)
def test_cast_weights_once_casts_shards_once_and_finds_changes():
    model, batch = shard_mixture(make_gathering_config("blockwise")), models.get_batches(1, 2, DIM)[0]
    shards = model[0].experts.gate_up_proj.to_local().flatten(0, 1).shape
    spy = mock.patch.object(all_gather_weight, "cast_blocks_with_scale", wraps=all_gather_weight.cast_blocks_with_scale)
    with spy as cast, cast_weights_once(model):
        for _ in range(3):
            model(models.get_rank_part(batch)).sum().backward()
    assert [call.args[0].shape for call in cast.call_args_list].count(shards) == 2  # of two blocks
    message = "was changed inside cast_weights_once"
    with pytest.raises(RuntimeError, match=message), cast_weights_once(model), torch.no_grad():
        model(models.get_rank_part(batch))
        model[1].experts.down_proj.mul_(1.0)
    assert not model[0].experts.all_gather_state.cast_once_shards


@on_ranks(2)
def test_an_unsharded_weight_of_experts_takes_one_byte_per_element():
    experts = shard_mixture(make_gathering_config("tensorwise"))[0]
    experts.unshard()
    weight = experts.experts.down_proj
    assert weight.shape == (3, DIM, HIDDEN)
    assert weight.column_data_fp8 is weight.data_fp8
    assert weight.data_fp8.untyped_storage().nbytes() == 4 * DIM * HIDDEN  # an expert of padding
    experts.reshard()
    assert weight.data_fp8.untyped_storage().nbytes() == 0


@on_ranks(2)
def test_what_cannot_be_sharded_says_so():
    model = shard_mixture(make_gathering_config("tensorwise"), dim=2)
    message = refusal(model, torch.ones(3, DIM))
    assert "NotImplementedError: expected weights of experts that FSDP2 shards along dim 0 or 1 and" in message
    message = refusal(convert_to_high_precision, model)
    assert "'0.experts.gate_up_proj' cannot be converted back: fully_shard gathers its weight in float8" in message


@on_ranks(2)
def test_ranks_that_disagree_are_told():
    recipe = "tensorwise" if dist.get_rank() else "blockwise"
    model = shard_mixture(None)
    convert_to_float8_training(
        model, config=make_gathering_config("tensorwise"), module_filter_fn=lambda _, name: "out" in name
    )
    convert_to_float8_training(
        model, config=make_gathering_config(recipe), module_filter_fn=lambda _, name: "out" not in name
    )
    message = refusal(precompute_float8_dynamic_scale_for_fsdp, model)
    assert "experts.gate_up_proj" in message

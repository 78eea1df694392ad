"""Tests that FSDP2 with float8 all-gather computes what one process computes, and sends a byte per element and cast."""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from quaver import CastConfig, ScalingGranularity, convert_to_float8_training
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from tests.counting import CollectiveCounter
from tests.library.distributed import models
from tests.library.distributed.fsdp_models import STEPS, Case, find_different_operands, train_cases
from tests.ranks import on_ranks, refusal, run
from tests.recipes import NON_BLOCK_RECIPES, make_recipe_config
from tests.thinned import at_night, first

ONE_PAYLOAD = ("tensorwise", "tensorwise_power_of_2", "rowwise_with_tensorwise_weight", "blockwise", "mxfp8_with_gw_hp")
TWO_PAYLOADS = ("rowwise", "rowwise_with_gw_hp")


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
@on_ranks()
def test_codes_and_scales_are_those_of_one_process(ranks, dtype):
    whole = models.make_model().to(dtype)
    for recipe in (*ONE_PAYLOAD, *TWO_PAYLOADS):
        config = make_recipe_config(recipe, enable_fsdp_float8_all_gather=True)
        model = models.shard_model(config, model=models.make_model().to(dtype))
        precompute_float8_dynamic_scale_for_fsdp(model)
        assert find_different_operands(model, whole, config) == [], (recipe, "precomputed")
        with torch.no_grad():  # drops the scales
            for parameter in model.parameters():
                parameter.mul_(1.0)
        assert find_different_operands(model, whole, config) == [], recipe


def _write(precompute, *names):
    """Run forwards after writes to all weights, then one after this rank has written to the named one, if any."""
    config = make_recipe_config("tensorwise", enable_fsdp_float8_all_gather=True)
    model, batch = models.shard_model(config), models.get_rank_part(models.get_batches(1, 2)[0])
    written = names[dist.get_rank()]
    for suffix in (".weight", ".weight", written):
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if suffix and name.endswith(suffix):
                    parameter.to_local().mul_(1.5)
        message = refusal(model, batch)
    return message


@pytest.mark.parametrize("precompute", [False, True])
def test_ranks_that_do_not_write_to_the_same_weights_raise(precompute):
    message, _ = run(2, _write, precompute, "0.up.weight", "", collective_timeout=6)
    assert "was written to outside of the usual step on rank 0, and not every rank reported it" in message
    for message in run(2, _write, precompute, "0.up.weight", "0.down.weight", collective_timeout=6):
        assert "written to: rank 0 has '0.up', rank 1 has '0.down'" in message
    assert run(2, _write, precompute, "0.up.weight", "0.up.weight", collective_timeout=6) == ["no error"] * 2


ALL_CASES = [
    Case(recipe, gather, precompute, compiled, param_dtype)
    for recipe, (gather, precompute), compiled, param_dtype in itertools.product(
        NON_BLOCK_RECIPES, [(False, False), (True, False), (True, True)], [None, "inductor"], [None, torch.bfloat16]
    )
]
PRECOMPUTED = [Case("tensorwise", precompute=True), Case("rowwise", precompute=True, param_dtype=torch.bfloat16)]
OTHERS = [Case("tensorwise", param_dtype=torch.bfloat16), Case("rowwise_with_gw_hp", gather=False)]
OTHERS += [Case("rowwise_with_gw_hp", param_dtype=torch.bfloat16), Case("mxfp8")]
COMPILED = [  # test_experts.py has a tensorwise one, without scales computed before
    Case(recipe, precompute=precompute, compiled="aot_eager", param_dtype=torch.bfloat16)
    for recipe, precompute in (("rowwise", True), ("rowwise", False), ("blockwise", True))
]


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [
        (4, PRECOMPUTED),
        (2, OTHERS),
        (2, COMPILED[:1]),
        *at_night((2, [case]) for case in COMPILED[1:]),
        *at_night((ranks, [case]) for ranks in (2, 4) for case in ALL_CASES),
    ],
)
def test_adam_steps_equal_one_process(ranks, cases):
    """Losses equal those of one process on the same global batches, taken in the parts that the ranks take.

    aot_eager runs the operations of eager code, so the one process is compiled for Inductor alone.

    The ranks add their gradients in another order than one process accumulates them, so each step may differ by
    float32 rounding (2e-7 seen), which Adam and the steps of the float8 grid may amplify: 1e-5. Step 1 has no history:
    one float32 sum, 1e-6.
    """
    for case, losses in zip(cases, run(ranks, train_cases, cases, STEPS)[0], strict=True):
        options = {"param_dtype": case.param_dtype, "float8_all_gather": case.gather}
        options["compiled"] = case.compiled if case.compiled == "inductor" else None
        expected = models.compute_single_process_losses(make_recipe_config(case.recipe), STEPS, ranks, **options)
        assert losses[0] == pytest.approx(expected[0], rel=1e-6), case
        assert losses == pytest.approx(expected, rel=1e-5), case


CUT = ((576, 300), (100, 70), (2, 200), (1, 64), (129, 33), (384, 128))
"""Out- and in-features: shards cut blocks, are smaller than one, or empty."""
DEEPSEEK = ((576, 7168),)
"""`kv_a_proj_with_mqa` of DeepSeek-V3."""


@pytest.mark.parametrize(
    ("ranks", "shapes"), first(1, [(ranks, shapes) for shapes in (CUT, DEEPSEEK) for ranks in (4, 2, 1, 3)])
)
@on_ranks()
def test_shards_have_the_codes_and_scales_of_one_process(ranks, shapes):
    def build():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(columns, rows, bias=False) for rows, columns in shapes))
        with torch.no_grad():
            for linear in model:
                linear.weight.mul_(torch.logspace(-3, 3, len(linear.weight))[:, None])
                linear.weight[: len(linear.weight) // 4] = 0
        return model

    along = CastConfig(scaling_granularity=ScalingGranularity.BLOCKWISE, block_size=(1, 32))
    for config in (
        *(make_recipe_config(recipe) for recipe in ("rowwise", "blockwise", "mxfp8")),
        make_recipe_config("blockwise", round_scales_to_power_of_2=False),
        make_recipe_config("deepgemm"),
        make_recipe_config("mxfp8", cast_config_weight=along),  # cast twice, and each scale exchanged
    ):
        gathering = dataclasses.replace(config, enable_fsdp_float8_all_gather=True)
        for precompute in (True, False):
            model = models.shard_model(gathering, model=build())
            if precompute:
                precompute_float8_dynamic_scale_for_fsdp(model)
            assert find_different_operands(model, build(), gathering) == [], (gathering, precompute)


@pytest.mark.parametrize(
    "recipe",
    [
        "rowwise",
        "blockwise",
        "rowwise:dequantized",
        "vllm-per-token:dequantized",
        *at_night((recipe,) for recipe in (*NON_BLOCK_RECIPES, "mxfp8") if recipe != "rowwise"),
    ],
)
@on_ranks(2)
def test_gathering_in_float8_changes_no_bit_of_float32_training(recipe):
    without, with_float8 = train_cases([Case(recipe, gather=False), Case(recipe)], 3)
    assert without == with_float8


def _count(recipe, gather, precompute):
    """Return the calls and bytes of each kind of collective in the second step, and the elements of padded parameters.

    Elements are counted by group (the blocks, or the last linear) and by kind (weights of linears, or others).
    """
    model = models.shard_model(make_recipe_config(recipe, enable_fsdp_float8_all_gather=gather))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first, second = models.get_batches(2, dist.get_world_size())
    if precompute:
        precompute_float8_dynamic_scale_for_fsdp(model)
    models.train_step(model, optimizer, first)
    with CollectiveCounter() as counter:
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        models.compute_loss(model(models.get_rank_part(second))).backward()
    ranks = dist.get_world_size()
    elements = dict.fromkeys(itertools.product(["blocks", "last"], ["weights", "others"]), 0)
    for name, parameter in model.named_parameters():
        group = "last" if name.startswith("2.") else "blocks"
        kind = "weights" if name.endswith("weight") and parameter.dim() == 2 else "others"
        elements[group, kind] += math.ceil(parameter.shape[0] / ranks) * ranks * parameter[0].numel()
    return counter.calls, counter.bytes, elements


LINEAR_WEIGHTS = [parameter.shape for parameter in models.make_model().parameters() if parameter.dim() == 2]


def count_scales(recipe, rows, columns):
    """Return the number of scales of a weight's casts for both of its matmuls."""
    blocks = {"blockwise": 128, "mxfp8_with_gw_hp": 32}
    if recipe in blocks:
        return math.ceil(rows / blocks[recipe]) * math.ceil(columns / blocks[recipe])
    return {"rowwise": rows + columns, "rowwise_with_gw_hp": rows + 1}.get(recipe, 1)


@pytest.mark.parametrize(
    ("ranks", "precompute", "recipes"),
    [(2, False, ("tensorwise", "blockwise", "mxfp8_with_gw_hp", *TWO_PAYLOADS)), (4, True, ("rowwise",))],
)
@on_ranks()
def test_a_step_takes_one_collective_of_scales_and_sends_codes(ranks, precompute, recipes):
    calls_hp, sent_hp, _ = _count("tensorwise", False, False)
    for recipe in recipes:
        calls, sent, elements = _count(recipe, True, precompute)
        # Each of the 3 groups is gathered for the forward and for the backward, except where torch lets the root's
        # group, which has the last linear, stay for the backward.
        assert calls["all_gather"] in (5, 6)
        assert calls["all_reduce"] == 1, recipe  # all scales of the model
        assert sent["all_reduce"] == 4 * sum(count_scales(recipe, *shape) for shape in LINEAR_WEIGHTS), recipe
        gathers = {"blocks": 2, "last": calls["all_gather"] - 4}
        casts = 2 if recipe in TWO_PAYLOADS else 1
        sizes = {name: casts * elements[name, "weights"] + 4 * elements[name, "others"] for name in gathers}
        assert sent["all_gather"] == sum(count * sizes[name] for name, count in gathers.items())
        assert calls_hp == {kind: count for kind, count in calls.items() if kind != "all_reduce"}
        assert sent_hp["all_gather"] == sum(4 * gathers[group] * count for (group, _), count in elements.items())


@pytest.mark.parametrize(("recipe", "casts"), [("tensorwise", 1), ("rowwise", 2), ("rowwise:dequantized", 1)])
@on_ranks(2)
def test_an_unsharded_weight_takes_one_byte_per_element_and_cast_until_reshard(recipe, casts):
    block = models.shard_model(make_recipe_config(recipe, enable_fsdp_float8_all_gather=True))[0]
    block.unshard()
    weight = block.up.weight
    storages = {codes.untyped_storage() for codes in (weight.data_fp8, weight.column_data_fp8)}
    assert sum(storage.nbytes() for storage in storages) == casts * weight.numel()
    block.reshard()
    assert sum(storage.nbytes() for storage in storages) == 0
    assert isinstance(block.up.weight, DTensor)


@on_ranks(2)
def test_the_cost_of_precompute_does_not_grow_with_the_model():
    """Counts kernels (operations that are no views) and collectives for 1, 10 and 100 linears."""
    costs = []
    for layers in (1, 10, 100):
        model = torch.nn.Sequential(*[torch.nn.Linear(16, 16, bias=False) for _ in range(layers)])
        convert_to_float8_training(model, config=make_recipe_config("tensorwise", enable_fsdp_float8_all_gather=True))
        fully_shard(model, mesh=models.get_mesh())
        precompute_float8_dynamic_scale_for_fsdp(model)
        with CollectiveCounter() as counter:
            precompute_float8_dynamic_scale_for_fsdp(model)
        costs.append((counter.calls, counter.kernels))
    assert all(cost == costs[0] for cost in costs), costs
    assert costs[0][0] == {"all_reduce": 1}
    assert sum(costs[0][1].values()) < 20

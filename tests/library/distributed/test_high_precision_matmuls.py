"""Tests `set_high_precision_matmuls` between steps: on one process, on ranks, compiled, and back again."""

import contextlib
import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters

from quaver import (
    CastConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingGranularity,
    cast_weights_once,
    convert_to_float8_training,
    freeze_to_float8,
    set_high_precision_matmuls,
    sync_float8_amax_and_scale_history,
)
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from quaver.experts.grouped_mm_method import to_float8_grouped_mm
from quaver.linear.tensor import Float8Tensor
from quaver.recipes.config import resolve_config
from tests.library.distributed import models, parallel_models
from tests.mixture import GroupedExperts
from tests.ranks import on_ranks, run
from tests.recipes import make_recipe_config
from tests.steps import assert_same, compute_results
from tests.thinned import at_night

ALL = ["output", "grad_input", "grad_weight"]
PHASES = ([], ["output"], ["grad_weight"], ["grad_input"], lambda name: ALL if name.startswith("0.") else [], [])
"""One step each. The first and the last are the recipe; one is of a block."""


def train(model, compute_loss, *, once=False, precompute=False):
    optimizer = torch.optim.SGD(model.parameters(), lr=models.LEARNING_RATE)
    losses = []
    for step, phase in enumerate(PHASES):
        set_high_precision_matmuls(model, phase)
        with cast_weights_once(model) if once else contextlib.nullcontext():
            loss = compute_loss(model, step)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync_float8_amax_and_scale_history(model)
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("recipe", "backend", "options"),
    [
        ("rowwise", None, {"once": True}),
        ("delayed", None, {}),
        ("blockwise", None, {"precompute": True}),
        *at_night([("rowwise", "aot_eager", {}), ("tensorwise", None, {})]),
    ],
)
@on_ranks(2)
def test_fsdp2_gathers_what_each_phase_reads(recipe, backend, options):
    """Gathering codes changes no bit of float32 training, whatever the phases."""
    data, losses = models.get_batches(len(PHASES), 2), []
    for gather in (False, True):
        config = make_recipe_config(recipe, enable_fsdp_float8_all_gather=gather)
        model = models.shard_model(config, model=models.make_model(1), compiled=backend if gather else None)
        compute_loss = lambda model, step: models.compute_loss(model(models.get_rank_part(data[step])))  # noqa: E731
        losses.append(train(model, compute_loss, **(options if gather else {})))
    assert losses[0] == losses[1]
    model[0].unshard()
    assert isinstance(model[0].up.weight, Float8Tensor)
    set_high_precision_matmuls(model, ["output"])
    model[0].unshard()
    assert type(model[0].up.weight) is nn.Parameter


def _train_tp(recipe, ranks):
    batches = parallel_models.make_batches(recipe) * len(PHASES)
    model = parallel_models.build_model(parallel_models.make_sharing_config(recipe))
    if ranks == 1:
        return train(model, lambda model, step: model(batches[step]).square().mean())
    parallel_models.spread(model, models.get_mesh())
    losses = train(model, lambda model, step: model(parallel_models.take_part(batches[step], 1)).square().mean() / 2)
    dist.all_reduce(total := torch.tensor(losses))
    return total.tolist()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_tensor_parallel_ranks_follow_the_phases_of_one_process(recipe):
    parallel_models.assert_same_losses(run(2, _train_tp, recipe, 2)[0], _train_tp(recipe, 1))


def test_compiled_code_is_made_once_for_each_phase():
    blocks = (nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)) for _ in range(2))
    eager = convert_to_float8_training(nn.Sequential(*blocks), config="delayed")
    model, input = copy.deepcopy(eager), torch.randn(16, 32)
    for block in model:  # Dynamo guards on linears of a block having the same config
        block.compile(fullgraph=True, backend="aot_eager")
    graphs = []
    for phase in PHASES[:3] * 2:
        before = counters["stats"]["unique_graphs"]
        set_high_precision_matmuls(model, phase)
        set_high_precision_matmuls(eager, phase)
        assert_same(compute_results(model, input), compute_results(eager, input))
        graphs.append(counters["stats"]["unique_graphs"] - before)
    assert graphs == [1] * 3 + [0] * 3  # for both blocks


def test_in_high_precision_a_linear_is_that_of_pytorch():
    plain, model = models.make_model(), convert_to_float8_training(models.make_model(), config="blockwise")
    input, recipe = models.get_batches(1, 1)[0].requires_grad_(), model[0].up.config
    set_high_precision_matmuls(model, ALL)
    assert_same(compute_results(model, input), compute_results(plain, input))
    set_high_precision_matmuls(model, [])
    assert model[0].up.config is recipe
    for matmuls in (["output"], lambda name: ["output"]):
        with pytest.warns(UserWarning, match="set_high_precision_matmuls changed nothing"):
            set_high_precision_matmuls(plain, matmuls)
    for unknown, converted in (
        (["forward"], model),
        ([["output"]], model),
        (["outptu"], nn.ReLU()),
        (None, model),
        (lambda name: None, model),
    ):
        with pytest.raises(ValueError, match="matmuls: expected names of output, grad_input, grad_weight, got"):
            set_high_precision_matmuls(converted, unknown)
    frozen = freeze_to_float8(models.make_model().requires_grad_(False))
    with pytest.raises(ValueError, match=r"the weight of 0\.up is stored in float8"):
        set_high_precision_matmuls(frozen, ["output"])
    set_high_precision_matmuls(frozen, ["grad_weight"])


def test_experts_that_multiply_in_a_method_follow_too():
    torch.manual_seed(0)
    plain, tokens = GroupedExperts(), torch.randn(6, 16, requires_grad=True)
    model = nn.Sequential(copy.deepcopy(plain))
    to_float8_grouped_mm(model[0], resolve_config("rowwise"))
    float8 = model(tokens)
    set_high_precision_matmuls(model, ["output"])
    assert_same(model(tokens), plain(tokens))
    set_high_precision_matmuls(model, ALL)
    assert_same(compute_results(model, tokens), compute_results(plain, tokens))
    set_high_precision_matmuls(model, [])
    assert_same(model(tokens), float8)


def test_a_config_that_fills_in_other_fields_than_an_equal_one_is_not_shared():
    given = Float8LinearConfig(cast_config_input_for_grad_weight=CastConfig())
    configs = []
    for config in (Float8LinearConfig(), given):
        linear = convert_to_float8_training(nn.Linear(16, 16), config=config)
        set_high_precision_matmuls(linear, ["output"])
        set_high_precision_matmuls(linear, [])
        configs.append(linear.config)
    rowwise = CastConfig(scaling_granularity=ScalingGranularity.AXISWISE)
    casts = [replace(config, cast_config_input=rowwise).cast_config_input_for_grad_weight for config in configs]
    granularities = [cast.scaling_granularity for cast in casts]
    assert granularities == [ScalingGranularity.AXISWISE, ScalingGranularity.TENSORWISE]


def test_names_come_from_any_iterable_but_a_string():
    model = convert_to_float8_training(models.make_model())
    set_high_precision_matmuls(model, (name for name in ["output"]))
    linears = [module for module in model.modules() if isinstance(module, Float8Linear)]
    assert [linear.config.high_precision_matmuls for linear in linears] == [("output",)] * len(linears)
    for matmuls in ("output", lambda name: "output"):
        message = r"matmuls: expected a list of names, got the string 'output'; give \['output'\]"
        with pytest.raises(ValueError, match=message):
            set_high_precision_matmuls(model, matmuls)

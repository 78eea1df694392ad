"""cast_weights_once: one cast per weight for all microbatches, errors for what torch can see, nothing left behind."""

import copy

import pytest
import torch
from torch import nn

import quaver.experts.grouped_mm
import quaver.quantize
from quaver import Float8LinearConfig, cast_weights_once, convert_to_float8_training
from tests.mixture import make_mixture
from tests.reference import RECIPES

RECIPE = pytest.mark.parametrize("recipe", RECIPES)


def model_of(recipe):
    model = nn.Sequential(nn.Linear(64, 96), nn.SiLU(), nn.Linear(96, 64, bias=False))
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def gradients_of(model, microbatches):
    model.zero_grad()
    losses = []
    for microbatch in microbatches:
        loss = model(microbatch).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses, [p.grad.clone() for p in model.parameters()]


@RECIPE
@pytest.mark.parametrize("compiled", [False, True])
def test_changes_no_number(recipe, compiled):
    model = model_of(recipe)
    run = copy.copy(model)
    if compiled:
        run = torch.compile(model, fullgraph=True, backend="inductor" if recipe == "rowwise" else "aot_eager")
    microbatches = [torch.randn(32, 64) for _ in range(3)]
    expected = gradients_of(run, microbatches)
    with cast_weights_once(model):
        got = gradients_of(run, microbatches)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


def mixture_of(recipe, is_transposed=False):
    return convert_to_float8_training(make_mixture(layers=1, is_transposed=is_transposed), config=recipe)[0]


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise", "mxfp8"])
def test_changes_no_number_of_experts(recipe, is_transposed):
    mixture = mixture_of(recipe, is_transposed)
    runs = [mixture]
    if recipe in ("tensorwise", "rowwise"):
        runs.append(torch.compile(mixture, fullgraph=True, backend="aot_eager"))
    microbatches = [torch.randn(32, 40) for _ in range(3)]
    for run in runs:
        expected = gradients_of(run, microbatches)
        with cast_weights_once(mixture):
            got = gradients_of(run, microbatches)
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize(("recipe", "casts_of_each"), [("tensorwise", 1), ("rowwise", 1), ("rowwise_with_gw_hp", 2)])
def test_casts_the_weights_of_experts_once(recipe, casts_of_each, monkeypatch):
    """Row-wise, one read makes both casts."""
    mixture, casts, cast_groups = mixture_of(recipe), [], quaver.experts.grouped_mm.cast_groups

    def count(hp, cast, ends, *args):
        if ends is None:
            casts.append(hp.shape)
        return cast_groups(hp, cast, ends, *args)

    monkeypatch.setattr(quaver.experts.grouped_mm, "cast_groups", count)
    with cast_weights_once(mixture):
        gradients_of(mixture, [torch.randn(32, 40) for _ in range(3)])
    for weight in (mixture.experts.gate_up_proj, mixture.experts.down_proj):
        assert casts.count(weight.flatten(0, 1).shape) == casts_of_each
    casts.clear()
    gradients_of(mixture, [torch.randn(32, 40)])
    assert len(casts) == 4  # forward and backward


@RECIPE
def test_casts_each_weight_once_per_layout(recipe, monkeypatch):
    model = model_of(recipe)
    casts = []

    def counted(name, function):
        def count(hp, dtype, *args):
            layouts = args[0] + args[1] if name == "cast_rowwise" else 1
            casts.extend([hp.shape] * layouts)
            return function(hp, dtype, *args)

        return count

    for granularity, cast in quaver.quantize.CASTS.items():
        monkeypatch.setitem(quaver.quantize.CASTS, granularity, counted(cast.__name__, cast))
    monkeypatch.setattr(quaver.quantize, "cast_with_scale", counted("cast_with_scale", quaver.quantize.cast_with_scale))
    layouts = 1 if recipe in ("tensorwise", "rowwise_with_tensorwise_weight") else 2
    with cast_weights_once(model):
        gradients_of(model, [torch.randn(32, 64) for _ in range(4)])
    for linear in (model[0], model[2]):
        assert casts.count(linear.weight.shape) == layouts


def test_an_update_between_steps_is_seen():
    model = model_of("tensorwise")
    input = torch.randn(32, 64)
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
        with cast_weights_once(model):
            scoped = model(input)
        assert scoped.equal(model(input))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda linear: linear.weight.mul_(2), "was changed inside cast_weights_once"),
        (lambda linear: linear.load_state_dict(copy.deepcopy(linear.state_dict())), "was changed inside"),
        (lambda linear: setattr(linear, "weight", nn.Parameter(linear.weight.clone())), "was replaced inside"),
    ],
)
def test_a_change_inside_is_an_error_at_the_next_use_and_at_the_exit(change, message):
    model = model_of("rowwise")
    with pytest.raises(RuntimeError, match=message), cast_weights_once(model), torch.no_grad():
        change(model[0])
        model(torch.randn(32, 64))
        pytest.fail("the use went through")
    with pytest.raises(RuntimeError, match=message), cast_weights_once(model), torch.no_grad():
        change(model[2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda experts: experts.down_proj[1].mul_(2), "was changed inside cast_weights_once"),
        (lambda experts: setattr(experts, "down_proj", nn.Parameter(experts.down_proj.clone())), "was replaced inside"),
    ],
)
def test_a_change_of_one_expert_is_an_error(change, message):
    mixture = mixture_of("rowwise")
    with pytest.raises(RuntimeError, match=message), cast_weights_once(mixture), torch.no_grad():
        change(mixture.experts)
        mixture(torch.randn(32, 40))
        pytest.fail("the use went through")
    with pytest.raises(RuntimeError, match=message), cast_weights_once(mixture), torch.no_grad():
        change(mixture.experts)
    assert mixture.experts._prepared_weights == {}
    with cast_weights_once(mixture):
        twin = copy.deepcopy(mixture)
        with pytest.raises(RuntimeError, match="already open"), cast_weights_once(mixture.experts):
            pass
        assert set(mixture.experts._prepared_weights) == {"gate_up_proj", "down_proj"}
    assert twin.experts._prepared_weights == {}


def test_compiled_code_finds_a_change_at_the_exit():
    model = model_of("tensorwise")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="was changed inside"), cast_weights_once(model), torch.no_grad():
        model[0].weight.mul_(2)
        compiled(torch.randn(32, 64))


def test_leaves_nothing_behind_whatever_happens():
    model = model_of("tensorwise")
    with pytest.raises(ZeroDivisionError), cast_weights_once(model):
        assert model[0]._prepared_weight is not None
        raise ZeroDivisionError
    assert model[0]._prepared_weight is None
    with cast_weights_once(model):
        twin = copy.deepcopy(model)
    assert twin[0]._prepared_weight is None
    assert twin(torch.ones(1, 64)).equal(model(torch.ones(1, 64)))


def test_backward_after_the_exit_uses_the_casts_of_the_forward():
    model = model_of("rowwise")
    input = torch.randn(32, 64)
    _, expected = gradients_of(model, [input])
    model.zero_grad()
    with cast_weights_once(model):
        loss = model(input).square().mean()
    loss.backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], expected, rtol=0, atol=0)


def test_nesting_is_refused_and_the_outer_scope_survives():
    model = model_of("tensorwise")
    with cast_weights_once(model):
        with pytest.raises(RuntimeError, match="already open"), cast_weights_once(model):
            pass
        assert model[0]._prepared_weight is not None


def test_a_model_without_float8_is_left_alone():
    model = nn.Linear(4, 4)
    with cast_weights_once(model):
        model.weight.data.mul_(2)
        model(torch.ones(1, 4))

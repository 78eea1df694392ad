"""cast_weights_once: one cast per weight for all microbatches, errors for what torch can see, nothing left behind."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

import quaver.experts.grouped_mm
import quaver.linear.quantize
from quaver import Float8LinearConfig, cast_weights_once, convert_to_float8_training, convert_to_high_precision
from quaver.checkpointing.policy import selective_checkpoint_contexts
from quaver.experts.module_weight import weights_under
from tests.mixture import DIM, make_mixture
from tests.reference import RECIPES
from tests.steps import assert_same, train
from tests.thinned import at_night

RECIPE = pytest.mark.parametrize("recipe", RECIPES)


def model_of(recipe):
    model = nn.Sequential(nn.Linear(DIM, 96), nn.SiLU(), nn.Linear(96, DIM, bias=False))
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def mixture_of(recipe, is_transposed=False):
    return convert_to_float8_training(make_mixture(layers=1, is_transposed=is_transposed), config=recipe)[0]


def transposed_mixture_of(recipe):
    return mixture_of(recipe, is_transposed=True)


def microbatches(count):
    return [torch.randn(32, DIM) for _ in range(count)]


def gradients_of(model, microbatches, call=None):
    model.zero_grad()
    losses = train(model, None, microbatches, call=call)
    return losses, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize(
    ("make", "recipe", "backend"),
    [
        *((model_of, recipe, None) for recipe in (*RECIPES, "blockwise")),
        *itertools.product((mixture_of, transposed_mixture_of), (*RECIPES[:3], "blockwise", "mxfp8"), [None]),
        (mixture_of, "tensorwise", "aot_eager"),
        *at_night(
            [
                *((model_of, recipe, "aot_eager") for recipe in (*RECIPES, "blockwise")),
                (model_of, "rowwise", "inductor"),
                (transposed_mixture_of, "rowwise", "aot_eager"),
                (mixture_of, "rowwise", "aot_eager"),
                (transposed_mixture_of, "tensorwise", "aot_eager"),
            ]
        ),
    ],
)
def test_changes_no_number(make, recipe, backend):
    model, given = make(recipe), microbatches(3)
    call = torch.compile(model, fullgraph=True, backend=backend) if backend else None
    expected = gradients_of(model, given)
    with cast_weights_once(model):
        assert_same(gradients_of(model, given, call), expected)


def checkpointed(contexts):
    return lambda model, input: checkpoint(model, input, use_reentrant=False, context_fn=contexts)


CALLS = {
    "plain": lambda model, input: model(input),
    "full": checkpointed(noop_context_fn),
    "op": checkpointed(selective_checkpoint_contexts),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("make", "recipe"),
    [*((model_of, recipe) for recipe in (*RECIPES[:3], "blockwise")), (mixture_of, "rowwise")],
)
def test_a_backward_outside_multiplies_by_the_codes_of_its_forward(make, recipe, call):
    """A backward may run when the scope of its forward is closed, or another one is open."""
    model, (input,) = make(recipe), microbatches(1)
    expected = gradients_of(model, [input])
    for forward_scope, backward_scope in itertools.product((cast_weights_once, nullcontext), repeat=2):
        model.zero_grad()
        with forward_scope(model):
            loss = CALLS[call](model, input).square().mean()
        with backward_scope(model):
            loss.backward()
        assert_same([p.grad for p in model.parameters()], expected[1])


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
        gradients_of(mixture, microbatches(3))
    for weight in (mixture.experts.gate_up_proj, mixture.experts.down_proj):
        assert casts.count(weight.flatten(0, 1).shape) == casts_of_each
    casts.clear()
    gradients_of(mixture, microbatches(1))
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

    for granularity, cast in quaver.linear.quantize.CASTS.items():
        monkeypatch.setitem(quaver.linear.quantize.CASTS, granularity, counted(cast.__name__, cast))
    monkeypatch.setattr(
        quaver.linear.quantize, "cast_with_scale", counted("cast_with_scale", quaver.linear.quantize.cast_with_scale)
    )
    layouts = 1 if recipe in ("tensorwise", "rowwise_with_tensorwise_weight") else 2
    with cast_weights_once(model):
        gradients_of(model, microbatches(4))
    for linear in (model[0], model[2]):
        assert casts.count(linear.weight.shape) == layouts


def replace_down_proj(model, layer=None):
    model.experts.down_proj = nn.Parameter(model.experts.down_proj.clone())


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (model_of, lambda model, layer: model[layer].weight.mul_(2), "was changed inside cast_weights_once"),
        (
            model_of,
            lambda model, layer: model[layer].load_state_dict(copy.deepcopy(model[layer].state_dict())),
            "was changed inside",
        ),
        (
            model_of,
            lambda model, layer: setattr(model[layer], "weight", nn.Parameter(model[layer].weight.clone())),
            "was replaced inside",
        ),
        (mixture_of, lambda model, layer: model.experts.down_proj[1].mul_(2), "was changed inside cast_weights_once"),
        (mixture_of, replace_down_proj, "was replaced inside"),
    ],
)
def test_a_change_inside_is_an_error_at_the_next_use_and_at_the_exit(make, change, message):
    model = make("rowwise")
    with pytest.raises(RuntimeError, match=message), cast_weights_once(model), torch.no_grad():
        change(model, 0)
        model(torch.randn(32, DIM))
        pytest.fail("the use went through")
    with pytest.raises(RuntimeError, match=message), cast_weights_once(model), torch.no_grad():
        change(model, 2)
    assert all(weight.prepared is None for _, weight in weights_under(model))


def test_compiled_code_finds_a_change_at_the_exit():
    model = model_of("tensorwise")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="was changed inside"), cast_weights_once(model), torch.no_grad():
        model[0].weight.mul_(2)
        compiled(torch.randn(32, DIM))


@pytest.mark.parametrize("make", [model_of, mixture_of])
def test_leaves_nothing_behind_whatever_happens(make):
    model = make("tensorwise")
    weights = [weight for _, weight in weights_under(model)]
    with pytest.raises(ZeroDivisionError), cast_weights_once(model):
        raise ZeroDivisionError
    assert all(weight.prepared is None for weight in weights)
    with cast_weights_once(model):
        twin = copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="already open"), cast_weights_once(weights[0].module):
            pass
        assert all(weight.prepared is not None for weight in weights)
    assert all(weight.prepared is None for _, weight in weights_under(twin))
    assert twin(torch.ones(1, DIM)).equal(model(torch.ones(1, DIM)))


def test_a_model_without_float8_is_left_alone():
    model = nn.Linear(4, 4)
    with cast_weights_once(model):
        model.weight.data.mul_(2)
        model(torch.ones(1, 4))


@pytest.mark.parametrize("make", [model_of, mixture_of])
def test_a_conversion_inside_the_scope_is_an_error(make):
    model = make("tensorwise")
    input = microbatches(1)[0]
    expected = model(input)
    with cast_weights_once(model):
        with pytest.raises(RuntimeError, match="cannot be converted back inside cast_weights_once"):
            convert_to_high_precision(model)
        assert model(input).equal(expected)
    convert_to_high_precision(model)


def test_another_config_inside_the_scope_is_an_error():
    model = model_of("tensorwise")
    with pytest.raises(RuntimeError, match="given another config"), cast_weights_once(model):
        model[0].config = Float8LinearConfig.from_recipe_name("rowwise")
        model(microbatches(1)[0])


def test_the_memory_of_a_fake_weight_is_not_asked_for(recwarn):
    """Predictions train with fake tensors; torch warns of their data_ptr()."""
    torch.set_warn_always(True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = model_of("tensorwise")
            with cast_weights_once(model):
                sum(model(batch).sum() for batch in microbatches(2)).backward()
    finally:
        torch.set_warn_always(False)
    assert not [str(each.message) for each in recwarn if "data pointer" in str(each.message)]

"""Tests cast_weights_once: one cast per weight for all microbatches, errors, and that nothing is left behind."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint, noop_context_fn

from quaver import Float8LinearConfig, cast_weights_once, convert_to_float8_training, convert_to_high_precision
from quaver.activations.policy import make_selective_contexts
from quaver.experts import function
from quaver.experts.module_weight import iter_model_weights
from quaver.linear import quantize
from tests.mixture import DIM, make_mixture
from tests.recipes import NON_BLOCK_RECIPES, TORCHAO_RECIPES
from tests.steps import assert_same, train
from tests.thinned import at_night

RECIPE = pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)


def build_model(recipe):
    model = nn.Sequential(nn.Linear(DIM, 96), nn.SiLU(), nn.Linear(96, DIM, bias=False))
    return convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def build_mixture(recipe, is_transposed=False):
    return convert_to_float8_training(make_mixture(layers=1, is_transposed=is_transposed), config=recipe)[0]


def build_transposed_mixture(recipe):
    return build_mixture(recipe, is_transposed=True)


def draw_microbatches(count):
    return [torch.randn(32, DIM) for _ in range(count)]


def compute_gradients(model, microbatches, call=None):
    """Return the losses and the accumulated gradients."""
    model.zero_grad()
    losses = train(model, None, microbatches, call=call)
    return losses, [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("make", "recipe", "backend"),
    [
        *((build_model, recipe, None) for recipe in (*NON_BLOCK_RECIPES, "blockwise")),
        *itertools.product((build_mixture, build_transposed_mixture), (*TORCHAO_RECIPES, "blockwise", "mxfp8"), [None]),
        (build_mixture, "tensorwise", "aot_eager"),
        *at_night(
            [
                *itertools.product((build_model,), (*NON_BLOCK_RECIPES, "blockwise"), ["aot_eager"]),
                *itertools.product((build_transposed_mixture,), ("rowwise", "tensorwise"), ["aot_eager"]),
                (build_model, "rowwise", "inductor"),
                (build_mixture, "rowwise", "aot_eager"),
            ]
        ),
    ],
)
def test_cast_weights_once_changes_no_number(make, recipe, backend):
    model, batches = make(recipe), draw_microbatches(3)
    call = torch.compile(model, fullgraph=True, backend=backend) if backend else None
    expected = compute_gradients(model, batches, call)
    with cast_weights_once(model):
        assert_same(compute_gradients(model, batches, call), expected)


def checkpoint_with(contexts):
    return lambda model, input: checkpoint(model, input, use_reentrant=False, context_fn=contexts)


CALLS = {
    "plain": lambda model, input: model(input),
    "full": checkpoint_with(noop_context_fn),
    "op": checkpoint_with(make_selective_contexts),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("make", "recipe"), [*itertools.product([build_model], (*TORCHAO_RECIPES, "blockwise")), (build_mixture, "rowwise")]
)
def test_a_backward_outside_multiplies_by_the_codes_of_its_forward(make, recipe, call):
    """A backward may run when the scope of its forward is closed, or another one is open."""
    model, (input,) = make(recipe), draw_microbatches(1)
    _, expected = compute_gradients(model, [input])
    for forward_scope, backward_scope in itertools.product((cast_weights_once, nullcontext), repeat=2):
        model.zero_grad()
        with forward_scope(model):
            loss = CALLS[call](model, input).square().mean()
        with backward_scope(model):
            loss.backward()
        assert_same([parameter.grad for parameter in model.parameters()], expected)


@pytest.mark.parametrize(("recipe", "casts_of_each"), [("tensorwise", 1), ("rowwise", 1), ("rowwise_with_gw_hp", 2)])
def test_cast_weights_once_casts_the_weights_of_experts_once(recipe, casts_of_each, monkeypatch):
    """One read makes both casts of the rowwise recipe."""
    mixture, casts, cast_groups = build_mixture(recipe), [], function.cast_groups

    def count(hp, cast, ends, groups, **options):
        if ends is None:
            casts.append(hp.shape)
        return cast_groups(hp, cast, ends, groups, **options)

    monkeypatch.setattr(function, "cast_groups", count)
    with cast_weights_once(mixture):
        compute_gradients(mixture, draw_microbatches(3))
    for weight in (mixture.experts.gate_up_proj, mixture.experts.down_proj):
        assert casts.count(weight.flatten(0, 1).shape) == casts_of_each
    casts.clear()
    compute_gradients(mixture, draw_microbatches(1))
    assert len(casts) == 4  # forward and backward


@RECIPE
def test_cast_weights_once_casts_each_weight_once_per_layout(recipe, monkeypatch):
    model, casts = build_model(recipe), []

    def count(cast):
        def counting(hp, dtype, *args):
            casts.extend([hp.shape] * (args[0] + args[1] if cast.__name__ == "cast_rowwise" else 1))
            return cast(hp, dtype, *args)

        return counting

    for granularity, cast in quantize.CASTS.items():
        monkeypatch.setitem(quantize.CASTS, granularity, count(cast))
    monkeypatch.setattr(quantize, "cast_with_scale", count(quantize.cast_with_scale))
    layouts = 1 if recipe in ("tensorwise", "rowwise_with_tensorwise_weight") else 2
    with cast_weights_once(model):
        compute_gradients(model, draw_microbatches(4))
    for linear in (model[0], model[2]):
        assert casts.count(linear.weight.shape) == layouts


def load_own_state(module):
    module.load_state_dict(copy.deepcopy(module.state_dict()))


def replace(module, name):
    setattr(module, name, nn.Parameter(getattr(module, name).clone()))


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (build_model, lambda model, layer: model[layer].weight.mul_(2), "was changed inside cast_weights_once"),
        (build_model, lambda model, layer: load_own_state(model[layer]), "was changed inside"),
        (build_model, lambda model, layer: replace(model[layer], "weight"), "the weight of [02] was replaced"),
        (
            build_mixture,
            lambda model, layer: model.experts.down_proj[1].mul_(2),
            "was changed inside cast_weights_once",
        ),
        (build_mixture, lambda model, layer: replace(model.experts, "down_proj"), "of experts.down_proj was replaced"),
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
    assert all(weight.cast_once is None for _, weight in iter_model_weights(model))


def test_compiled_code_finds_a_change_at_the_exit():
    model = build_model("tensorwise")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="was changed inside"), cast_weights_once(model), torch.no_grad():
        model[0].weight.mul_(2)
        compiled(torch.randn(32, DIM))


@pytest.mark.parametrize("make", [build_model, build_mixture])
def test_cast_weights_once_leaves_nothing_behind(make):
    model = make("tensorwise")
    weights = [weight for _, weight in iter_model_weights(model)]
    with pytest.raises(ZeroDivisionError), cast_weights_once(model):
        raise ZeroDivisionError
    assert all(weight.cast_once is None for weight in weights)
    with cast_weights_once(model):
        twin = copy.deepcopy(model)
        with pytest.raises(RuntimeError, match="already open"), cast_weights_once(weights[0].module):
            pass
        assert all(weight.cast_once is not None for weight in weights)
    assert all(weight.cast_once is None for _, weight in iter_model_weights(twin))
    assert twin(torch.ones(1, DIM)).equal(model(torch.ones(1, DIM)))


def test_a_model_without_float8_is_left_alone():
    model = nn.Linear(4, 4)
    with cast_weights_once(model):
        model.weight.data.mul_(2)
        model(torch.ones(1, 4))


@pytest.mark.parametrize("make", [build_model, build_mixture])
def test_a_conversion_inside_the_scope_is_an_error(make):
    model, (input,) = make("tensorwise"), draw_microbatches(1)
    expected = model(input)
    with cast_weights_once(model):
        with pytest.raises(RuntimeError, match="cannot be converted back inside cast_weights_once"):
            convert_to_high_precision(model)
        assert model(input).equal(expected)
    convert_to_high_precision(model)


def test_another_config_inside_the_scope_is_an_error():
    model = build_model("tensorwise")
    with pytest.raises(RuntimeError, match="given another config"), cast_weights_once(model):
        model[0].config = Float8LinearConfig.from_recipe_name("rowwise")
        model(draw_microbatches(1)[0])


def test_the_memory_of_a_fake_weight_is_not_asked_for(recwarn):
    """Predictions train with fake tensors; torch warns of their data_ptr()."""
    torch.set_warn_always(True)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = build_model("tensorwise")
            with cast_weights_once(model):
                sum(model(batch).sum() for batch in draw_microbatches(2)).backward()
    finally:
        torch.set_warn_always(False)
    assert not [warning for warning in recwarn if "data pointer" in str(warning.message)]

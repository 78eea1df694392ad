"""A linear whose casts come from the kernels that write layouts, as on a GPU: the same numbers, from fewer casts.

Those kernels' oracle stands in for them here; tests/unit/test_triton_layouts.py holds the kernels to it.
"""

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from quaver import Float8Linear, Float8LinearConfig, convert_to_float8_training, sync_float8_amax_and_scale_history
from quaver.casts import MatrixCasts
from quaver.config import Float8LinearRecipeName
from quaver.kernels import layouts
from quaver.weight_scope import cast_weights_once

RECIPES = [name.value for name in Float8LinearRecipeName]
CASTS = ("cast_layouts", "cast_with_persistent_scale", "cast_axes", "cast_with_scales")
E4M3 = torch.float8_e4m3fn


def counting(name, cast, counted):
    def counting_cast(*args, **options):
        wanted = [options[each] for each in options if each in ("rows", "columns")]
        wanted = wanted or [options["row_scale"] is not None, options["column_scale"] is not None]
        counted[name, tuple(wanted)] += 1
        return cast(*args, **options)

    return counting_cast


@pytest.fixture
def calls(monkeypatch):
    """Cast in layouts, and count the calls by name, and which codes each made."""
    counted = Counter()
    for name in CASTS:
        monkeypatch.setattr(layouts, name, counting(name, getattr(layouts, name), counted))
    monkeypatch.setattr(MatrixCasts, "lays_out", lambda self, hp: True)
    return counted


def make(recipe, bias=False):
    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    return convert_to_float8_training(nn.Sequential(nn.Linear(48, 80, bias=bias, dtype=torch.bfloat16)), config=config)


def steps(model, count=3):
    """Results and gradients of a few steps, with an SGD step and a sync of kept scales between them."""
    torch.manual_seed(1)
    made = []
    for _ in range(count):
        input = torch.randn(5, 7, 48, dtype=torch.bfloat16).mul_(3).requires_grad_()
        model.zero_grad()
        output = model(input)
        output.backward(torch.randn_like(output))
        made += [output.detach(), input.grad, *(p.grad.clone() for p in model.parameters())]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
        sync_float8_amax_and_scale_history(model)
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_numbers_are_the_same_to_the_bit(recipe, bias, request):
    model = make(recipe, bias)
    expected = steps(copy.deepcopy(model))
    request.getfixturevalue("calls")
    for got, want in zip(steps(model), expected, strict=True):
        assert got.equal(want)


BOTH, ROWS, COLUMNS = (True, True), (True, False), (False, True)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        # input and grad_output once each for both matmuls; the weight once in the forward and once in the backward
        ("tensorwise", {("cast_layouts", BOTH): 2, ("cast_layouts", ROWS): 1, ("cast_with_scales", COLUMNS): 1}),
        ("rowwise", {("cast_axes", BOTH): 2, ("cast_axes", ROWS): 1, ("cast_axes", COLUMNS): 1}),
        ("rowwise_with_gw_hp", {("cast_axes", ROWS): 3, ("cast_with_scales", COLUMNS): 1}),
    ],
)
def test_how_many_casts_a_step_makes(calls, recipe, expected):
    steps(make(recipe), count=1)
    assert calls == expected


def test_a_known_delayed_scale_is_used_for_both_layouts_at_once(calls):
    model = make("delayed")
    steps(model, count=2)
    calls.clear()
    steps(model, count=1)
    assert calls == {
        ("cast_with_persistent_scale", BOTH): 2,
        ("cast_with_persistent_scale", ROWS): 1,
        ("cast_with_scales", COLUMNS): 1,
    }


def test_a_weight_that_is_cast_once_is_cast_into_both_layouts(calls):
    model = make("tensorwise")
    with cast_weights_once(model):
        calls_of_scope = Counter(calls)
        steps_in_scope = [model(torch.randn(4, 48, dtype=torch.bfloat16)).sum() for _ in range(2)]
        for loss in steps_in_scope:
            loss.backward()
    assert calls_of_scope == {("cast_layouts", BOTH): 1}
    assert sum(calls.values()) == 1 + 2 * 2  # and input and grad_output of each micro-batch
    weight_codes = MatrixCasts(Float8LinearConfig(), torch.bfloat16).both(
        model[0].weight.detach(), *[Float8LinearConfig().casts.weight] * 2
    )
    assert weight_codes.last.data.is_contiguous()
    assert weight_codes.first.data.t().is_contiguous()
    assert weight_codes.first.data.view(torch.uint8).equal(weight_codes.last.data.view(torch.uint8))


def test_siblings_share_the_casts_of_their_input(calls):
    config = Float8LinearConfig()
    linears = [Float8Linear(48, 80, bias=False, dtype=torch.bfloat16, config=config) for _ in range(3)]
    input = torch.randn(9, 48, dtype=torch.bfloat16, requires_grad=True)
    outputs = [linear(input) for linear in linears]
    assert calls["cast_layouts", BOTH] == 1
    assert calls["cast_layouts", ROWS] == 3  # their weights
    del outputs

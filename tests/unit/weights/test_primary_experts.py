"""Float8 primary weights of experts: 3-D masters, and the codes that their grouped matmuls read."""

import copy
import itertools

import pytest
import torch

from quaver import convert_to_float8_training, use_float8_primary_weights
from quaver.experts.grouped_mm import operands_of_quantized
from quaver.weights.module_weight import weights_of_module
from quaver.weights.primary import Float8PrimaryWeight
from tests.mixture import DIM, make_mixture
from tests.reference import BLOCK_RECIPES, RECIPES, assert_same_bits
from tests.unit.weights.test_primary import adamw, assert_same_weights, load, saved

STACKS = ("gate_up_proj", "down_proj")


def model_of(recipe, is_transposed=False):
    return convert_to_float8_training(make_mixture(layers=1, is_transposed=is_transposed), config=recipe)


def pair(recipe="rowwise", is_transposed=False, **options):
    model = model_of(recipe, is_transposed)
    return model, use_float8_primary_weights(model, adamw(model.parameters()), **options)


def ordinary(recipe="rowwise", is_transposed=False):
    model = model_of(recipe, is_transposed)
    return model, adamw(model.parameters())


def train(model, optimizer, steps=range(3), run=None):
    losses = []
    for step in steps:
        for microbatch in torch.randn(16, DIM, generator=torch.Generator().manual_seed(step)).chunk(2):
            loss = (run or model)(microbatch).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_codes_follow(model):
    """The codes that the next forward reads are those of the masters."""
    experts = model[0].experts
    for weight in weights_of_module(experts):
        primary = weight.parameter
        fresh = Float8PrimaryWeight.of(primary.wrapped, experts.float8_config, experts.is_transposed)
        both = (operands_of_quantized(each, experts.float8_config, experts.is_transposed) for each in (primary, fresh))
        for operand, expected in zip(*both, strict=True):
            assert_same_bits(operand.data, expected.data)
            assert operand.dequant_scale.equal(expected.dequant_scale)


@pytest.mark.parametrize(
    ("recipe", "is_transposed", "compiled"),
    [*itertools.product([*RECIPES, *BLOCK_RECIPES], [False, True], [False]), ("tensorwise", False, True)],
)
def test_losses_and_weights_are_those_of_ordinary_parameters(recipe, is_transposed, compiled):
    torch.compiler.reset()
    (reference, plain), (model, optimizer) = ordinary(recipe, is_transposed), pair(recipe, is_transposed)
    run = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    losses = train(model, optimizer, run=run)
    assert losses == train(reference, plain)
    assert len(set(losses)) == len(losses)
    assert_same_weights(model, reference)
    assert_codes_follow(model)
    casts = 2 if recipe in ("rowwise", "rowwise_with_gw_hp") else 1
    for name in STACKS:
        weight = getattr(model[0].experts, name)
        assert isinstance(weight, Float8PrimaryWeight)
        assert len({each.data.data_ptr() for each in weight.stored()}) == casts


@pytest.mark.parametrize(("first", "then"), [(pair, pair), (ordinary, pair), (pair, ordinary)])
def test_a_checkpoint_resumes_to_the_bit(first, then):
    model, optimizer = first()
    train(model, optimizer)
    checkpoint = saved(model, optimizer)
    expected = train(model, optimizer, range(3, 5))
    resumed = load(checkpoint, *then())
    assert train(*resumed, range(3, 5)) == expected
    assert_same_weights(resumed[0], model)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_copies_and_writes(is_transposed):
    model, optimizer = pair("rowwise", is_transposed)
    copied, of_copy = copy.deepcopy((model, optimizer))
    assert train(copied, of_copy) == train(model, optimizer)
    with torch.no_grad():
        copied[0].experts.gate_up_proj.mul_(2)
        copied.state_dict()["0.experts.down_proj"].mul_(-3)  # around the parameter
    assert_codes_follow(copied)
    assert copied[0].experts.down_proj.equal(-3 * model[0].experts.down_proj)
    with pytest.raises(ValueError, match=r"expected an optimizer that holds weights of float8 linears or experts"):
        use_float8_primary_weights(model_of("rowwise"), adamw(model.parameters()))


def test_tied_experts_are_refused_and_nothing_is_changed():
    model = convert_to_float8_training(make_mixture(layers=2), config="rowwise")
    model[1].experts.down_proj = model[0].experts.down_proj
    with pytest.raises(ValueError, match=r"0\.experts\.down_proj cannot be .* it is tied: .*1\.experts\.down_proj"):
        use_float8_primary_weights(model, adamw(model.parameters()))
    assert not [each for each in model.parameters() if isinstance(each, Float8PrimaryWeight)]

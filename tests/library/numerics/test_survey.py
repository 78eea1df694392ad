"""What an operand keeps under each recipe, and the recipes that a budget of decibels chooses."""

import pytest
import torch
from torch import nn

from quaver.numerics.figures import figures
from quaver.numerics.survey import recipes_under, survey


@pytest.mark.parametrize(
    ("operand", "expected"), [("input", 31.5), ("weight", 31.5), ("grad_output", 25.6)], ids=lambda value: str(value)
)
def test_a_gaussian_keeps_what_its_format_keeps(operand, expected):
    found = figures(torch.randn(512, 256), operand)
    assert found["tensorwise"] == pytest.approx(expected, abs=0.4)
    assert found["rowwise"] == pytest.approx(31.5, abs=0.4)


def test_an_outlier_that_hides_in_the_sqnr_shows_in_the_figure():
    """One channel 2^17 times larger: tensorwise and rowwise lose the rest, blocks of 32 only the outlier's block."""
    input = torch.randn(64, 4096)
    input[:, 7] *= 2**17
    found = figures(input, "input")
    assert found["tensorwise"] < 15
    assert found["rowwise"] < 15 < found["mxfp8"]


def test_a_cast_that_a_recipe_has_not_loses_nothing():
    zeros = figures(torch.zeros(16, 16), "input")
    assert set(zeros.values()) == {None}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2, 2), "output"), "operand: expected one of input, weight, grad_output, got 'output'"),
        ((torch.ones(2, 2).double(), "input"), "hp: expected one of .*, got torch.float64"),
        ((torch.ones(2, 2), "input", ["delayed"]), "'delayed' scales by a history"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        figures(*arguments)


class Outlier(nn.Module):
    """Two linears; the second reads an outlier channel of 2^17."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1024, 64), nn.Linear(1024, 64)

    def forward(self, input):
        scale = torch.ones(1024)
        scale[3] = 2.0**17
        return self.first(input) + self.second(input * scale)


def test_a_budget_gives_each_layer_the_most_float8_that_keeps_it():
    model = Outlier()
    surveyed = survey(model, lambda: model(torch.randn(64, 1024)).square().mean().backward())
    assert recipes_under(24, surveyed, lambda name: False).of("first") == "tensorwise"
    assert recipes_under(24, surveyed, lambda name: False).of("second") in ("blockwise", "mxfp8")
    strict = recipes_under(30, surveyed, lambda name: False)
    assert strict.of("first") == "rowwise"
    assert recipes_under(60, surveyed, lambda name: False).layers == dict.fromkeys(
        ("first", "second"), "high_precision"
    )
    assert recipes_under(24, surveyed, lambda name: name == "second").layers == {}


def test_a_model_without_gradients_is_refused():
    model = Outlier()
    with pytest.raises(ValueError, match="expected a model whose linears get gradients"):
        survey(model, lambda: None)

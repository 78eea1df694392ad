"""Tests that the rank whose weight differs from the others' is found by the statistics of its casts."""

import math

import pytest
import torch

from quaver.linear.quantize import Quantizer
from quaver.numerics.rank_statistics import find_disagreements
from quaver.numerics.statistics import make_tallies, merge_tallies, observe_matrix
from quaver.recipes.config import Float8LinearConfig

SAME, OTHER, NOT_FINITE, NOTHING = "same", "other", "not finite", None


def make_weight_tallies(weight, casts=1):
    """Return the tallies [1, TALLY_WIDTH] of a rank that casts a weight so often."""
    tallies = make_tallies(1, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    hp = torch.randn(64, 48, generator=generator)
    hp[5, 7] = {SAME: 0.5, OTHER: 0.501, NOT_FINITE: math.nan, NOTHING: 0}[weight]
    operand = Quantizer(Float8LinearConfig().casts.weight, hp.dtype)(hp, row=True, column=False).row
    for _ in range(casts if weight else 0):
        merge_tallies(tallies, observe_matrix(hp, operand)[None])
    return tallies


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ([SAME], {}),
        ([SAME, SAME, SAME], {}),
        ([NOT_FINITE, NOT_FINITE], {}),
        ([NOTHING, SAME, NOTHING], {}),
        ([SAME, OTHER], {0: 1}),
        ([OTHER, SAME, SAME], {0: 0}),
        ([NOTHING, SAME, SAME, OTHER, OTHER, SAME], {0: 3}),
        ([SAME, SAME, NOT_FINITE], {0: 2}),
    ],
)
def test_the_rank_that_differs_from_the_majority_is_found(weights, expected):
    assert find_disagreements([make_weight_tallies(weight) for weight in weights], [0]) == expected


def test_ranks_may_run_different_numbers_of_microbatches():
    assert find_disagreements([make_weight_tallies(SAME, casts=casts) for casts in (1, 3, 7)], [0]) == {}
    assert find_disagreements([make_weight_tallies(SAME, casts=3), make_weight_tallies(OTHER, casts=7)], [0]) == {0: 1}

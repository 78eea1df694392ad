"""Compares the learning rate of each step with closed formulas, at the corners of every schedule."""

import math

import pytest

from quaver.lab.settings import LRScheduler, Optimizer
from quaver.lab.trainer.optimizer import compute_learning_rate

LR, STEPS, WARMUP, FLOOR = 0.5, 110, 10, 0.1
WARMING = {1: LR / 10, 9: LR * 9 / 10, 10: LR}


def compute_rate(share: float) -> float:
    """Return the rate when `share` of what lies between the floor and the top is left."""
    return LR * (FLOOR + (1 - FLOOR) * share)


def make_wsd(decay_type: str) -> dict[str, object]:
    return {"schedule": "wsd", "decay_ratio": 0.2, "decay_type": decay_type}


CASES = {  # step: rate. The warm-up ends at step 10; after it 100 steps are left, and wsd decays in the last 22.
    "cosine": ({}, {11: compute_rate((1 + math.cos(math.pi / 100)) / 2), 60: compute_rate(0.5), 110: LR * FLOOR}),
    "linear": ({"schedule": "linear"}, {11: compute_rate(0.99), 60: compute_rate(0.5), 110: LR * FLOOR}),
    "constant": ({"schedule": "constant"}, {11: LR, 60: LR, 110: LR}),
    "wsd_linear": (
        make_wsd("linear"),
        {11: LR, 88: LR, 89: compute_rate(21 / 22), 99: compute_rate(0.5), 110: LR * FLOOR},
    ),
    "wsd_sqrt": (
        make_wsd("sqrt"),
        {88: LR, 89: compute_rate(1 - math.sqrt(1 / 22)), 99: compute_rate(1 - math.sqrt(0.5)), 110: LR * FLOOR},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_learning_rates_at_the_corners_follow_the_formulas(name):
    settings, expected = CASES[name]
    schedule = LRScheduler(warmup_steps=WARMUP, min_lr_factor=FLOOR, **settings)
    expected = WARMING | expected
    rates = {step: compute_learning_rate(step, STEPS, Optimizer(lr=LR), schedule) for step in expected}
    assert rates == pytest.approx(expected, rel=1e-12)
    falling = [compute_learning_rate(step, STEPS, Optimizer(lr=LR), schedule) for step in range(WARMUP, STEPS + 1)]
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(("steps", "ratio", "expected"), [(110, 0.2, 22), (4, 0.1, 1), (9, 1.0, 9)])
def test_the_decay_has_whole_steps_and_at_least_one(steps, ratio, expected):
    schedule = LRScheduler(warmup_steps=0, schedule="wsd", decay_ratio=ratio, min_lr_factor=0.0)
    assert schedule.count_decay_steps(steps) == expected
    rates = [compute_learning_rate(step, steps, Optimizer(lr=LR), schedule) for step in range(1, steps + 1)]
    assert [rate < LR for rate in rates] == [False] * (steps - expected) + [True] * expected
    assert rates[-1] == 0

"""The learning rate of each step against closed formulas, at the corners of every schedule."""

import math

import pytest

from quaver.trainer.config import LRScheduler, Optimizer, TrainConfig, Training
from quaver.trainer.optimizer import learning_rate

LR, STEPS, WARMUP, FLOOR = 0.5, 110, 10, 0.1
WARMING = {1: LR / 10, 9: LR * 9 / 10, 10: LR}


def above_floor(share: float) -> float:
    """The rate when `share` of what lies between the floor and the top is left."""
    return LR * (FLOOR + (1 - FLOOR) * share)


def wsd(decay_type: str) -> dict[str, object]:
    return {"schedule": "wsd", "decay_ratio": 0.2, "decay_type": decay_type}


CASES = {  # step: rate. The warm-up ends at step 10; after it 100 steps are left, and wsd decays in the last 22.
    "cosine": ({}, {11: above_floor((1 + math.cos(math.pi / 100)) / 2), 60: above_floor(0.5), 110: LR * FLOOR}),
    "linear": ({"schedule": "linear"}, {11: above_floor(0.99), 60: above_floor(0.5), 110: LR * FLOOR}),
    "constant": ({"schedule": "constant"}, {11: LR, 60: LR, 110: LR}),
    "wsd_linear": (
        wsd("linear"),
        {11: LR, 88: LR, 89: above_floor(21 / 22), 99: above_floor(0.5), 110: LR * FLOOR},
    ),
    "wsd_sqrt": (
        wsd("sqrt"),
        {88: LR, 89: above_floor(1 - math.sqrt(1 / 22)), 99: above_floor(1 - math.sqrt(0.5)), 110: LR * FLOOR},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_rates_at_the_corners(name):
    settings, expected = CASES[name]
    schedule = LRScheduler(warmup_steps=WARMUP, min_lr_factor=FLOOR, **settings)
    expected = WARMING | expected
    rates = {step: learning_rate(step, STEPS, Optimizer(lr=LR), schedule) for step in expected}
    assert rates == pytest.approx(expected, rel=1e-12)
    falling = [learning_rate(step, STEPS, Optimizer(lr=LR), schedule) for step in range(WARMUP, STEPS + 1)]
    assert falling == sorted(falling, reverse=True)


def test_the_default_is_bit_for_bit_the_cosine_that_it_was():
    optimizer, schedule = Optimizer(lr=1.5e-3), LRScheduler(warmup_steps=40, min_lr_factor=0.1)
    for step in range(41, 401):
        cosine = 0.5 * (1 + math.cos(math.pi * ((step - 40) / 360)))
        assert learning_rate(step, 400, optimizer, schedule) == 1.5e-3 * (0.1 + (1 - 0.1) * cosine)


@pytest.mark.parametrize(("steps", "ratio", "expected"), [(110, 0.2, 22), (4, 0.1, 1), (9, 1.0, 9)])
def test_the_decay_has_whole_steps_and_at_least_one(steps, ratio, expected):
    schedule = LRScheduler(warmup_steps=0, schedule="wsd", decay_ratio=ratio, min_lr_factor=0.0)
    assert schedule.decay_steps(steps) == expected
    below = [step for step in range(1, steps + 1) if learning_rate(step, steps, Optimizer(lr=LR), schedule) < LR]
    assert below == list(range(steps - expected + 1, steps + 1))
    assert learning_rate(steps, steps, Optimizer(lr=LR), schedule) == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"schedule": "step"}, r"^lr_scheduler.schedule must be one of cosine, linear, wsd, constant, got 'step'$"),
        ({"schedule": "wsd", "decay_type": "exp"}, r"^lr_scheduler.decay_type must be one of linear, sqrt, cosine, "),
        ({"schedule": "wsd", "decay_ratio": 0.0}, r"^lr_scheduler.decay_ratio must be above 0 and at most 1, got 0.0$"),
        ({"decay_ratio": 0.2}, r"^lr_scheduler.decay_ratio must be its default, 0.1, unless .* is wsd, got 0.2$"),
        ({"decay_type": "sqrt"}, r"^lr_scheduler.decay_type must be its default, 'linear', unless .* is wsd, "),
        (
            {"schedule": "constant", "min_lr_factor": 0.0},
            r"^lr_scheduler.min_lr_factor must be its default, 0.1, unless lr_scheduler.schedule goes down, got 0.0$",
        ),
    ],
)
def test_bad_schedules(settings, message):
    with pytest.raises(ValueError, match=message):
        LRScheduler(**settings)


def test_the_warm_up_must_leave_room_for_the_decay():
    TrainConfig(training=Training(steps=100), lr_scheduler=LRScheduler(warmup_steps=75, **wsd("linear")))
    TrainConfig(training=Training(steps=100), lr_scheduler=LRScheduler(warmup_steps=80, **wsd("linear")))
    TrainConfig(training=Training(steps=10), lr_scheduler=LRScheduler(warmup_steps=20))  # as before: only a warm-up
    message = r"^lr_scheduler.warmup_steps must be at most 80 with the 20 steps of decay in 100 steps, got 81$"
    with pytest.raises(ValueError, match=message):
        TrainConfig(training=Training(steps=100), lr_scheduler=LRScheduler(warmup_steps=81, **wsd("linear")))

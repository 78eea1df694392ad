"""Tests `compute_mismatch` against its formulas, its rule in the monitor, and the layers that differ first."""

import copy
import math

import pytest
import torch
from torch import nn

import quaver
from quaver import convert_to_float8_training
from quaver.numerics import Mismatch, compute_mismatch, find_first_differences
from quaver.numerics.alarm_sink import AlarmSink
from quaver.numerics.alarms import AlarmCleared, Alarms
from quaver.numerics.record import Record
from tests.steps import train

TRAIN = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.25, -torch.inf]])
ROLLOUT = torch.tensor([[-1.0, -2.5, -0.25], [-3.0, -0.5, torch.nan]])
MASK = torch.tensor([[1, 1, 1], [0, 1, 0]])


def test_figures_are_those_of_the_formulas():
    d = [0.0, 0.5, -0.25, 0.25]
    figures = compute_mismatch(TRAIN, ROLLOUT, MASK)
    assert figures.k1 == pytest.approx(-sum(d) / 4)
    assert figures.k3 == pytest.approx(sum(math.exp(x) - 1 - x for x in d) / 4)
    assert figures.token_mult_prob_error == pytest.approx(sum(math.exp(abs(x)) for x in d) / 4)
    assert (figures.largest, figures.tokens) == (0.5, 4)
    assert compute_mismatch(ROLLOUT[0].bfloat16(), ROLLOUT[0].bfloat16()) == Mismatch(0.0, 0.0, 1.0, 0.0, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((TRAIN, ROLLOUT[:1]), r"of one shape, got \[2, 3\] and \[1, 3\]"),
        ((TRAIN, ROLLOUT, MASK[0]), r"mask: expected \[2, 3\] as log probabilities, got \[3\]"),
        ((TRAIN, ROLLOUT, MASK * 2), "mask: expected 0 or 1"),
        ((TRAIN, ROLLOUT, MASK * 0), "mask: expected tokens that count, got none of 6"),
        ((TRAIN, TRAIN), "logprobs_train: expected finite values, got 1 of 6"),
        ((TRAIN[:, :2], ROLLOUT[:, 1:]), "logprobs_rollout: expected finite values, got 1 of 4"),
    ],
)
def test_bad_arguments_of_a_mismatch_are_refused_in_one_line(arguments, message):
    with pytest.raises(ValueError, match=message):
        compute_mismatch(*arguments)


def test_a_mismatch_alarms_once_and_clears(tmp_path):
    """The worst figures since the last sample count, in a sample that is taken; the record gives the same alarms."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 32)), config="rowwise")
    optimizer, events = torch.optim.SGD(model.parameters(), lr=0.01), []
    sink = AlarmSink(tmp_path / "numerics.jsonl", on_event=events.append)
    with quaver.monitor(model, every=2, sink=sink, extras_every=0) as monitor:
        for error in (1.01, 1.2, 1.0, 1.04, 1.04, 1.02, 1.02, 1.02):
            monitor.record_mismatch(Mismatch(0.0, 0.01, error, 0.3, 64))
            train(model, optimizer, [torch.randn(16, 32)])
    alarm, cleared = (event for event in events if event.rule == "mismatch")
    assert (alarm.step, alarm.layer, alarm.value, alarm.threshold) == (2, "rollout", 1.2, 1.05)
    assert "exp|difference|" in alarm.message
    assert "forward_dtype=" in alarm.message
    assert isinstance(cleared, AlarmCleared)
    assert cleared.step == 8
    alarms = Alarms()
    header, *samples = Record.read(tmp_path / "numerics.jsonl", keeps_lines=True).lines
    replayed = [event for sample in samples for event in alarms.update(header, sample)]
    assert [event.step for event in replayed if event.rule == "mismatch"] == [2, 8]


def test_the_layers_that_differ_first_are_named():
    """One weight of a copy was rounded: its layer makes the difference, those behind it only follow."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    other = copy.deepcopy(model)
    assert find_first_differences(model, other, torch.ones(2, 8)) == []
    with torch.no_grad():
        other[1].weight.copy_(other[1].weight.bfloat16())
    differences = find_first_differences(model, other, torch.ones(2, 8))
    assert [(difference.layer, difference.is_origin) for difference in differences] == [
        ("1", True),
        ("2", False),
        ("3", False),
    ]
    assert 40 < differences[0].sqnr_db < 80
    assert not model[1]._forward_hooks
    with pytest.warns(UserWarning, match="not compared: 4$"):
        assert find_first_differences(model, nn.Sequential(*model, nn.ReLU()), torch.ones(2, 8)) == []
    with pytest.raises(ValueError, match="layers of the same names, got none"):
        find_first_differences(model, nn.Linear(8, 8), torch.ones(2, 8))

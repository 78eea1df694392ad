"""Tests alarms over synthetic samples: which rule, tensor and step; one alarm per cause, and when it ends."""

import json
from collections.abc import Container, Iterable, Iterator
from typing import Any

import pytest

from quaver.numerics.alarm_rules import AlarmRule, TensorMeasurement
from quaver.numerics.alarms import Alarm, AlarmCleared, Alarms
from quaver.numerics.error_bounds import (
    compute_bulk_db,
    compute_cast_bound_db,
    compute_rounding_bound_db,
    compute_underflow_share,
)
from quaver.numerics.history import History
from quaver.recipes.formats import E4M3, E5M2
from tests.library.numerics.samples import LAYERS, RMS, find_position, make_header, make_sample

UP, DOWN = "layers.1.mlp.up_proj", "layers.1.mlp.down_proj"


def update(samples: Iterable[dict[str, Any]], header: dict[str, Any] | None = None) -> list[Alarm | AlarmCleared]:
    """Return the events of samples with one header."""
    alarms, header = Alarms(), header or make_header()
    return [event for sample in samples for event in alarms.update(header, sample)]


def collect_events(changes: dict[tuple[str, str], dict[str, Any]], steps: Container[int], last=30, recipe="tensorwise"):
    """Return the events of the steps 1 to `last`, with `changes` in the samples of `steps`."""
    samples = (make_sample(step, changes if step in steps else None) for step in range(1, last + 1))
    return update(samples, make_header(recipe))


def scale_statistics(operand: str, by: float) -> dict[str, Any]:
    return {"rms": RMS[operand] * by, "amax": 5 * RMS[operand] * by}


NONFINITE = {(DOWN, "input"): {"nonfinite": 8.0}, (DOWN, "output"): {"nonfinite": 64.0}}
FAULTS = {
    "nonfinite": (NONFINITE, "nonfinite", "input", 0),
    "lower scale": ({(UP, "input"): {"sqnr_db": 2.0}}, "codes", "input", 0),
    "clipped": ({(UP, "input"): {"saturated": 0.01, "sqnr_db": 9.0}}, "saturation", "input", 0),
    "wrong product": ({(UP, "grad_input"): {"sqnr_db": 3.0}}, "result", "grad_input", 1),
    "no gradient": ({(UP, "grad_output"): {"amax": 0.0, "rms": 0.0, "sqnr_db": None}}, "zero", "grad_output", 1),
    "outliers": ({(DOWN, "input"): {"underflow": 0.3}}, "underflow", "input", 1),
    "larger weight": ({(DOWN, "weight"): scale_statistics("weight", 100)}, "jump", "weight", 0),
    "small gradient": ({(DOWN, "grad_weight"): scale_statistics("grad_weight", 1e-6)}, "jump", "grad_weight", 1),
}


@pytest.mark.parametrize(("changes", "rule", "operand", "late"), FAULTS.values(), ids=FAULTS)
def test_a_fault_raises_one_alarm_with_its_name(changes, rule, operand, late):
    (alarm,) = [event for event in collect_events(changes, range(12, 99)) if isinstance(event, Alarm)]
    (layer, _), *_ = changes
    assert (alarm.rule, alarm.layer, alarm.operand, alarm.since, alarm.step) == (rule, layer, operand, 12, 12 + late)
    assert f"{layer} {operand}" in alarm.message
    assert "since step 12" in alarm.message
    json.dumps(alarm.to_dict(), allow_nan=False)


def test_a_user_may_add_a_rule():
    large = AlarmRule("large", lambda tensor, _: TensorMeasurement(tensor.amax, 2.0, 2.0), "has an amax of {value:g}")
    event = Alarms(rules=[large]).update(make_header(), make_sample(1))[0]
    assert (event.rule, event.operand, event.threshold) == ("large", "input", 2.0)


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_healthy_run_raises_none(recipe):
    assert collect_events({}, range(0), last=60, recipe=recipe) == []


@pytest.mark.parametrize("name", ["lower scale", "no gradient", "outliers"])
def test_an_alarm_is_cleared_once_when_its_cause_ends_and_can_come_again(name):
    changes, rule, operand, late = FAULTS[name]
    (layer, _), *_ = changes
    history = collect_events(changes, [*range(10, 15), *range(25, 28)], last=40)
    assert [type(event) for event in history] == [Alarm, AlarmCleared, Alarm, AlarmCleared]
    assert history[1] == AlarmCleared(16 if rule == "codes" else 15 + late, rule, layer, operand)
    assert history[2].since == 25


def test_an_alarm_needs_as_many_samples_in_a_row_as_its_rule_says():
    assert collect_events(FAULTS["outliers"][0], [10, 12, 14]) == []


def test_a_value_between_raising_and_clearing_keeps_an_alarm():
    shares = [0.0, 0.3, 0.3, 0.06, 0.3, 0.06, 0.01, 0.01, 0.06]
    samples = (make_sample(step, {(UP, "input"): {"underflow": share}}) for step, share in enumerate(shares, start=1))
    assert [(type(event), event.step) for event in update(samples)] == [(Alarm, 3), (AlarmCleared, 8)]


def test_weights_that_a_learning_rate_ruins_in_the_first_step_alarm_in_the_second():
    (alarm, *_) = collect_events(
        {(DOWN, "weight"): scale_statistics("weight", 1e4), (UP, "output"): scale_statistics("output", 1e4)},
        range(2, 99),
    )
    assert (alarm.rule, alarm.layer, alarm.operand, alarm.step) == ("jump", DOWN, "weight", 2)
    warmed_up = {(layer, "weight"): scale_statistics("weight", 100) for layer in LAYERS}
    assert collect_events(warmed_up, range(2, 99), last=3) == []


def test_consequences_of_a_cause_raise_no_alarm():
    changes = {(layer, "grad_output"): scale_statistics("grad_output", 1e6) for layer in LAYERS}
    changes |= {(layer, "grad_weight"): scale_statistics("grad_weight", 1e6) for layer in LAYERS}
    (alarm, *rest) = collect_events(changes, range(12, 99))
    assert (alarm.rule, alarm.layer, alarm.operand) == ("jump", LAYERS[-1], "grad_output")
    assert alarm.followers == 2 * len(LAYERS) - 1
    assert [(type(event), event.stays) for event in rest] == [(AlarmCleared, True)]  # the new level is the usual one
    assert rest[0].message == f"{LAYERS[-1]} grad_output: jump has not come back; this is its new level"
    came_back = collect_events(changes, range(12, 14))
    stays = [(type(event), getattr(event, "stays", None)) for event in came_back]
    assert stays == [(Alarm, None), (AlarmCleared, False)]


def test_an_alarm_lasts_while_its_rule_is_bad_on_a_follower():
    def make_samples(follower_ends: int) -> Iterator[dict[str, Any]]:
        for step in range(1, 12):
            bad = [(UP, "input")] * (step == 5) + [(DOWN, "weight")] * (5 < step < follower_ends)
            yield make_sample(step, dict.fromkeys(bad, {"nonfinite": 3.0}))

    for follower_ends, cleared in ((0, [6]), (9, [9]), (99, [])):  # the NaN of an input spoils a weight
        alarm, *rest = update(make_samples(follower_ends))
        assert (alarm.step, alarm.operand) == (5, "input")
        assert [event.step for event in rest if isinstance(event, AlarmCleared)] == cleared


@pytest.mark.parametrize("recipe", ["rowwise", None])
def test_a_follower_that_stays_bad_after_a_fallback_of_its_cause_raises_the_next_alarm(recipe):
    alarms, header, clipped = Alarms(), make_header(), {"saturated": 0.01, "sqnr_db": 9.0}
    raised: list[Alarm | AlarmCleared] = []
    for step in range(1, 40):
        bad = (UP, DOWN) if step < 6 else (DOWN,)
        raised += alarms.update(header, make_sample(step, {(layer, "input"): clipped for layer in bad if step > 4}))
        if step == 5:
            header["tensors"] = [
                about | ({"recipe": recipe} if recipe else {"layer": "another"}) if about["layer"] == UP else about
                for about in header["tensors"]
            ]
    assert [(type(event), event.layer, event.step) for event in raised] == [(Alarm, UP, 5), (Alarm, DOWN, 14)]
    assert alarms.active == [("saturation", DOWN, "input")]


def test_delayed_scales_may_clip_what_rounding_hides():
    changes = {(UP, "input"): {"saturated": 1e-4, "sqnr_db": 29.0}}
    assert collect_events(changes, range(12, 99), recipe="delayed") == []
    assert [event.rule for event in collect_events(changes, range(12, 99))] == ["saturation"]
    changes[UP, "input"]["sqnr_db"] = 20.0
    assert [event.rule for event in collect_events(changes, range(12, 99), recipe="delayed")] == ["saturation"]


def test_exponential_growth_alarms_and_growth_that_slows_down_does_not():
    def rules(exponent: Any):
        samples = (
            make_sample(step, {(UP, "input"): scale_statistics("input", 2 ** exponent(step))}) for step in range(1, 25)
        )
        return [event.rule for event in update(samples)]

    assert rules(lambda step: 1.2 * step)[0] == "growth"
    assert rules(lambda step: 8 * (1 - 0.8**step)) == []


def find_dead_units(zeros_of_input: float, experts: int | None) -> list[str]:
    """Return the alarms' rules where a quarter of a gradient becomes zero, with this share of zeros in the input."""
    header = make_header()
    for tensor in header["tensors"]:
        tensor["experts"] = experts
    zeros = {(DOWN, "input"): {"zeros": zeros_of_input}}
    samples = (
        make_sample(step, zeros | {(DOWN, "grad_weight"): {"zeros": 0.25 * (step > 12)}}) for step in range(1, 31)
    )
    return [event.rule for event in update(samples, header) if isinstance(event, Alarm)]


def test_idle_units_behind_relu_are_not_dead_and_experts_without_tokens_are():
    assert find_dead_units(0.0, None) == ["dead"]
    assert find_dead_units(0.5, None) == []
    assert find_dead_units(0.5, 8) == ["dead"]


@pytest.mark.parametrize(("recipe", "scaling"), [("i:sta_e4m3", "static"), ("delayed_x", "delayed")])
def test_persistent_scales_are_known_by_their_scaling_not_by_the_name_of_a_recipe(recipe, scaling):
    header, clipped = make_header(recipe), {"saturated": 1e-4, "sqnr_db": 29.0}
    for tensor in header["tensors"]:
        tensor["scaling"] = "dynamic" if tensor["operand"] == "weight" else scaling
    changes = {(UP, "input"): clipped}
    samples = (make_sample(step, changes | ({(DOWN, "weight"): clipped} if step > 5 else {})) for step in range(1, 9))
    (alarm,) = update(samples, header)
    assert (alarm.rule, alarm.layer, alarm.operand, alarm.step) == ("saturation", DOWN, "weight", 6)


def test_remedies_have_their_numbers():
    samples = [make_sample(step, {(DOWN, "input"): {"sqnr_db": 13.0, "scale_max": 600.0}}) for step in (1, 2)]
    whatif = {recipe: [None] * len(make_header()["tensors"]) for recipe in ("rowwise", "mxfp8", "delayed")}
    for values, sqnr_db in zip(whatif.values(), (27.1, 29.0, 13.2), strict=True):
        values[find_position(DOWN, "input")] = sqnr_db
    (alarm,) = update(sample | {"whatif": whatif} for sample in samples)
    assert [remedy["recipe"] for remedy in alarm.remedies] == ["mxfp8", "rowwise", "high precision"]
    assert alarm.remedies[1]["gain_db"] == pytest.approx(14.1)
    assert alarm.remedies[2]["flops_share"] == pytest.approx(1 / len(LAYERS))
    assert ". mxfp8 gives 29.0 dB; rowwise gives 27.1 dB; high precision costs" in alarm.message
    whatif = dict.fromkeys(("tensorwise", "rowwise", "blockwise", "mxfp8"), whatif["rowwise"])
    (alarm,) = update(sample | {"whatif": whatif} for sample in samples)
    assert ". tensorwise, rowwise, blockwise and 1 more give 27.1 dB; high" in alarm.message


@pytest.mark.parametrize(
    ("sums", "uses_fast", "remedies"),
    [
        ((55.0, 23.0, 64.0), True, ["use_fast_accum=False"]),
        ((55.0, 23.0, 30.0), True, ["use_fast_accum=False", "high precision"]),
        ((55.0, 23.0, 40.0), False, ["high precision"]),
        ((55.0, 23.0, 64.0), False, None),
        ((28.0, 40.0, 64.0), True, None),
        ((70.0, 50.0, 64.0), True, None),
        (("inf", 30.0, "inf"), True, ["use_fast_accum=False"]),
    ],
)
def test_sums_that_cost_more_than_casts_have_a_setting_as_their_remedy(sums, uses_fast, remedies):
    header, sample, position = make_header(), make_sample(1), find_position(DOWN, "output")
    header["tensors"][position]["use_fast_accum"] = uses_fast
    sample["sums"] = {name: [None] * len(header["tensors"]) for name in ("casts", "fast", "exact")}
    for values, sqnr_db in zip(sample["sums"].values(), sums, strict=True):
        values[position] = sqnr_db
    alarms = Alarms().update(header, sample)
    assert [[remedy["recipe"] for remedy in alarm.remedies] for alarm in alarms] == ([remedies] if remedies else [])
    assert all((alarm.rule, alarm.layer, alarm.operand) == ("sums", DOWN, "output") for alarm in alarms)


def test_a_weight_that_differs_between_ranks_names_the_rank():
    (alarm,) = update([make_sample(1) | {"disagree": {str(find_position(UP, "weight")): 3}}])
    assert (alarm.rule, alarm.layer, alarm.rank) == ("ranks", UP, 3)


def test_infinities_of_a_file_are_strings():
    sample = make_sample(1, {(UP, "input"): {"rms": "nan", "nonfinite": 3.0, "sqnr_db": "-inf"}})
    assert [alarm.rule for alarm in update([sample])] == ["nonfinite"]


def test_a_misspelt_statistic_is_refused():
    (tensor, *_) = History().read(make_header(), make_sample(1)).tensors
    assert tensor.sqnr_db == 31.5
    assert tensor.kurtosis is tensor.largest is None  # not in these samples
    with pytest.raises(AttributeError, match="got 'sqrn_db'"):
        _ = tensor.sqrn_db
    with pytest.raises(AttributeError, match="got 'rsm'"):
        tensor.get_log2("rsm")


def test_an_unknown_alarm_action_is_refused():
    with pytest.raises(ValueError, match="action: expected one of log, callback, stop, fallback, got 'mail'"):
        Alarms(action="mail")


def test_bounds_follow_from_the_formats():
    assert compute_rounding_bound_db(E4M3) == pytest.approx(24.08, abs=0.01)
    assert compute_rounding_bound_db(E5M2) == pytest.approx(18.06, abs=0.01)
    assert compute_cast_bound_db(E4M3, 1.0, 5 / 448) == pytest.approx(24.08, abs=0.01)
    assert compute_cast_bound_db(E4M3, 1.0, 64.0) < 24
    assert compute_bulk_db(compute_underflow_share(24.08)) == pytest.approx(24.08)

"""docs/scaling.md: its tables are those of the recorded run, what is cheap to measure again agrees, its code runs."""

import json
import re
import warnings

import pytest
import torch

from benchmarks.record import fill
from benchmarks.scaling import DOCS, IMAGES, RECORD, tables
from benchmarks.scaling_costs import config_of
from benchmarks.scaling_numerics import delayed, fare, scenarios
from benchmarks.scaling_pictures import PICTURES


@pytest.fixture(scope="module")
def results():
    return json.loads(RECORD.read_text())


def test_the_tables_are_those_of_the_recorded_run(results):
    text = DOCS.read_text()
    assert fill(text, tables(results)) == text, "run python -m benchmarks.scaling --recorded --update-docs"


def test_another_figure_would_be_noticed(results):
    results = json.loads(json.dumps(results))
    results["all_reduces"][0]["bytes"] += 1
    text = DOCS.read_text()
    assert fill(text, tables(results)) != text


def test_a_page_without_a_table_is_an_error(results):
    with pytest.raises(ValueError, match="table: all_reduces"):
        fill("no markers", tables(results))


def test_every_picture_is_there_and_shown():
    assert set(re.findall(r"\(images/(scaling_\w+\.png)\)", DOCS.read_text())) == set(PICTURES)
    for name in PICTURES:
        assert (IMAGES / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("scenario", "contestant"),
    [("growth", "delayed, max"), ("spike_1e6", "delayed, max, window (1/64, 1.5)"), ("drift_down", "static")],
)
def test_series_are_those_of_the_recorded_run(results, scenario, contestant):
    planned = scenarios()[scenario]
    measured = fare(planned.deviations, planned.contestants[contestant])
    recorded = results["scenarios"][scenario][contestant]
    assert measured["sqnr_db"] == pytest.approx(recorded["sqnr_db"], abs=0.05)
    assert measured["used_over_ideal"] == pytest.approx(recorded["used_over_ideal"], rel=1e-3)
    assert measured["saturated"] == pytest.approx(recorded["saturated"], abs=1e-4)


def test_what_the_page_says_of_the_scenarios(results):
    assert set(results["scenarios"]) == set(scenarios())
    stationary = results["stationary"]
    for result in ("output", "grad_input", "grad_weight"):
        for dynamic, kept in zip(stationary["tensorwise"][result], stationary["delayed"][result], strict=True):
            assert abs(dynamic - kept) < 0.3
    growth = results["scenarios"]["growth"]
    saturating = [step for step, share in enumerate(growth["delayed, max"]["saturated"]) if share > 1e-3]
    assert saturating == list(range(10, 20))
    assert growth["delayed, max"]["sqnr_db"][20] > 31.4
    assert max(growth["delayed, headroom 2"]["saturated"]) < 1e-4
    spike = results["scenarios"]["spike_1e6"]
    lost = {name: [step for step, db in enumerate(series["sqnr_db"]) if db < 1] for name, series in spike.items()}
    assert lost["dynamic"] == []
    assert lost["delayed, max"] == list(range(10, 27))
    assert lost["delayed, most_recent"] == [10, 11]
    assert lost["delayed, max, window (1/64, 1.5)"] == [10]
    windowed = growth["delayed, window (0, 1.5)"]["saturated"]
    assert [step for step, share in enumerate(windowed) if share > 1e-3] == [10]


@pytest.mark.parametrize("history_len", [1, 4])
def test_a_spike_is_remembered_for_history_len_steps(history_len):
    series = fare([1e6 if step == 2 else 1.0 for step in range(10)], delayed(history_len=history_len))
    assert [step for step, db in enumerate(series["sqnr_db"]) if db < 1] == [2, *range(3, 3 + history_len)]


def test_the_first_step_is_that_of_the_dynamic_recipe():
    first = [fare([3.0], config_of(recipe))["sqnr_db"] for recipe in ("tensorwise", "delayed")]
    assert first[0] == first[1]


def test_the_code_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = "\n".join(re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL))
    assert code.count("sync_float8_amax_and_scale_history(") == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="two optimizer steps without")
        names = {"__name__": "docs"}
        exec(compile(code, str(DOCS), "exec"), names)
    expected, loaded = (names["float8_scaling_state"](names[model]).state_dict() for model in ("model", "resumed"))
    assert expected.keys() == loaded.keys()
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())

"""Tests that the page of a report holds every number of the record to a step of its scale, in less than 5 MB."""

import json
import re
from base64 import b64decode

import numpy as np
import pytest

from quaver.lab.report.alarms import read_alarms
from quaver.lab.report.facts import describe_health, is_healthy
from quaver.lab.report.maps import find_limits, make_maps
from quaver.lab.report.merge import MAX_MAP_CELLS, choose_grid
from quaver.lab.report.page import write_report
from quaver.lab.report.run import RunData, read_runs
from quaver.lab.report.series import Curve, collect_curves, thin_curve
from quaver.lab.report.statistics import BEST, INFINITE, MISSING, NOT_A_NUMBER, STATISTICS, WORST
from quaver.numerics.record import Record
from tests.lab.browser.reports import HOSTILE
from tests.lab.report.records import (
    make_alarm,
    make_conversion,
    make_header,
    make_layers,
    make_sample,
    make_tensors,
    make_wide_record,
    read_data,
    write_lines,
    write_run,
)

BY_NAME = {statistic.name: statistic for statistic in STATISTICS}


def read_bytes(run, name):
    """Return the bytes of a map, [tensors, columns], 0 where it has no row."""
    heat_map, columns = run["maps"][name], len(run["columns"][0])
    cells = np.zeros((len(run["tensors"]["rows"]), columns), dtype=np.uint8)
    cells[heat_map["rows"]] = np.frombuffer(b64decode(heat_map["bytes"]), dtype=np.uint8).reshape(-1, columns)
    return cells


@pytest.mark.parametrize(
    ("name", "values", "codes"),
    [
        ("sqnr_db", [20, -np.inf, np.inf, np.nan, 0, 10, -30, 70], [2, 254, 1, 0, 253, 128, 253, 2]),
        ("underflow", [0, 1e-2, 1, 1e-9], [1, 128, 253, 2]),
        ("amax", [0, 2.0**-4, 1, 2.0**4, np.inf], [1, 2, 128, 253, 254]),
    ],
)
def test_worse_values_are_encoded_as_larger_bytes(name, values, codes):
    limits = {"sqnr_db": (0.0, 20.0), "underflow": (-4.0, 0.0), "amax": (-4.0, 4.0)}[name]
    values = np.array(values)
    assert BY_NAME[name].encode(values, ~np.isnan(values), limits).tolist() == codes


def test_cells_are_the_values_of_the_record(tmp_path):
    folder = write_run(tmp_path / "run", layers=make_layers(2), samples=30)
    (run,) = read_runs([folder])
    write_report(tmp_path / "page.html", [run])
    data = read_data(tmp_path / "page.html")
    for about in data["statistics"]:
        statistic, (low, high) = BY_NAME[about["name"]], about["limits"]
        values = run.numerics.statistics[about["name"]].T
        codes = read_bytes(data["runs"][0]["numerics"], about["name"]).astype(float)
        assert np.array_equal(codes == MISSING, np.isnan(values))
        is_zero = values == 0
        assert (codes[is_zero] == BEST).all()
        shown = ~np.isnan(values) & ~is_zero
        part = (codes[shown] - 2) / (WORST - 2)
        decoded = low + (1 - part if statistic.is_low_worse else part) * (high - low)
        assert np.abs(decoded - statistic.apply_scale(values[shown])).max() <= (high - low) / (WORST - 2) / 2 + 1e-9
        for tensor, step, text in data["runs"][0]["numerics"]["worst"][about["name"]]:
            column = run.numerics.steps.tolist().index(step)
            worst = values[tensor, column]
            assert worst == (np.nanmin if statistic.is_low_worse else np.nanmax)(values[tensor])
            assert text == statistic.format_value(worst)


def test_nonfinite_operands_are_marked_and_missing_values_are_not(tmp_path):
    tensors = make_tensors(["a"])[:3]
    fine = {"amax": [1.0, 1.0, 1.0], "underflow": [0.1, 0.1, None], "saturated": [0.0, 0.0, None]}
    fine |= {"sqnr_db": [30.0, 30.0, 30.0], "nonfinite": [0, 0, 0]}
    bad = fine | {"amax": [2.0, 1.0, 1.0], "sqnr_db": [float("nan"), float("-inf"), 30.0], "nonfinite": [3, 0, 0]}
    write_lines(tmp_path / "numerics.jsonl", [make_header(tensors), make_sample(10, fine), make_sample(20, bad)])
    (run,) = read_runs([tmp_path])
    maps = make_maps(run.numerics, [], find_limits([run.numerics]))
    assert read_bytes(maps, "sqnr_db")[:, 1].tolist() == [NOT_A_NUMBER, INFINITE, 2 + (WORST - 2) // 2 + 1]
    assert read_bytes(maps, "amax")[:, 1].tolist()[0] == NOT_A_NUMBER
    assert read_bytes(maps, "underflow")[2].tolist() == [MISSING, MISSING]
    assert describe_health(run).endswith("; but NaN or infinities since step 20, in a input")
    assert not is_healthy(run)


def test_the_first_nonfinite_operand_is_named_in_the_order_of_the_step(tmp_path):
    tensors = make_tensors(["a", "b"])
    values = {name: [0.0] * len(tensors) for name in ("amax", "underflow", "saturated", "sqnr_db")}
    values["nonfinite"] = [int(tensor["operand"].startswith("grad")) for tensor in tensors]
    write_lines(tmp_path / "numerics.jsonl", [make_header(tensors), make_sample(10, values)])
    (run,) = read_runs([tmp_path])
    assert "since step 10, in b grad output and " in describe_health(run)


def test_two_runs_share_a_scale(tmp_path):
    runs = read_runs([write_run(tmp_path / name, layers=make_layers(1), seed=at) for at, name in enumerate("ab")])
    write_report(tmp_path / "page.html", runs)
    data = read_data(tmp_path / "page.html")
    assert [run["label"] for run in data["runs"]] == ["a", "b"]
    values = np.concatenate([run.numerics.statistics["sqnr_db"] for run in runs])
    assert data["statistics"][0]["limits"] == [values.min(), values.max()]


@pytest.mark.parametrize(("layers", "runs"), [([f"layers.{at}.ffn" for at in range(100)], 2), (make_layers(100), 1)])
def test_a_page_of_100_layers_and_1000_samples_is_below_5_mb(tmp_path, layers, runs):
    record = make_wide_record(make_tensors(layers), 1000)
    write_report(tmp_path / "page.html", [RunData(f"run {at}", tmp_path, numerics=record) for at in range(runs)])
    assert 2_000_000 < (tmp_path / "page.html").stat().st_size < 5_000_000


def test_a_merged_cell_is_the_worst_of_its_cells():
    codes = np.random.default_rng(0).integers(0, 250, (1000, 900)).astype(np.uint8)
    codes[617, 411] = 255
    kinds = ["input", "weight", "grad_output"] * 300
    grid = choose_grid(1000, kinds, 4, max_cells=300_000)
    merged = grid.merge(codes)
    assert merged.size * 4 <= 300_000 * 1.1
    assert {len({kinds[at] for at in row}) for row in grid.rows} == {1}
    assert sorted(at for row in grid.rows for at in row) == list(range(900))
    spans = list(zip(grid.column_edges, grid.column_edges[1:], strict=False))
    expected = [[codes[first:last, row].max() for first, last in spans] for row in grid.rows]
    assert np.array_equal(merged, expected)
    small = choose_grid(50, kinds, 4, MAX_MAP_CELLS)
    assert np.array_equal(small.merge(codes[:50]), codes[:50].T)


def test_the_page_names_the_steps_that_have_no_numbers(tmp_path):
    kinds = ("skipped_step", "nonfinite_step")
    records = [{"kind": kind, "step": step, "model": "a", "reason": "inf"} for step, kind in enumerate(kinds)]
    write_report(tmp_path / "page.html", [RunData("a", tmp_path, records=records)])
    (run,) = read_data(tmp_path / "page.html")["runs"]
    assert run["events"] == [[0, "skipped: inf"], [1, "not finite: inf"]]


def test_curves_keep_their_extremes_and_finite_values_only():
    records = [{"step": at, "model": "a", "loss": 1.0 + (at == 777) - (at == 4321)} for at in range(10_000)]
    records[5]["loss"] = float("nan")
    (curve,) = collect_curves([*records, {"step": 3, "model": "a", "reason": "nan"}], "loss")
    assert 5 not in curve.steps
    kept = thin_curve(curve)
    assert len(kept.steps) <= 1502
    assert {0, 777, 4321, 9999} <= set(kept.steps)
    assert kept.values[kept.steps.index(777)] == 2
    assert thin_curve(Curve("a", [1, 2], [3.0, 4.0])) == Curve("a", [1, 2], [3.0, 4.0])


def test_histograms_are_those_of_the_record_and_where_alarms_began(tmp_path):
    tensors = make_tensors(make_layers(1))
    folder = write_run(tmp_path / "run", layers=make_layers(1), alarms=[make_alarm(240, tensors[8])])
    (run,) = read_runs([folder])
    limits = find_limits([run.numerics])
    everything = make_maps(run.numerics, run.alarms, limits)["histograms"]
    assert everything["samples"] == 4
    assert len(everything["rows"]) == 4 * len(tensors)
    lines = [json.loads(line) for line in (folder / "numerics.jsonl").open()]
    stored = {line["step"]: line["histogram"] for line in lines if "histogram" in line}
    for tensor, step, low, before, after in everything["rows"]:
        for text, name in ((before, "before"), (after, "after")):
            part = low - stored[step]["low"]
            assert b64decode(stored[step][name][tensor])[part:][: len(b64decode(text))] == b64decode(text)
    few = make_maps(run.numerics, run.alarms, limits, share=0.0005)["histograms"]["rows"]
    assert {step for tensor, step, *_ in few if tensor == 8} == {min(step for step in stored if step >= 220)}
    assert len(few) < 6


def test_what_ifs_are_those_of_the_last_sample_that_has_them(tmp_path):
    tensors = make_tensors(["a"])[:3]
    values = {"amax": [1.0] * 3, "underflow": [0.0] * 3, "saturated": [0.0] * 3, "nonfinite": [0] * 3}
    what_ifs = [{"rowwise": [10.0, 20.0, None]}, {"rowwise": [None, 21.0, 31.0], "mxfp8": [None, "inf", 4.0]}]
    lines = [
        make_sample(10, values | {"sqnr_db": [1.0, 2.0, 3.0]}, whatif=what_ifs[0]),
        make_sample(20, values | {"sqnr_db": [9.0, 8.0, float("nan")]}, whatif=what_ifs[1]),
        make_sample(30, values | {"sqnr_db": [0.0, 0.0, 0.0]}),
    ]
    write_lines(tmp_path / "numerics.jsonl", [make_header(tensors), *lines])
    (run,) = read_runs([tmp_path])
    assert make_maps(run.numerics, [], find_limits([run.numerics]))["whatif"] == {
        "recipes": ["rowwise", "mxfp8"],
        "rows": [[0, 10, 1.0, 10.0, None], [1, 20, 8.0, 21.0, None], [2, 20, None, 31.0, 4.0]],
    }


def test_alarms_end_where_their_cause_does(tmp_path):
    tensors = make_tensors(["a"])
    first, other = make_alarm(30, tensors[0]), make_alarm(30, tensors[1], value=float("inf"), remedies=[])
    end = {"kind": "cleared", "step": 70, **{name: first[name] for name in ("rule", "layer", "operand")}}
    run = write_run(tmp_path / "run", layers=["a"], alarms=[first, other | {"value": "inf"}, end, first | {"step": 90}])
    alarms = read_alarms(Record.read(run), "it")
    assert [alarm["until"] for alarm in alarms] == [70, None, None]
    assert alarms[0]["remedies"] == ["rowwise: 27.1 dB, +14.0 dB", "high precision: 0.8% of the FLOPs"]
    assert (alarms[1]["value"], alarms[1]["remedies"]) == ("inf", [])


def test_names_stay_text(tmp_path):
    layer = f"layers.0.{HOSTILE}"
    tensors = make_tensors([layer])
    folder = write_run(tmp_path / "run", layers=[layer], alarms=[make_alarm(20, tensors[0])], models=(HOSTILE,))
    (folder / "conversion_report.json").write_text(json.dumps(make_conversion([layer]) | {"notes": [HOSTILE]}))
    runs = read_runs([folder])
    write_report(tmp_path / "page.html", runs)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(re.findall(r"<script\b", text)) == len(re.findall(r"</script>", text)) == 2
    assert not re.search(r"https?:|@import|url\(|\bfetch\(|innerHTML|\beval\(", text)
    (run,) = read_data(tmp_path / "page.html")["runs"]
    assert run["numerics"]["tensors"]["names"][0] == layer
    assert run["conversion"]["notes"] == [HOSTILE]
    assert HOSTILE in run["alarms"][0]["message"]

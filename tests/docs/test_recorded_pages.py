"""Tests that tables of pages come from the recorded runs, and that the code of the pages runs."""

import json
import re
import warnings
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from benchmarks import ledger, performance, reliability, scaling, stored_activations
from benchmarks.record import ROOT, fill_page
from benchmarks.scaling import PICTURES, make_scenarios, measure_casts
from quaver.lab.cli.bench import VERBS
from tests.ranks import run
from tests.steps import assert_same


def read_code(page):
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


def test_the_tables_are_those_of_the_recorded_run():
    for page, tables in performance.make_recorded_tables().items():
        text = page.read_text(encoding="utf-8")
        assert fill_page(text, tables) == text, "run python -m benchmarks.performance --update-docs"
    name, table = tables.popitem()
    assert fill_page(text, {name: table.replace("1", "2")}) != text
    with pytest.raises(ValueError, match=f"table: {name}"):
        fill_page("no markers", {name: table})


def test_the_page_of_benchmarks_has_every_benchmark():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    assert all(f"quaver bench {verb}" in page for verb in VERBS)


def test_the_table_of_stored_activations_is_that_of_the_recorded_run_and_keeps_its_promise():
    page, results = stored_activations.PAGE.read_text(), json.loads(stored_activations.RECORD.read_text())
    assert fill_page(page, stored_activations.make_tables(results)) == page
    saved = {row["compiled"]: row["kept"]["saved"] for row in results["rows"] if row["recipe"] == "bfloat16"}
    stored = [row["stored"]["saved"] / saved[row["compiled"]] for row in results["rows"] if row["recipe"] == "rowwise"]
    assert max(stored) <= 0.55
    for row in results["rows"]:  # with checkpoints the other table counted the same blocks
        assert stored_activations.read_memory_table(row["recipe"], row["compiled"])["none"] == row["kept"]["saved"]


def test_the_table_of_a_blocks_cost_is_that_of_the_recorded_counts():
    page, results = ledger.PAGE.read_text(), json.loads(ledger.RECORD.read_text())
    assert fill_page(page, ledger.make_tables(results)) == page, "run python -m benchmarks.ledger --update-docs"
    for row, counted in zip(results["table"], results["ledgers"], strict=True):
        assert row["precision"] == counted["name"].removeprefix("quaver ")
        assert float(row["sum GB"]) == round(counted["overhead_bytes"] / 1e9, 1)
        assert int(row["launches"]) == counted["launches"]


@pytest.mark.parametrize("name", performance.COMMANDS)
def test_a_file_of_measurements_is_whole_and_names_its_machine(name):
    result = performance.read(performance.CPU / f"{name}.json")
    assert result["complete"]
    assert result["rows"]
    about = result["environment"]
    assert about["threads"] == 1
    assert re.fullmatch(r"[0-9a-f]{7,}\+?", about["commit"])
    assert about["command"] == " ".join(["quaver", *performance.make_command(name)])
    assert performance.COMMANDS[name].split()[0] in VERBS


def _run_code(code):
    with mock.patch.object(dist, "init_process_group"), mock.patch.object(nn.Module, "compile"):
        exec(compile(code, "docs", "exec"), {"__name__": "docs"})


def test_the_code_of_the_page_for_ranks_runs():
    """Without the compiler, which would take most of the time."""
    code = read_code(ROOT / "docs" / "distributed.md")
    assert code.count("fully_shard(") > 4
    run(2, _run_code, code)


def test_the_code_for_delayed_scaling_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = read_code(scaling.DOCS)
    assert code.count("sync_float8_amax_and_scale_history(") == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*forwards with gradients without")
        names = {"__name__": "docs"}
        exec(compile(code, "docs", "exec"), names)
    expected, loaded = (names["float8_scaling_state"](names[model]).state_dict() for model in ("model", "resumed"))
    assert_same(loaded, expected)


def test_every_picture_is_there_and_shown():
    assert set(re.findall(r"\(images/(scaling_\w+\.png)\)", scaling.DOCS.read_text())) == set(PICTURES)
    for name in PICTURES:
        assert (scaling.IMAGES / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("scenario", "contestant"),
    [("growth", "delayed, max"), ("spike_1e6", "delayed, most_recent"), ("drift_down", "static")],
)
def test_series_are_those_of_the_recorded_run(scenario, contestant):
    planned = make_scenarios()[scenario]
    measured = measure_casts(planned.deviations, planned.contestants[contestant])
    recorded = json.loads(scaling.RECORD.read_text())["scenarios"][scenario][contestant]
    assert measured["sqnr_db"] == pytest.approx(recorded["sqnr_db"], abs=0.05)
    assert measured["used_over_ideal"] == pytest.approx(recorded["used_over_ideal"], rel=1e-3)
    assert measured["saturated"] == pytest.approx(recorded["saturated"], abs=1e-4)


def test_the_table_of_reliability_has_the_statements_of_its_benchmark():
    page = (ROOT / "docs" / "reliability.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and " / " in line][1:]
    assert rows == [reliability.make_row(part) for part in reliability.PARTS.values()]

"""Pages with recorded results: their tables are those of the recorded runs, and their code runs."""

import json
import re
import warnings
from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks import distributed, performance, scaling
from benchmarks.record import fill
from benchmarks.scaling import PICTURES, fare, scenarios
from quaver.cli.bench import VERBS
from tests.distributed.ranks import run

RESULTS = {"distributed": distributed.RESULTS, "scaling": scaling.RECORD}
TABLES = {"distributed": distributed.tables, "scaling": scaling.tables}
DOCS = {"distributed": distributed.DOCS, "scaling": scaling.DOCS, "performance": performance.DOCS}


def results_of(page):
    return json.loads(RESULTS[page].read_text())


def code_of(page):
    return "\n".join(re.findall(r"```python\n(.*?)```", DOCS[page].read_text(), re.DOTALL))


@pytest.mark.parametrize("page", DOCS)
def test_the_tables_are_those_of_the_recorded_run(page):
    text = DOCS[page].read_text(encoding="utf-8")
    tables = performance.recorded() if page == "performance" else TABLES[page](results_of(page))
    assert fill(text, tables) == text, f"run python -m benchmarks.{page} --update-docs"


@pytest.mark.parametrize(
    ("page", "name", "key"),
    [("distributed", "fsdp", "unsharded_bytes_per_element"), ("scaling", "all_reduces", "bytes")],
)
def test_another_figure_would_be_noticed(page, name, key):
    results, text = results_of(page), DOCS[page].read_text()
    results[name][0][key] += 1
    assert fill(text, TABLES[page](results)) != text
    with pytest.raises(ValueError, match=f"table: {name}"):
        fill("no markers", TABLES[page](results))


@pytest.mark.parametrize("name", performance.COMMANDS)
def test_a_file_of_measurements_is_whole_and_names_its_machine(name):
    result = performance.read(performance.CPU / f"{name}.json")
    assert result["complete"]
    assert result["rows"]
    about = result["environment"]
    assert about["threads"] == 1
    assert re.fullmatch(r"[0-9a-f]{7,}\+?", about["commit"])
    assert about["command"] == " ".join(["quaver", *performance.words(name)])
    assert performance.COMMANDS[name].split()[0] in VERBS


def test_the_arithmetic_for_llama_3_8b():
    shapes = distributed.linear_shapes(**distributed.LLAMA_3_8B)
    elements = sum(n * k for n, k in shapes)
    assert f"the {elements:,} linear weights" in DOCS["distributed"].read_text()
    assert distributed.scale_bytes("tensorwise", shapes) == 4 * 7 * 32


def _run_code(code):
    with mock.patch("torch.distributed.init_process_group"), mock.patch.object(nn.Module, "compile"):
        exec(compile(code, "docs", "exec"), {"__name__": "docs"})


def test_the_code_for_ranks_runs():
    """Without the compiler, which would take most of the time."""
    code = code_of("distributed")
    assert code.count("fully_shard(") > 4
    run(2, _run_code, code)


def test_the_code_for_delayed_scaling_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = code_of("scaling")
    assert code.count("sync_float8_amax_and_scale_history(") == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="two optimizer steps without")
        names = {"__name__": "docs"}
        exec(compile(code, "docs", "exec"), names)
    expected, loaded = (names["float8_scaling_state"](names[model]).state_dict() for model in ("model", "resumed"))
    assert expected.keys() == loaded.keys()
    assert all(torch.equal(loaded[key], value) for key, value in expected.items())


def test_every_picture_is_there_and_shown():
    assert set(re.findall(r"\(images/(scaling_\w+\.png)\)", DOCS["scaling"].read_text())) == set(PICTURES)
    for name in PICTURES:
        assert (scaling.IMAGES / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("scenario", "contestant"),
    [("growth", "delayed"), ("spike_1e6", "delayed, window (1/64, 1.5)"), ("drift_down", "static")],
)
def test_series_are_those_of_the_recorded_run(scenario, contestant):
    deviations, contestants = scenarios()[scenario]
    measured = fare(deviations, contestants[contestant])
    recorded = results_of("scaling")["scenarios"][scenario][contestant]
    assert measured["sqnr_db"] == pytest.approx(recorded["sqnr_db"], abs=0.05)
    assert measured["used_over_ideal"] == pytest.approx(recorded["used_over_ideal"], rel=1e-3)
    assert measured["saturated"] == pytest.approx(recorded["saturated"], abs=1e-4)

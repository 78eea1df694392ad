"""Tests that the tables of docs/experiments/ are those of the recorded predictions, and those are the model's."""

import json

import pytest

from benchmarks.plan import memory, published, scaling
from benchmarks.plan.published import (
    CALIBRATED_GPUS,
    MAX_UNEXPLAINED_ERROR,
    REASONS,
    calibrate_share,
    find_note,
    predict_tokens_per_s,
)
from benchmarks.plan.published_runs import load_published
from benchmarks.plan.scaling import CONFIGS, H100, SHOWN_GPU_COUNTS, Layout, find_best, make_run
from benchmarks.record import fill_page
from quaver.lab.plan.cluster import Cluster
from quaver.lab.plan.peak_memory import ESTIMATE_ERROR, estimate_peak
from quaver.lab.plan.simulate import simulate
from quaver.lab.plan.step import build_tasks

PARTS = published, scaling, memory
PUBLISHED, SCALING, MEMORY = (json.loads(part.RECORD.read_text()) for part in PARTS)
ROWS = {row.name: row for row in load_published()}
QUICK = [name for name, row in ROWS.items() if row.pp == 1 and row.micro_batches <= 2]


@pytest.mark.parametrize(("part", "results"), [*zip(PARTS, (PUBLISHED, SCALING, MEMORY), strict=True)])
def test_the_tables_are_those_of_the_recorded_predictions(part, results):
    page = part.PAGE.read_text()
    assert fill_page(page, part.make_tables(results)) == page, "run python -m benchmarks.plan --recorded --update-docs"
    assert scaling.PICTURE.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "names", [QUICK[::4], pytest.param(list(ROWS), marks=pytest.mark.nightly)], ids=["some", "all"]
)
def test_recorded_predictions_of_published_runs_are_the_models(names):
    recorded = {row["name"]: row for row in PUBLISHED["rows"]}
    assert list(recorded) == list(ROWS)
    for name in names:
        assert recorded[name]["published"] == ROWS[name].tokens_per_s_per_gpu
        assert recorded[name]["predicted"] == pytest.approx(predict_tokens_per_s(ROWS[name]), abs=0.06), name


def test_recorded_memory_of_published_runs_is_near_the_estimate():
    rows = {row.name: row for row in memory.list_with_memory() if not memory.list_missing_features(row)}
    assert [row["name"] for row in MEMORY["rows"]] == list(rows)
    for recorded in MEMORY["rows"]:
        row = rows[recorded["name"]]
        estimate = estimate_peak(memory.make_run_config(row), row.gpus)
        assert recorded["trainer"] == pytest.approx(estimate, rel=ESTIMATE_ERROR), row.name
        if recorded["as_published"] is not None:  # live bytes are no more than what was reserved
            assert recorded["as_published"] + memory.count_added_bytes(row) < row.memory_gib * 2**30, row.name


@pytest.mark.nightly
def test_recorded_memory_of_a_published_run_is_the_trainers():
    name = "torchao-tutorial-202506 8B 8 H100 bfloat16"
    (recorded,) = (row for row in MEMORY["rows"] if row["name"] == name)
    config, row = memory.make_run_config(ROWS[name]), ROWS[name]
    assert recorded["trainer"] == memory.predict_peak_bytes(config, row.gpus)
    with memory.use_published_loss(row):
        assert recorded["as_published"] == memory.predict_peak_bytes(config, row.gpus)


def test_rows_far_off_and_no_others_have_a_reason():
    off = [
        row["name"] for row in PUBLISHED["rows"] if abs(row["predicted"] / row["published"] - 1) > MAX_UNEXPLAINED_ERROR
    ]
    assert [name for name in off if not find_note(name)] == []
    assert all(any(name.startswith(part) for name in off) for part in REASONS)
    assert len(off) <= 8


@pytest.mark.parametrize(
    "name", ["H100", "H100-500W", *(pytest.param(n, marks=pytest.mark.nightly) for n in CALIBRATED_GPUS)]
)
def test_a_gpus_rate_is_that_of_its_calibration(name):
    assert CALIBRATED_GPUS[name].sustained_share == pytest.approx(calibrate_share(name), abs=0.001)


def test_curves_of_scaling_are_the_models():
    cluster = Cluster.from_spec(H100)
    for config, layout, gpus in (("llama3_8b", Layout(0, 1), 1024), ("mixture_30b_a3b", Layout(64, 1, 8), 512)):
        run = make_run(config, "float8", layout, gpus, is_weak=True)
        assert run.world_size == gpus
        points = scaling.find_points(SCALING["curves"], config, "float8", "weak", layout.name)
        assert points[gpus] == pytest.approx(scaling.predict_tokens_per_s(run, cluster), rel=1e-4)
    assert make_run("llama3_8b", "float8", Layout(64, 1), 100, is_weak=True) is None
    assert make_run("llama3_8b", "float8", Layout(0, 1), 1024, is_weak=False) is None  # 512 sequences
    assert make_run("llama3_405b", "float8", Layout(0, 1), 8, is_weak=True) is None  # does not fit


def test_recorded_weak_scaling_keeps_the_tokens_per_gpu():
    curves = SCALING["curves"]
    assert {curve["config"] for curve in curves} == set(CONFIGS)
    for config in CONFIGS:
        for precision in ("bfloat16", "float8"):
            points = [find_best(curves, config, precision, "weak", gpus) for gpus in SHOWN_GPU_COUNTS]
            tokens = [point[0] for point in points if point]
            assert min(tokens[1:]) > 0.7 * max(tokens)
    plain = scaling.find_points(curves, "llama3_8b", "float8", "weak", "FSDP2")
    assert plain[100_352] < 0.15 * plain[8]


def test_further_micro_batches_take_as_long_as_the_third():
    run = make_run("llama3_8b", "bfloat16", Layout(0, 1), 64, is_weak=False)
    assert run.micro_batches > 3
    cluster = Cluster.from_spec(H100)
    whole = simulate(build_tasks(run, cluster)).seconds
    assert run.step_tokens / whole / 64 == pytest.approx(scaling.predict_tokens_per_s(run, cluster), rel=1e-3)

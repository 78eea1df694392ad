"""Tests what runs of a second compute and leave behind, and how they end."""

import json
from dataclasses import replace
from typing import Any

import pytest

from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.settings import Float8, TrainConfig
from quaver.lab.settings.config_file import load_config
from quaver.lab.trainer.memory import PeakMemory
from quaver.lab.trainer.summary import summarize
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.lab.trainer.training_run import TrainingRun, prepare_run
from tests.lab.conftest import make_tiny, write_text
from tests.lab.trainer.runs import read_steps, run_to_end, with_settings
from tests.steps import assert_same

PNG = b"\x89PNG\r\n\x1a\n"


def read_all_losses(run: TrainingRun, name: str) -> list[float]:
    """Return the losses of training and of validation."""
    records = [record for record in read_json_lines(run.folder.metrics_path) if record["model"] == name]
    return [record["loss" if record["kind"] == "step" else "validation_loss"] for record in records]


def read_summary(run: TrainingRun) -> dict[str, Any]:
    return json.loads((run.folder.path / "summary.json").read_text())


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("train")
    return make_tiny(folder, write_text(folder / "text"))


@pytest.fixture(scope="module")
def run(config: TrainConfig) -> TrainingRun:
    return run_to_end(config)


@pytest.fixture(scope="module")
def compared_run(config: TrainConfig) -> TrainingRun:
    job = replace(config.job, name="compared", compare=True)
    return run_to_end(replace(config, job=job, float8=Float8(recipe_name="tensorwise")))


def test_a_run_leaves_everything_in_its_folder(run, config):
    folder = run.folder.path
    files = {"config.toml", "data.json", "metrics.jsonl", "summary.json", "curves.png", "provenance.jsonl"}
    assert {file.name for file in folder.iterdir()} == files | {".writer.lock", "checkpoint"}
    resolved = with_settings(config, training={"global_batch_size": 2})
    assert load_config(folder / "config.toml") == run.config == resolved
    assert (folder / "curves.png").read_bytes().startswith(PNG)
    assert len(json.loads((folder / "data.json").read_text())["sha256"]) == 64


def test_the_summary_has_the_last_loss_and_the_peak_of_memory(run):
    records = read_json_lines(run.folder.metrics_path)
    assert [record["step"] for record in records if record["kind"] == "step"] == [1, 2, 3, 4]
    assert [record["step"] for record in records if record["kind"] == "validation"] == [2, 4]
    summary = read_summary(run)
    assert (summary["status"], summary["steps"]) == ("finished", 4)
    result = summary["models"]["bfloat16"]
    assert result["validation_loss"] == records[-1]["validation_loss"]
    assert result["peak_memory_source"] == "tensors of one step, exact"
    parameters = sum(p.numel() * 4 for p in run.models[0].model.parameters())
    assert result["peak_memory_bytes"] > 4 * parameters  # weights, gradients, two moments, and activations


def test_a_run_prints_its_steps(tiny_config, capsys):
    run_to_end(tiny_config)
    output = capsys.readouterr().out
    assert "grad norm" in output
    assert "tokens/s" in output


def test_memory_is_measured_in_a_step_without_a_trace(tiny_config, monkeypatch):
    steps, train_step = [], TrainedModel.train_step

    def record_and_train(self, step, batches, *, measure_memory):
        if measure_memory:
            steps.append(step)
        return train_step(self, step, batches, measure_memory=measure_memory)

    monkeypatch.setattr(TrainedModel, "train_step", record_and_train)
    traced = {"enable_profiling": True, "profile_freq": 3, "profiler_warmup": 1, "profiler_active": 1}
    monkeypatch.setattr(TrainedModel, "has_countable_memory", False)  # as of compiled code
    (model,) = run_to_end(with_settings(tiny_config, profiling=traced)).models
    assert steps == [4]
    assert model.peak_memory.peak_bytes


def test_both_models_begin_with_equal_weights(tiny_float8_config):
    run = prepare_run(tiny_float8_config)
    assert [model.name for model in run.models] == ["tensorwise", "bfloat16"]
    float8_weights, weights = (model.model.state_dict() for model in run.models)
    assert_same(float8_weights, weights)
    assert all(weights[name].data_ptr() != weight.data_ptr() for name, weight in float8_weights.items())


def test_both_models_take_turns_and_the_baseline_is_a_run_without_float8(run, compared_run):
    turns = [(record["step"], record["model"][0]) for record in read_steps(compared_run.folder.metrics_path)]
    assert turns == [(1, "t"), (1, "b"), (2, "b"), (2, "t"), (3, "t"), (3, "b"), (4, "b"), (4, "t")]
    float8, baseline = (read_all_losses(compared_run, model.name) for model in compared_run.models)
    assert float8 != baseline
    assert float8 == pytest.approx(baseline, rel=0.05)
    assert read_all_losses(run, "bfloat16") == baseline


def test_the_summary_compares_the_models(compared_run):
    summary = read_summary(compared_run)
    comparison = summary["comparison"]
    tensorwise, bfloat16 = summary["models"]["tensorwise"], summary["models"]["bfloat16"]
    assert comparison["loss_gap"] == pytest.approx(tensorwise["validation_loss"] / bfloat16["validation_loss"] - 1)
    speedup = bfloat16["median_step_seconds"] / tensorwise["median_step_seconds"]
    assert comparison["tokens_per_s_ratio"] == pytest.approx(speedup)
    assert comparison["peak_memory_ratio"] == tensorwise["peak_memory_bytes"] / bfloat16["peak_memory_bytes"]


def test_the_conversion_report_has_the_backends_that_ran(compared_run):
    report = json.loads((compared_run.folder.path / "conversion_report.json").read_text())
    assert "lm_head" in json.dumps(report)
    assert {layer["backend"] for layer in report["layers"] if layer["converted"]} == {"exact"}


def test_a_peak_is_not_compared_with_one_that_was_not_measured(tiny_float8_config):
    run = prepare_run(tiny_float8_config)
    run.models[0].peak_memory = PeakMemory(100, "tensors of one step, exact")
    summary = summarize(run, status="finished", reason=None)
    assert summary["comparison"]["peak_memory_ratio"] is None

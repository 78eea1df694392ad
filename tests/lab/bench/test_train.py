"""Tests that quaver bench train alternates models of the trainer in several precisions and saves their ratios."""

import json

import pytest
import torch

from quaver.lab.bench.train import TrainBenchmark
from quaver.lab.cli import main
from quaver.lab.settings.config_file import build_config
from quaver.lab.trainer.nonfinite import NonFiniteError
from quaver.lab.trainer.trained_model import TrainedModel


def make_sections(text_folder, **float8):
    """Return the settings of a tiny run."""
    return {
        "model": {"dim": 32, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 64, "n_layers": 1},
        "training": {"seq_len": 32, "local_batch_size": 2, "steps": 3, "device": "cpu"},
        "lr_scheduler": {"warmup_steps": 2},
        "data": {"path": str(text_folder)},
        "float8": float8,
    }


def test_models_take_turns_with_the_trainers_own_step(text_folder, monkeypatch):
    order = []
    train_step = TrainedModel.train_step

    def record_step(self, step, batches, *, measure_memory=False):
        order.append((step, self.name, measure_memory))
        return train_step(self, step, batches, measure_memory=measure_memory)

    monkeypatch.setattr(TrainedModel, "train_step", record_step)
    config = build_config(make_sections(text_folder, high_precision_schedule=("all: last 1 steps",)))
    benchmark = TrainBenchmark(recipes=("tensorwise", "delayed"), rounds=3, warmup=2)
    result = benchmark.measure_steps(benchmark.set_up(config))
    assert [step for step, _, _ in order] == [step for step in range(1, 6) for _ in range(3)]
    assert {name for _, name, _ in order} == {"bfloat16", "tensorwise", "delayed"}
    assert {order[3 * step][1] for step in range(3)} == {"bfloat16", "tensorwise", "delayed"}
    assert {step for step, _, measures in order if measures} == {2}
    assert [row["timing"]["samples"] for row in result["rows"]] == [3, 3, 3]


def test_the_command_takes_the_trainers_flags_and_saves_rows_and_ratios(text_folder, tmp_path, run_quaver, monkeypatch):
    monkeypatch.chdir(tmp_path)  # it needs no config file of a checkout
    sections = make_sections(text_folder).items()
    flags = [f"--{section}.{key}={value}" for section, settings in sections for key, value in settings.items()]
    printed = run_quaver("bench", "train", *flags, "--recipes", "rowwise", "--rounds", 2, "--warmup", 2)
    assert "64 tokens a step" in printed
    saved = json.loads((tmp_path / "runs/bench-train.json").read_text())
    assert saved["environment"]["threads"] == torch.get_num_threads()
    plain, float8 = saved["rows"]
    assert (plain["precision"], float8["precision"]) == ("bfloat16", "rowwise")
    assert saved["step_tokens"] == 64
    assert saved["config"]["model"]["dim"] == 32
    for row in (plain, float8):
        median_us = row["timing"]["median_us"]
        assert row["tokens_per_s"] == pytest.approx(64 / median_us * 1e6)
        assert row["time_over_high_precision"] == median_us / plain["timing"]["median_us"]
        assert row["peak_over_high_precision"] == row["peak_bytes"] / plain["peak_bytes"]


def test_a_step_that_is_not_finite_keeps_the_rows_of_the_steps_before(text_folder, tmp_path, capsys, monkeypatch):
    train_step = TrainedModel.train_step

    def train_until_step_5(self, step, batches, **options):
        if step == 5:
            raise NonFiniteError("the loss of step 5 is nan")
        return train_step(self, step, batches, **options)

    monkeypatch.setattr(TrainedModel, "train_step", train_until_step_5)
    sections, output = make_sections(text_folder).items(), tmp_path / "train.json"
    flags = [f"--{section}.{key}={value}" for section, settings in sections for key, value in settings.items()]
    words = ["bench", "train", *flags, "--recipes", "rowwise", "--rounds", "4", "--warmup", "2"]
    assert main([*words, "--output", str(output)]) == 3
    assert capsys.readouterr().err == "quaver: error: the loss of step 5 is nan\n"
    saved = json.loads(output.read_text())
    assert (saved["complete"], [row["timing"]["samples"] for row in saved["rows"]]) == (False, [2, 2])

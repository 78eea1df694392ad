"""Tests that a run records an alarm, stops with a checkpoint, or gives a linear another recipe."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from quaver import Float8Linear
from quaver.lab.cli import main
from quaver.lab.cli import train as train_cli
from quaver.lab.model import flops as flops_module
from quaver.lab.model.flops import count_flops_per_token_by_precision
from quaver.lab.runs.checkpoint_folder import read_record, write_record
from quaver.lab.runs.errors import CheckpointError
from quaver.lab.settings import Float8, TrainConfig
from quaver.lab.settings.config_file import load_config
from quaver.lab.terminal.console import make_stdout_console
from quaver.lab.trainer.alarms import RunAlarms
from quaver.lab.trainer.display import Display
from quaver.lab.trainer.nonfinite import NonFiniteError
from quaver.lab.trainer.recipe_change import change_recipes
from quaver.lab.trainer.train import train
from quaver.lab.trainer.training_run import TrainingRun, build_run, prepare_run
from quaver.numerics.alarms import Alarm
from quaver.numerics.record import Record
from tests.lab.trainer.runs import with_settings
from tests.steps import assert_same

LAYER = "model.layers.0.mlp.up_proj"


@pytest.fixture
def watched_config(tiny_config: TrainConfig) -> TrainConfig:
    """Return a config of one layer: the samples of each linear take the time."""
    float8, numerics = vars(Float8()), {"every": 1, "extras_every": 1}
    return with_settings(tiny_config, model={"n_layers": 1}, training={"steps": 3}, float8=float8, numerics=numerics)


def add_outlier(run: TrainingRun, where: Any = (..., 5)) -> TrainingRun:
    """Multiply one channel of a linear's input by 2^20, so that the others become zero."""

    def hook(module: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        scale = torch.ones_like(inputs[0])
        scale[where] = 2.0**20
        return (inputs[0] * scale,)

    run.models[0].model.get_submodule(LAYER).register_forward_pre_hook(hook)
    return run


def read_alarms(run: TrainingRun) -> list[dict]:
    return Record.read(run.folder.path).alarms


def test_alarms_are_recorded_with_remedies_and_the_run_goes_on(watched_config):
    config = with_settings(watched_config, training={"steps": 2}, numerics={"extras_every": 1000})
    run = add_outlier(prepare_run(config), (0, 0, 5))
    assert train(run)["status"] == "finished"
    alarm = next(alarm for alarm in read_alarms(run) if alarm["rule"] in ("underflow", "sqnr"))
    assert (alarm["layer"], alarm["operand"], alarm["step"]) == (LAYER, "input", 2)
    remedies = {remedy["recipe"]: remedy for remedy in alarm["remedies"]}
    assert remedies["rowwise"]["gain_db"] > 20  # one row of 64 is lost
    assert re.search(r"rowwise,? .*gives? \d+\.\d dB", alarm["message"])
    assert alarm["remedies"][-1]["recipe"] == "high precision"
    assert 0 < alarm["remedies"][-1]["flops_share"] < 1


def test_stop_ends_the_run_with_a_checkpoint_and_exit_code_5(watched_config, monkeypatch):
    config = with_settings(watched_config, numerics={"on_alarm": "stop"}, checkpoint={"interval": 100})
    run = add_outlier(prepare_run(config))
    summary = train(run)
    assert (summary["status"], summary["steps"]) == ("alarm", 2)
    assert f"{LAYER} input" in summary["reason"]
    assert run.checkpoints.folder.list_steps() == [2]
    monkeypatch.setattr(train_cli, "build_run", lambda *built: add_outlier(build_run(*built)))
    argv = ["train", "--resume", str(run.folder.path), "--training.steps=8"]
    assert main(argv) == 5  # it recalls nothing, and stops again


@pytest.mark.parametrize("recipe", ["high_precision", pytest.param("mxfp8", marks=pytest.mark.nightly)])
def test_a_fallback_changes_one_linear_for_the_rest_of_the_run_and_after_a_resume(watched_config, recipe, monkeypatch):
    monkeypatch.setattr(flops_module, "has_bfloat16_units", lambda device: False)
    config = with_settings(watched_config, numerics={"on_alarm": "fallback", "fallback_recipe": recipe})
    run = add_outlier(prepare_run(config))
    assert train(run)["status"] == "finished"
    flops = count_flops_per_token_by_precision(
        run.models[0].model, config.model, config.training.seq_len, "bfloat16", run.device
    )
    assert run.models[0].flops_per_token == flops
    record = read_record(run.checkpoints.folder.get_path(3))
    assert record["config"]["float8"]["layer_recipes"] == [f"{LAYER}={recipe}"]
    headers = Record.read(run.folder.path).headers
    assert [header["step"] for header in headers] == [1, 3]
    recipes = [{tensor["recipe"] for tensor in header["tensors"] if tensor["layer"] == LAYER} for header in headers]
    assert recipes == [{"tensorwise"}, set() if recipe == "high_precision" else {recipe}]
    again = load_config(run.folder.path / "config.toml")
    resumed = prepare_run(with_settings(again, checkpoint={"resume": "must"}, training={"steps": 4}))
    linear = resumed.models[0].model.get_submodule(LAYER)
    resumed_recipe = linear.config.recipe_name.value if isinstance(linear, Float8Linear) else "high_precision"
    assert resumed_recipe == recipe
    assert resumed.models[0].model.model.layers[0].post_attention_layernorm.feeds_float8 == (recipe == "mxfp8")
    assert resumed.models[0].flops_per_token == flops
    assert train(resumed)["status"] == "finished"


def test_experts_fall_back_once_for_the_alarms_of_both_weights(watched_config):
    model = {"n_experts": 2, "top_k": 1}
    run = prepare_run(with_settings(watched_config, model=model, numerics={"on_alarm": "fallback"}))
    display, experts = Display(make_stdout_console(quiet=True), 1, False), "model.layers.0.mlp.experts"
    alarms = RunAlarms(run.config.numerics, display, run.models[0].model, set())
    for weight, fallbacks in (("gate_up_proj", {experts: "high_precision"}), ("down_proj", {})):
        alarms.handle_event(Alarm(1, 1, "sqnr", f"{experts}.{weight}", "input", None, 0.0, 1.0, "", ()))
        assert alarms.pop_fallbacks() == fallbacks


def test_a_run_resumed_at_or_before_a_fallback_takes_the_same_steps(watched_config):
    """From step 1 it falls back again, in its step; from step 2 it begins with that recipe, weights and moments."""
    checkpoint = {"interval": 1, "keep_latest_k": 0}
    config = with_settings(watched_config, numerics={"on_alarm": "fallback"}, checkpoint=checkpoint)
    train(run := add_outlier(prepare_run(config)))
    assert {int(state["step"]) for state in run.models[0].optimizer.state.values()} == {3}
    config = load_config(run.folder.path / "config.toml")
    for step, kind in ((2, nn.Linear), (1, Float8Linear)):  # which discards the later ones
        resumed = add_outlier(prepare_run(with_settings(config, checkpoint={"resume": "must", "load_step": step})))
        assert type(resumed.models[0].model.get_submodule(LAYER)) is kind
        train(resumed)
        assert resumed.progress.fallbacks == {LAYER: "high_precision"}
        assert_same(dict(resumed.models[0].model.named_parameters()), dict(run.models[0].model.named_parameters()))


def test_a_resumed_run_raises_no_alarm_that_lasts_again_unless_it_was_stopped(watched_config):
    run = add_outlier(prepare_run(with_settings(watched_config, training={"steps": 2})))
    train(run)
    before = read_alarms(run)
    config = with_settings(load_config(run.folder.path / "config.toml"), training={"steps": 5})
    train(add_outlier(prepare_run(with_settings(config, checkpoint={"resume": "must"}))))
    assert before
    assert read_alarms(run) == before
    stops = with_settings(config, checkpoint={"resume": "must", "load_step": 2}, numerics={"on_alarm": "stop"})
    assert train(add_outlier(prepare_run(stops)))["status"] == "alarm"


def test_fallbacks_that_a_resume_cannot_have_are_refused(watched_config):
    run = prepare_run(with_settings(watched_config, training={"steps": 1}, numerics={"every": 0, "extras_every": 20}))
    train(run)
    checkpoint = run.checkpoints.folder.get_path(1)
    record = read_record(checkpoint)
    config = with_settings(
        load_config(run.folder.path / "config.toml"), checkpoint={"resume": "must"}, training={"steps": 2}
    )
    for layer, recipe, message in (
        ("model.layers.7.up_proj", "rowwise", "'model.layers.7.up_proj' is neither a linear nor an expert"),
        (LAYER, "int8", "unknown recipe 'int8'"),
    ):
        write_record(checkpoint, record | {"progress": record["progress"] | {"fallbacks": {layer: recipe}}})
        with pytest.raises(CheckpointError, match=f"the run fell back in {layer}: .*{message}"):
            prepare_run(config)


def test_a_resume_without_float8_notes_the_fallbacks_that_it_leaves(watched_config):
    numerics = {"every": 0, "extras_every": 20}
    run = prepare_run(with_settings(watched_config, training={"steps": 1}, numerics=numerics, job={"compare": True}))
    train(run)
    checkpoint = run.checkpoints.folder.get_path(1)
    record = read_record(checkpoint)
    write_record(checkpoint, record | {"progress": record["progress"] | {"fallbacks": {LAYER: "rowwise"}}})
    config = with_settings(
        load_config(run.folder.path / "config.toml"), checkpoint={"resume": "must"}, training={"steps": 2}
    )
    resumed = prepare_run(with_settings(config, job={"compare": False}, float8={"enable_float8_linear": False}))
    assert resumed.notes == [f"the run has no float8, so {LAYER} has no recipe to fall back to"]


def test_tensor_parallel_linears_cannot_fall_back(watched_config):
    run = prepare_run(watched_config)
    (trained,) = run.models
    trained.config = with_settings(trained.config, parallelism={"tensor_parallel_degree": 2})
    with pytest.raises(ValueError, match="float8.layer_recipes must be empty with parallelism.tensor_parallel_degree"):
        change_recipes(trained, {LAYER: "high_precision"})


def test_the_samples_before_a_nan_are_kept(watched_config, before_each_step):
    run = prepare_run(with_settings(watched_config, training={"steps": 2}))
    weight = run.models[0].model.get_submodule(LAYER).weight.data
    before_each_step(lambda model, step: weight[0, 0].fill_(torch.nan) if step == 2 else None)
    with pytest.raises(NonFiniteError, match=f"step 2 has .* first in weight of {LAYER}"):
        train(run)
    record = Record.read(run.folder.post_mortem_path)
    assert record.steps.tolist() == [1, 2]
    (alarm,) = record.alarms
    assert (alarm["rule"], alarm["layer"], alarm["operand"]) == ("nonfinite", LAYER, "weight")

"""Compares steps, validations and blocks in high precision in a float8 run with the bfloat16 baseline, bit for bit."""

import copy
import json
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from quaver import Float8Linear
from quaver.conversion.high_precision import iter_float8_modules
from quaver.lab.model.float8 import convert_model, in_high_precision
from quaver.lab.model.llama import Llama
from quaver.lab.model.parallelize import parallelize
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.settings import Float8, Model, TrainConfig, Validation
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.lab.trainer.training_run import TrainingRun, prepare_run
from tests.lab.trainer.runs import read_losses, read_steps, run_to_end, with_settings
from tests.steps import assert_same


def set_float8(config: TrainConfig, name: str = "run", **settings: Any) -> TrainConfig:
    return replace(with_settings(config, job={"name": name}), float8=Float8(**settings))


def read_records(run: TrainingRun, recipe: str = "tensorwise") -> list[dict[str, Any]]:
    return [record for record in read_json_lines(run.folder.metrics_path) if record["model"] == recipe]


def read_conversion(run: TrainingRun) -> list[dict[str, Any]]:
    return json.loads((run.folder.path / "conversion_report.json").read_text())["layers"]


def list_converted(run: TrainingRun) -> set[str]:
    return {layer["name"] for layer in read_conversion(run) if layer["converted"]}


def train_step(run: TrainingRun, model: TrainedModel, number: int) -> tuple[float, float]:
    consumed = number * run.config.training.step_batch_size
    result = model.train_step(number, run.data.make_step_batches(run.config.training, consumed))
    return result.loss, result.grad_norm


def copy_state(source: TrainedModel, target: TrainedModel) -> None:
    target.model.load_state_dict(source.model.state_dict())
    target.optimizer.load_state_dict(copy.deepcopy(source.optimizer.state_dict()))  # torch would share the tensors


@pytest.mark.parametrize("recipe", ["rowwise_with_gw_hp", "delayed"])
def test_validation_and_a_tail_step_in_high_precision_are_those_of_the_baseline(tiny_float8_config, recipe):
    accumulating = with_settings(tiny_float8_config, training={"global_batch_size": 4})
    config = replace(accumulating, validation=Validation(freq=2, steps=2, high_precision_too=True))
    run = prepare_run(set_float8(config, recipe_name=recipe, high_precision_schedule=("all: last 1 steps",)))
    float8, baseline = run.models
    for number in (1, 2, 3):
        train_step(run, float8, number)
    assert float8.step_label == recipe
    copy_state(float8, baseline)
    scales = copy.deepcopy(float8.scaling.state_dict())

    batches = run.data.make_validation_batches(config.training, config.validation)
    result, expected = float8.validate(batches), baseline.validate(batches)
    assert result.loss != result.loss_hp
    assert result.loss_hp == expected.loss == expected.loss_hp
    assert isinstance(float8.model.model.layers[0].mlp.up_proj, Float8Linear)

    assert train_step(run, float8, 4) == train_step(run, baseline, 4)
    assert float8.step_label == "bfloat16"
    assert_same(list(float8.model.parameters()), list(baseline.model.parameters()))
    assert_same(float8.scaling.state_dict(), scales)


def test_the_records_say_which_precision_a_step_had(tiny_float8_config):
    run = run_to_end(set_float8(tiny_float8_config, high_precision_schedule=("all: last 1 steps",)))
    plain = run_to_end(set_float8(tiny_float8_config, "plain"))
    *losses, last = read_losses(run.folder.metrics_path, "tensorwise")
    *plain_losses, plain_last = read_losses(plain.folder.metrics_path, "tensorwise")
    assert losses == plain_losses
    assert last != plain_last
    steps = read_steps(run.folder.metrics_path, "tensorwise")
    assert [record["step"] for record in steps if record.get("measures_memory")] == [2]
    precisions = [(record["step"], record["precision"]) for record in steps]
    assert precisions == [*((step, "tensorwise") for step in (1, 2, 3)), (4, "bfloat16")]
    validations = [record for record in read_records(run) if record["kind"] == "validation"]
    assert [record["precision"] for record in validations] == ["tensorwise", "bfloat16"]
    assert {record["precision"] for record in read_records(run, "bfloat16")} == {"bfloat16"}
    assert [len(model.step_seconds) for model in run.models] == [3, 4]  # bfloat16 steps do not count as tensorwise


def test_delayed_scaling_records_nothing_for_the_tail_and_does_not_warn(tiny_float8_config):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that of a missing sync
        schedule = ("all: last 2 steps",)
        run = run_to_end(set_float8(tiny_float8_config, recipe_name="delayed", high_precision_schedule=schedule))
    saturation = ["saturated" in " ".join(record) for record in read_steps(run.folder.metrics_path, "delayed")]
    assert saturation == [True, True, False, False]
    assert [line["step"] for line in read_json_lines(run.folder.float8_scales_path)] == [1, 2]


def test_both_validation_losses_are_kept(tiny_float8_config):
    config = replace(tiny_float8_config, validation=Validation(freq=2, steps=2, high_precision_too=True))
    run = run_to_end(set_float8(config))
    summary = json.loads((run.folder.path / "summary.json").read_text())["models"]["tensorwise"]
    last = read_records(run)[-1]
    assert last["validation_loss"] == summary["validation_loss"] != summary["validation_loss_hp"]
    assert last["validation_loss_hp"] == summary["validation_loss_hp"]
    plain = run_to_end(set_float8(tiny_float8_config, "plain"))  # validation changes no training step
    assert read_losses(run.folder.metrics_path, "tensorwise") == read_losses(plain.folder.metrics_path, "tensorwise")
    assert "validation_loss_hp" not in read_records(plain)[-1]


def test_an_error_brings_float8_back(tiny_float8_config):
    model = prepare_run(tiny_float8_config).models[0].model
    with pytest.raises(RuntimeError, match="inside"), in_high_precision(model):
        assert {module.config.short_str().count("dis") for _, module in iter_float8_modules(model)} == {3}
        raise RuntimeError("inside")
    assert [module.config.high_precision_matmuls for _, module in iter_float8_modules(model)] == [()] * 14


def test_a_linear_that_fully_shard_wraps_leaves_float8_and_returns(one_rank, tiny_float8_config):
    run = prepare_run(set_float8(tiny_float8_config, filter_fqns=()))
    batch = run.data.make_step_batches(run.config.training, 0)[0]
    float8, baseline = run.models
    for model in run.models:
        parallelize(model.model, run.config, init_device_mesh("cpu", (1,), mesh_dim_names=("dp_shard",)))
    wrapped = type(float8.model.lm_head)
    assert wrapped is not Float8Linear
    with torch.no_grad():
        expected = baseline.compute_loss(batch)
        with in_high_precision(float8.model):
            assert torch.equal(float8.compute_loss(batch), expected)
        assert not torch.equal(float8.compute_loss(batch), expected)
    assert type(float8.model.lm_head) is wrapped


def test_first_and_last_blocks_can_stay_out_of_float8(tiny_float8_config):
    deep = with_settings(tiny_float8_config, model={"n_layers": 4})
    run = prepare_run(set_float8(deep, skip_first_layers=1, skip_last_layers=2, filter_fqns=("lm_head", "o_proj")))
    model = run.models[0].model
    in_float8 = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    block = {f"model.layers.1.{name}" for name, m in model.model.layers[1].named_modules() if isinstance(m, nn.Linear)}
    assert in_float8 == list_converted(run) == block - {"model.layers.1.self_attn.o_proj"}
    reasons = {layer["name"]: layer["reason"] for layer in read_conversion(run)}
    assert reasons["model.layers.0.mlp.up_proj"] == "float8.skip_first_layers = 1"
    for block in (2, 3):
        assert reasons[f"model.layers.{block}.mlp.up_proj"] == "float8.skip_last_layers = 2"
    assert reasons["model.layers.0.self_attn.o_proj"] == "float8.filter_fqns has 'o_proj'"


def test_every_block_but_the_output_projection_can_stay_out(tiny_float8_config):
    run = prepare_run(set_float8(tiny_float8_config, skip_first_layers=2, filter_fqns=()))
    assert list_converted(run) == {"lm_head"}
    with pytest.raises(ValueError, match=r"nothing to convert: .*float8.skip_first_layers = 2"):
        prepare_run(set_float8(tiny_float8_config, "none", skip_first_layers=2))


def test_the_trainer_converts_by_layer():
    name = "model.layers.1.mlp.down_proj"
    config = Float8(layer_recipes=(f"{name}=mxfp8", "model.layers.0.mlp.up_proj=high_precision"))
    with torch.device("meta"):
        llama = Llama(Model())
    convert_model(llama, config, tokens=64, device=torch.device("cpu"))
    recipes = {name: module.config.recipe_name.value for name, module in iter_float8_modules(llama)}
    assert recipes[name] == "mxfp8"
    assert recipes.keys().isdisjoint(["model.layers.0.mlp.up_proj", "lm_head"])
    assert recipes["model.layers.0.mlp.down_proj"] == "tensorwise"

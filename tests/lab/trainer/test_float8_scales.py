"""Tests runs with delayed scaling: the records of their scales, and when the scales are updated."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from quaver import DelayedScalingConfig, Float8Linear, TensorScaleReport
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.settings import Float8, LRScheduler, Metrics, TrainConfig
from quaver.lab.trainer import trained_model as trained_model_module
from quaver.lab.trainer.float8_scales import make_scales_record, summarize_saturation
from quaver.lab.trainer.memory import count_storage_bytes
from quaver.lab.trainer.nonfinite import NonFiniteError
from quaver.lab.trainer.train import train
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.lab.trainer.training_run import prepare_run
from tests.lab.trainer.runs import read_losses, read_steps, run_to_end, with_settings

NAN, INF = math.nan, math.inf
MAX = {"input": 448.0, "weight": 448.0, "grad_output": 57344.0}


@pytest.fixture
def delayed_config(tiny_config: TrainConfig) -> TrainConfig:
    return set_float8(tiny_config, recipe_name="delayed")


def set_float8(config: TrainConfig, **settings: object) -> TrainConfig:
    return replace(config, float8=Float8(**settings))


def compute_scale(amaxes: list[float], format_max: float, headroom: float) -> np.float32:
    """The rule with the maximum of a history: divided in float64, rounded once."""
    return np.float32(np.float64(format_max) / headroom / np.float64(np.float32(max(amaxes))))


def test_each_line_has_the_scale_that_the_lines_before_ask_for(delayed_config):
    remembered, headroom = 3, 1.5
    settings = {"delayed_history_len": remembered, "delayed_headroom": headroom}
    config = set_float8(with_settings(delayed_config, training={"steps": 20}), recipe_name="delayed", **settings)
    config = replace(config, lr_scheduler=LRScheduler(warmup_steps=2))
    run = run_to_end(config)
    lines = read_json_lines(run.folder.float8_scales_path)
    assert [(line["step"], line["model"]) for line in lines] == [(step, "delayed") for step in range(1, 21)]
    losses = read_losses(run.folder.metrics_path)
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 0.5
    for name in ("model.layers.1.mlp.down_proj.input", "model.layers.0.self_attn.o_proj.grad_output"):
        amaxes, format_max = [line["amax"][name] for line in lines], MAX[name.split(".")[-1]]
        assert len(set(amaxes)) > 10  # the rule has something to follow
        for index, line in enumerate(lines[1:], 1):
            expected = compute_scale(amaxes[max(0, index - remembered) : index], format_max, headroom)
            assert np.float32(line["quant_scale"][name]) == expected
            ratio = float(expected) * amaxes[index] / format_max
            assert line["used_over_ideal"][name] == pytest.approx(ratio, rel=1e-4)


def test_the_first_step_is_dynamic_and_all_of_its_tensors_are_there(delayed_config):
    run = run_to_end(delayed_config)
    first, *later = read_json_lines(run.folder.float8_scales_path)
    # Of each block: 4 inputs (q, k, v and gate, up share theirs), 7 weights, 7 gradients.
    assert len(first["amax"]) == len(first["quant_scale"]) == 2 * 18
    assert first["dynamic"] == list(first["amax"]) == [tensor.name for tensor in run.models[0].scaling.report()]
    assert set(first["used_over_ideal"].values()) == {1.0}
    assert first["saturated"] == {}
    assert all(line["dynamic"] == [] for line in later)
    assert all(line["nonfinite"] == [] for line in (first, *later))


def test_metrics_count_what_the_lines_list(delayed_config):
    """Gradients that shrink and grow saturate."""
    config = set_float8(delayed_config, recipe_name="delayed", delayed_scale_fn_name="most_recent")
    run = run_to_end(with_settings(config, training={"steps": 12}))
    steps = read_steps(run.folder.metrics_path)
    for record, line in zip(steps, read_json_lines(run.folder.float8_scales_path), strict=True):
        assert record["float8_saturated"] == sum(line["saturated"].values())
        assert record["float8_saturated_tensors"] == len(line["saturated"])
        assert all(line["used_over_ideal"][name] > 1 for name in line["saturated"])
    assert sum(record["float8_saturated_tensors"] for record in steps) > 5


@pytest.mark.parametrize(("freq", "steps"), [(3, [3]), (0, None)])
def test_lines_are_written_as_often_as_asked(delayed_config, freq, steps):
    run = run_to_end(replace(delayed_config, metrics=Metrics(float8_scales_freq=freq)))
    if steps is None:
        assert not run.folder.float8_scales_path.exists()
    else:
        assert [line["step"] for line in read_json_lines(run.folder.float8_scales_path)] == steps
    assert sum("float8_saturated" in record for record in read_json_lines(run.folder.metrics_path)) == 4


def test_scales_are_synced_once_a_step_whatever_runs_between(delayed_config, monkeypatch, recwarn):
    synced, name = [], "sync_float8_amax_and_scale_history"
    sync = getattr(trained_model_module, name)
    monkeypatch.setattr(trained_model_module, name, lambda model: (synced.append(model), sync(model)))
    batches = {"local_batch_size": 2, "global_batch_size": 4}
    run = run_to_end(with_settings(delayed_config, training=batches, job={"compare": True}))
    assert synced == [run.models[0].model] * 4
    assert {line["model"] for line in read_json_lines(run.folder.float8_scales_path)} == {"delayed"}  # not the baseline
    for record in read_json_lines(run.folder.metrics_path):
        assert ("float8_saturated" in record) == (record["model"] == "delayed" and record["kind"] == "step")
    assert not [warning for warning in recwarn if "sync_float8_amax_and_scale_history" in str(warning.message)]


def test_validation_moves_no_scale(delayed_config):
    losses = []
    for freq in (1, 100):
        run = run_to_end(with_settings(delayed_config, job={"name": f"every {freq}"}, validation={"freq": freq}))
        losses.append(read_losses(run.folder.metrics_path))
    assert losses[0] == losses[1]


def test_a_nonfinite_step_is_repeated_with_the_scales_it_had_and_leaves_its_lines(delayed_config, before_each_step):
    run, scales = prepare_run(delayed_config), []

    def break_the_third(model: TrainedModel, step: int) -> None:
        if step == 3:
            model.model.lm_head.weight.data[0, 0] = torch.inf
        scales.append(copy_scales(model))

    before_each_step(break_the_third)
    with pytest.raises(NonFiniteError, match="delayed: step 3 .*first in weight of lm_head"):
        train(run)
    assert torch.equal(copy_scales(run.models[0]), scales[2])
    assert [line["step"] for line in read_json_lines(run.folder.float8_scales_path)] == [1, 2]


def copy_scales(model: TrainedModel) -> torch.Tensor:
    state = model.scaling.state_dict()
    return torch.stack([value for name, value in state.items() if name.endswith("quant_scale")])


def test_persistent_scales_are_resident_memory(delayed_config, tiny_config):
    def count_resident_bytes(config: TrainConfig) -> int:
        return count_storage_bytes(prepare_run(config).models[0].iter_resident_tensors())

    plain = count_resident_bytes(with_settings(tiny_config, job={"name": "plain"}))
    tensors = 2 * 18
    for history_len in (16, 256):
        config = with_settings(delayed_config, job={"name": f"{history_len}"})
        config = set_float8(config, recipe_name="delayed", delayed_history_len=history_len)
        growth = count_resident_bytes(config) - plain
        assert tensors * (1 + history_len) * 4 <= growth <= tensors * (16 + history_len) * 4


def test_settings_reach_the_linears(delayed_config):
    delayed = {"history_len": 4, "scale_fn_name": "most_recent", "margin": 1, "headroom": 1.25}
    delayed |= {"nonfinite_amax": "keep_scale"}
    settings = {f"delayed_{name}": value for name, value in delayed.items()}
    config = set_float8(delayed_config, recipe_name="delayed", **settings)
    linears = [module for module in prepare_run(config).models[0].model.modules() if isinstance(module, Float8Linear)]
    for linear in linears:
        assert linear.config.delayed_scaling_config == DelayedScalingConfig(**delayed)
    assert Float8().make_delayed_scaling_config() == DelayedScalingConfig()


def test_a_record_has_only_numbers_that_json_has():
    report = [
        TensorScaleReport("a", 2.0, False, 100.0, 0.4464285714285714, 0),
        TensorScaleReport("not cast", 2.0, False, -1.0, NAN, 0),
        TensorScaleReport("cold and not cast", NAN, True, -1.0, NAN, 0),
        TensorScaleReport("zeros", 4.0, False, 0.0, NAN, 0),
        TensorScaleReport("cold zeros", NAN, True, 0.0, NAN, 0),
        TensorScaleReport("inf", 8.0, False, INF, NAN, 3),
        TensorScaleReport("nan", 8.0, False, NAN, NAN, 0),
        TensorScaleReport("full", 1 / 3, True, 1344.0, 1.0, 0),
    ]
    assert json.loads(json.dumps(make_scales_record(7, "delayed", report), allow_nan=False)) == {
        "step": 7,
        "model": "delayed",
        "quant_scale": {"a": 2.0, "zeros": 4.0, "inf": 8.0, "nan": 8.0, "full": 0.333333333},
        "amax": {"a": 100.0, "zeros": 0.0, "cold zeros": 0.0, "full": 1344.0},
        "used_over_ideal": {"a": 0.446428571, "full": 1.0},
        "saturated": {"inf": 3},
        "dynamic": ["cold zeros", "full"],
        "nonfinite": ["inf", "nan"],
    }
    assert summarize_saturation(report) == {"float8_saturated": 3, "float8_saturated_tensors": 1}
    assert summarize_saturation([]) == {}

"""Tests quaver.compat.delayed_buffers, which loads checkpoints of torchao 0.9's delayed scaling."""

import copy

import pytest
import torch
from torch import nn

from quaver import convert_to_float8_training, float8_scaling_state
from quaver.compat.delayed_buffers import load_delayed_buffers
from tests.library.conversion.delayed import (
    copy_scales,
    find_report,
    make_delayed_config,
    make_linear,
    make_old_checkpoint,
    read_scale,
    step,
)
from tests.steps import assert_same

AMAXES = {"input": [3.0, 7.0, 2.0], "weight": [0.25], "grad_output": [1.0, 0.5]}


@pytest.mark.parametrize("options", [{}, {"short": True, "shape": ()}], ids=["torchao", "float8_experimental"])
def test_buffers_become_the_scales_of_the_model(options):
    module = make_linear(bias=True)
    old = make_old_checkpoint(module, AMAXES, **options)
    keys = list(old)
    assert not any(module.load_state_dict(load_delayed_buffers(module, old), strict=True))
    assert list(old) == keys
    assert read_scale(module, "input") == 448 / 7
    assert read_scale(module, "weight") == 448 / 0.25
    assert read_scale(module, "grad_output") == 57344
    assert copy_scales(module)["input.amax_history"].tolist() == [0.0] * 13 + [2.0, 7.0, 3.0]
    step(module, torch.full((4, 64), 0.1))
    assert find_report(module, "input").quant_scale == 448 / 7
    assert not find_report(module, "weight").is_dynamic
    assert copy_scales(module)["input.amax_history"].tolist()[-4:] == pytest.approx([2.0, 7.0, 3.0, 0.1])


@pytest.mark.parametrize("prefix", ["", "_orig_mod."])
def test_buffers_of_several_linears_are_loaded(prefix, caplog):
    source = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    model = convert_to_float8_training(copy.deepcopy(source), config=make_delayed_config(history_len=2))
    old = {}
    for index, linear in enumerate(source):
        old |= make_old_checkpoint(linear, AMAXES if index else {"weight": [float("nan")]}, prefix=f"{prefix}{index}.")
    target = torch.compile(model) if prefix else model
    target.load_state_dict(load_delayed_buffers(target, old))
    assert caplog.messages == []
    assert copy_scales(model)["1.input.amax_history"].tolist() == [7.0, 3.0]
    assert not any(value.any() for name, value in copy_scales(model).items() if name.startswith("0."))  # never cast


def test_a_model_that_scales_dynamically_drops_the_buffers_and_says_so(caplog):
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32)))
    old = {"0.fp8_other": torch.zeros(1)}
    for index, linear in enumerate(model):
        old |= make_old_checkpoint(linear, AMAXES, prefix=f"{index}.")
    rest = load_delayed_buffers(model, old)
    assert rest.keys() == model.state_dict().keys() | {"0.fp8_other"}
    assert [record.message for record in caplog.records] == [
        "dropped the fp8_* buffers of a checkpoint of delayed scaling: the model has no scale for them"
    ]


def test_a_checkpoint_without_buffers_changes_no_scale():
    module = make_linear()
    step(module, torch.randn(4, 64))
    before = copy_scales(module)
    assert load_delayed_buffers(module, module.state_dict()).keys() == module.state_dict().keys()
    assert_same(before, copy_scales(module))


@pytest.mark.parametrize(("history", "message"), [(torch.zeros(0), r"\[0\] with"), ([7.0], r"\[7.0\], tensor")])
def test_buffers_of_another_shape_are_refused(history, message):
    old = make_old_checkpoint(make_linear(), AMAXES) | {"fp8_amax_history_input": history}
    with pytest.raises(ValueError, match=f"fp8_amax_history_input: expected a vector of amaxes .*, got {message}"):
        load_delayed_buffers(make_linear(), old)


def test_buffers_that_nobody_took_are_unexpected_keys():
    module = make_linear()
    with pytest.raises(RuntimeError, match="Unexpected key.*fp8_amax_input"):
        module.load_state_dict(make_old_checkpoint(module, AMAXES))
    assert not any(value.any() for value in float8_scaling_state(module).state_dict().values())

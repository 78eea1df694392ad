"""Tests the monitor on static scales, primary weights, and a frozen base with adapters."""

import pytest
import torch
from torch import nn

from quaver import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training, use_float8_primary_weights
from quaver.integrations.transformers import prepare_model_for_float8
from quaver.numerics.alarms import Alarms
from quaver.numerics.monitoring import monitor
from tests.reference import lowest_sqnr_db
from tests.steps import draw, train

SCALE = 64.0
BATCHES = draw(4, 32, 48).unbind()


def make_model(config):
    torch.manual_seed(0)
    return convert_to_float8_training(nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32)), config=config)


def train_and_monitor(model, optimizer, batches=BATCHES):
    """Return the losses, and the lines of the record."""
    lines = []
    with monitor(model, every=1, sink=lines.append):
        losses = train(model, optimizer, batches)
    return losses, lines


def make_sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def make_static_config():
    cast = CastConfig(scaling_type=ScalingType.STATIC, static_quant_scale=SCALE)
    gradient = CastConfig(scaling_type=ScalingType.STATIC, static_quant_scale=2.0**20)
    return Float8LinearConfig(cast_config_input=cast, cast_config_weight=cast, cast_config_grad_output=gradient)


def test_static_scales_are_sampled_and_alarm_only_where_clipping_costs_more_than_rounding():
    model = make_model(make_static_config())
    losses, (header, *samples) = train_and_monitor(model, make_sgd(model))
    model = make_model(make_static_config())
    assert losses == train(model, make_sgd(model), BATCHES)
    assert {tensor["scaling"] for tensor in header["tensors"] if tensor["cast"] != "result"} == {"static"}
    index = [(tensor["layer"], tensor["operand"]) for tensor in header["tensors"]].index(("0", "input"))
    assert {sample["scale_max"][index] for sample in samples} == {1 / SCALE}
    assert {sample["saturated"][index] for sample in samples} == {0.0}

    def find_alarms(spike):
        """Return the rules of alarms where one element of a batch is `spike`; the scale holds numbers up to 7."""
        batches, alarms = [batch.clone() for batch in BATCHES], Alarms()
        for batch in batches:
            batch[0, 0] = spike
        model = make_model(make_static_config())
        _, (header, *samples) = train_and_monitor(model, make_sgd(model), batches)
        for sample in samples:
            assert sample["saturated"][index] == pytest.approx(1 / BATCHES[0].numel(), rel=1e-5)
        return {event.rule for sample in samples for event in alarms.update(header, sample)}

    assert find_alarms(7.5) == set()
    assert find_alarms(70.0) == {"saturation"}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_primary_weights_have_scales_and_their_runs_are_the_same(recipe):
    model = make_model(recipe)
    losses, (header, *samples) = train_and_monitor(model, use_float8_primary_weights(model, make_sgd(model)))
    model = make_model(recipe)
    assert losses == train(model, use_float8_primary_weights(model, make_sgd(model)), BATCHES)
    for tensor, scale, sqnr_db in zip(header["tensors"], samples[-1]["scale_max"], samples[-1]["sqnr_db"], strict=True):
        if tensor["operand"] == "weight":
            assert scale > 0
            assert sqnr_db is None
        elif tensor["operand"] == "input":
            assert sqnr_db > lowest_sqnr_db(3)
    alarms = Alarms()
    assert [event for sample in samples for event in alarms.update(header, sample)] == []


def test_a_frozen_base_with_adapters_of_peft_is_monitored():
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    def make_adapted():
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **shape))
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        return prepare_model_for_float8(model, "rowwise")

    def train_steps(model):
        batches = [torch.arange(32).view(2, 16) + step for step in range(3)]
        return train(model, make_sgd(model), batches, call=lambda tokens: model(input_ids=tokens).logits)

    model, lines = make_adapted(), []
    with monitor(model, every=1, sink=lines.append):
        losses = train_steps(model)
    assert losses == train_steps(make_adapted())
    header, *samples = lines
    tensors = header["tensors"]
    assert {tensor["layer"].rpartition("q_proj")[2] for tensor in tensors if "q_proj" in tensor["layer"]} == {
        ".base_layer"
    }
    assert not any(tensor["operand"] == "grad_weight" for tensor in tensors)
    weights = [index for index, tensor in enumerate(tensors) if tensor["operand"] == "weight"]
    assert len({tuple(sample["rms"][index] for index in weights) for sample in samples}) == 1
    alarms = Alarms()
    assert [event for sample in samples for event in alarms.update(header, sample)] == []

"""The monitor over weights and scales of other kinds: static scales, primary weights, a frozen base with adapters."""

import pytest
import torch
from torch import nn

from quaver import CastConfig, Float8LinearConfig, ScalingType, convert_to_float8_training, use_float8_primary_weights
from quaver.integrations.transformers import prepare_model_for_float8
from quaver.numerics.alarms import Alarms
from quaver.numerics.monitoring import monitor
from tests.steps import draw, train

SCALE = 64.0
BATCHES = draw(4, 32, 48).unbind()


def make(config):
    torch.manual_seed(0)
    return convert_to_float8_training(nn.Sequential(nn.Linear(48, 64), nn.ReLU(), nn.Linear(64, 32)), config=config)


def watched(model, optimizer, batches=BATCHES):
    lines = []
    with monitor(model, every=1, sink=lines.append):
        losses = train(model, optimizer, batches)
    return losses, lines


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def static():
    cast = CastConfig(scaling_type=ScalingType.STATIC, static_quant_scale=SCALE)
    gradient = CastConfig(scaling_type=ScalingType.STATIC, static_quant_scale=2.0**20)
    return Float8LinearConfig(cast_config_input=cast, cast_config_weight=cast, cast_config_grad_output=gradient)


def test_static_scales_are_sampled_and_alarm_only_where_clipping_costs_more_than_rounding():
    model = make(static())
    losses, (header, *samples) = watched(model, sgd(model))
    model = make(static())
    assert losses == train(model, sgd(model), BATCHES)
    assert {each["scaling"] for each in header["tensors"] if each["cast"] != "result"} == {"static"}
    place = next(at for at, each in enumerate(header["tensors"]) if (each["layer"], each["operand"]) == ("0", "input"))
    assert {sample["scale_max"][place] for sample in samples} == {1 / SCALE}
    assert {sample["saturated"][place] for sample in samples} == {0.0}

    def rules(spike):
        """The alarms where one element of a batch is `spike`; 7 is the largest that the scale holds."""
        batches, alarms = [batch.clone() for batch in BATCHES], Alarms()
        for batch in batches:
            batch[0, 0] = spike
        model = make(static())
        _, (header, *samples) = watched(model, sgd(model), batches)
        assert [sample["saturated"][place] for sample in samples] == pytest.approx(
            [1 / BATCHES[0].numel()] * 4, rel=1e-5
        )
        return {event.rule for sample in samples for event in alarms.update(header, sample)}

    assert rules(7.5) == set()
    assert rules(70.0) == {"saturation"}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_primary_weights_have_scales_and_their_runs_are_the_same(recipe):
    model = make(recipe)
    losses, (header, *samples) = watched(model, use_float8_primary_weights(model, sgd(model)))
    model = make(recipe)
    assert losses == train(model, use_float8_primary_weights(model, sgd(model)), BATCHES)
    for at, each in enumerate(header["tensors"]):
        sample = samples[-1]
        if each["operand"] == "weight":
            assert sample["scale_max"][at] > 0
            assert sample["sqnr_db"][at] is None
        elif each["operand"] == "input":
            assert sample["sqnr_db"][at] > 30
    alarms = Alarms()
    assert [event for sample in samples for event in alarms.update(header, sample)] == []


def test_a_frozen_base_with_adapters_of_peft():
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

    def adapted():
        torch.manual_seed(0)
        shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **shape))
        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
        return prepare_model_for_float8(model, "rowwise")

    def steps(model):
        optimizer, losses = sgd(model), []
        for step in range(3):
            tokens = torch.arange(32).view(2, 16) + step
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, lines = adapted(), []
    with monitor(model, every=1, sink=lines.append):
        losses = steps(model)
    assert losses == steps(adapted())
    header, *samples = lines
    assert {
        each["layer"].rpartition("self_attn.q_proj")[2] for each in header["tensors"] if "q_proj" in each["layer"]
    } == {".base_layer"}
    assert not any(each["operand"] == "grad_weight" for each in header["tensors"])
    weights = [at for at, each in enumerate(header["tensors"]) if each["operand"] == "weight"]
    assert {tuple(sample["rms"][at] for at in weights) for sample in samples} == {
        tuple(samples[0]["rms"][at] for at in weights)
    }
    alarms = Alarms()
    assert [event for sample in samples for event in alarms.update(header, sample)] == []

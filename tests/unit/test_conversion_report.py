"""`conversion_report`: which weights it lists, and what it says of them."""

import copy
import functools
import json
from dataclasses import replace

import pytest
import torch
import transformers
from torch import nn

from quaver import (
    FilterDecision,
    Float8Linear,
    conversion_report,
    convert_to_float8_training,
)
from quaver.config import resolve_config
from tests.unit.test_convert import Model


def test_a_report_is_of_the_model_as_it_is():
    model = convert_to_float8_training(Model())
    assert conversion_report(model.blocks[0]).summary().startswith("2 of 2")
    model.blocks[0][0] = nn.Linear(32, 64)
    layers = {layer.name: layer for layer in conversion_report(model).layers}
    assert layers["blocks.0.0"].reason == "not converted, or new since the conversion"
    model.to_empty(device="cpu")
    assert {layer.name: layer for layer in conversion_report(copy.deepcopy(model)).layers} == layers
    by_hand = nn.Sequential(Float8Linear(16, 16, config="rowwise"), nn.Linear(16, 16))
    assert [layer.converted for layer in conversion_report(by_hand).layers] == [True, False]
    assert conversion_report(by_hand).config == str(resolve_config("rowwise"))
    by_hand[0].forward = functools.partial(Float8Linear.forward, by_hand[0])
    assert "replaced on the instance after the conversion" in conversion_report(by_hand).layers[0].reason


def llama():
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=1, vocab_size=128, tie_word_embeddings=False, **sizes)
    return transformers.LlamaForCausalLM(config)


def test_a_resized_language_model_is_reported_as_it_is():
    model = convert_to_float8_training(llama())
    assert conversion_report(model).summary().startswith("8 of 8 matmul weights in float8")
    model.resize_token_embeddings(144)
    layers = {layer.name: layer for layer in conversion_report(model).layers}
    assert layers["lm_head"].out_features == 144
    assert layers["lm_head"].converted is isinstance(model.lm_head, Float8Linear)
    convert_to_float8_training(model)
    assert conversion_report(model).summary().startswith("8 of 8 matmul weights in float8")
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 24, 16))
        self.bias = nn.Parameter(torch.randn(4, 24))
        self.norm = nn.LayerNorm((4, 16))
        self.pos_embed = nn.Parameter(torch.randn(1, 8, 16))
        self.conv = nn.Conv1d(16, 16, 3)
        self.embed = nn.Embedding(8, 16)
        self.linear = nn.Linear(16, 16)
        self.conv1d = transformers.pytorch_utils.Conv1D(24, 16)
        self.bilinear = nn.Bilinear(16, 8, 24)
        self.gru = nn.GRU(16, 8)


def test_weights_of_other_modules_are_listed():
    layers = conversion_report(convert_to_float8_training(Experts())).layers
    assert [(layer.name, layer.in_features, layer.out_features) for layer in layers if not layer.converted] == [
        ("w1", 16, 24),
        ("conv1d.weight", 24, 16),
        ("bilinear.weight", 8, 16),
        ("gru.weight_ih_l0", 16, 24),
        ("gru.weight_hh_l0", 8, 24),
    ]
    assert layers[0].reason == "3-D parameter of Experts, which is no nn.Linear"
    assert [layer.name for layer in layers if layer.converted] == ["linear"]


def test_the_row_wise_recipe_for_fsdp2_is_named(caplog):
    for recipe, named in (("rowwise", True), ("rowwise_with_gw_hp", True), ("rowwise_with_tensorwise_weight", False)):
        config = replace(resolve_config(recipe), enable_fsdp_float8_all_gather=True)
        caplog.clear()
        report = conversion_report(convert_to_float8_training(nn.Linear(16, 16), config=config))
        for text in (str(report), caplog.text, str(report.to_dict()["notes"])):
            assert ("recipe for FSDP2 is rowwise_with_tensorwise_weight" in text) is named


def test_the_report_has_every_linear_and_why():
    model = Model()
    assert convert_to_float8_training(model, module_filter_fn=lambda module, name: "blocks.1" not in name) is model
    assert {name for name, m in model.named_modules() if isinstance(m, Float8Linear)} == {
        "blocks.0.0",
        "blocks.0.2",
        "head",
    }
    report = conversion_report(model)
    reasons = {layer.name: (layer.converted, layer.reason) for layer in report.layers}
    assert reasons == {
        "blocks.0.0": (True, ""),
        "blocks.0.2": (True, ""),
        "blocks.1.0": (False, "filter"),
        "blocks.1.2": (False, "filter"),
        "scaled": (
            False,
            "subclass Scaled of nn.Linear overrides forward (include_subclasses=True replaces its forward)",
        ),
        "attention.in_proj_weight": (False, "2-D parameter of MultiheadAttention, which is no nn.Linear"),
        "attention.out_proj": (
            False,
            "its parent reads the weight without calling the module (nn.MultiheadAttention)",
        ),
        "head": (True, "weight tied to embed"),
    }
    converted, total = 2 * 32 * 64 + 32 * 48, 4 * 32 * 64 + (1 + 3 + 1) * 32 * 32 + 32 * 48
    assert report.float8_flops_fraction == pytest.approx(converted / total)
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["name"] == "blocks.0.0"
    assert "3 of 8 matmul weights in float8" in str(report)
    for name in reasons:
        assert name in str(report)


def test_convolutions_are_named_because_the_share_of_flops_leaves_them_out():
    model = convert_to_float8_training(nn.Sequential(nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16, 16)))
    assert conversion_report(model).summary() == (
        "1 of 1 matmul weights in float8, 100.0% of their FLOPs; 1 convolution in high precision"
    )


def test_a_filter_may_say_why():
    model = convert_to_float8_training(
        Model(), module_filter_fn=lambda module, name: FilterDecision(name == "head", f"because {name}")
    )
    layers = {layer.name: layer for layer in conversion_report(model).layers}
    assert layers["head"].reason == "because head; weight tied to embed"
    assert layers["blocks.0.0"].reason == "because blocks.0.0"

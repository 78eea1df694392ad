"""Tests which weights `conversion_report` lists, and what it says of them."""

import copy
import functools
import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
import transformers
from torch import nn

from quaver import (
    FilterDecision,
    Float8Linear,
    assert_float8_training,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from quaver.linear.last_run import record_run
from quaver.recipes.config import resolve_config
from quaver.runtime.slow_paths import report_slow_path
from tests.library.conversion.models import Model
from tests.mixture import make_mixture


def get_layers(report):
    return {layer.name: layer for layer in report.layers}


def test_a_report_is_of_the_model_as_it_is():
    model = convert_to_float8_training(Model())
    assert conversion_report(model.blocks[0]).summary().startswith("2 of 2")
    model.blocks[0][0] = nn.Linear(32, 64)
    layers = get_layers(conversion_report(model))
    assert layers["blocks.0.0"].reason == "not converted, or new since the conversion"
    model.to_empty(device="cpu")
    assert get_layers(conversion_report(copy.deepcopy(model))) == layers
    by_hand = nn.Sequential(Float8Linear(16, 16, config="rowwise"), nn.Linear(16, 16))
    assert [layer.converted for layer in conversion_report(by_hand).layers] == [True, False]
    assert conversion_report(by_hand).config == str(resolve_config("rowwise"))
    by_hand[0].forward = functools.partial(Float8Linear.forward, by_hand[0])
    assert "replaced on the instance: it runs in float8 only if" in conversion_report(by_hand).layers[0].reason


class NormalizedTokenMixer(nn.Module):
    """No norm, embedding or token, in spite of its name."""

    def __init__(self):
        super().__init__()
        self.token_weight = nn.Parameter(torch.randn(8, 16))


class ParallelEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.num_embeddings, self.weight = 8, nn.Parameter(torch.randn(8, 16))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 24, 16))
        self.bias = nn.Parameter(torch.randn(4, 24))
        self.norm = nn.LayerNorm((4, 16))
        self.positional_embedding, self.scale_shift_table = (nn.Parameter(torch.randn(8, 16)) for _ in range(2))
        self.conv = nn.Conv1d(16, 16, 3)
        self.embed = nn.Embedding(8, 16)
        self.linear = nn.Linear(16, 16)
        self.conv1d = transformers.pytorch_utils.Conv1D(24, 16)
        self.bilinear = nn.Bilinear(16, 8, 24)
        self.gru = nn.GRU(16, 8)
        self.mixer, self.parallel = NormalizedTokenMixer(), ParallelEmbedding()


def test_weights_of_other_modules_are_listed():
    layers = conversion_report(convert_to_float8_training(Experts())).layers
    assert [(layer.name, layer.in_features, layer.out_features) for layer in layers if not layer.converted] == [
        ("w1", 16, 24),
        ("conv1d.weight", 24, 16),
        ("bilinear.weight", 8, 16),
        ("gru.weight_ih_l0", 16, 24),
        ("gru.weight_hh_l0", 8, 24),
        ("mixer.token_weight", 16, 8),
    ]
    assert layers[0].reason.startswith("3-D parameter of Experts, which is not an nn.Linear; if these are experts, mul")
    assert [layer.name for layer in layers if layer.converted] == ["linear"]


def test_the_row_wise_recipe_for_fsdp2_is_named(caplog):
    for recipe, named in (("rowwise", True), ("rowwise_with_gw_hp", True), ("rowwise_with_tensorwise_weight", False)):
        config = replace(resolve_config(recipe), enable_fsdp_float8_all_gather=True)
        caplog.clear()
        report = conversion_report(convert_to_float8_training(nn.Linear(16, 16), config=config))
        for text in (str(report), caplog.text, str(report.to_dict()["notes"])):
            assert ("1 byte (rowwise_with_tensorwise_weight, blockwise)" in text) is named


def test_the_report_has_every_linear_and_why():
    model = Model()
    assert convert_to_float8_training(model, module_filter_fn=lambda _, name: "blocks.1" not in name) is model
    converted = {name for name, module in model.named_modules() if isinstance(module, Float8Linear)}
    assert converted == {"blocks.0.0", "blocks.0.2", "head"}
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
        "attention.in_proj_weight": (False, "2-D parameter of MultiheadAttention, which is not an nn.Linear"),
        "attention.out_proj": (False, "its parent reads the weight without calling the module (nn.MultiheadAttention)"),
        "head": (True, "weight tied to embed"),
    }
    in_float8, total = 2 * 32 * 64 + 32 * 48, 4 * 32 * 64 + (1 + 3 + 1) * 32 * 32 + 32 * 48
    assert report.float8_flops_fraction == pytest.approx(in_float8 / total)
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["name"] == "blocks.0.0"
    assert "3 of 8 matmul weights in float8" in str(report)
    for name in reasons:
        assert name in str(report)


def test_a_dtype_that_float8_matmuls_do_not_read_is_named():
    model = nn.ModuleDict({"wide": nn.Linear(16, 16).double(), "late": nn.Linear(16, 16)})
    model["experts"] = make_mixture(1)[0].experts.double()
    convert_to_float8_training(model)
    model["late"].double()
    layers = get_layers(conversion_report(model))
    assert {name for name, layer in layers.items() if layer.converted} == set()
    reasons = [layers[name].reason for name in ("wide", "experts.down_proj", "late")]
    expected = "torch.float64, and float8 matmuls read torch.float32, torch.bfloat16, torch.float16"
    assert reasons == [f"its weight is {expected}", f"its gate_up_proj is {expected}", f"its weight is {expected}"]
    with pytest.raises(RuntimeError, match="late: its weight is torch.float64"):
        assert_float8_training(model)


def test_matmuls_in_high_precision_are_not_counted_and_each_layer_names_its_config():
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    convert_to_float8_training(model[0], config="rowwise_with_gw_hp")
    assert get_layers(conversion_report(model[0]))[""].float8_matmuls == ("output", "grad_input")
    convert_to_float8_training(model[1], config="rowwise")
    report = conversion_report(model)
    assert report.float8_flops_fraction == pytest.approx(5 / 6)
    lines = str(report).splitlines()
    for number, (recipe, row) in enumerate(zip(("rowwise_with_gw_hp", "rowwise"), lines[-2:], strict=True), 1):
        assert f"config {number}: {resolve_config(recipe)}" in lines
        assert row.endswith(f"config {number}")
        assert report.config.splitlines()[report.layers[number - 1].config - 1] == str(resolve_config(recipe))


def test_convolutions_are_named_because_the_share_of_flops_leaves_them_out():
    model = convert_to_float8_training(nn.Sequential(nn.Conv2d(16, 16, 3), nn.Flatten(), nn.Linear(16, 16)))
    assert conversion_report(model).summary() == (
        "1 of 1 matmul weights in float8, 100.0% of their FLOPs; 1 convolution in high precision"
    )


def test_a_filter_may_say_why():
    def decide(_, name):
        return FilterDecision(convert=name == "head", reason=f"because {name}")

    layers = get_layers(conversion_report(convert_to_float8_training(Model(), module_filter_fn=decide)))
    assert layers["head"].reason == "because head; weight tied to embed"
    assert layers["blocks.0.0"].reason == "because blocks.0.0"


class Mlp(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.up, self.down = nn.Linear(16, width, bias=False), nn.Linear(width, 16, bias=False)


class ListOfExperts(nn.Module):
    """A list of MLPs, shared ones, and a router, as in DeepSeek's own code."""

    def __init__(self, experts=8, **settings):
        super().__init__()
        self.gate = nn.Module()
        self.experts = nn.ModuleList(Mlp() for _ in range(experts))
        self.shared_experts = nn.ModuleList(Mlp() for _ in range(2))
        self.head = nn.Linear(16, 48, bias=False)
        self.__dict__.update(settings)


def report_on(model, *, converted):
    """Return the report on a model whose layers are converted if their names contain this word."""
    return conversion_report(convert_to_float8_training(model, module_filter_fn=lambda _, name: converted in name))


SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}


@pytest.mark.parametrize(
    ("name", "settings", "active", "expert_flops", "shared_flops"),
    [
        ("Mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 48}, 2, 3 * 32 * 48, 0),
        ("Qwen3Moe", {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24}, 4, 3 * 32 * 24, 0),
        ("GptOss", {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 48}, 3, 3 * 32 * 48, 0),
        (
            "HunYuanMoEV1",
            {"num_experts": 8, "moe_topk": 2, "intermediate_size": 48, "head_dim": 16},
            2,
            3 * 32 * 48,
            3 * 32 * 48,
        ),
        (
            "DeepseekV3",
            {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2, "moe_intermediate_size": 24}
            | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 0} | LATENT,
            4,
            3 * 32 * 24,
            3 * 32 * 48,
        ),
    ],
)  # fmt: skip
def test_the_active_experts_of_transformers_models_are_counted(name, settings, active, expert_flops, shared_flops):
    config = getattr(transformers, f"{name}Config")(**SIZES, **settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    report = report_on(model, converted="lm_head")
    assert report.notes == []
    experts = [layer for layer in report.layers if ".experts." in layer.name]
    assert {layer.matrices_per_token for layer in experts} == {active}
    assert sum(layer.flops_per_token for layer in experts) == 2 * active * 6 * expert_flops
    shared = [layer for layer in report.layers if ".shared_" in layer.name]
    assert sum(layer.flops_per_token for layer in shared) == 2 * 6 * shared_flops
    total = sum(layer.flops_per_token for layer in report.layers)
    assert report.float8_flops_fraction == pytest.approx(6 * 32 * 64 / total)
    assert f" {active} a token  " in str(report)


class Config:
    def __init__(self, **settings):
        self.__dict__.update(settings)


@pytest.mark.parametrize(
    ("settings", "active"),
    [
        ({"config": Config(num_experts_per_tok=2)}, 2),
        ({"config": Config(num_experts_per_token=3)}, 3),
        ({"config": Config(experts_per_token=2)}, 2),
        ({"config": Config(moe_topk=2)}, 2),
        ({"config": Config(moe_k=4)}, 4),
        ({"config": Config(n_expert_per_token=3)}, 3),
        ({"config": Config(top_k=4)}, 4),
        ({"config": Config(top_k=4, model_type="t5")}, None),  # a setting of generation
        ({"config": Config(moe_topk=[2, 2])}, None),
        ({"config": Config(num_experts_per_tok=9)}, None),
        ({"config": Config(text_config=Config(num_experts_per_tok=2))}, 2),
        ({"config": Config(num_experts_per_tok=2), "top_k": 3}, 3),  # what the block says is nearer
        ({"top_k": 2}, 2),
        ({}, None),
    ],
)
def test_the_active_experts_of_a_list_are_counted(settings, active):
    report = report_on(ListOfExperts(**settings), converted="experts")
    expert, head = 2 * 16 * 32, 16 * 48
    in_float8 = (active or 1) * expert + 2 * expert
    assert report.float8_flops_fraction == pytest.approx(in_float8 / (in_float8 + head))
    assert get_layers(report)["experts.3.up"].matrices_per_token == (active or 1) / 8
    assert get_layers(report)["shared_experts.0.up"].matrices_per_token == 1
    assert ("the number of experts in experts that a token uses is unknown" in str(report)) is (active is None)


def test_a_router_says_how_many_experts_are_active():
    model = ListOfExperts()
    model.gate.top_k = 2
    nested = nn.ModuleDict({"wrapped": nn.Sequential(model)})
    assert get_layers(conversion_report(nested))["wrapped.0.experts.0.up"].matrices_per_token == 2 / 8


def test_experts_without_a_count_are_said_to_be_unknown(caplog):
    model = nn.ModuleDict({"experts": Experts(), "other": nn.Linear(16, 16)})
    report = conversion_report(convert_to_float8_training(model))
    assert get_layers(report)["experts.w1"].matrices_per_token == 1
    for text in (caplog.text, str(report), str(report.to_dict()["notes"])):
        assert "the number of experts in experts.w1 that a token uses is unknown" in text
    model.shared_experts = model.pop("experts")
    report = conversion_report(model)
    assert get_layers(report)["shared_experts.w1"].matrices_per_token == 4
    assert get_layers(report)["shared_experts.bilinear.weight"].matrices_per_token == 24
    assert report.notes == []


def test_a_stack_that_is_no_mixture_of_experts_takes_no_count_of_the_model():
    model = nn.Module()
    model.config, model.heads = Config(num_experts_per_tok=2), nn.Parameter(torch.randn(4, 16, 16))
    report = conversion_report(model)
    assert report.layers[0].matrices_per_token == 1
    assert "heads" in report.notes[0]
    model.config = Config()
    report = conversion_report(model)
    assert report.layers[0].matrices_per_token == 4  # nothing is a mixture here: each head multiplies each token
    assert report.notes == []


@pytest.mark.parametrize(
    ("scale", "expected"),
    [
        ("weight_scale", "its weight is stored in torch.float8_e4m3fn, which another library quantized"),
        ("", "its weight is stored in torch.float8_e4m3fn without a scale, and cast before each forward (for example"),
    ],
)
def test_a_weight_that_another_library_quantized_or_stores_in_float8_is_named_as_such(scale, expected):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    model[0].weight = nn.Parameter(model[0].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    model[0].forward = lambda input: input  # as compressed-tensors and diffusers do
    if scale:
        model[0].register_parameter(scale, nn.Parameter(torch.ones(1)))
    convert_to_float8_training(model, include_subclasses=True)
    (layer,) = conversion_report(model).skipped
    assert layer.reason.startswith(expected)


class Linear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))


def test_a_class_that_is_called_as_one_of_torch_is_named_with_its_module():
    model = nn.Sequential(Linear(), type("Linear", (nn.Linear,), {"forward": lambda self, input: input})(16, 16))
    reasons = [layer.reason for layer in conversion_report(model).layers]
    assert reasons[0] == f"2-D parameter of {__name__}.Linear, which is not an nn.Linear"
    assert reasons[1].startswith(f"subclass {__name__}.Linear of nn.Linear overrides forward")


def test_the_report_has_slow_paths_and_a_backend_for_each_layer(caplog):
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16))
    report_slow_path("key", "slow on cuda:0")
    assert conversion_report(model).notes == []  # nothing is in float8
    caplog.clear()
    convert_to_float8_training(model, module_filter_fn=lambda _, name: name != "2")
    assert "slow on cuda:0" not in caplog.text  # it was logged when it happened
    with torch.no_grad(), mock.patch.object(Float8Linear, "_describe_backends", return_value="native and exact"):
        record_run(model[0], torch.device("cuda:0"))
    report = conversion_report(model)
    assert report.notes == ["in this process: slow on cuda:0"]
    assert [layer.backend for layer in report.layers] == ["native and exact", "not run yet", ""]
    assert json.loads(json.dumps(report.to_dict()))["layers"][0]["backend"] == "native and exact"
    rows = str(report).splitlines()[-3:]
    assert [row.partition("16 -> 16")[2].split() for row in rows] == [
        ["float8", "native", "and", "exact"],
        ["float8", "not", "run", "yet"],
        ["skipped", "filter"],
    ]
    assert "slow on cuda:0" in str(report)
    convert_to_high_precision(model)
    assert conversion_report(convert_to_float8_training(model)).layers[0].backend == "not run yet"

"""Tests transformers' mixtures: each expert is the float8 linear of its tokens, in every layout of weights."""

import copy
import functools
import pickle
from unittest import mock

import peft
import pytest
import torch
from torch import nn
from transformers.integrations import moe
from transformers.models.aria.modeling_aria import AriaExperts
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

import quaver
from quaver import assert_float8_training, conversion_report, convert_to_float8_training, float8_linear
from quaver.experts.module import Float8Experts, is_experts
from quaver.integrations.transformers import prepare_model_for_float8
from tests.library.third_party.experts import build_experts, route_tokens
from tests.library.third_party.zoo import MODELS, compute_loss, make
from tests.reference import BACKEND, assert_same_bits, sqnr_db
from tests.steps import assert_same, compute_results
from tests.thinned import thinned

ONE_MATMUL_DB = {"tensorwise": 24.6, "rowwise": 28.4, "blockwise": 27.0, "mxfp8": 27.0}
MIXTURES = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss", "glm4_moe", "llama4")


def multiply_one_by_one(recipe):
    """Return transformers' grouped linear, by one float8 linear for each expert."""

    def grouped_linear(input, weight, offs, bias=None, is_transposed=False):
        parts, start = [], 0
        for expert, stop in enumerate(offs.tolist()):
            matrix = weight[expert].t() if is_transposed else weight[expert]
            parts.append(float8_linear(input[start:stop], matrix.contiguous(), config=recipe))
            start = stop
        parts.append(input.new_zeros(len(input) - start, parts[0].shape[1]))
        out = torch.cat(parts)
        return out if bias is None else out + bias

    return grouped_linear


EACH_RECIPE = ("tensorwise", "rowwise_with_gw_hp", "blockwise", "mxfp8")
# Those whose weights are not transposed.
OTHER_CLASSES = MixtralExperts, Qwen3MoeExperts, DeepseekV3Experts, NemotronHExperts, MuseSparkExperts, AriaExperts


@pytest.mark.parametrize(
    ("cls", "recipe"),
    [*((GptOssExperts, recipe) for recipe in EACH_RECIPE), *thinned(OTHER_CLASSES, EACH_RECIPE, together=1)],
)
def test_each_expert_is_a_float8_linear(cls, recipe):
    experts = build_experts(cls)
    stable = mock.patch.object(torch, "sort", functools.partial(torch.sort, stable=True))
    with stable, mock.patch.object(moe, "_grouped_linear", multiply_one_by_one(recipe)):
        expected = compute_results(
            experts, *route_tokens(), call=lambda *args: moe.grouped_mm_experts_forward(experts, *args)
        )
    convert_to_float8_training(experts, config=recipe)
    assert isinstance(experts, Float8Experts)
    assert_same(compute_results(experts, *route_tokens()), expected)


@pytest.mark.parametrize("recipe", ONE_MATMUL_DB)
def test_gradients_of_llama_4_are_near_those_in_float32(recipe):
    """The floor: a gradient has the error of at most five of the six matmuls, and activations may double it."""
    experts, hidden = build_experts(Llama4TextExperts), torch.randn(200, 64)
    expected = compute_results(experts, hidden)
    convert_to_float8_training(experts, config=recipe)
    for result, exact in zip(compute_results(experts, hidden), expected, strict=True):
        assert sqnr_db(exact, result) > ONE_MATMUL_DB[recipe] - 10


def test_llama_4_refuses_rows_that_its_experts_do_not_divide():
    experts = convert_to_float8_training(build_experts(Llama4TextExperts), config="rowwise")
    with pytest.raises(ValueError, match="the same number of tokens for each of .* experts.*got 7 rows"):
        experts(torch.randn(7, 64))


def test_experts_take_the_routing_by_name():
    experts, (hidden, index, weights) = convert_to_float8_training(build_experts(MixtralExperts)), route_tokens()
    assert experts(hidden, top_k_index=index, top_k_weights=weights).equal(experts(hidden, index, weights))
    with pytest.raises(TypeError, match="expected top_k_index and top_k_weights, or neither, got one of them"):
        experts(hidden, index)


@pytest.mark.parametrize("absent", [4, -1])
@pytest.mark.parametrize("cls", [MixtralExperts, GptOssExperts], ids=lambda cls: cls.__name__)
def test_experts_of_other_ranks_add_nothing(cls, absent):
    """transformers' expert parallelism gives them the index E, and DeepEP -1."""
    experts = convert_to_float8_training(build_experts(cls), config="rowwise")
    experts._is_expert_parallel = True
    hidden, index, weights = route_tokens()
    elsewhere = torch.rand(index.shape) < 0.4
    index[elsewhere] = index[7] = absent
    out, grad_hidden, *_ = compute_results(experts, hidden, index, weights)
    assert out.isfinite().all()
    assert not out[7].any()
    assert not grad_hidden[7].any()
    here = index[:, 0] != absent
    hidden, index, weights = hidden[here], index[here], weights[here]
    first_alone = compute_results(experts, hidden, index[:, :1], weights[:, :1])
    second_without_weight = compute_results(experts, hidden, index, weights.index_fill(1, torch.tensor(1), 0))
    torch.testing.assert_close(first_alone[0], second_without_weight[0])


def test_copied_experts_compute_the_same():
    experts = convert_to_float8_training(build_experts(MixtralExperts), config="rowwise")
    for again in (copy.deepcopy(experts), pickle.loads(pickle.dumps(experts))):
        assert type(again) is type(experts)
        assert conversion_report(again).layers[0].backend == "not run yet"
        assert_same_bits(again(*route_tokens()).detach(), experts(*route_tokens()).detach())


@BACKEND
def test_compiled_experts_have_the_results_of_eager_ones(backend):
    experts = convert_to_float8_training(build_experts(GptOssExperts), config="rowwise")
    eager = compute_results(experts, *route_tokens())
    compiled = torch.compile(experts, fullgraph=True, backend=backend)
    torch.testing.assert_close(compute_results(experts, *route_tokens(), call=compiled), eager, rtol=1e-5, atol=1e-5)


def mixture(name):
    torch.manual_seed(0)
    return make(name)


@pytest.mark.parametrize("name", MIXTURES)
def test_a_mixture_is_converted_and_back(name):
    """Converted with its linears, routed as before, and back again."""
    model, inputs = mixture(name)
    original = copy.deepcopy(model)
    is_linear = lambda module, _: isinstance(module, nn.Linear)  # noqa: E731
    only_linears = prepare_model_for_float8(copy.deepcopy(model), "rowwise_with_gw_hp", module_filter_fn=is_linear)
    report = conversion_report(prepare_model_for_float8(model, "rowwise_with_gw_hp"))
    experts = {name: module for name, module in model.named_modules() if is_experts(module)}
    assert experts
    assert all(isinstance(module, Float8Experts) for module in experts.values())
    stacks = [layer for layer in report.layers if layer.name.rpartition(".")[0] in experts]
    assert len(stacks) == 2 * len(experts)
    assert all(layer.converted for layer in stacks)
    assert report.float8_flops_fraction > conversion_report(only_linears).float8_flops_fraction + 0.1
    assert not [layer for layer in report.converted if layer.name.endswith(("gate", "router", "gate.weight"))]
    assert_float8_training(model, torch.optim.SGD(model.parameters(), 0.1))
    loss = compute_loss(model, inputs)
    loss.backward()
    torch.testing.assert_close(loss, compute_loss(original, inputs), rtol=2e-3, atol=0)
    assert {layer.backend for layer in conversion_report(model).converted} == {"exact"}
    assert all(parameter.grad is not None for module in experts.values() for parameter in module.parameters())

    assert_same_bits(compute_loss(copy.deepcopy(model), inputs).detach(), loss.detach())
    assert list(model.state_dict()) == list(original.state_dict())
    plain = quaver.convert_to_high_precision(model)
    assert [type(m) for m in plain.modules()] == [type(m) for m in original.modules()]
    assert compute_loss(plain, inputs).item() == compute_loss(original, inputs).item()


def test_a_filter_may_leave_out_the_experts_of_one_layer():
    """transformers names one implementation for the whole model; here a layer decides for itself."""
    model, inputs = mixture("qwen3_moe")
    convert_to_float8_training(model, module_filter_fn=lambda m, name: name == "model.layers.1.mlp.experts")
    first, second = (layer.mlp.experts for layer in model.model.layers)
    assert not isinstance(first, Float8Experts)
    assert isinstance(second, Float8Experts)
    model.set_experts_implementation("grouped_mm")
    compute_loss(model, inputs).backward()
    layers = {layer.name: layer for layer in conversion_report(model).layers}
    assert layers["model.layers.1.mlp.experts.down_proj"].backend == "exact"
    assert layers["model.layers.0.mlp.experts.down_proj"].reason == "filter"


def test_filters_that_know_linears_and_recipes_that_keep_scales_leave_experts_in_high_precision(caplog):
    model, inputs = mixture("mixtral")
    with pytest.raises(TypeError, match="a MixtralExperts with 3-D weights: .*in_features"):
        convert_to_float8_training(model, config="rowwise", module_filter_fn=lambda m, name: m.in_features > 16)
    assert not [m for m in model.modules() if isinstance(m, Float8Experts)]
    prepare_model_for_float8(model, "delayed")
    assert not [m for m in model.modules() if isinstance(m, Float8Experts)]
    assert "experts are scaled dynamically" in caplog.text
    compute_loss(model, inputs).backward()


def test_every_mixture_of_the_zoo_is_listed():
    with torch.device("meta"):
        others = [make(name)[0] for name in set(MODELS) - set(MIXTURES)]
    assert not [module for model in others for module in model.modules() if is_experts(module)]


@pytest.mark.parametrize("converted_first", [True, False])
def test_lora_on_experts_trains_and_merges(converted_first):
    """PEFT computes base + B A for each forward; the experts multiply that in float8, and merge it to the same."""
    model, inputs = mixture("qwen3_moe")
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=parameters)
    model = prepare_model_for_float8(model, "rowwise") if converted_first else model
    model = peft.get_peft_model(model, config)
    model = model if converted_first else prepare_model_for_float8(model, "rowwise")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.05)
    assert_float8_training(model, allow_frozen=True)
    loss = compute_loss(model, inputs)
    loss.backward()
    gradients = [p.grad for name, p in model.named_parameters() if "experts" in name and p.requires_grad]
    assert len(gradients) == 8
    assert all(gradient.isfinite().all() and gradient.any() for gradient in gradients)
    merged = model.merge_and_unload()
    assert type(merged.model.layers[0].mlp.experts).__name__ == "Float8Qwen3MoeExperts"
    torch.testing.assert_close(compute_loss(merged, inputs), loss, rtol=1e-3, atol=0)

"""Tests the trainer's mixture of experts: routing as in GLM-4.5, balance, float8, and exports to Hugging Face."""

import copy

import pytest
import torch
import torch.nn.functional as F

from quaver import conversion_report, convert_to_float8_training
from quaver.activations import apply_activation_checkpointing
from quaver.experts.module import Float8Experts
from quaver.lab.model.flops import count_flops_per_token_by_precision, list_linear_precisions
from quaver.lab.model.initialize import allocate, initialize
from quaver.lab.model.llama import count_training_flops_per_token, make_meta_llama
from quaver.lab.model.mixture import Mixture, Router, balance_experts, list_modules, pop_expert_load
from quaver.lab.settings import Model
from tests.reference import assert_same_bits, sqnr_db
from tests.steps import assert_same

SHAPE = {"vocab_size": 64, "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "hidden_dim": 48}
SMALL = Model(**SHAPE, n_experts=4, n_shared_experts=1)


def build_model(config=SMALL):
    model = make_meta_llama(config)
    allocate(model, torch.device("cpu"))
    initialize(model, seed=0)
    return model


def make_tokens():
    return torch.arange(60).view(3, 20) * 7 % 64


def take_load(model):
    return pop_expert_load(list_modules(model, Router), lambda counts: counts)


def compute_one_by_one(mixture, hidden):
    """Compute the mixture by its equations, one token at a time."""
    router, experts = mixture.gate, mixture.experts
    outputs = []
    for token in hidden.flatten(0, 1):
        scores = torch.sigmoid(router.weight @ token)
        chosen = (scores + router.e_score_correction_bias).topk(router.top_k).indices
        parts = []
        for expert in chosen.tolist():
            gate, up = (experts.gate_up_proj[expert] @ token).chunk(2)
            parts.append(scores[expert] / scores[chosen].sum() * (experts.down_proj[expert] @ (F.silu(gate) * up)))
        outputs.append(sum(parts))
    return torch.stack(outputs).view_as(hidden) + mixture.shared_experts(hidden)


def test_a_mixture_computes_its_equations():
    torch.manual_seed(0)
    mixture = build_model().model.layers[0].mlp
    assert isinstance(mixture, Mixture)
    mixture.gate.e_score_correction_bias.copy_(torch.tensor([0.5, 0, -0.5, 0]))
    hidden = torch.randn(2, 5, 32)
    torch.testing.assert_close(mixture(hidden), compute_one_by_one(mixture, hidden))


def test_the_bias_moves_towards_balance_and_weighs_nothing():
    model = build_model().train()
    routers = list_modules(model, Router)
    model(make_tokens()).sum().backward()
    assert all(router.tokens_per_expert.sum() == 2 * 60 for router in routers)
    load = pop_expert_load(list_modules(model, Router), lambda counts: 2 * counts)
    assert load.shape == (2, 4)
    torch.testing.assert_close(load.sum(1), torch.ones(2))
    balance_experts(list_modules(model, Router), load, 0.25)
    for router, shares in zip(routers, load, strict=True):
        assert router.e_score_correction_bias.tolist() == (0.25 * torch.sign(0.25 - shares)).tolist()
        assert not router.tokens_per_expert.any()
    router = routers[0]
    hidden = torch.randn(7, 32)
    chosen, weights = router(hidden)
    scores = torch.sigmoid(F.linear(hidden, router.weight)).gather(1, chosen)
    torch.testing.assert_close(weights, scores / scores.sum(1, keepdim=True))


def test_counts_are_of_training_steps_only():
    model = build_model()
    model.eval()(make_tokens())
    with torch.no_grad():
        model.train()(make_tokens())
    assert take_load(model).isnan().all()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "mxfp8"])
def test_float8_experts_are_close_and_balanced_alike(recipe):
    model = build_model().train()
    reference = copy.deepcopy(model)
    convert_to_float8_training(model, config=recipe, module_filter_fn=lambda m, name: name.endswith("experts"))
    assert sum(isinstance(module, Float8Experts) for module in model.modules()) == 2
    outputs = [module(make_tokens()) for module in (reference, model)]
    for output in outputs:
        output.square().mean().backward()
    assert sqnr_db(outputs[0].detach(), outputs[1].detach()) > 25
    assert_same_bits(take_load(model)[0], take_load(reference)[0])
    for name, parameter in reference.named_parameters():
        if ".experts." in name:
            assert sqnr_db(parameter.grad, model.get_parameter(name).grad) > 14


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_checkpointing_repeats_every_bit(mode):
    gradients = []
    for checkpointed in (False, True):
        model = convert_to_float8_training(build_model(), config="rowwise").train()
        if checkpointed:
            apply_activation_checkpointing(model.iter_blocks(), mode=mode, preserve_rng_state=False)
        model(make_tokens()).square().mean().backward()
        gradients.append([*(parameter.grad for parameter in model.parameters()), take_load(model)])
    assert_same(*gradients)


def test_bfloat16_parameters_keep_the_balance_in_float32():
    router = build_model().to(torch.bfloat16).model.layers[0].mlp.gate
    assert router.weight.dtype is torch.bfloat16
    assert router.e_score_correction_bias.dtype is router.tokens_per_expert.dtype is torch.float32


def test_flops_are_those_of_the_experts_that_a_token_takes():
    model = convert_to_float8_training(build_model(), config="rowwise")
    flops = count_training_flops_per_token(SMALL, seq_len=20)
    attention = 4 * 32 * 32
    weights = 2 * (attention + 3 * 3 * 32 * 48 + 32 * 4) + 32 * 64
    assert flops == 6 * weights + 12 * 2 * 32 * 20
    by_name = {layer.name: layer for layer in list_linear_precisions(model, "bfloat16", torch.device("cpu"))}
    experts = by_name["model.layers.0.mlp.experts.gate_up_proj"]
    assert (experts.in_features, experts.out_features, experts.matrices_per_token) == (32, 96, 2)
    assert "rowwise" in experts.operands["grad_weight"]
    total = count_flops_per_token_by_precision(model, SMALL, 20, "bfloat16", torch.device("cpu"))
    assert sum(total.values()) == flops
    reported = {layer.name: layer.flops_per_token for layer in conversion_report(model).layers}
    assert reported["model.layers.0.mlp.experts.down_proj"] == 6 * 2 * 32 * 48

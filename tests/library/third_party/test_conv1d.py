"""Tests GPT-2's Conv1D in float8: a linear's casts, the state dict and files of the Conv1D, and the conversion back."""

import copy
import pickle

import peft
import pytest
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

import quaver
from quaver import Float8Linear, conversion_report, convert_to_high_precision, float8_linear, freeze_to_float8
from quaver.export import save_float8
from quaver.integrations.transformers import Float8Callback, prepare_model_for_float8
from tests.library.third_party.hf_trainer import get_losses, trained
from tests.steps import assert_same

SMALL = {"n_layer": 2, "n_head": 4}
TOKENS = torch.arange(64).view(2, 32)


def gpt2(seed=0):
    torch.manual_seed(seed)
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 2}
    return GPT2LMHeadModel(GPT2Config(n_embd=64, vocab_size=128, **SMALL, **still))


def build_prepared(seed=0, recipe="rowwise"):
    return prepare_model_for_float8(gpt2(seed), recipe)


SIZES = {"n_embd": 64, "vocab_size": 128, **SMALL}
MODELS = {
    "GPT2LMHeadModel": ("GPT2Config", SIZES, "rowwise"),
    "OpenAIGPTLMHeadModel": ("OpenAIGPTConfig", SIZES, "delayed"),
    "ImageGPTForCausalImageModeling": ("ImageGPTConfig", {**SIZES, "vocab_size": 129}, "mxfp8"),
    "DecisionTransformerModel": ("DecisionTransformerConfig", {"hidden_size": 64, **SMALL}, None),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_layers_of_blocks_are_in_float8_and_the_state_dict_is_as_before(name):
    config, sizes, recipe = MODELS[name]
    model = getattr(transformers, name)(getattr(transformers, config)(**sizes))
    parameters, before = list(model.parameters()), copy.deepcopy(model.state_dict())
    prepare_model_for_float8(model, recipe)
    assert len(conversion_report(model).converted) == 8
    assert_same(dict(model.state_dict()), dict(before))
    convert_to_high_precision(model)
    assert sum(type(module) is Conv1D for module in model.modules()) == 8
    assert all(new is old for new, old in zip(model.parameters(), parameters, strict=True))
    assert_same(dict(model.state_dict()), dict(before))


def test_a_layer_computes_as_a_float8_linear_with_its_weight_transposed():
    weight = gpt2().transformer.h[0].mlp.c_fc.weight.detach().t().contiguous().requires_grad_()
    layer, inputs = build_prepared().transformer.h[0].mlp.c_fc, torch.randn(32, 64)
    output = layer(inputs)
    assert_same(output, float8_linear(inputs, weight, layer.bias, config="rowwise"))
    output.square().sum().backward()
    float8_linear(inputs, weight, layer.bias, config="rowwise").square().sum().backward()
    assert_same(layer.weight.grad, weight.grad)


def test_copies_pickles_loads_and_saved_folders_compute_the_same(tmp_path):
    model = build_prepared()
    logits = model(TOKENS).logits
    for assign in (False, True):
        loaded = build_prepared(seed=1)
        loaded.load_state_dict(model.state_dict(), assign=assign)
        assert_same(loaded(TOKENS).logits, logits)
    assert_same(copy.deepcopy(model)(TOKENS).logits, logits)
    assert_same(pickle.loads(pickle.dumps(model))(TOKENS).logits, logits)
    model.save_pretrained(tmp_path)
    assert_same(GPT2LMHeadModel.from_pretrained(tmp_path)(TOKENS).logits, gpt2()(TOKENS).logits)
    with pytest.raises(ValueError, match="no server reads Conv1D weights in float8"):
        save_float8(model, tmp_path / "float8")
    assert not (tmp_path / "float8").exists()


def test_adapters_of_peft_merge_into_square_weights_as_into_linears():
    adapters = peft.LoraConfig(r=4, target_modules=["c_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    expected = peft.get_peft_model(gpt2(), adapters).merge_and_unload()(TOKENS).logits
    torch.manual_seed(1)
    merged = peft.get_peft_model(build_prepared(), adapters).merge_and_unload()
    assert isinstance(merged.transformer.h[0].attn.c_proj, Float8Linear)
    assert_same(convert_to_high_precision(merged)(TOKENS).logits, expected)


def build_frozen(seed=0):
    return freeze_to_float8(build_prepared(seed), config="rowwise", module_filter_fn=lambda _, name: name != "lm_head")


def test_frozen_layers_save_load_and_train_adapters(tmp_path):
    model, other = build_frozen(), build_frozen(seed=1)
    values = model.transformer.h[0].attn.c_proj.weight.to_high_precision()  # square
    assert_same(model.state_dict(keep_vars=True)["transformer.h.0.attn.c_proj.weight"], values.t())
    other.load_state_dict(model.state_dict())
    assert_same(other.transformer.h[0].attn.c_proj.weight.to_high_precision(), values)
    model.save_pretrained(tmp_path)
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path)
    assert_same(loaded.transformer.h[0].attn.c_proj.weight, values.t())
    expected = model.eval()(TOKENS).logits
    assert_same(other.eval()(TOKENS).logits, expected)
    assert_same(convert_to_high_precision(model).state_dict(), loaded.state_dict())
    adapted = peft.get_peft_model(other, peft.LoraConfig(target_modules=["c_attn"], init_lora_weights=False))
    adapted(TOKENS, labels=TOKENS).loss.backward()
    assert all(parameter.grad.any() for parameter in adapted.parameters() if parameter.requires_grad)


def test_primary_weights_train_as_before():
    losses, states = [], []
    for is_primary in (False, True):
        model = build_prepared()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        optimizer = quaver.use_float8_primary_weights(model, optimizer) if is_primary else optimizer
        for _ in range(2):
            losses.append(model(TOKENS, labels=TOKENS).loss)
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        states.append(dict(model.state_dict()))
    assert_same(losses[2:], losses[:2])
    assert_same(states[1], states[0])


def test_what_peft_wrapped_or_the_filter_leaves_out_stays_a_conv1d():
    model = peft.get_peft_model(gpt2(), peft.LoraConfig(r=16, target_modules=["c_attn"], fan_in_fan_out=True))
    prepare_model_for_float8(model, "rowwise", module_filter_fn=lambda linear, name: linear.out_features == 256)
    assert {layer.name.rpartition(".")[2] for layer in conversion_report(model).converted} == {"c_fc"}
    assert sum(type(module) is Conv1D for module in model.modules()) == 6


def test_a_run_of_the_trainer_resumes(tmp_path):
    whole = trained(tmp_path, build_prepared(recipe="delayed"), [Float8Callback()], save_strategy="steps")
    resumed = trained(
        tmp_path, build_prepared(1, recipe="delayed"), [Float8Callback()], resume=tmp_path / "checkpoint-2"
    )
    assert get_losses(resumed)[-2:] == get_losses(whole)[-2:]

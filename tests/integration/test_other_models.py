"""Models of many families, as their libraries write them: converted and trained for some steps in two precisions."""

import copy

import pytest
import torch
import transformers

from quaver import (
    Float8Linear,
    Float8LinearConfig,
    conversion_report,
    convert_to_float8_training,
    sync_float8_amax_and_scale_history,
)

RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed")
TOKENS = torch.arange(64).reshape(2, 32) * 7 % 128
TEXT = {"input_ids": TOKENS, "labels": TOKENS}
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = {**SIZES, "vocab_size": 128, "intermediate_size": 96, "num_key_value_heads": 2, "attention_dropout": 0.0}
MIXTURE = {**DECODER, "num_experts_per_tok": 2, "output_router_logits": True}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

GPT2 = {"vocab_size": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
T5 = {"vocab_size": 128, "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
VIT = {**SIZES, **NO_DROPOUT, "intermediate_size": 96, "image_size": 32, "patch_size": 8, "num_labels": 4}
IMAGES = {"pixel_values": torch.arange(6144.0).sin().reshape(2, 3, 32, 32), "labels": torch.arange(2)}

MODELS = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", DECODER, TEXT),
    "falcon": (
        "FalconConfig",
        "FalconForCausalLM",
        {**SIZES, "vocab_size": 128, "bias": True, "attention_dropout": 0.0},
        TEXT,
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2, TEXT),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**MIXTURE, "num_local_experts": 4}, TEXT),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**MIXTURE, "num_experts": 4, "head_dim": 16}, TEXT),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5, TEXT),
    "bert": ("BertConfig", "BertForMaskedLM", {**SIZES, **NO_DROPOUT, "vocab_size": 128}, TEXT),
    "vit": ("ViTConfig", "ViTForImageClassification", VIT, IMAGES),
}


def make(name):
    config_class, model_class, sizes, inputs = MODELS[name]
    config = getattr(transformers, config_class)(**sizes)
    config.pad_token_id, config.decoder_start_token_id, config.use_cache = 0, 0, False
    return getattr(transformers, model_class)(config).train(), inputs


def convert(model, recipe):
    """Falcon's linears are of a subclass."""
    config = Float8LinearConfig.from_recipe_name(recipe)
    convert_to_float8_training(model, config=config, include_subclasses=True)


def train(model, inputs, steps=4):
    """The losses of some steps, with a validation in inference mode before each."""
    dtype = next(model.parameters()).dtype
    inputs = {name: value.to(dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    for _ in range(steps):
        with torch.inference_mode():
            validated = model(**inputs).loss
        loss = model(**inputs).loss
        torch.testing.assert_close(loss.detach(), validated, rtol=0.02, atol=0)  # attention has kernels for either
        loss.backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        sync_float8_amax_and_scale_history(model)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_trains_like_its_high_precision_twin(name, hp_dtype, recipe):
    model, inputs = make(name)
    model.to(hp_dtype)
    twin = copy.deepcopy(model)
    linears = [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)]
    convert(model, recipe)
    assert [n for n, m in model.named_modules() if isinstance(m, Float8Linear)] == linears
    losses, expected = train(model, inputs), train(twin, inputs)
    assert losses == pytest.approx(expected, rel=0.05)
    assert losses != expected or hp_dtype is torch.bfloat16
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("gpt2", "Conv1D", ["h.0.attn.c_attn", "h.0.attn.c_proj", "h.1.mlp.c_fc", "h.1.mlp.c_proj"]),
        ("mixtral", "", ["layers.0.mlp.experts", "layers.1.mlp.experts"]),
        ("qwen3_moe", "", ["layers.0.mlp.experts", "layers.1.mlp.experts"]),
    ],
)
def test_weights_that_are_not_of_linears_are_reported_as_skipped(name, kind, found):
    """GPT-2's Conv1D, and experts whose weights are one parameter of three dims: matmuls that stay as they were."""
    model, _ = make(name)
    convert_to_float8_training(model)
    skipped = {layer.name: layer.reason for layer in conversion_report(model).skipped}
    for part in found:
        reasons = [reason for layer, reason in skipped.items() if part in layer]
        assert reasons, f"{part} is not in {sorted(skipped)}"
        assert all(kind in reason for reason in reasons)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_its_own_gradient_checkpointing_changes_no_bit(name, use_reentrant, recipe):
    losses = []
    for checkpoints in (False, True):
        torch.manual_seed(0)
        model, inputs = make(name)
        convert(model, recipe)
        if checkpoints:
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
        losses.append(train(model, inputs, steps=3))
    assert losses[0] == losses[1]

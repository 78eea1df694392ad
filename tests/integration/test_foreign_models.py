"""Models that are not ours: convert, train some steps beside a high-precision twin, convert back."""

import copy

import pytest
import torch
import transformers

from quaver import (
    Float8Linear,
    Float8LinearConfig,
    cast_weights_once,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
)
from tests.reference import RECIPES


def llama():
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=160,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    tokens = torch.randint(256, (4, 32))
    return transformers.LlamaForCausalLM(config), lambda model: model(input_ids=tokens, labels=tokens).loss


def bert():
    config = transformers.BertConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    tokens = torch.randint(256, (4, 32))
    return transformers.BertForMaskedLM(config), lambda model: model(input_ids=tokens, labels=tokens).loss


def sam_vision_encoder():
    config = transformers.SamVisionConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=64,
        patch_size=16,
        window_size=2,
        global_attn_indexes=[1],
        output_channels=32,
        mlp_dim=128,
    )
    images, target = torch.randn(2, 3, 64, 64), torch.randn(2, 32, 4, 4)
    return transformers.SamVisionModel(config), lambda model: (model(images).last_hidden_state - target).square().mean()


def train(model, loss_of, steps=12):
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with cast_weights_once(model):
            loss = loss_of(model)
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", [llama, bert, sam_vision_encoder])
def test_trains_like_its_high_precision_twin(make, recipe, hp_dtype):
    model, loss_of = make()
    twin = copy.deepcopy(model)
    if hp_dtype is torch.bfloat16:
        plain_loss_of = loss_of

        def loss_of(model):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return plain_loss_of(model).float()

    linears = sum(isinstance(m, torch.nn.Linear) for m in model.modules())
    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))
    assert sum(isinstance(m, Float8Linear) for m in model.modules()) == linears
    assert len(conversion_report(model).converted) == linears

    losses, expected = train(model, loss_of), train(twin, loss_of)
    assert losses != expected
    assert expected[-1] < 0.97 * expected[0]
    for loss, reference in zip(losses, expected, strict=True):
        assert loss == pytest.approx(reference, rel=0.05)

    convert_to_high_precision(model)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert loss_of(model).item() == loss_of(twin).item()

"""Attention inside documents: a packed row is its documents alone; without documents all is as before."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from quaver.trainer.config import ActivationCheckpoint, Float8, Model, TrainConfig, Training
from quaver.trainer.float8 import convert_model
from quaver.trainer.loss import next_token_loss
from quaver.trainer.model import Llama, document_attention_mask
from quaver.trainer.parallelize import parallelize
from quaver.trainer.train import prepare

CONFIG = Model(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=96)
LENGTHS = [[7, 1, 20, 4], [32], [1, 1, 30], [16, 16]]
"""Documents of each of four rows of 32 tokens."""

FLOAT32_ROUNDING = {"rtol": 0.0, "atol": 2e-5}
"""Rotation by other positions rounds the same products of queries and keys otherwise. Logits reach 7 here, of which one
float32 unit is 5e-7; differences of at most 8e-6 were measured over 20 seeds."""


@pytest.fixture
def model() -> Llama:
    model = Llama(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3 if parameter.dim() == 2 else 1)  # else attention hardly matters
    return model


@pytest.fixture
def packed() -> tuple[Tensor, Tensor]:
    """Tokens and documents [4, 32]."""
    rows = [torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)) for lengths in LENGTHS]
    return torch.randint(0, 256, (4, 32)), torch.stack(rows)


def test_the_mask_is_causal_inside_documents(packed):
    _, documents = packed
    mask = document_attention_mask(documents)
    assert (mask.dtype, mask.shape) == (torch.bool, (4, 1, 32, 32))
    for row, query, key in ((0, 7, 6), (0, 8, 7), (0, 27, 8), (0, 8, 9), (0, 31, 28), (1, 31, 0), (2, 1, 0)):
        assert mask[row, 0, query, key] == (documents[row, query] == documents[row, key] and key <= query)
    assert mask.diagonal(dim1=-2, dim2=-1).all()
    assert mask.sum() == sum(length * (length + 1) // 2 for lengths in LENGTHS for length in lengths)


def test_a_packed_row_is_its_documents_alone(model, packed):
    tokens, documents = packed
    together = model(tokens, documents)
    for row, lengths in enumerate(LENGTHS):
        alone = torch.cat([model(part[None])[0] for part in tokens[row].split(lengths)])
        torch.testing.assert_close(together[row], alone, **FLOAT32_ROUNDING)
    crossing = model(tokens)
    assert (crossing[0] - together[0]).abs().max() > 1000 * FLOAT32_ROUNDING["atol"]  # the mask matters
    torch.testing.assert_close(crossing[1], together[1], **FLOAT32_ROUNDING)  # one document: nothing to mask


def test_without_documents_attention_is_called_as_ever(model, packed, monkeypatch):
    calls = []
    attention = F.scaled_dot_product_attention

    def recorded(*tensors: Tensor, **options: object) -> Tensor:
        calls.append((len(tensors), tensors[1].shape[1], options))
        return attention(*tensors, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    model(packed[0])
    assert calls == [(3, 2, {"is_causal": True, "enable_gqa": True})] * 2


@pytest.mark.parametrize(
    ("recipe", "compiled", "mode"),
    [
        (None, False, "full"),
        ("tensorwise", False, "selective"),
        ("rowwise", True, "selective"),
    ],
)
def test_compiled_and_checkpointed_blocks_do_the_same(recipe, compiled, mode, packed, monkeypatch):
    float8 = Float8(recipe_name=recipe) if recipe else Float8(enable_float8_linear=False)
    config = TrainConfig(
        model=CONFIG,
        training=Training(compile=compiled),
        activation_checkpoint=ActivationCheckpoint(mode=mode),
        float8=float8,
    )
    tokens, documents = packed

    def loss_and_gradients(config: TrainConfig) -> tuple[Tensor, list[Tensor]]:
        torch.manual_seed(1)
        model = Llama(CONFIG)
        if recipe:
            convert_model(model, config.float8, tokens=tokens.numel(), device=torch.device("cpu"))
        parallelize(model, config, None)
        loss = next_token_loss(model(tokens, documents), tokens.roll(-1, 1))
        loss.backward()
        return loss, [parameter.grad for parameter in model.parameters()]

    compile_block = nn.Module.compile
    monkeypatch.setattr(
        nn.Module, "compile", lambda block, **options: compile_block(block, backend="aot_eager", **options)
    )
    plain = replace(config, training=Training(), activation_checkpoint=ActivationCheckpoint())
    loss, gradients = loss_and_gradients(config)
    expected, expected_gradients = loss_and_gradients(plain)
    assert torch.equal(loss, expected)
    for gradient, reference in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-7)


def test_a_run_with_the_mask_is_another_run(tiny_config, tmp_path, text_folder):
    for number, file in enumerate(sorted(text_folder.iterdir())):
        file.write_text(f"{number} {file.name} " * 2)  # several documents in a sequence
    for number in range(60):
        (text_folder / f"more{number}.txt").write_text(f"{number} times {number} is {number * number}")
    losses = []
    for name, mask in (("with", True), ("without", False)):
        job = replace(tiny_config.job, name=name)
        run = prepare(replace(tiny_config, job=job, data=replace(tiny_config.data, document_mask=mask)))
        batches = run.data.step_batches(run.config.training, 0)
        assert (batches[0].documents is not None) == mask
        losses.append(run.models[0].train_step(1, batches).loss)
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)  # first weights: little attention

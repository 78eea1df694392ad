"""The sliced loss: against the expression in float32, to the bit where it should be, and what it takes."""

import pytest
import torch
import torch.nn.functional as F

from quaver.recorder.storages import TensorBytes
from quaver.trainer import loss as losses
from quaver.trainer.loss import IGNORED, next_token_loss

TOKENS, WORDS = 37, 50


def expression(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def made(dtype, ignored=0):
    torch.manual_seed(0)
    logits = (5 * torch.randn(2, TOKENS, WORDS)).to(dtype).requires_grad_()
    targets = torch.randint(WORDS, (2, TOKENS))
    targets.view(-1)[:ignored] = IGNORED
    return logits, targets


@pytest.mark.parametrize("ignored", [0, 11])
@pytest.mark.parametrize("rows", [1, 7, 2 * TOKENS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_the_gradient_is_that_of_the_expression_to_the_bit(dtype, rows, ignored, monkeypatch):
    monkeypatch.setattr(losses, "SLICE_ELEMENTS", rows * WORDS)
    logits, targets = made(dtype, ignored)
    expected_logits = logits.detach().clone().requires_grad_()
    got, expected = next_token_loss(logits, targets), expression(expected_logits, targets)
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0)
    (got / 3).backward()
    (expected / 3).backward()
    assert torch.equal(logits.grad, expected_logits.grad)


def test_small_logits_are_one_slice_with_the_loss_of_the_expression():
    logits, targets = made(torch.bfloat16)
    assert torch.equal(next_token_loss(logits, targets), expression(logits, targets))


def test_neither_direction_has_all_logits_in_float32(monkeypatch):
    rows, words = 64, 4096
    monkeypatch.setattr(losses, "SLICE_ELEMENTS", 4 * words)
    logits = torch.randn(1, rows, words, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(words, (1, rows))
    with TensorBytes() as tensors:
        loss = next_token_loss(logits, targets)
        forward = tensors.peak_bytes
        assert tensors.live_bytes <= 64  # the logits are kept as they are
        loss.backward()
    slice_bytes = 4 * words * 4
    assert forward <= 3 * slice_bytes
    assert tensors.peak_bytes <= 4 * slice_bytes + 64  # the gradient is where the logits were
    with pytest.raises(RuntimeError, match="modified by an inplace operation|backward through the graph a second time"):
        loss.backward()


def test_it_has_no_second_derivative(monkeypatch):
    monkeypatch.setattr(losses, "SLICE_ELEMENTS", WORDS)
    logits, targets = made(torch.float32)
    (gradient,) = torch.autograd.grad(next_token_loss(logits, targets), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


def test_a_compiled_loss_is_the_expression():
    logits, targets = made(torch.bfloat16)
    compiled = torch.compile(next_token_loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits, targets), expression(logits, targets))

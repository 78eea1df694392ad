"""Compares the sliced loss with the expression in float32, and counts the memory that it takes."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor

from quaver.lab.model import loss as losses
from quaver.lab.model.loss import IGNORE_INDEX, compute_next_token_loss
from quaver.lab.recorder.storages import TensorByteCounter
from quaver.runtime.collectives import all_gather
from tests.counting import CollectiveCounter
from tests.ranks import get_cached_mesh, on_ranks
from tests.thinned import thinned

TOKENS, WORDS = 37, 50


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def make_logits_and_targets(dtype, ignored=0, words=WORDS):
    torch.manual_seed(0)
    logits = (5 * torch.randn(2, TOKENS, words)).to(dtype).requires_grad_()
    targets = torch.randint(words, (2, TOKENS))
    targets.view(-1)[:ignored] = IGNORE_INDEX
    return logits, targets


@pytest.mark.parametrize("ignored", [0, 11])
@pytest.mark.parametrize("rows", [1, 7, 2 * TOKENS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_the_gradient_is_that_of_the_expression_to_the_bit(dtype, rows, ignored, monkeypatch):
    monkeypatch.setattr(losses, "SLICE_ELEMENTS", rows * WORDS)
    logits, targets = make_logits_and_targets(dtype, ignored)
    expected_logits = logits.detach().clone().requires_grad_()
    loss, expected = compute_next_token_loss(logits, targets), cross_entropy(expected_logits, targets)
    assert loss.dtype is torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    (loss / 3).backward()
    (expected / 3).backward()
    assert torch.equal(logits.grad, expected_logits.grad)


def test_small_logits_are_one_slice_with_the_loss_of_the_expression():
    logits, targets = make_logits_and_targets(torch.bfloat16)
    assert torch.equal(compute_next_token_loss(logits, targets), cross_entropy(logits, targets))


def test_neither_direction_has_all_logits_in_float32(monkeypatch):
    rows, words = 64, 4096
    monkeypatch.setattr(losses, "SLICE_ELEMENTS", 4 * words)
    logits = torch.randn(1, rows, words, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(words, (1, rows))
    with TensorByteCounter() as tensors:
        loss = compute_next_token_loss(logits, targets)
        forward = tensors.peak_bytes
        assert tensors.live_bytes <= 64  # the logits are kept as they are
        loss.backward()
    slice_bytes = 4 * words * 4
    assert forward <= 3 * slice_bytes
    assert tensors.peak_bytes <= 4 * slice_bytes + 64  # the gradient is where the logits were
    with pytest.raises(RuntimeError, match="modified by an inplace operation|backward through the graph a second time"):
        loss.backward()


def test_the_loss_has_no_second_derivative(monkeypatch):
    monkeypatch.setattr(losses, "SLICE_ELEMENTS", WORDS)
    logits, targets = make_logits_and_targets(torch.float32)
    (gradient,) = torch.autograd.grad(compute_next_token_loss(logits, targets), logits, create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradient.sum().backward()


def test_a_compiled_loss_is_the_expression():
    logits, targets = make_logits_and_targets(torch.bfloat16)
    compiled = torch.compile(compute_next_token_loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits, targets), cross_entropy(logits, targets))


CASES = {
    "plain": lambda logits, targets: None,
    "ignored": lambda logits, targets: targets[0, :9].fill_(IGNORE_INDEX),
    "all ignored": lambda logits, targets: targets.fill_(IGNORE_INDEX),
    "NaN": lambda logits, targets: logits[0, 0, -1].fill_(torch.nan),
    "NaN, ignored": lambda logits, targets: (logits[0, 0, -1].fill_(torch.nan), targets[0, 0].fill_(IGNORE_INDEX)),
    "inf": lambda logits, targets: logits[0, 0, -1].fill_(torch.inf),
    "-inf": lambda logits, targets: logits[:, :, 0].fill_(-torch.inf),
    "a row of -inf": lambda logits, targets: logits[0, 0].fill_(-torch.inf),
    "a part of -inf": lambda logits, targets: (logits[..., WORDS // 2 :].fill_(-torch.inf), targets.fill_(0)),
}


def split(logits):
    """Return the same logits as a DTensor whose vocabulary two ranks split."""
    return distribute_tensor(logits.detach(), get_cached_mesh((2,), ("tp",)), [Shard(2)]).requires_grad_()


@pytest.mark.parametrize(
    ("words", "dtype", "case"), thinned([WORDS, WORDS + 1, 1], [torch.bfloat16, torch.float32], CASES, together=1)
)
@on_ranks(2)
def test_a_split_vocabulary_has_the_loss_and_the_gradient_of_a_whole_one(words, dtype, case):
    whole, targets = make_logits_and_targets(dtype, words=words)
    CASES[case](whole.detach(), targets)
    parts = split(whole)
    expected = cross_entropy(whole, targets)
    with patch.object(losses, "SLICE_ELEMENTS", 7 * words):
        loss = compute_next_token_loss(parts * 1, targets)
    (loss / 3).backward()
    (expected / 3).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0, equal_nan=True)
    rtol = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(parts.grad.full_tensor(), whole.grad, rtol=rtol, atol=1e-8, equal_nan=True)
    bits = loss.detach().reshape(1).view(torch.int32)
    assert (all_gather(bits, 0, dist.group.WORLD) == bits).all()


@on_ranks(2)
def test_ranks_gather_three_numbers_of_a_token_and_have_one_slice_in_float32():
    tokens, words = 64, 4096
    logits = split(torch.randn(1, tokens, 2 * words, dtype=torch.bfloat16))
    targets = torch.randint(2 * words, (1, tokens))
    slice_bytes, numbers = 4 * words * 4, 4 * tokens
    with patch.object(losses, "SLICE_ELEMENTS", 4 * words), CollectiveCounter() as counter:
        with TensorByteCounter() as tensors:
            loss = compute_next_token_loss(logits, targets)
            assert tensors.peak_bytes <= slice_bytes + 30 * numbers
            assert counter.collectives == [("all_gather", torch.float32, 2 * 3 * numbers)]
            (gradient,) = torch.autograd.grad(loss, logits)
        assert tensors.peak_bytes <= slice_bytes + 30 * numbers
        assert len(counter.collectives) == 1
    assert gradient.to_local().data_ptr() == logits.to_local().data_ptr()


@on_ranks(2)
def test_a_target_that_is_no_word_of_any_rank_makes_the_loss_nan():
    for target in (WORDS, -1):
        logits, targets = make_logits_and_targets(torch.bfloat16)
        targets[1, 1] = target
        assert compute_next_token_loss(split(logits), targets).isnan()


@pytest.mark.nightly
@on_ranks(2)
def test_a_compiled_loss_of_a_split_vocabulary_is_the_same():
    logits, targets = make_logits_and_targets(torch.bfloat16)
    results = []
    for loss in (compute_next_token_loss, torch.compile(compute_next_token_loss, fullgraph=True, backend="aot_eager")):
        parts = split(logits)
        value = loss(parts * 1, targets)
        value.backward()
        results.append((value.item(), parts.grad.full_tensor().tolist()))
    assert results[0] == results[1]

"""Checks whether a model's logits depend on the other prompts of the batch: 5 tokens alone, among 500, one by one."""

import pytest
import torch

from quaver import sync_float8_amax_and_scale_history
from quaver.numerics import mismatch
from tests.library.foreign.llama import llama

BATCH = torch.randint(128, (100, 5), generator=torch.Generator().manual_seed(1))
OF_A_TOKEN = ("rowwise", "rowwise_with_tensorwise_weight", "blockwise", "mxfp8")


def model(recipe):
    made = llama(recipe).bfloat16()
    if recipe == "delayed":
        made(BATCH).logits.sum().backward()
        sync_float8_amax_and_scale_history(made)
    return made.eval()


def logprobs(logits):
    return logits.float().log_softmax(-1)[:, :-1].gather(-1, BATCH[:1, 1:, None])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@torch.no_grad()
def in_batch_and_by_token(made):
    """The log probabilities of the first prompt: alone, in the batch, and by decoding with a cache."""
    steps, past = [], None
    for position in range(BATCH.shape[1]):
        output = made(BATCH[:1, position : position + 1], past_key_values=past, use_cache=True)
        past = output.past_key_values
        steps.append(output.logits)
    return [logprobs(each) for each in (made(BATCH[:1]).logits, made(BATCH).logits[:1], torch.cat(steps, 1))]


@pytest.mark.parametrize("recipe", [None, *OF_A_TOKEN, "delayed"])
def test_scales_of_tokens_blocks_and_earlier_steps_leave_the_batch_out(recipe):
    """To the order of sums of the CPU's bfloat16 matmuls and attention: equal to the bit on AMX and AVX-512."""
    alone, in_batch, by_token = in_batch_and_by_token(model(recipe))
    for other in (in_batch, by_token):
        assert mismatch(alone, other).k3 < 1e-7


def test_one_scale_for_a_tensor_has_the_batch_in_it():
    alone, in_batch, by_token = in_batch_and_by_token(model("tensorwise"))
    for other in (in_batch, by_token):
        found = mismatch(alone, other)
        assert 1e-7 < found.k3 < 1e-3
        assert found.token_mult_prob_error < 1.03

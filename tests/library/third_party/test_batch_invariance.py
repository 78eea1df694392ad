"""Tests whether a model's logits depend on the other prompts of the batch: 5 tokens alone, among 500, one by one."""

import pytest
import torch

from quaver import sync_float8_amax_and_scale_history
from quaver.numerics import compute_mismatch
from tests.library.third_party.llama import llama

BATCH = torch.randint(128, (100, 5), generator=torch.Generator().manual_seed(1))
RECIPES_PER_TOKEN = ("rowwise", "rowwise_with_tensorwise_weight", "blockwise", "mxfp8")


def build_model(recipe):
    model = llama(recipe).bfloat16()
    if recipe == "delayed":
        model(BATCH).logits.sum().backward()
        sync_float8_amax_and_scale_history(model)
    return model.eval()


def compute_logprobs(logits):
    return logits.float().log_softmax(-1)[:, :-1].gather(-1, BATCH[:1, 1:, None])


@torch.no_grad()
def compare_logprobs(model):
    """Compare the log probabilities of the first prompt alone with those in the batch and of decoding with a cache."""
    steps, past = [], None
    for position in range(BATCH.shape[1]):
        output = model(BATCH[:1, position : position + 1], past_key_values=past, use_cache=True)
        past = output.past_key_values
        steps.append(output.logits)
    alone = compute_logprobs(model(BATCH[:1]).logits)
    batched = (model(BATCH).logits[:1], torch.cat(steps, 1))
    return [compute_mismatch(alone, compute_logprobs(logits)) for logits in batched]


@pytest.mark.parametrize("recipe", [None, *RECIPES_PER_TOKEN, "delayed"])
def test_scales_of_tokens_blocks_and_earlier_steps_leave_the_batch_out(recipe):
    """To the order of sums of the CPU's bfloat16 matmuls and attention: equal to the bit on AMX and AVX-512."""
    for difference in compare_logprobs(build_model(recipe)):
        assert difference.k3 < 1e-7


def test_one_scale_for_a_tensor_depends_on_the_batch():
    for difference in compare_logprobs(build_model("tensorwise")):
        assert 1e-7 < difference.k3 < 1e-3
        assert difference.token_mult_prob_error < 1.03

"""Tests that training.reduce adds up microbatches' gradients of every kind of parameter in float32.

test_train_distributed.py compares the losses of ranks, and test_traffic.py what they send. A loss scaled by a power of
2 has gradients scaled alike, to the bit. The sum of 256, 1 and 1 is 256 in bfloat16.
"""

import pytest
import torch

from quaver.lab.data import Batch
from quaver.lab.model.plain_tensors import list_plain_tensors
from quaver.lab.settings import Model, TrainConfig
from quaver.lab.trainer.micro_batches import accumulate_gradients
from tests.lab.trainer.runs import build_on_rank, with_settings
from tests.ranks import run as run_on_ranks

TINY = Model(32, 32, 2, 2, 2, 32, n_experts=2, n_shared_experts=1, tie_word_embeddings=True)
SCALES = [256.0, 1.0, 1.0]
NEVER = {"parallelism": {"fsdp_reshard_after_forward": "never"}}
CASES = {
    "sharded": (2, {"training": {"reduce": "last", "residual_dtype": "bfloat16"}}),
    "gathered once": (2, {"training": {"reduce": "last", "residual_dtype": "bfloat16"}, **NEVER}),
    "bfloat16": (2, {"training": {"reduce": "last", "dtype": "bfloat16"}}),
    "alone": (1, {"training": {"reduce": "last", "dtype": "bfloat16"}}),
    "alone, bfloat16 sums": (1, {"training": {"dtype": "bfloat16"}}),
    "bfloat16 sums": (2, {"training": {"dtype": "bfloat16"}}),
}


def compute_gradients(config: TrainConfig, ranks: int, scales: list[float]) -> dict[str, torch.Tensor]:
    trained, _ = build_on_rank(config, ranks)
    tokens = torch.arange(32).view(2, 16) * 7 % 32
    with accumulate_gradients(trained.model, config, scales) as micro_batches:
        for scale in micro_batches:
            (trained.compute_loss(Batch(tokens, tokens.roll(-1, 1), None)) * scale).backward()
    return {name: list_plain_tensors(parameter.grad)[0] for name, parameter in trained.model.named_parameters()}


def list_inexact_sums(config: TrainConfig, ranks: int) -> list[str]:
    """Return the parameters whose gradient is not the rounded float32 sum of those of the three microbatches."""
    one, three = compute_gradients(config, ranks, [1.0]), compute_gradients(config, ranks, SCALES)
    return [name for name, grad in one.items() if not torch.equal(three[name], (258 * grad.float()).to(grad.dtype))]


@pytest.mark.parametrize("name", CASES)
def test_gradients_of_micro_batches_are_added_up_in_float32(name):
    ranks, sections = CASES[name]
    config = with_settings(TrainConfig(model=TINY), float8={"recipe_name": "rowwise"}, **sections)
    inexact = list_inexact_sums(config, 1) if ranks == 1 else run_on_ranks(2, list_inexact_sums, config, 2)[0]
    if config.training.reduce == "every":
        assert {"model.embed_tokens.weight", "model.norm.weight", "model.layers.1.mlp.experts.down_proj"} <= {*inexact}
    else:
        assert inexact == []


def train_after_an_error(config: TrainConfig, ranks: int) -> bool:
    """Return whether every parameter gets a gradient."""
    trained, _ = build_on_rank(config, ranks)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    with (
        pytest.raises(RuntimeError, match="mine"),
        accumulate_gradients(trained.model, config, [1, 2, 3]) as micro_batches,
    ):
        for number in micro_batches:
            trained.compute_loss(Batch(tokens, tokens, None)).backward()
            if number == 2:
                raise RuntimeError("mine")
    plain = trained.compute_loss(Batch(tokens, tokens, None))  # gathered once more, so resharded before
    trained.model.zero_grad()
    plain.backward()
    return all(parameter.grad is not None for parameter in trained.model.parameters())


def test_after_an_error_ranks_reduce_again():
    config = with_settings(TrainConfig(model=TINY), training={"reduce": "last"}, **NEVER)
    assert run_on_ranks(2, train_after_an_error, config, 2) == [True, True]

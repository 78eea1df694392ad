"""Tests the dtype of the residual under `training.residual_dtype`, what FSDP2 gathers, and the numbers on ranks."""

from dataclasses import replace

import pytest
import torch

from quaver.lab.data import Batch
from quaver.lab.memory.train_step.predict_run import predict_run_memory
from quaver.lab.settings import ActivationCheckpoint, Float8, Parallelism, TrainConfig
from tests.lab.trainer.runs import build_on_rank, with_settings
from tests.ranks import run as run_on_ranks
from tests.reference import sqnr_db

BFLOAT16 = {"residual_dtype": "bfloat16"}


def record_stream(config: TrainConfig, ranks: int) -> dict:
    """Run forward and backward on this rank, and return what the embedding and blocks pass on."""
    trained, _ = build_on_rank(config, ranks)
    stream: dict = {"blocks": [], "dtypes": [], "gathered": []}
    embedding = trained.model.model.embed_tokens
    embedding.register_forward_hook(lambda module, _, out: stream["gathered"].append(module.weight.dtype))
    for block in trained.model.iter_blocks():
        block.register_forward_pre_hook(lambda _, args: stream["blocks"].append(args[0].detach().float()))
        block.register_forward_hook(lambda _, args, out: stream["dtypes"].append((args[0].dtype, out.dtype)))
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    trained.forward_backward([Batch(tokens, tokens.roll(-1, 1))])  # each rank with the same
    grad = embedding.weight.grad
    stream["grad"] = grad.full_tensor() if ranks > 1 else grad
    return stream


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    ("training", "dtype"),
    [
        ({}, torch.float32),
        ({"residual_dtype": "float32"}, torch.float32),
        (BFLOAT16, torch.bfloat16),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"mixed_precision_param": "float32"}, torch.float32),
    ],
    ids=str,
)
def test_the_residual_has_the_dtype_of_its_setting(tiny_config, training, dtype, compiled):
    config = with_settings(tiny_config, training={**training, "compile": compiled})
    assert set(record_stream(config, 1)["dtypes"]) == {(dtype, dtype)}


@pytest.mark.parametrize("degree", [1, 2], ids=["shard", "tensor"])
def test_ranks_compute_what_one_process_computes(tiny_config, degree):
    config = with_settings(tiny_config, training=BFLOAT16, parallelism={"tensor_parallel_degree": degree})
    one = record_stream(config if degree == 1 else replace(config, parallelism=Parallelism()), 1)
    assert one["gathered"] == [torch.float32]
    for rank, stream in enumerate(run_on_ranks(2, record_stream, config, 2)):
        expected = [hidden.chunk(degree, 1)[rank % degree] for hidden in one["blocks"]]  # the sequence is split
        assert stream["blocks"][0].equal(expected[0])
        assert sqnr_db(expected[1], stream["blocks"][1]) > 40
        assert set(stream["dtypes"]) == {(torch.bfloat16, torch.bfloat16)}
        assert stream["gathered"] == [torch.bfloat16 if degree == 1 else torch.float32]
        assert stream["grad"].dtype == torch.float32
        assert sqnr_db(one["grad"], stream["grad"]) > 40


def test_a_checkpoint_recomputes_the_same_bits(tiny_config):
    config = with_settings(replace(tiny_config, float8=Float8(recipe_name="rowwise")), training=BFLOAT16)
    plain = record_stream(config, 1)["grad"]
    assert record_stream(replace(config, activation_checkpoint=ActivationCheckpoint("full")), 1)["grad"].equal(plain)


def test_a_bfloat16_residual_saves_the_predicted_bytes(tiny_config):
    """The stream before each half of a block and before the last norm, which norms save on a GPU."""
    configs = (with_settings(tiny_config, training={"residual_dtype": name}) for name in ("float32", "bfloat16"))
    saved, fewer = (predict_run_memory(config, 1, "cuda").prediction.saved_by_forward_bytes for config in configs)
    stream_elements = 2 * tiny_config.training.seq_len * tiny_config.model.dim
    expected = (2 * tiny_config.model.n_layers + 1) * stream_elements * 2
    assert saved - fewer == pytest.approx(expected, rel=0.02)  # norms' weights and root mean squares

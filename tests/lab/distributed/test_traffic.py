"""Tests that ranks send what `quaver memory --traffic` predicts and what formulas say."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from quaver.lab.memory.train_step.predict_run import make_train_step
from quaver.lab.memory.train_step.traffic import TrafficCounter, name_mesh_dims, predict_traffic
from quaver.lab.model.parallelize import open_fake_mesh
from quaver.lab.settings import Comm, Float8, Model, Parallelism, TrainConfig, Training
from quaver.lab.settings.parallel_dims import ParallelDims
from tests import ranks
from tests.counting import CollectiveCounter
from tests.lab.trainer.runs import build_on_rank
from tests.thinned import at_night

RANKS, DIM, HIDDEN, LAYERS, TOKENS = 2, 32, 64, 2, 2 * 32
GATHERED = {"enable_fsdp_float8_all_gather": True, "precompute_float8_dynamic_scale_for_fsdp": True}


def make_config(*, float8, dp_replicate=1, tp=1, **training):
    return TrainConfig(
        model=Model(dim=DIM, n_layers=LAYERS, n_heads=4, n_kv_heads=2, hidden_dim=HIDDEN),
        training=Training(seq_len=TOKENS // 2, local_batch_size=2, device="cpu", **training),
        parallelism=Parallelism(data_parallel_replicate_degree=dp_replicate, tensor_parallel_degree=tp),
        float8=float8,
    )


SPLIT_AND_SHARDED = make_config(float8=Float8(**GATHERED), tp=2)
CASES = {
    "FSDP2, bfloat16": make_config(float8=Float8(enable_float8_linear=False)),
    "FSDP2, tensorwise": make_config(float8=Float8(**GATHERED)),
    "FSDP2, rowwise, no precompute": make_config(
        float8=Float8(recipe_name="rowwise", enable_fsdp_float8_all_gather=True)
    ),
    "replicated, tensorwise": make_config(float8=Float8(), dp_replicate=2),
    "tensor parallel, tensorwise": make_config(float8=Float8(), tp=2),
    "FSDP2, reduced after the last": make_config(float8=Float8(), global_batch_size=12, reduce="last"),
    "tensor parallel, rowwise": make_config(float8=Float8(recipe_name="rowwise"), tp=2),
}


ALWAYS = ("FSDP2, rowwise, no precompute", "tensor parallel, tensorwise")


def count_collectives(config):
    """Return the number and the bytes of the collectives that this rank starts in its second step, by kind."""
    trained, dims = build_on_rank(config, RANKS)
    step, _ = make_train_step(trained, trained.config, dims)
    step()
    with CollectiveCounter() as counter:
        step()
    return counter.calls, counter.bytes


@pytest.mark.parametrize("case", [*ALWAYS, *at_night((case,) for case in CASES if case not in ALWAYS)])
def test_predicted_collectives_are_those_that_a_step_starts(case):
    calls, sizes = ranks.run(RANKS, count_collectives, CASES[case])[0]
    traffic = predict_traffic(CASES[case], RANKS)
    predicted_calls, predicted_bytes = Counter(), Counter()
    for row in traffic.collectives:
        predicted_calls[row.kind] += row.count
        # Of FSDP2's reduce-scatters the counter sees the part that stays.
        parts = row.ranks if (row.kind, row.mesh_dims) == ("reduce_scatter", "dp_shard") else 1
        predicted_bytes[row.kind] += row.tensor_bytes // parts
    assert predicted_calls == calls
    assert predicted_bytes == sizes


def predict_rows(config, ranks=4):
    traffic = predict_traffic(config, ranks)
    return traffic, {(row.mesh_dims, row.kind, row.dtype): row for row in traffic.collectives}


@pytest.mark.parametrize(("reduce", "scatters", "in_float8"), [("last", 1, True), ("last_all_reduce", 3, False)])
def test_gradients_are_sent_after_the_last_of_three_micro_batches(reduce, scatters, in_float8):
    run = make_config(float8=Float8(), dp_replicate=2, global_batch_size=24, reduce=reduce)
    traffic, rows = predict_rows(replace(run, comm=Comm(float8_gradients=in_float8)))
    groups = LAYERS + 2
    sent = rows["dp_shard", "all_to_all", "uint8"] if in_float8 else rows["dp_shard", "reduce_scatter", "float32"]
    assert sent.count == scatters * groups
    bytes_each = (1 + 4 / 256) if in_float8 else 4
    assert sent.tensor_bytes == pytest.approx(scatters * traffic.parameters * bytes_each, rel=2e-3)  # cut blocks
    replicated = rows["dp_replicate", "all_reduce", "float32"]
    assert (replicated.count, replicated.tensor_bytes) == (groups, 4 * traffic.parameters // 2)


def test_fsdp2_sends_the_bytes_of_the_formulas():
    """Weights of blocks are gathered before the forward and before the backward; the rest once, to stay."""
    weights = LAYERS * (2 * DIM * DIM + 2 * DIM * DIM // 2 + 3 * DIM * HIDDEN)
    traffic, rows = predict_rows(CASES["FSDP2, tensorwise"])
    gathered = rows["dp_shard", "all_gather", "uint8"]
    # A block's norms are gathered with its weights, in bfloat16: as bytes among bytes.
    assert gathered.tensor_bytes == 2 * (weights + LAYERS * 2 * DIM * 2)
    assert gathered.count == 2 * LAYERS
    assert gathered.sent_bytes == gathered.tensor_bytes * 3 // 4
    assert rows["dp_shard", "reduce_scatter", "float32"].tensor_bytes == 4 * traffic.parameters
    assert rows["dp_shard", "all_reduce", "int32"].tensor_bytes == 4 * LAYERS * 7  # an amax of each weight
    # Parameters and two moments in float32, and a step counter of each parameter.
    assert traffic.checkpoint_bytes == 12 * traffic.parameters + 4 * (LAYERS * 9 + 3)


def test_tensor_parallelism_sends_the_bytes_of_the_formulas():
    traffic, rows = predict_rows(SPLIT_AND_SHARDED, ranks=1024)  # which takes no longer than four
    assert (traffic.dims.dp_shard, traffic.dims.tp) == (512, 2)
    assert rows["dp_shard", "reduce_scatter", "float32"].ranks == 512
    counts = [row.count for key, row in rows.items() if key[0] == "dp_shard"]
    assert traffic.sums["dp_shard"].num_collectives == sum(counts)
    # The inputs of attention and feed-forward, [tokens, dim], as codes; in backward again the gradients of o and down.
    assert rows["tp", "all_gather", "uint8"].tensor_bytes == LAYERS * 4 * TOKENS * DIM
    assert rows["tp", "all_gather", "uint8"].count == LAYERS * 4
    # The output projection's input, but no logits; the embedding's gradient, and three numbers of a token and rank.
    assert rows["tp", "all_gather", "bfloat16"].tensor_bytes == 2 * TOKENS * DIM
    assert rows["tp", "all_gather", "float32"].tensor_bytes == 4 * TOKENS * DIM + 2 * 12 * TOKENS


@pytest.mark.parametrize(
    ("dims", "ranks", "mesh_dims"),
    [
        ((2, 2, 2), range(8), "dp_replicate x dp_shard x tp"),
        ((2, 2, 2), (0, 1), "tp"),
        ((2, 2, 2), (0, 2), "dp_shard"),
        ((2, 2, 2), (0, 4), "dp_replicate"),
        ((2, 2, 2), (0, 2, 4, 6), "dp_replicate x dp_shard"),
        ((1, 8, 1, 0, 2), (0, 1), "ep"),
        ((1, 8, 1, 0, 2), (0, 2, 4, 6), "dp_shard / ep"),
    ],
)
def test_a_group_is_named_by_its_dims(dims, ranks, mesh_dims):
    assert name_mesh_dims(ranks, ParallelDims(*dims)) == mesh_dims


def test_a_collective_whose_bytes_are_not_counted_is_refused():
    with (
        open_fake_mesh(ParallelDims(dp_shard=2)),
        TrafficCounter(),
        pytest.raises(NotImplementedError, match="got broadcast_"),
    ):
        torch.distributed.broadcast(torch.zeros(4), 0)

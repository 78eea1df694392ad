"""Tests what initial weights are drawn, and that every layout of ranks holds the shards of the same ones."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from quaver.lab.model.initialize import allocate, initialize
from quaver.lab.model.llama import Llama, make_meta_llama
from quaver.lab.model.parallelize import make_mesh, parallelize
from quaver.lab.settings import Model, TrainConfig, Training
from quaver.lab.settings.parallel_dims import ParallelDims

CPU = torch.device("cpu")
# 68 rows over 2 tensor parallel and 4 sharding ranks are 9, 9, 9 and 7 of each half: unlike shards.
CONFIG = Model(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=68)


def make_llama(config: Model = CONFIG, seed: int = 0, dims: ParallelDims | None = None, **training: object) -> Llama:
    model = make_meta_llama(config)
    mesh = make_mesh(dims or ParallelDims(), "cpu")
    parallelize(model, TrainConfig(model=config, training=Training(**training)), mesh)
    allocate(model, CPU)
    initialize(model, seed)
    return model


def test_matrices_have_their_spread_and_vectors_are_ones():
    config = Model(dim=128, n_layers=8, n_heads=4, n_kv_heads=2, hidden_dim=256)
    for name, parameter in make_llama(config).named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
            continue
        std = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02  # sqrt(2 * 8 layers) = 4
        assert parameter.std().item() == pytest.approx(std, rel=0.03), name
        assert parameter.mean().item() == pytest.approx(0, abs=std / 20), name


def test_weights_depend_on_seed_and_name_alone():
    first, again, other = (dict(make_llama(seed=seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    matrices = [parameter for parameter in first.values() if parameter.dim() == 2]
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].dim() == 2)
    heads = {tuple(matrix.flatten()[:4].tolist()) for matrix in matrices}
    assert len(heads) == len(matrices)  # no two are drawn alike
    wider = make_llama(replace(CONFIG, hidden_dim=72), seed=1)
    assert torch.equal(first["lm_head.weight"], wider.lm_head.weight)  # whatever other parameters there are


def test_bfloat16_weights_are_the_float32_ones_rounded():
    wide = make_llama()
    narrow = make_meta_llama(CONFIG).bfloat16()
    allocate(narrow, CPU)
    initialize(narrow, 0)
    assert all(map(torch.equal, narrow.parameters(), wide.bfloat16().parameters()))


def test_a_tied_projection_stays_tied():
    model = make_llama(replace(CONFIG, tie_word_embeddings=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_buffers_are_refused():
    model = make_meta_llama(CONFIG)
    model.register_buffer("amax_history", torch.zeros(3, device="meta"))
    with pytest.raises(NotImplementedError, match="buffers have no initial values here: amax_history"):
        allocate(model, CPU)


@pytest.mark.parametrize(
    "sizes", [(1, 4, 1), (1, 1, 2), (2, 1, 1), (1, 4, 2), (2, 2, 2)], ids=lambda sizes: "x".join(map(str, sizes))
)
def test_each_rank_holds_its_shard_of_the_same_weights(sizes):
    expected = dict(make_llama(seed=3).named_parameters())
    for rank in range(ParallelDims(*sizes).world_size):
        dims = ParallelDims(*sizes, rank=rank)
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=dims.world_size)
        try:
            shards = dict(make_llama(seed=3, dims=dims).named_parameters())
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it keeps the meshes that it has seen, with their rank
        shard_rank = dims.data_parallel_rank % dims.dp_shard
        for name, parameter in shards.items():
            shard = expected[name]
            if shard.dim() == 2:  # tensor parallelism first, then FSDP2 along dim 0
                dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
                shard = shard.chunk(dims.tp, dim)[rank % dims.tp]
            shard = shard.chunk(dims.dp_shard)[shard_rank]
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.to_local(), shard), (rank, name)

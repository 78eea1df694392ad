"""Tests that one process exports what two ranks saved, sharded or split by tensor parallelism, to the bit."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from quaver.lab.model.initialize import initialize
from quaver.lab.model.llama import Llama
from quaver.lab.runs.checkpoint_folder import RECORD_FORMAT, write_record
from quaver.lab.settings import Float8, Model, Parallelism, TrainConfig, Training
from tests.lab.trainer.runs import build_on_rank
from tests.ranks import run
from tests.steps import assert_same

MODEL = Model(dim=48, n_layers=2, n_heads=6, n_kv_heads=2, hidden_dim=80)
CONFIG = TrainConfig(model=MODEL, training=Training(seq_len=32, device="cpu"))
LAYOUTS = {
    "shard": replace(CONFIG, float8=Float8(enable_fsdp_float8_all_gather=True)),
    "tied": replace(CONFIG, model=replace(MODEL, tie_word_embeddings=True)),
    "tensor": replace(CONFIG, parallelism=Parallelism(tensor_parallel_degree=2)),
}


def save_weights(config: TrainConfig, path: Path) -> bool:
    """Save the first weights of a run as this rank has them, and return whether it has only a part."""
    trained, _ = build_on_rank(config, 2)
    state = get_model_state_dict(trained.model)
    save({"model": state}, checkpoint_id=path)
    weight = state["model.layers.1.mlp.up_proj.weight"]
    return isinstance(weight, DTensor) and weight.to_local().numel() < weight.numel()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_export_of_what_two_ranks_saved(layout, tmp_path, run_quaver):
    config = LAYOUTS[layout]
    checkpoint = tmp_path / "step-00000007"
    assert run(2, save_weights, config, checkpoint / "tensorwise") == [True, True]
    record = {"format": RECORD_FORMAT, "models": ["tensorwise"], "world_size": 2, "progress": {"step": 7}}
    record |= {"config": asdict(config), "data": {"eos_id": 0, "sha256": ""}}
    write_record(checkpoint, record)

    options = ["--dtype=float32", "--max-shard-size=100KB"]
    run_quaver("convert", "quaver-to-hf", checkpoint, tmp_path / "hf", *options)
    expected = Llama(config.model)
    initialize(expected, seed=0)
    state = expected.state_dict()
    if config.model.tie_word_embeddings:
        del state["lm_head.weight"]
    files = sorted((tmp_path / "hf").glob("*.safetensors"))
    assert len(files) > 1
    exported = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert_same(exported, state)

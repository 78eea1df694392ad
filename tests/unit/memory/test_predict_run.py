"""What is predicted of a run, against what a run then takes."""

import time
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from quaver.memory.runs.predict import SEES_GATHERS, predict_memory
from quaver.recorder.allocator import measure_usage
from quaver.trainer.config import ActivationCheckpoint, Float8, Parallelism
from quaver.trainer.config_io import build_config, load_config
from quaver.trainer.data import Batch
from quaver.trainer.initialize import allocate, initialize
from quaver.trainer.memory import storage_bytes
from quaver.trainer.parallel_dims import resolve
from quaver.trainer.parallelize import parallelize
from quaver.trainer.ranks import Ranks
from quaver.trainer.run_setup import make_models
from quaver.trainer.train import prepare, train
from quaver.trainer.trained_model import TrainedModel
from tests.distributed.ranks import run as run_on_ranks

STEPS = 3
"""On ranks: when gloo's threads release their buffers is chance, and can only add; the least of so many counts."""


def test_a_run_is_predicted(tiny_float8_config):
    config = replace(tiny_float8_config, job=replace(tiny_float8_config.job, compare=False))
    memory = predict_memory(config)
    run = prepare(config)
    train(run)
    (twin,) = run.models
    assert twin.peak.exact
    inputs = memory.prediction.report["resident_bytes"]["inputs"]
    assert memory.prediction.peak_bytes - inputs == pytest.approx(twin.peak.peak_bytes, rel=0.03)
    assert memory.prediction.resident_bytes - inputs == storage_bytes(twin.resident_tensors())


GATHERS_FLOAT8 = Float8(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True)
ON_RANKS = {
    "tensor parallel, full": {
        "float8": Float8(recipe_name="rowwise"),
        "parallelism": Parallelism(tensor_parallel_degree=2),
        "activation_checkpoint": ActivationCheckpoint(mode="full"),
    },
}


def _measured_on_rank(settings):
    device, rank = torch.device("cpu"), torch.distributed.get_rank()
    config, layout = resolve(build_config(settings), rank=rank, world_size=2)
    name, model = next(iter(make_models(config, device).by_name.items()))
    parallelize(model, config, init_device_mesh("cpu", tuple(layout.mesh.values()), mesh_dim_names=tuple(layout.mesh)))
    allocate(model, device)
    initialize(model, seed=0)
    twin = TrainedModel(name, model, config, device, Ranks(rank, rank, 2))
    shape = (config.training.local_batch_size, config.training.seq_len)
    batch = Batch(torch.randint(0, 256, shape), torch.randint(0, 256, shape))
    twin.train_step(1, [batch])
    peaks = []
    for step in range(2, 2 + STEPS):
        # A step leaves the scales of the next one in the place of the last one's, which a profile does not see go.
        with patch("quaver.recorder.allocator._check_one_step"), measure_usage(device) as measured:
            measured.mark()
            twin.train_step(step, [batch])
        peaks.append(measured.usage.tensor_peak_bytes)
    return min(peaks)


@pytest.mark.skipif(not SEES_GATHERS, reason="gathers into fake tensors go unseen in this torch")
@pytest.mark.parametrize("name", ON_RANKS)
def test_a_run_on_ranks_is_predicted(tiny_config, name):
    config = replace(tiny_config, **ON_RANKS[name])
    measured = run_on_ranks(2, _measured_on_rank, asdict(config))
    memory = predict_memory(config, 2)
    assert memory.prediction.step_peak_bytes == pytest.approx(max(measured), rel=0.03)
    assert not torch.distributed.is_initialized()


@pytest.mark.skipif(not SEES_GATHERS, reason="gathers into fake tensors go unseen in this torch")
@pytest.mark.parametrize(
    ("ranks", "section"),
    [
        (4, {"parallelism": Parallelism(tensor_parallel_degree=2), "float8": GATHERS_FLOAT8}),
        (
            16,
            {
                "parallelism": Parallelism(data_parallel_replicate_degree=2, data_parallel_shard_degree=8),
                "float8": Float8(recipe_name="delayed", enable_fsdp_float8_all_gather=True),
            },
        ),
    ],
    ids=["tensor parallel too", "hybrid, delayed"],
)
def test_more_ranks_hold_less_each(tiny_config, ranks, section):
    config = replace(tiny_config, **section)
    alone = replace(config, float8=replace(config.float8, **_NOT_GATHERED), parallelism=Parallelism())
    one, many = predict_memory(alone), predict_memory(config, ranks)
    held = {name: many.prediction.by_category[name] for name in ("parameters", "optimizer_state")}
    split = ranks // config.parallelism.data_parallel_replicate_degree
    assert held["parameters"] == pytest.approx(one.prediction.by_category["parameters"] / split, rel=0.1)
    assert held["optimizer_state"] == pytest.approx(2 * held["parameters"], rel=0.05)
    assert many.prediction.by_category["gathered_weights"] > 0
    assert many.prediction.step_peak_bytes > 0


_NOT_GATHERED = {"enable_fsdp_float8_all_gather": False, "precompute_float8_dynamic_scale_for_fsdp": False}


@pytest.mark.nightly
def test_llama_8b_on_8_ranks_takes_less_than_a_minute():
    config = load_config(Path(__file__).parents[3] / "train_configs" / "llama3_8b.toml")
    start = time.monotonic()
    memory = predict_memory(config, 8)
    assert time.monotonic() - start < 60
    assert memory.prediction.by_category["parameters"] == pytest.approx(4 * 8_030_261_248 / 8, rel=0.001)
    # Logits in float32, their log-softmax and its gradient, of 8192 tokens, are the largest tensors at the peak.
    largest = memory.prediction.at_peak[0]
    assert largest["shape"] == [8192, 128256]
    assert largest["dtype"] == "float32"

"""What is predicted of a run, against what a run then takes."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from quaver.memory.runs.predict import SEES_GATHERS, predict_memory
from quaver.trainer.config import Float8, Parallelism
from quaver.trainer.config_io import load_config
from quaver.trainer.memory import storage_bytes
from quaver.trainer.train import prepare, train
from tests.unit.trainer.runs import changed


def test_a_run_is_predicted(tiny_float8_config):
    config = changed(tiny_float8_config, job={"compare": False})
    memory = predict_memory(config)
    run = prepare(config)
    train(run)
    (twin,) = run.models
    assert twin.peak.exact
    inputs = memory.prediction.report["resident_bytes"]["inputs"]
    assert memory.prediction.peak_bytes - inputs == pytest.approx(twin.peak.peak_bytes, rel=0.03)
    assert memory.prediction.resident_bytes - inputs == storage_bytes(twin.resident_tensors())


GATHERS_FLOAT8 = Float8(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True)


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

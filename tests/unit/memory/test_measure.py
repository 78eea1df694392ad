"""Measured steps against their predictions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quaver.cli.memory.views import side_by_side_table
from quaver.memory.runs.measure import MOST_RANKS, measure_memory, side_by_side
from quaver.memory.runs.predict import SEES_GATHERS, predict_memory
from quaver.trainer.config import ActivationCheckpoint, Data, Float8, Optimizer, Parallelism, Training
from quaver.trainer.config_io import load_config
from tests.unit.trainer.runs import changed

CONFIGS = Path(__file__).parents[3] / "train_configs"
WITHIN = 0.01


def _ratios(predicted, measured):
    return {row["what"]: row["ratio"] for row in side_by_side(predicted, measured)}


def test_the_debug_model_is_measured_as_it_is_predicted():
    config = load_config(CONFIGS / "llama3_debug.toml")
    predicted, measured = predict_memory(config), measure_memory(config)
    ratios = _ratios(predicted, measured)
    assert {"parameters", "optimizer state", "saved activations", "peak", "saved for backward"} <= set(ratios)
    assert all(ratio == pytest.approx(1, rel=WITHIN) for ratio in ratios.values())
    # The allocator's log has the same peak.
    assert measured.allocator_tensor_peak_bytes == pytest.approx(measured.prediction.peak_bytes, rel=1e-4)
    assert measured.allocator_peak_bytes >= measured.allocator_tensor_peak_bytes
    ours, theirs = predicted.to_dict(), measured.to_dict()
    assert set(ours) <= set(theirs)
    assert set(ours["report"]) == set(theirs["report"])
    assert theirs["device"] == "cpu"
    json.dumps(theirs)


MICRO_BATCHES = Training(seq_len=32, local_batch_size=2, global_batch_size=8, device="cpu")


@pytest.mark.parametrize(
    "section",
    [
        {"training": MICRO_BATCHES, "data": Data(document_mask=True)},
        {"float8": Float8(recipe_name="delayed"), "optimizer": Optimizer(implementation="foreach")},
        {"float8": Float8(recipe_name="rowwise"), "activation_checkpoint": ActivationCheckpoint(mode="full")},
    ],
    ids=lambda section: " ".join(section),
)
def test_settings_of_a_run(tiny_config, section):
    config = replace(tiny_config, **section)
    predicted, measured = predict_memory(config), measure_memory(config)
    assert measured.micro_batches == predicted.micro_batches
    ratios = _ratios(predicted, measured)
    assert ratios["peak"] == pytest.approx(1, rel=WITHIN)
    assert ratios["between steps"] == pytest.approx(1, rel=WITHIN)


def test_compiled_code_is_measured_by_the_allocator(tiny_float8_config):
    config = changed(tiny_float8_config, job={"compare": False})
    compiled = changed(config, training={"compile": True})
    eager, measured = measure_memory(config), measure_memory(compiled)
    assert any("training.compile" in note for note in measured.notes)
    assert not any("training.compile" in note for note in eager.notes)
    assert measured.prediction.peak_bytes == measured.allocator_tensor_peak_bytes
    assert measured.prediction.saved_by_forward_bytes > 0
    there = measured.prediction.report["resident_bytes"]
    assert there["parameters"] == eager.prediction.by_category["parameters"]
    assert there["optimizer_state"] == eager.prediction.by_category["optimizer_state"]
    ratios = _ratios(eager, measured)
    assert ratios["saved activations"] is None
    assert 0.5 < ratios["peak"] < 2


ON_RANKS = {
    "dp_shard": {
        "float8": Float8(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True),
    },
    "tp": {
        "float8": Float8(recipe_name="rowwise"),
        "parallelism": Parallelism(tensor_parallel_degree=2),
        "activation_checkpoint": ActivationCheckpoint(mode="full"),
    },
}


@pytest.mark.nightly
@pytest.mark.skipif(not SEES_GATHERS, reason="gathers into fake tensors go unseen in this torch")
@pytest.mark.parametrize("dim", ON_RANKS)
def test_ranks_are_started_and_the_first_is_measured(tiny_config, dim):
    """Two processes are spawned, which takes 12 s; test_predict.py compares a prediction with ranks in each run."""
    config = replace(tiny_config, **ON_RANKS[dim])
    measured = measure_memory(config, 2)
    assert measured.layout.mesh == {dim: 2}
    ratios = _ratios(predict_memory(config, 2), measured)
    assert ratios["peak"] == pytest.approx(1, rel=WITHIN)
    assert ratios["saved for backward"] == pytest.approx(1, rel=WITHIN)
    assert not torch.distributed.is_initialized()


def test_what_is_refused(tiny_config):
    with pytest.raises(ValueError, match=f"--ranks must be at most {MOST_RANKS} where a step is measured, got 16"):
        measure_memory(tiny_config, 16)
    split = replace(tiny_config, parallelism=Parallelism(tensor_parallel_degree=2))
    with pytest.raises(ValueError, match=r"parallelism\.tensor_parallel_degree"):
        measure_memory(split, 3)


def test_the_table(tiny_config):
    memory = predict_memory(tiny_config)
    rows = side_by_side(memory, memory)
    rows[0] |= {"measured_bytes": None, "ratio": None}
    table = side_by_side_table(rows)
    assert table.row_count == len(rows)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0][-3:] == ["peak", "between steps", "saved for backward"]
    assert cells[2][0] == ""
    assert cells[3][-1] == "1.0000"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_measured_by_both(tiny_float8_config):
    config = changed(tiny_float8_config, job={"compare": False})
    measured = measure_memory(changed(config, training={"device": "cuda"}))
    assert measured.device == torch.cuda.get_device_name()
    assert measured.allocator_tensor_peak_bytes is None
    # The allocator rounds up to 512 bytes, and counts what operators free themselves.
    assert measured.allocator_peak_bytes >= measured.prediction.peak_bytes
    with pytest.raises(NotImplementedError, match="expected one rank on a GPU"):
        measure_memory(changed(config, training={"device": "cuda"}), 2)

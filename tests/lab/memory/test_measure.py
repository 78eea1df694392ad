"""Compares the predicted memory of runs of the trainer with measured steps, and on simulated ranks."""

import json
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from quaver.lab.cli.memory_views import make_side_by_side_table
from quaver.lab.memory.train_step.measure import MAX_RANKS, measure_memory, measure_rank, tabulate_side_by_side
from quaver.lab.memory.train_step.predict_run import predict_run_memory
from quaver.lab.model.llama import Block
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import ActivationCheckpoint, Data, Float8, Model, Optimizer, Parallelism, Training
from quaver.lab.settings.config_file import load_config
from quaver.lab.settings.parallel_dims import resolve_parallel_dims
from quaver.lab.trainer.trained_model import TrainedModel
from tests.lab.integration.train_on_ranks import compile_quickly
from tests.lab.memory.models import needs_gathers
from tests.lab.trainer.runs import CONFIGS, run_to_end, with_settings
from tests.ranks import run as run_on_ranks

MAX_ERROR = 0.01
MAX_GLOO_ERROR = 0.08
"""Gloo holds a buffer for longer at times: 131,072 bytes of 2,400,000. Peaks without its buffers are 10% less."""
HELD_BY_GLOO = {"peak", "saved activations", "saved for backward"}
"""The rows that have such a buffer. One that outlives the forward counts as saved for backward."""
ALL = {"peak", "between steps", "saved for backward"}


def check_ratios(predicted, measured, names=ALL):
    ratios = {row["what"]: row["ratio"] for row in tabulate_side_by_side(predicted, measured)}
    held = HELD_BY_GLOO & names if measured.dims.world_size > 1 else set()
    assert {name: ratios[name] for name in held} == pytest.approx(dict.fromkeys(held, 1), rel=MAX_GLOO_ERROR)
    names = names - held
    assert {name: ratios[name] for name in names} == pytest.approx(dict.fromkeys(names, 1), rel=MAX_ERROR)


def test_the_debug_model_is_measured_as_it_is_predicted():
    config = with_settings(load_config(CONFIGS / "llama3_debug.toml"), model={"n_layers": 1}, training={"seq_len": 64})
    predicted, measured = predict_run_memory(config), measure_memory(config)
    check_ratios(predicted, measured, ALL | {"parameters", "optimizer state", "saved activations"})
    # The allocator's log has the same peak.
    assert measured.allocator_tensor_peak_bytes == pytest.approx(measured.prediction.peak_bytes, rel=1e-4)
    assert measured.allocator_peak_bytes >= measured.allocator_tensor_peak_bytes
    prediction, measurement = predicted.to_dict(), measured.to_dict()
    assert set(prediction) <= set(measurement)
    assert set(prediction["report"]) == set(measurement["report"])
    assert measurement["device"] == "cpu"
    rows = prediction["report"]["saved_for_backward"]
    modules = {row["module"] for row in rows if row["category"] == "saved_activations"}
    assert "model.layers.0.mlp.gate_proj" in modules
    assert not {"model.layers.0.mlp", "model.layers.0.input_layernorm"} & modules  # they save their inputs only
    json.dumps(measurement)


MICRO_BATCHES = Training(seq_len=32, local_batch_size=2, global_batch_size=8, device="cpu")
RESIDUAL_BFLOAT16 = Training(seq_len=32, local_batch_size=2, device="cpu", residual_dtype="bfloat16")
FLOAT32 = Training(seq_len=32, local_batch_size=2, device="cpu", mixed_precision_param="float32")
MIXTURE = Model(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=32, n_experts=4)
DELAYED_FOREACH = {"float8": Float8(recipe_name="delayed"), "optimizer": Optimizer(implementation="foreach")}
FULL = ActivationCheckpoint(mode="full")
GATHERS_FLOAT8 = Float8(enable_fsdp_float8_all_gather=True, precompute_float8_dynamic_scale_for_fsdp=True)
WIDE = Model(dim=128, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=160)
SPLIT = {"float8": Float8(recipe_name="rowwise"), "parallelism": Parallelism(tensor_parallel_degree=2)}
night = [pytest.mark.nightly, needs_gathers]


@pytest.mark.parametrize(
    ("ranks", "section"),
    [
        (1, {"training": MICRO_BATCHES, "data": Data(document_mask=True), **DELAYED_FOREACH}),
        (1, {"model": WIDE, "optimizer": Optimizer(name="Float8AdamW"), "training": RESIDUAL_BFLOAT16}),
        (1, {"model": MIXTURE, "optimizer": Optimizer(name="Muon"), "training": FLOAT32}),
        pytest.param(1, {"float8": Float8(recipe_name="rowwise"), "activation_checkpoint": FULL}, marks=night[:1]),
        pytest.param(1, {"model": WIDE, "optimizer": Optimizer(name="Float8Muon")}, marks=night[:1]),
        # spawned processes take 12 s; a test below compares a prediction with ranks in each run
        pytest.param(2, {"float8": GATHERS_FLOAT8}, marks=night),
        pytest.param(2, {"training": RESIDUAL_BFLOAT16}, marks=night),
        pytest.param(2, {"model": WIDE}, marks=night),
        pytest.param(2, {"model": WIDE, "optimizer": Optimizer(name="Float8Muon")}, marks=night),
        pytest.param(2, {**SPLIT, "activation_checkpoint": FULL}, marks=night),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else str(value),
)
def test_a_measured_run_has_the_predicted_memory(tiny_config, ranks, section):
    config = replace(tiny_config, **section)
    predicted, measured = predict_run_memory(config, ranks), measure_memory(config, ranks)
    assert (measured.micro_batches, measured.dims.mesh) == (predicted.micro_batches, predicted.dims.mesh)
    check_ratios(predicted, measured, ALL if ranks > 1 else {"peak", "between steps"})
    assert not torch.distributed.is_initialized()


def test_the_trainer_reports_the_predicted_peak(tiny_float8_config):
    config = with_settings(tiny_float8_config, job={"compare": False}, model={"n_layers": 1})
    prediction = predict_run_memory(config).prediction
    (model,) = run_to_end(config).models
    inputs = prediction.report["resident_bytes"]["inputs"]
    assert prediction.peak_bytes - inputs == pytest.approx(model.peak_memory.peak_bytes, rel=0.03)


def test_compiled_code_is_measured_by_the_allocator(tiny_config, monkeypatch):
    """The backend does not matter here: test_compiled.py measures the code of Inductor."""
    monkeypatch.setattr(Block, "compile", compile_quickly)
    config = with_settings(tiny_config, model={"n_layers": 1})
    eager, measured = measure_memory(config), measure_memory(with_settings(config, training={"compile": True}))
    assert any("training.compile" in note for note in measured.notes)
    assert not any("training.compile" in note for note in eager.notes)
    assert measured.prediction.peak_bytes == measured.allocator_tensor_peak_bytes
    (model,) = run_to_end(with_settings(config, training={"compile": True})).models  # what the trainer's table shows
    inputs = eager.prediction.by_category["inputs"]
    assert model.peak_memory.peak_bytes == pytest.approx(measured.allocator_tensor_peak_bytes - inputs, rel=MAX_ERROR)
    assert measured.prediction.saved_by_forward_bytes > 0
    resident = measured.prediction.report["resident_bytes"]
    assert resident["parameters"] == eager.prediction.by_category["parameters"]
    assert resident["optimizer_state"] == eager.prediction.by_category["optimizer_state"]
    ratios = {row["what"]: row["ratio"] for row in tabulate_side_by_side(eager, measured)}
    assert ratios["saved activations"] is None
    assert 0.5 < ratios["peak"] < 2
    table = make_side_by_side_table(tabulate_side_by_side(eager, measured))
    cells = [list(column.cells) for column in table.columns]
    assert cells[0][-3:] == ["peak", "between steps", "saved for backward"]
    assert cells[2][0] == cells[3][0] == ""
    assert cells[3][-3] == f"{ratios['peak']:.4f}"


def measure_with_even_load(config):
    def choose_evenly(scores, k, **_):
        return SimpleNamespace(indices=(torch.arange(len(scores) * k) % scores.shape[1]).view(-1, k))

    resolved, dims = resolve_parallel_dims(config, rank=dist.get_rank(), world_size=2)
    with patch.object(torch, "topk", choose_evenly):
        return measure_rank(resolved, dims, Ranks(dims.rank, dims.rank, 2), torch.device("cpu"))


@needs_gathers
def test_split_experts_have_the_predicted_memory(tiny_config):
    model = replace(tiny_config.model, n_experts=4, top_k=2)
    config = replace(tiny_config, model=model, parallelism=Parallelism(expert_parallel_degree=2))
    measured = run_on_ranks(2, measure_with_even_load, config)[0]
    predicted = predict_run_memory(config, 2)
    check_ratios(predicted, measured, ALL | {"parameters", "optimizer state", "saved activations"})
    assert any("experts" in note for note in predicted.notes)


@pytest.mark.nightly
def test_a_rank_of_8_holds_an_eighth_of_the_parameters_of_llama_8b():
    prediction = predict_run_memory(load_config(CONFIGS / "llama3_8b.toml"), 8).prediction
    assert prediction.by_category["parameters"] == pytest.approx(4 * 8_030_261_248 / 8, rel=0.001)
    # The output projection's backward: the embedding's weight is gathered, lm_head's gradient is copied and reduced.
    largest = prediction.at_peak[:3]
    assert [(row["bytes"], row["dtype"]) for row in largest] == [(4 * 128256 * 4096, "float32")] * 3
    assert {row["module"] for row in largest} == {"model.embed_tokens", "lm_head"}


def test_the_second_step_is_recorded_and_one_micro_batch_comes_before(tiny_config, monkeypatch):
    sizes, train_step = [], TrainedModel.train_step

    def record_size(trained, number, batches):
        sizes.append(len(batches))
        return train_step(trained, number, batches)

    monkeypatch.setattr(TrainedModel, "train_step", record_size)
    batch = {"global_batch_size": 3 * tiny_config.training.local_batch_size}
    predict_run_memory(with_settings(tiny_config, model={"n_layers": 1}, training=batch))
    assert sizes == [1, 3]


@needs_gathers
def test_a_prediction_is_the_same_again(tiny_config):
    """DTensor caches what it derives from a shape; for a new shape, too, it allocates nothing that is counted."""
    unseen = {"vocab_size": 2 * 331, "n_layers": 1}
    config = with_settings(tiny_config, model=unseen, parallelism={"tensor_parallel_degree": 2})
    first, second = (predict_run_memory(config, 2).prediction.report["timeline"] for _ in range(2))
    assert [row[2:] for row in first] == [row[2:] for row in second]


def test_ranks_that_cannot_be_measured_are_refused(tiny_config):
    with pytest.raises(ValueError, match=f"--ranks must be at most {MAX_RANKS} where a step is measured, got 16"):
        measure_memory(tiny_config, 16)
    split = replace(tiny_config, parallelism=Parallelism(tensor_parallel_degree=2))
    with pytest.raises(ValueError, match=r"parallelism\.tensor_parallel_degree"):
        measure_memory(split, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_is_measured_by_both(tiny_float8_config):
    config = with_settings(tiny_float8_config, job={"compare": False})
    measured = measure_memory(with_settings(config, training={"device": "cuda"}))
    assert measured.device == torch.cuda.get_device_name()
    assert measured.allocator_tensor_peak_bytes is None
    # The allocator rounds up to 512 bytes, and counts what operators free themselves.
    assert measured.allocator_peak_bytes >= measured.prediction.peak_bytes
    with pytest.raises(NotImplementedError, match="expected one rank on a GPU"):
        measure_memory(with_settings(config, training={"device": "cuda"}), 2)

"""Tests predictions of a step's memory against measured steps and by arithmetic, and what cannot be predicted."""

import copy
import json
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.memory_modules import CHECKPOINTING, PRECISIONS, Case, Size, measure, predict
from quaver import convert_to_float8_training, float8_scaling_state
from quaver.lab.memory import TensorByteCounter, predict_step_memory
from quaver.lab.memory.devices.gloo_buffers import GlooBuffers
from quaver.lab.memory.faking.fakes import fake_tensors
from quaver.lab.model.parallelize import open_fake_mesh
from quaver.lab.settings.parallel_dims import ParallelDims
from tests.lab.memory.models import CPU, Block, check
from tests.steps import assert_same

SIZE = Size(sequences=2)
QUICK = {
    ("linear", "bfloat16", "none"),
    ("attention", "tensorwise", "full"),
    ("ffn", "rowwise", "op"),
    ("1 block", "rowwise_with_gw_hp", "none"),
}
"""Every module and mode of checkpointing; the full product runs nightly."""

ROWS = [
    pytest.param(*row, marks=() if row in QUICK else pytest.mark.nightly)
    for row in product(("linear", "attention", "ffn", "1 block"), PRECISIONS, CHECKPOINTING)
    # A lone linear in a checkpoint: the cache of its input's codes lives as long as the checkpoint keeps the input.
    if not (row[0] == "linear" and row[1] != "bfloat16" and row[2] != "none")
]


@pytest.mark.parametrize(("module", "precision", "checkpointing"), ROWS)
def test_a_prediction_is_what_is_measured(module, precision, checkpointing):
    case = Case(module, precision, checkpointing)
    prediction = predict(case, SIZE)
    resident_bytes, usage = measure(case, SIZE, CPU)
    check(prediction, usage)
    resident = prediction.report["resident_bytes"]
    assert sum(resident.values()) - resident["inputs"] == resident_bytes
    assert not dist.is_initialized()


ROWS_BYTES = 128 * 4
"""Of one column of the inputs below, 128 rows of float32."""
WEIGHT_BYTES = 4 * 2 * 64 * 256


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_predicted_step_equals_arithmetic(device):
    """All that autograd saves is an input of a matmul, and one of them also relu's result."""
    with torch.device(device):
        model = Block()
    weights = copy.deepcopy(model.state_dict())
    prediction = predict_step_memory(model, (torch.empty(128, 64, device=device),), optimizer=torch.optim.Adam)
    assert prediction.by_category["parameters"] == WEIGHT_BYTES
    assert prediction.by_category["optimizer_state"] == 2 * WEIGHT_BYTES + 2 * 4  # its steps are float32 numbers
    assert prediction.resident_bytes == 3 * WEIGHT_BYTES + 2 * 4 + 64 * ROWS_BYTES
    # relu's result is saved; the output has been read by the loss, but is alive until the loss's function returns
    assert prediction.saved_by_forward_bytes - 256 * ROWS_BYTES in (4, 8)
    saved = {(row["module"], tuple(row["shape"])) for row in prediction.saved_for_backward}
    assert ("Block", (128, 256)) in saved
    # relu's result, its gradient, and the result of relu's backward
    assert prediction.step_peak_bytes >= 3 * 256 * ROWS_BYTES
    assert prediction.phase_of_peak == "backward"
    by_module = prediction.sum_bytes_by("module")
    assert sum(prediction.by_category.values()) == sum(by_module.values()) == prediction.peak_bytes
    assert all(weight.grad is None for weight in model.parameters())
    if device == "cpu":
        assert_same(model.state_dict(), weights)
    json.dumps(prediction.to_dict(timeline=True))


def test_persistent_scales_are_copied():
    model = convert_to_float8_training(Block(), config="delayed")
    state = float8_scaling_state(model).state_dict()
    before = copy.deepcopy(state)
    prediction = predict_step_memory(model, (torch.empty(128, 64),))
    assert "quaver.cast_with_persistent_scale" in str(prediction.report["saved_for_backward"])
    assert_same(state, before)


def build_sharded_block():
    with open_fake_mesh(ParallelDims(dp_shard=2)) as mesh, torch.device("meta"):
        return fully_shard(Block(), mesh=mesh)


@pytest.mark.parametrize(
    ("build", "loss", "message"),
    [
        (build_sharded_block, None, "expected a model on one device, got up.weight with"),
        (lambda: nn.Sequential(torch.compile(nn.Linear(64, 64))), None, r"torch.compile, got 0; use 0.compile\(\)"),
        (Block, lambda output: output, r"a loss of one number that depends on a parameter, got \[2, 64\]"),
        (lambda: nn.LSTM(64, 4), None, "expected a model that returns a tensor, got tuple"),
    ],
    ids=["sharded", "wrapped", "no loss", "no tensor"],
)
def test_models_and_losses_that_cannot_be_predicted_are_refused(build, loss, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        predict_step_memory(build(), (torch.empty(2, 64),), loss=loss)
    with pytest.raises(ValueError, match="expected inputs as a tuple of the forward's arguments, got Tensor"):
        predict_step_memory(Block(), torch.empty(1, 64))
    with pytest.raises(ValueError, match="a function from parameters to an optimizer, got one; give SGD"):
        predict_step_memory(Block(), (torch.empty(1, 64),), optimizer=torch.optim.SGD(Block().parameters()))
    with pytest.raises(ValueError, match="autocast to bfloat16 or float16, or None, got torch.float32"):
        predict_step_memory(Block(), (torch.empty(1, 64),), autocast=torch.float32)


def test_what_gloo_copies_is_counted():
    # torch 2.13 has new names for these two, and warns of the old ones.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with open_fake_mesh(ParallelDims(dp_shard=4)), fake_tensors():
        part, whole = torch.empty(1000), torch.empty(4000)
        with TensorByteCounter() as counted, GlooBuffers():
            gather(whole, part)
            gathering_bytes = counted.peak_bytes
            kept = torch.empty(500)
            reduce_scatter(part, whole)
    assert gathering_bytes == 4 * 4000
    assert counted.peak_bytes == 4 * (500 + 4000)
    assert counted.live_bytes == kept.nbytes

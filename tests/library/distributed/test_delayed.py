"""Tests persistent scales on several ranks: modules that run on some only, calibration, ranks that disagree."""

import contextlib
import copy
import itertools
import re
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from quaver import (
    CastConfig,
    DelayedScalingConfig,
    Float8LinearConfig,
    ScalingType,
    calibrate_float8_static_scales,
    convert_to_float8_training,
    convert_to_high_precision,
    sync_float8_amax_and_scale_history,
)
from tests.counting import CollectiveCounter
from tests.library.distributed import models
from tests.library.distributed.parallel_models import build_model, make_sharing_config, spread, take_part
from tests.ranks import on_ranks, refusal, run
from tests.recipes import make_recipe_config
from tests.steps import assert_same

STATIC = CastConfig(scaling_type=ScalingType.STATIC)


class Experts(nn.Module):
    """Linears, of which each rank runs those that it chooses."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(models.DIM, models.DIM) for _ in range(3))

    def forward(self, input, chosen):
        return sum(self.experts[index](input) for index in chosen)


@on_ranks(2)
def test_a_module_that_runs_on_one_rank_is_recorded_for_all_and_one_that_runs_nowhere_keeps_its_scale():
    """Expert 0 runs on rank 0, expert 1 in the first step only, expert 2 never."""
    model = convert_to_float8_training(Experts(), config=make_recipe_config("delayed"))
    rank = dist.get_rank()
    snapshots = []
    for step in range(3):
        chosen = ([0] if rank == 0 else []) + ([1] if step == 0 else [])
        if chosen:
            models.compute_loss(
                model(torch.full((models.TOKENS, models.DIM), float(2 + step + rank)), chosen)
            ).backward()
        (conversion_slots,) = models.get_conversion_slots(model)
        amaxes = conversion_slots.amax_buffer[:3, 0]
        assert ((amaxes > 0) if rank == 0 else (amaxes == -1)).all()
        sync_float8_amax_and_scale_history(model)
        models.assert_same_scaling_on_all_ranks(model)
        snapshots.append(models.copy_scaling(model))
        assert snapshots[step]["experts.0.input.amax_history"][-1] == 2 + step
    first, *later = (
        {name: value for name, value in snapshot.items() if name.startswith("experts.1")} for snapshot in snapshots
    )
    assert first["experts.1.input.amax_history"].tolist() == [0.0] * 15 + [3.0]  # of rank 1, the larger
    assert_same(later, [first] * 2)
    assert not any(value.any() for name, value in snapshots[-1].items() if name.startswith("experts.2"))


def static_config(**options):
    casts = {f"cast_config_{operand}": STATIC for operand in ("input", "weight", "grad_output")}
    return Float8LinearConfig(**casts, **options)


def calibrate(model, inputs, divided_by=1):
    """Calibrate, grow the weights, and return the scales."""
    with calibrate_float8_static_scales(model):
        for batch in inputs:
            (models.compute_loss(model(batch)) / divided_by).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    return models.copy_scaling(model)


def _calibrate(how):
    """Calibrate twice; return the scales after each calibration, and the amax exchanges of a step after it."""
    ranks = dist.get_world_size()
    if how == "tp":
        config = static_config(shared_inputs=make_sharing_config("delayed").shared_inputs)
        model, inputs = spread(build_model(config), models.get_mesh()), [torch.randn(2, 16, 32) for _ in range(4)]
        parts = [take_part(input, 1) for input in inputs]
    else:
        model = models.shard_model(static_config(enable_fsdp_float8_all_gather=how == "fsdp"))
        parts = [models.get_rank_part(batch) for batch in models.get_batches(4, ranks)]
    with pytest.raises(RuntimeError, match="never measured"):
        model(parts[0])
    result = []
    for index in (0, 2):
        calibrate(model, parts[index : index + 2], ranks if how == "tp" else 1)
        models.assert_same_scaling_on_all_ranks(model)
        with CollectiveCounter() as counter:
            model(parts[0]).square().mean().backward()
        exchanges = [dtype for dtype, _ in counter.of("all_reduce") if dtype is torch.int32 or how != "tp"]
        result.append((models.copy_scaling(model), len(exchanges)))
    before = models.copy_scaling(model)
    sync_float8_amax_and_scale_history(model)
    assert_same(models.copy_scaling(model), before)
    return result


@pytest.mark.parametrize("how", ["fsdp", pytest.param("high precision", marks=pytest.mark.nightly)])
@on_ranks(2)
def test_static_scales_are_calibrated_over_all_ranks(how):
    model = convert_to_float8_training(models.make_model(), config=static_config())
    inputs = [batch.chunk(2) for batch in models.get_batches(4, 2)]
    for (snapshot, exchanges), index in zip(_calibrate(how), (0, 2), strict=True):
        assert_same(snapshot, calibrate(model, itertools.chain(*inputs[index : index + 2])))
        assert exchanges == 0


@on_ranks(2)
def test_static_scales_are_calibrated_with_tensor_parallelism():
    """Scales are those of one process within the rounding of float32 sums, and later steps exchange none."""
    torch.manual_seed(5)
    result = _calibrate("tp")
    torch.manual_seed(5)
    model = build_model(static_config(shared_inputs=make_sharing_config("delayed").shared_inputs))
    inputs = [torch.randn(2, 16, 32) for _ in range(4)]
    for (snapshot, exchanges), index in zip(result, (0, 2), strict=True):
        torch.testing.assert_close(snapshot, calibrate(model, inputs[index : index + 2]), rtol=1e-5, atol=0)
        assert exchanges == 0


@on_ranks(2)
def test_a_compiled_sync_takes_the_maximum_over_ranks():
    """Each rank trains on its own batch; eager and compiled syncs must leave the same state after each step."""
    model = convert_to_float8_training(models.make_model(), config=make_recipe_config("delayed"))
    twin = copy.deepcopy(model)
    sync = torch.compile(sync_float8_amax_and_scale_history, fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    for batch in models.get_batches(3, dist.get_world_size()):
        for trained, sync_scales in ((model, sync_float8_amax_and_scale_history), (twin, sync)):
            models.compute_loss(trained(models.get_rank_part(batch) * (1 + dist.get_rank()))).backward()
            sync_scales(trained)
        assert_same(models.copy_scaling(twin), models.copy_scaling(model))
        models.assert_same_scaling_on_all_ranks(twin)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def _disagree(how, call):
    """Train a step on two ranks, of which rank 1 differs."""
    other, config = dist.get_rank() == 1, make_recipe_config("delayed") if call == "sync" else static_config()
    if how == "config" and other:
        changed = {"delayed_scaling_config": DelayedScalingConfig(history_len=8)}
        config = replace(config, **(changed if call == "sync" else {"round_scales_to_power_of_2": True}))
    elif how not in ("layer", "outer layer") and other:
        config = make_recipe_config(how)
    layers = 1 if how in ("layer", "outer layer") and other else 2
    model = convert_to_float8_training(models.make_model(layers), config=config)
    if how == "outer layer":  # outside the synced module, but in its state
        sync_float8_amax_and_scale_history(model[0])
    with calibrate_float8_static_scales(model) if call == "calibrate" else contextlib.nullcontext():
        models.compute_loss(model(models.get_batches(1, 1)[0])).backward()
    sync_float8_amax_and_scale_history(model)


@on_ranks(2)
def test_all_ranks_raise_when_they_disagree():
    for how, call in (
        *((how, "sync") for how in ("config", "delayed_with_dynamic_weight", "layer", "outer layer", "tensorwise")),
        *((how, "calibrate") for how in ("config", "layer", "tensorwise")),
    ):
        message = refusal(_disagree, how, call)
        assert "ranks disagree about the tensors with persistent scales: rank" in message, (how, call, message)


def _convert_again(everywhere):
    """Convert a model again after a sync, `everywhere` or on rank 1 only."""
    model = convert_to_float8_training(models.make_model(), config=make_recipe_config("delayed"))
    sync_float8_amax_and_scale_history(model)
    if everywhere or dist.get_rank() == 1:
        convert_to_float8_training(convert_to_high_precision(model), config=make_recipe_config("delayed"))
    return refusal(sync_float8_amax_and_scale_history, model)


def test_a_rank_whose_scales_change_alone_raises_and_enters_no_collective():
    assert run(2, _convert_again, True) == ["no error"] * 2
    others, alone = run(2, _convert_again, False, collective_timeout=4)
    assert "the tensors with persistent scales changed on rank 1, and not every rank reported it" in alone
    assert "Timed out" in others


def _convert_again_after_an_error():
    """Convert a model again on rank 1, which catches the error of its sync; then on both."""
    model = convert_to_float8_training(models.make_model(), config=make_recipe_config("delayed"))
    sync_float8_amax_and_scale_history(model)
    errors = []
    for everywhere in (False, True):
        if everywhere or dist.get_rank() == 1:
            convert_to_float8_training(convert_to_high_precision(model), config=make_recipe_config("delayed"))
            errors.append(refusal(sync_float8_amax_and_scale_history, model))
        dist.barrier()
    return errors


def test_a_rank_that_catches_its_error_can_change_with_the_others_later():
    others, alone = run(2, _convert_again_after_an_error, collective_timeout=4)
    assert others == ["no error"]
    assert "changed on rank 1, and not every rank reported it" in alone[0]
    assert alone[1:] == ["no error"]


@on_ranks(2)
def test_siblings_that_are_not_named_are_not_calibrated_with_tensor_parallelism():
    model = spread(build_model(static_config(shared_inputs=())), models.get_mesh())
    message = refusal(calibrate, model, [take_part(torch.randn(2, 16, 32), 1)])
    assert re.match(r"RuntimeError: calibration: 0\.attention\.k\.input( \(and \d+ more\))? was not cast", message)
    assert "must be named in Float8LinearConfig.shared_inputs" in message

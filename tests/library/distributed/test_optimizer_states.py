"""States of Float8AdamW and Float8Muon over ranks: the same bits for any sharding, saved, resharded and gathered."""

import copy
import os
import signal
import tempfile
from dataclasses import replace
from unittest import TestCase

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from quaver.conversion.convert import convert_to_float8_training
from quaver.optim import CombinedOptimizer, Float8AdamW, Float8Muon
from quaver.recipes.config import Float8LinearConfig
from tests.ranks import RanksError, mesh_of, on_ranks, run
from tests.steps import assert_same, full
from tests.thinned import at_night

STEPS = 3


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 12, 300) * 0.1)


class Parts(nn.Module):
    def __init__(self, parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def make_model():
    """Rows that no number of ranks divides, rows of several blocks, experts, a convolution, small parameters."""
    torch.manual_seed(0)
    return Parts(
        {
            "up": nn.Linear(512, 67),
            "down": nn.Linear(67 * 8, 129, bias=False),
            "wide": nn.Linear(600, 21, bias=False),
            "experts": Experts(),
            "conv": nn.Conv2d(30, 17, 3),
            "norm": nn.LayerNorm(512),
        }
    )


def give_gradients(model, step):
    """The same on any number of ranks: each parameter's share of what one process draws."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        values = torch.randn(2, *parameter.shape, generator=generator)
        grad = (values[0] * 10 ** values[1]).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(grad, parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.grad = grad.to(parameter.device)


def train(model, optimizer, steps):
    for step in steps:
        give_gradients(model, step)
        optimizer.step()
        optimizer.zero_grad()


def result(model, optimizer):
    """Parameters and states by name, in whole."""
    return {
        name: {"parameter": full(p).clone(), **{key: full(value).clone() for key, value in optimizer.state[p].items()}}
        for name, p in model.named_parameters()
    }


def alone(steps=STEPS, dtype=torch.float32):
    model = make_model().to(dtype)
    optimizer = Float8AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(steps))
    return result(model, optimizer)


def fsdp(dtype=torch.float32, placement=None, **options):
    model = make_model().to(dtype)
    model = fully_shard(model, shard_placement_fn=placement, **options)
    return model, Float8AdamW(model.parameters(), lr=1e-2)


def _fsdp_equals_one_process(dtype):
    model, optimizer = fsdp(dtype)
    train(model, optimizer, range(STEPS))
    assert_same(result(model, optimizer), alone(dtype=dtype))


@pytest.mark.parametrize("ranks", [2, 3, *at_night([(8,)])])
def test_states_are_the_same_on_any_number_of_ranks(ranks):
    run(ranks, _fsdp_equals_one_process, torch.bfloat16 if ranks == 3 else torch.float32)


@on_ranks(4)
def test_hsdp_experts_by_rows_and_offloaded_states_are_the_same():
    expected = alone()
    mesh = mesh_of((2, 2), ("replicate", "shard"))
    by_rows = {"placement": lambda p: Shard(1) if p.dim() == 3 else None}
    for options in ({"mesh": mesh}, by_rows, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model, optimizer = fsdp(**options)
        train(model, optimizer, range(STEPS))
        assert_same(result(model, optimizer), expected)


def row_parallel(parts, muon=False):
    """`wide` has rows of 600, which two ranks or more cut within blocks; `up` rows of 512, which four do, not two."""
    mesh = mesh_of((dist.get_world_size() // parts, parts), ("dp", "tp"))
    model = make_model()
    if muon:
        model = nn.Sequential(*(part for part in model.children() if isinstance(part, nn.Linear)))
        model.requires_grad_(False)
        for part in model:
            part.weight.requires_grad_(True)
    if parts > 1:
        for part in model.modules():
            if isinstance(part, nn.Linear):
                parallelize_module(part, mesh["tp"], RowwiseParallel())
    for module in model.children():
        fully_shard(module, mesh=mesh["dp"])
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, (Float8Muon if muon else Float8AdamW)(trained, lr=1e-2)


def _reshard(folder, muon):
    """Two steps on each degree of tensor parallelism, from the checkpoint of the one before."""
    results = {}
    for step, parts in enumerate((1, 4, 2)):
        model, optimizer = row_parallel(parts, muon)
        if step:
            _load(folder, model, optimizer)
        train(model, optimizer, range(2 * step, 2 * step + 2))
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=f"{folder}/{step}")
        results = result(model, optimizer)
    whole, optimizer = row_parallel(1, muon)
    train(whole, optimizer, range(6))
    assert_same(results, result(whole, optimizer))


@pytest.mark.parametrize("muon", [True, *at_night([(False,)])])
def test_blocks_that_ranks_share_have_the_bits_of_one_process_on_any_degree(muon, tmp_path):
    run(4, _reshard, str(tmp_path), muon)


@on_ranks(2)
def test_a_parameter_that_is_sharded_in_other_dims_has_float32_moments():
    model = nn.Module()
    mesh = mesh_of((2,))
    model.weight = nn.Parameter(distribute_tensor(torch.ones(64, 32, 4, 4), mesh, [Shard(2)]))
    optimizer = Float8AdamW(model.parameters(), lr=1e-2)
    optimizer.name_parameters(model)
    is_first = dist.get_rank() == 0
    with (TestCase().assertLogs if is_first else TestCase().assertNoLogs)("quaver.optim.base") as logs:
        train(model, optimizer, range(STEPS))
    if is_first:
        assert len(logs.output) == 1
        assert "moments of weight [64, 32, 4, 4] are float32: it is sharded in a dim" in logs.output[0]
    assert set(optimizer.state[model.weight]) == {"step", "exp_avg", "exp_avg_sq"}


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _save(folder, load, steps):
    """Load a checkpoint where there is one, train some steps and save it."""
    model, optimizer = fsdp()
    if load:
        _load(folder, model, optimizer)
    train(model, optimizer, steps)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/{steps[-1]}")
    return model, optimizer


def _save_and_gather(folder, load, steps):
    return result(*_save(folder, load, steps))


def _load(folder, model, optimizer):
    latest = max(os.listdir(folder), key=int)
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/{latest}")
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def test_checkpoints_reshard_from_4_to_2_to_1_to_4_ranks_to_the_bit():
    with tempfile.TemporaryDirectory() as folder:
        for step, ranks in enumerate((4, 2, 1, 4)):
            results = run(ranks, _save_and_gather, folder, step > 0, [step])
        assert_same(results[0], alone(steps=4))


def _save_and_die(folder, load, step):
    """Save a step, make another that is lost, and end without any clean-up."""
    model, optimizer = _save(folder, load, [step])
    try:
        dist.barrier()  # from here on a peer may be dead
        train(model, optimizer, [step + 1])
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


LIVES = (4, 1, 3)
"""Numbers of ranks, each from one start to the next kill."""


@pytest.mark.parametrize("lives", [LIVES, *at_night([((*LIVES, *(2, 1, 3, 1) * 4),)])], ids=len)
def test_killed_ranks_are_resumed_by_other_numbers_of_ranks_to_the_bit(lives, tmp_path):
    for step, ranks in enumerate(lives):
        with pytest.raises(RanksError) as error:
            run(ranks, _save_and_die, str(tmp_path), step > 0, step, collective_timeout=60)
        assert error.value.messages == ["the process died"] * ranks
    results = run(2, _save_and_gather, str(tmp_path), True, [len(lives)])
    assert_same(results[0], alone(steps=len(lives) + 1))


@on_ranks(2)
def test_states_are_gathered_and_scattered_to_the_bit():
    model, optimizer = fsdp()
    train(model, optimizer, range(2))
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_optimizer_state_dict(model, optimizer, options=full)
    if dist.get_rank() == 0:
        assert gathered["state"]["up.weight"]["exp_avg_fp8"].shape == (67, 512)
    other, resumed = fsdp()
    other.load_state_dict(model.state_dict())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, resumed, gathered, options=options)
    for each in ((model, optimizer), (other, resumed)):
        train(*each, [2])
    assert_same(result(other, resumed), result(model, optimizer))
    copied = Float8AdamW(other.parameters(), lr=1e-2)
    copied.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same([copied.state[p] for p in other.parameters()], [optimizer.state[p] for p in model.parameters()])


@on_ranks(2)
def test_states_of_adamw_are_converted_where_they_lie():
    models = [fsdp()[0] for _ in range(2)]
    adamw = torch.optim.AdamW(models[0].parameters())
    train(models[0], adamw, range(2))
    ours = Float8AdamW(models[1].parameters())
    ours.load_adamw_state_dict(adamw.state_dict())
    single = make_model()
    one_process = torch.optim.AdamW(single.parameters())
    train(single, one_process, range(2))
    expected = Float8AdamW(single.parameters())
    expected.load_adamw_state_dict(one_process.state_dict())
    for sharded, plain in zip(models[1].parameters(), single.parameters(), strict=True):
        assert_same(ours.state[sharded], expected.state[plain])
    adamw.load_state_dict(ours.adamw_state_dict())
    assert all(isinstance(adamw.state[p]["exp_avg"], DTensor) for p in models[0].parameters())


# ---- quaver's weights ------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_weights_that_are_gathered_in_float8_see_the_step():
    """Scales that were computed before a step are not used after it."""
    losses = []
    for gathers in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 64), nn.Linear(64, 256))
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=gathers)
        model = fully_shard(convert_to_float8_training(model, config=config))
        optimizer = Float8AdamW(model.parameters(), lr=0.1)
        for step in range(4):
            loss = model(torch.ones(16, 256) * (step + 1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert losses[:4] == losses[4:]


# ---- Muon ------------------------------------------------------------------------------------------------------------


def muon(parallelize, folder=None):
    """Parameters and states in whole after these steps of three matrices; a checkpoint between two of them."""
    model = make_model()
    for name in ("experts", "conv", "norm"):
        delattr(model, name)
    model.up.register_parameter("bias", None)
    model = parallelize(model)
    optimizer = Float8Muon(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    if folder:
        state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=f"{folder}/2")
        optimizer = Float8Muon(model.parameters(), lr=1e-2)
        _load(folder, model, optimizer)
    train(model, optimizer, [2])
    return result(model, optimizer)


def _tensor_parallel(model):
    mesh = mesh_of((1, dist.get_world_size()), ("dp", "tp"))
    plan = {"up": RowwiseParallel(), "down": ColwiseParallel(), "wide": ColwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for module in model.children():
        fully_shard(module, mesh=mesh["dp"])
    return model


def _hsdp(model):
    return fully_shard(model, mesh=mesh_of((2, 2), ("replicate", "shard")))


def _offloaded(model):
    return fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _muon_equals_one_process(parallelize, folder):
    assert_same(muon(parallelize, folder), muon(lambda model: model))


@pytest.mark.parametrize(
    ("ranks", "parallelize"),
    [(3, fully_shard), (2, _tensor_parallel), *at_night([(2, fully_shard), (4, _hsdp), (2, _offloaded)])],
)
def test_momentum_and_matrices_of_muon_are_the_same_on_any_number_of_ranks(ranks, parallelize, tmp_path):
    run(ranks, _muon_equals_one_process, parallelize, str(tmp_path))


@on_ranks(2)
def test_an_inf_on_one_rank_leaves_all_ranks_untouched_under_a_gradient_scaler():
    """AdamW and Muon in one optimizer, whose gradients are clipped, in a step before it and in one after."""
    model, _ = fsdp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    optimizer = CombinedOptimizer(Float8Muon(matrices, lr=1e-2), Float8AdamW(others, lr=1e-2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, ruined in enumerate((None, "up", "experts", None)):
        before, scale = copy.deepcopy(result(model, optimizer)), scaler.get_scale()
        scaler.scale(torch.ones(()))  # makes the scale
        give_gradients(model, step)
        if ruined and dist.get_rank() == 1:
            getattr(model, ruined).weight.grad.to_local()[0] = float("inf")
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert bool(norm.full_tensor().isfinite()) == (ruined is None)
        assert scaler.get_scale() == (scale / 2 if ruined else scale)
        after = result(model, optimizer)
        if ruined:
            assert_same(after, before)
        else:
            assert not any(torch.equal(after[name]["parameter"], before[name]["parameter"]) for name in after)


@on_ranks(2)
def test_gradients_of_another_layout_are_refused():
    model, optimizer = fsdp()
    give_gradients(model, 0)
    parameter = model.up.weight
    parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
    with pytest.raises(ValueError, match="with its parameter's placements .* redistribute it before step"):
        optimizer.step()


def _steps_with_an_empty_shard(optimizer_of, dtype):
    config = replace(Float8LinearConfig(), enable_fsdp_float8_all_gather=True)
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 1)).to(dtype), config=config)
    for each in (*model, model):
        fully_shard(each)
    optimizer = optimizer_of([each for each in model.parameters() if each.dim() == 2])
    batch = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    losses = []
    for _ in range(3):
        loss = model(batch).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(("optimizer_of", "dtype"), [(Float8AdamW, torch.float32), (Float8Muon, torch.bfloat16)])
def test_a_rank_with_an_empty_shard_sees_each_step(optimizer_of, dtype):
    """Else it would keep the scale that the others drop, and not join the collective that computes the next one."""
    losses, one = (run(ranks, _steps_with_an_empty_shard, optimizer_of, dtype) for ranks in (2, 1))
    assert losses[0] == losses[1] == pytest.approx(one[0], rel=1e-3)

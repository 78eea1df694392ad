"""Tests that states of Float8AdamW and Float8Muon have the same bits for any sharding, saved and resharded."""

import copy
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
from tests import steps
from tests.ranks import get_cached_mesh, on_ranks, refusal, run
from tests.steps import assert_same, draw, to_plain
from tests.thinned import at_night

STEPS = 2


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 12, 300) * 0.1)


def make_matrices(bias=False):
    """Return linears with rows that no number of ranks divides, and rows of several blocks."""
    torch.manual_seed(0)
    model = nn.Module()
    model.up, model.down = nn.Linear(512, 67, bias=bias), nn.Linear(67 * 8, 129, bias=False)
    model.wide = nn.Linear(600, 21, bias=False)
    return model


def make_model():
    """Return `make_matrices` with experts, a convolution and small parameters."""
    model = make_matrices(bias=True)
    model.experts, model.conv, model.norm = Experts(), nn.Conv2d(30, 17, 3), nn.LayerNorm(512)
    return model


def give_gradients(model, step):
    """Set gradients on any number of ranks: each parameter's share of what one process draws."""
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


def copy_states(model, optimizer):
    """Return parameters and states by name, in whole."""
    states = {}
    for name, parameter in model.named_parameters():
        states[name] = {key: to_plain(value).clone() for key, value in optimizer.state[parameter].items()}
        states[name]["parameter"] = to_plain(parameter).clone()
    return states


def train_one_process(steps=STEPS, dtype=torch.float32):
    model = make_model().to(dtype)
    optimizer = Float8AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(steps))
    return copy_states(model, optimizer)


def shard(dtype=torch.float32, **options):
    model = fully_shard(make_model().to(dtype), **options)
    return model, Float8AdamW(model.parameters(), lr=1e-2)


def _check_fsdp_equals_one_process(dtype):
    model, optimizer = shard(dtype)
    train(model, optimizer, range(STEPS))
    assert_same(copy_states(model, optimizer), train_one_process(dtype=dtype))


@pytest.mark.parametrize("ranks", [2, 3, *at_night([(8,)])])
def test_states_are_the_same_on_any_number_of_ranks(ranks):
    run(ranks, _check_fsdp_equals_one_process, torch.bfloat16 if ranks == 3 else torch.float32)


@on_ranks(4)
def test_hsdp_experts_by_rows_and_offloaded_states_are_the_same():
    expected = train_one_process()
    mesh = get_cached_mesh((2, 2), ("replicate", "shard"))
    by_rows = {"shard_placement_fn": lambda parameter: Shard(1) if parameter.dim() == 3 else None}
    for options in ({"mesh": mesh}, by_rows, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}):
        model, optimizer = shard(**options)
        train(model, optimizer, range(STEPS))
        assert_same(copy_states(model, optimizer), expected)


def shard_rows(parts, muon):
    """Shard rows of 600 (`wide`), which two ranks or more cut within blocks, and of 512 (`up`), which four do."""
    mesh = get_cached_mesh((dist.get_world_size() // parts, parts), ("dp", "tp"))
    model = make_matrices() if muon else make_model()
    if parts > 1:
        for part in model.modules():
            if isinstance(part, nn.Linear):
                parallelize_module(part, mesh["tp"], RowwiseParallel())
    for module in model.children():
        fully_shard(module, mesh=mesh["dp"])
    return model, (Float8Muon if muon else Float8AdamW)(model.parameters(), lr=1e-2)


def _reshard(folder, muon):
    """Take a step on each degree of tensor parallelism, from the checkpoint of the one before."""
    for step, parts in enumerate((1, 4, 2)):
        model, optimizer = shard_rows(parts, muon)
        if step:
            load(folder, step - 1, model, optimizer)
        train(model, optimizer, [step])
        save(folder, step, model, optimizer)
    whole, whole_optimizer = shard_rows(1, muon)
    train(whole, whole_optimizer, range(3))
    assert_same(copy_states(model, optimizer), copy_states(whole, whole_optimizer))


@pytest.mark.parametrize("muon", [True, *at_night([(False,)])])
def test_blocks_that_ranks_share_have_the_bits_of_one_process_on_any_degree(muon, tmp_path):
    run(4, _reshard, str(tmp_path), muon)


@on_ranks(2)
def test_a_parameter_that_is_sharded_in_other_dims_has_float32_moments():
    model = nn.Module()
    mesh = get_cached_mesh((2,))
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


def get_states(model, optimizer):
    return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}


def save(folder, step, model, optimizer):
    dcp.save(get_states(model, optimizer), checkpoint_id=f"{folder}/{step}")


def load(folder, step, model, optimizer):
    state = get_states(model, optimizer)
    dcp.load(state, checkpoint_id=f"{folder}/{step}")
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _step_and_save(folder, step):
    """Take a step from the checkpoint of the one before, if there is one."""
    model, optimizer = shard()
    if step:
        load(folder, step - 1, model, optimizer)
    train(model, optimizer, [step])
    save(folder, step, model, optimizer)
    return copy_states(model, optimizer)


@pytest.mark.parametrize("degrees", [(4, 1, 2), *at_night([((4, 1, 3, *(2, 1, 3, 1) * 4),)])], ids=len)
def test_checkpoints_reshard_to_other_numbers_of_ranks_to_the_bit(degrees, tmp_path):
    for step, ranks in enumerate(degrees):
        results = run(ranks, _step_and_save, str(tmp_path), step)
    assert_same(results[0], train_one_process(steps=len(degrees)))


@on_ranks(2)
def test_states_are_gathered_and_scattered_to_the_bit():
    model, optimizer = shard()
    train(model, optimizer, range(2))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gathered = get_optimizer_state_dict(model, optimizer, options=options)
    if dist.get_rank() == 0:
        assert gathered["state"]["up.weight"]["exp_avg_fp8"].shape == (67, 512)
    other, resumed = shard()
    other.load_state_dict(model.state_dict())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, resumed, gathered, options=options)
    train(model, optimizer, [2])
    train(other, resumed, [2])
    assert_same(copy_states(other, resumed), copy_states(model, optimizer))
    reloaded = Float8AdamW(other.parameters(), lr=1e-2)
    reloaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert_same(copy_states(other, reloaded), copy_states(model, optimizer))


@on_ranks(2)
def test_states_of_adamw_are_converted_where_they_lie():
    states = []
    for model in (make_model(), shard()[0]):
        adamw, optimizer = torch.optim.AdamW(model.parameters()), Float8AdamW(model.parameters())
        train(model, adamw, range(2))
        optimizer.load_adamw_state_dict(adamw.state_dict())
        states.append(copy_states(model, optimizer))
    assert_same(*reversed(states))
    adamw.load_state_dict(optimizer.adamw_state_dict())
    assert all(isinstance(adamw.state[parameter]["exp_avg"], DTensor) for parameter in model.parameters())
    if dist.get_rank() == 1:
        adamw.state[model.up.weight]["exp_avg"].to_local()[0] = torch.nan
    with pytest.raises(ValueError, match="expected finite numbers, in exp_avg, got others"):  # on all ranks
        optimizer.load_adamw_state_dict(adamw.state_dict())


def train_muon(parallelize, folder=None):
    """Train three matrices, with a checkpoint between two steps; return parameters and states in whole."""
    model = parallelize(make_matrices())
    optimizer = Float8Muon(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    if folder:
        save(folder, 2, model, optimizer)
        optimizer = Float8Muon(model.parameters(), lr=1e-2)
        load(folder, 2, model, optimizer)
    train(model, optimizer, [2])
    return copy_states(model, optimizer)


def _shard_tensors(model):
    mesh = get_cached_mesh((1, dist.get_world_size()), ("dp", "tp"))
    plan = {"up": RowwiseParallel(), "down": ColwiseParallel(), "wide": ColwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for module in model.children():
        fully_shard(module, mesh=mesh["dp"])
    return model


def _replicate(model):
    return fully_shard(model, mesh=get_cached_mesh((2, 2), ("replicate", "shard")))


def _offload(model):
    return fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def _check_muon_equals_one_process(parallelize, folder):
    assert_same(train_muon(parallelize, folder), train_muon(lambda model: model))


@pytest.mark.parametrize(
    ("ranks", "parallelize"),
    [(3, fully_shard), (2, _shard_tensors), *at_night([(2, fully_shard), (4, _replicate), (2, _offload)])],
)
def test_momentum_and_matrices_of_muon_are_the_same_on_any_number_of_ranks(ranks, parallelize, tmp_path):
    run(ranks, _check_muon_equals_one_process, parallelize, str(tmp_path))


@on_ranks(2)
def test_an_inf_on_one_rank_leaves_all_ranks_untouched_under_a_gradient_scaler():
    """AdamW and Muon are in one optimizer, whose gradients are clipped; other steps change all weights."""
    model, _ = shard()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() != 2]
    optimizer = CombinedOptimizer(Float8Muon(matrices, lr=1e-2), Float8AdamW(others, lr=1e-2))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, ruined in enumerate((None, "up", "experts", None)):
        before, scale = copy.deepcopy(copy_states(model, optimizer)), scaler.get_scale()
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
        after = copy_states(model, optimizer)
        if ruined:
            assert_same(after, before)
        else:
            assert not any(torch.equal(after[name]["parameter"], before[name]["parameter"]) for name in after)


@on_ranks(4)
def test_ranks_with_replicas_raise_if_their_seeds_differ():
    """Ranks 0 and 2 have the same shards, and so do ranks 1 and 3."""
    for seed, raises in ((dist.get_rank() % 2, False), (dist.get_rank() // 2, True)):
        model = _replicate(make_matrices())
        optimizer = Float8AdamW(model.parameters(), seed=seed)
        give_gradients(model, 0)
        expected = "RuntimeError: ranks disagree about the seeds of Float8AdamW: rank" if raises else "no error"
        assert refusal(optimizer.step).startswith(expected)
    optimizer.param_groups[0]["seed"] = 1
    optimizer.step()


@on_ranks(2)
def test_gradients_of_another_layout_are_refused():
    model, optimizer = shard()
    give_gradients(model, 0)
    parameter = model.up.weight
    parameter.grad = parameter.grad.redistribute(placements=[Replicate()])
    with pytest.raises(ValueError, match="with its parameter's placements .* redistribute it before step"):
        optimizer.step()


def _train_with_an_empty_shard(make_optimizer, dtype, gathers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 1)).to(dtype)
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=gathers))
    for module in (*model, model):
        fully_shard(module)
    optimizer = make_optimizer([module.weight for module in model], lr=0.1)
    return steps.train(model, optimizer, [draw(4, 64).to(dtype)] * 3)


@pytest.mark.parametrize(("make_optimizer", "dtype"), [(Float8AdamW, torch.float32), (Float8Muon, torch.bfloat16)])
def test_a_rank_with_an_empty_shard_sees_each_step(make_optimizer, dtype):
    """Otherwise it would keep the scale that others drop, and not join the collective for the next one."""
    losses, expected = (run(2, _train_with_an_empty_shard, make_optimizer, dtype, gathers) for gathers in (True, False))
    assert losses == expected

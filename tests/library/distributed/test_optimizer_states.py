"""States of Float8AdamW and Float8Muon over ranks: the same bits for any sharding, saved, resharded and gathered."""

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
from tests.ranks import mesh_of, on_ranks, run
from tests.steps import assert_same, draw, full
from tests.thinned import at_night

STEPS = 2


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


def make_matrices():
    """The linears of `make_model`, without biases."""
    model = make_model()
    for name in ("experts", "conv", "norm"):
        delattr(model, name)
    model.up.register_parameter("bias", None)
    return model


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


def row_parallel(parts, muon):
    """`wide` has rows of 600, which two ranks or more cut within blocks; `up` rows of 512, which four do, not two."""
    mesh = mesh_of((dist.get_world_size() // parts, parts), ("dp", "tp"))
    model = make_matrices() if muon else make_model()
    if parts > 1:
        for part in model.modules():
            if isinstance(part, nn.Linear):
                parallelize_module(part, mesh["tp"], RowwiseParallel())
    for module in model.children():
        fully_shard(module, mesh=mesh["dp"])
    return model, (Float8Muon if muon else Float8AdamW)(model.parameters(), lr=1e-2)


def _reshard(folder, muon):
    """A step on each degree of tensor parallelism, from the checkpoint of the one before."""
    for step, parts in enumerate((1, 4, 2)):
        model, optimizer = row_parallel(parts, muon)
        if step:
            load(folder, step - 1, model, optimizer)
        train(model, optimizer, [step])
        save(folder, step, model, optimizer)
    whole, of_whole = row_parallel(1, muon)
    train(whole, of_whole, range(3))
    assert_same(result(model, optimizer), result(whole, of_whole))


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


def save(folder, step, model, optimizer):
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=f"{folder}/{step}")


def load(folder, step, model, optimizer):
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(state, checkpoint_id=f"{folder}/{step}")
    model.load_state_dict(state["model"])
    set_optimizer_state_dict(model, optimizer, state["optimizer"])


def _step_and_save(folder, step):
    """A step from the checkpoint of the one before, if there is one."""
    model, optimizer = fsdp()
    if step:
        load(folder, step - 1, model, optimizer)
    train(model, optimizer, [step])
    save(folder, step, model, optimizer)
    return result(model, optimizer)


@pytest.mark.parametrize("degrees", [(4, 1, 2), *at_night([((4, 1, 3, *(2, 1, 3, 1) * 4),)])], ids=len)
def test_checkpoints_reshard_to_other_numbers_of_ranks_to_the_bit(degrees, tmp_path):
    for step, ranks in enumerate(degrees):
        results = run(ranks, _step_and_save, str(tmp_path), step)
    assert_same(results[0], alone(steps=len(degrees)))


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


# ---- Muon ------------------------------------------------------------------------------------------------------------


def muon(parallelize, folder=None):
    """Parameters and states in whole after these steps of three matrices; a checkpoint between two of them."""
    model = parallelize(make_matrices())
    optimizer = Float8Muon(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    if folder:
        save(folder, 2, model, optimizer)
        optimizer = Float8Muon(model.parameters(), lr=1e-2)
        load(folder, 2, model, optimizer)
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


def _steps_with_an_empty_shard(optimizer_of, dtype, gathers):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 1)).to(dtype)
    convert_to_float8_training(model, config=Float8LinearConfig(enable_fsdp_float8_all_gather=gathers))
    for each in (*model, model):
        fully_shard(each)
    optimizer = optimizer_of([each for each in model.parameters() if each.dim() == 2], lr=0.1)
    return steps.train(model, optimizer, [draw(4, 64).to(dtype)] * 3)


@pytest.mark.parametrize(("optimizer_of", "dtype"), [(Float8AdamW, torch.float32), (Float8Muon, torch.bfloat16)])
def test_a_rank_with_an_empty_shard_sees_each_step(optimizer_of, dtype):
    """Else it would keep the scale that the others drop, and not join the collective that computes the next one."""
    losses, expected = (run(2, _steps_with_an_empty_shard, optimizer_of, dtype, gathers) for gathers in (True, False))
    assert losses == expected

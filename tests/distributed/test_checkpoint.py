"""Checkpoints of models with float8 all-gather: plain tensors under nn.Linear's names, for any number of ranks.

Every rank takes the same batch: a gradient averaged over 1, 2 or 4 ranks has the same bits, and so has a run that is
resumed on another number of ranks.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from quaver import convert_to_float8_training
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from tests.distributed.models import config_of, make_model
from tests.distributed.ranks import RanksError, run
from tests.distributed.test_tensor_parallel import model_of, spread
from tests.reference import RECIPES

RECIPE = pytest.mark.parametrize("recipe", RECIPES)
PAYLOADS = pytest.mark.parametrize(
    "recipe",  # an all-gather of one payload, and of two; the others nightly
    [
        pytest.param(recipe, marks=() if recipe in ("tensorwise", "rowwise") else pytest.mark.nightly)
        for recipe in RECIPES
    ],
)
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
STEPS_BEFORE, STEPS_AFTER = 2, 2

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def sharded(recipe, *, gather=True, other_weights=False, layout="fsdp"):
    """Return a model in `layout` and an optimizer without state; a checkpoint must replace the other weights.

    "fsdp": shards of 18 and 42 rows, and of 3, which is less than 4 ranks have. "fsdp and tp": 2 x 2.
    """
    config = config_of(recipe, enable_fsdp_float8_all_gather=gather)
    if layout == "fsdp":
        model = convert_to_float8_training(make_model(layers=2), config=config)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    else:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = spread(model_of(config), mesh["tp"])
        mesh = mesh["dp"]
    if other_weights:
        make_other(model)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer_of(model)


def make_other(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-7.0)


def optimizer_of(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def train(model, optimizer, steps, start=0, *, precompute=False):
    """Return the losses of steps `start` to `start + steps`."""
    losses = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(6, 18, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
    return losses


def state_of(model, optimizer, options=None):
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def set_state(model, optimizer, state, options=None):
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def assert_plain(state, *, is_sharded):
    """Assert that all are plain tensors, or DTensors of them if `is_sharded`."""
    tensors = [*state["model"].values()]
    for of_parameter in state["optimizer"]["state"].values():
        tensors += of_parameter.values()
    assert tensors
    for tensor in tensors:
        assert type(tensor) in ((torch.Tensor, DTensor) if is_sharded else (torch.Tensor,))
        if isinstance(tensor, DTensor):
            assert type(tensor._local_tensor) is torch.Tensor


def whole(state):
    """Return the full tensors of a model's state_dict."""
    return {name: t.full_tensor() if isinstance(t, DTensor) else t.detach().clone() for name, t in state.items()}


def assert_equal_states(got, expected):
    got, expected = whole(got), whole(expected)
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=0, atol=0, msg=name)


# ---- save on some ranks, load on others ------------------------------------------------------------------------------


def _save(recipe, path):
    """Train, save, and return what a loader must find: the full weights, and the losses of the next steps."""
    model, optimizer = sharded(recipe)
    train(model, optimizer, STEPS_BEFORE, precompute=True)
    state = state_of(model, optimizer)
    assert_plain(state, is_sharded=True)
    assert state["model"].keys() == make_model(layers=2).state_dict().keys()
    dcp.save(state, checkpoint_id=path)
    full = state_of(model, optimizer, FULL)
    weights = whole(state["model"])
    if dist.get_rank() == 0:  # the only rank that gets it
        assert_plain(full, is_sharded=False)
        assert_equal_states(full["model"], weights)
    return weights, train(model, optimizer, STEPS_AFTER, STEPS_BEFORE)


def _load_into(model, optimizer, path):
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state(model, optimizer, state)


def _load(recipe, gather, path, weights, losses):
    model, optimizer = sharded(recipe, gather=gather, other_weights=True)
    train(model, optimizer, 1, precompute=gather)  # scales and moments of the other weights
    _load_into(model, optimizer, path)
    assert_equal_states(get_model_state_dict(model), weights)
    assert train(model, optimizer, STEPS_AFTER, STEPS_BEFORE) == losses


@RECIPE
def test_saved_on_4_ranks_loaded_on_2_and_1(recipe, tmp_path):
    path = str(tmp_path)
    weights, losses = run(4, _save, recipe, path)[0]
    for ranks, gather in ((2, True), (4, False)):
        run(ranks, _load, recipe, gather, path, weights, losses)
    for convert in (True, False):
        model = make_model(layers=2)
        if convert:
            convert_to_float8_training(model, config=config_of(recipe, enable_fsdp_float8_all_gather=True))
        make_other(model)
        optimizer = optimizer_of(model)
        _load_into(model, optimizer, path)
        assert_equal_states(get_model_state_dict(model), weights)
        if convert:
            assert train(model, optimizer, STEPS_AFTER, STEPS_BEFORE) == losses


def _save_of_one(recipe, state):
    """Load the full state of an unconverted model from every rank, and from rank 0 alone."""
    for options in (
        StateDictOptions(full_state_dict=True),
        StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    ):
        model, optimizer = sharded(recipe, other_weights=True)
        train(model, optimizer, 1, precompute=True)
        given = {} if options.broadcast_from_rank0 and dist.get_rank() else dict(state)
        set_model_state_dict(model, given, options=options)
        assert_equal_states(get_model_state_dict(model), state)
        fresh, _ = sharded(recipe)
        fresh.load_state_dict(get_model_state_dict(model))
        assert train(model, optimizer_of(model), 2) == train(fresh, optimizer_of(fresh), 2)


@PAYLOADS
def test_a_whole_state_is_loaded_on_4_ranks(recipe):
    state = make_model(layers=2).state_dict()
    run(4, _save_of_one, recipe, {name: value * 3 for name, value in state.items()})


# ---- with tensor parallelism -----------------------------------------------------------------------------------------


def _save_and_load_2d(recipe, path):
    model, optimizer = sharded(recipe, layout="fsdp and tp")
    train_2d(model, optimizer)
    state = state_of(model, optimizer)
    assert_plain(state, is_sharded=True)
    assert state["model"].keys() == model_of(config_of(recipe)).state_dict().keys()
    dcp.save(state, checkpoint_id=path)
    weights, loss = whole(state["model"]), train_2d(model, optimizer)
    model, optimizer = sharded(recipe, layout="fsdp and tp", other_weights=True)
    train_2d(model, optimizer)
    _load_into(model, optimizer, path)
    assert_equal_states(get_model_state_dict(model), weights)
    assert train_2d(model, optimizer) == loss
    return weights


def train_2d(model, optimizer):
    loss = model(torch.ones(2, 4, 32) * torch.linspace(-1, 1, 32)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    precompute_float8_dynamic_scale_for_fsdp(model)
    return loss.item()


@PAYLOADS
def test_of_tensor_parallel_shards(recipe, tmp_path):
    """The next steps are the same to the bit, and a single process reads the same weights."""
    path = str(tmp_path)
    weights = run(4, _save_and_load_2d, recipe, path)[0]
    for gather in (True, False):
        model = model_of(config_of(recipe, enable_fsdp_float8_all_gather=gather))
        make_other(model)
        _load_into(model, optimizer_of(model), path)
        assert_equal_states(get_model_state_dict(model), weights)


# ---- no scale outlives its weight ------------------------------------------------------------------------------------

LOADS = ("load_state_dict", "load_state_dict(assign=True)", "set_model_state_dict", "copy, precompute", "copy, load")


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _losses_after(recipe, loads, path=None):
    """A load over a model with precomputed scales gives the losses of a fresh model with these weights."""
    fresh, _ = sharded(recipe)
    expected = train(fresh, optimizer_of(fresh), 2)
    for load in loads:
        source, _ = sharded(recipe)
        model, optimizer = sharded(recipe, other_weights=True)
        train(model, optimizer, 1, precompute=True)
        state = source.state_dict()
        if load.startswith("load_state_dict"):
            model.load_state_dict(state, assign="assign" in load)
        elif load == "set_model_state_dict":
            set_model_state_dict(model, state)
        elif load == "dcp.load":
            dcp.save(state, checkpoint_id=path)
            dcp.load(model.state_dict(), checkpoint_id=path)
        else:  # into the tensors of state_dict, without the module's knowledge
            for name, value in model.state_dict().items():
                local(value).copy_(local(state[name]))
            if load == "copy, precompute":
                precompute_float8_dynamic_scale_for_fsdp(model)
            elif load == "copy, load":
                model.load_state_dict(model.state_dict())
        assert train(model, optimizer_of(model), 2) == expected, load


@PAYLOADS
def test_the_step_after_a_load_is_that_of_a_fresh_model(recipe):
    run(4, _losses_after, recipe, LOADS)


@pytest.mark.parametrize("load", ["copy", "dcp.load"])
def test_a_weight_that_was_written_directly_is_an_error(load, tmp_path):
    """dcp.load writes into the tensors of the state_dict; the error asks for the load_state_dict that must follow."""
    with pytest.raises(RanksError, match="written to directly") as error:
        run(2, _losses_after, "tensorwise", (load,), str(tmp_path))
    assert all("written to directly" in message for message in error.value.messages)

"""Tests that checkpoints hold plain tensors and exact delayed scales, from any number of ranks to any.

Every rank takes the same batch: a gradient averaged over 1, 2 or 4 ranks has the same bits, and so has a run that is
resumed on another number of ranks.
"""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from quaver import DelayedScalingConfig, convert_to_float8_training, float8_scaling_state
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from tests import steps
from tests.library.distributed.models import assert_same_scaling_on_all_ranks, copy_scaling, make_model
from tests.library.distributed.parallel_models import build_model, spread
from tests.ranks import get_cached_mesh, on_ranks, run
from tests.recipes import NON_BLOCK_RECIPES, PERSISTENT_RECIPES, make_recipe_config
from tests.steps import assert_same, draw, to_plain
from tests.thinned import at_night

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
BEFORE, AFTER = 2, 2
SHAPES = {"fsdp": (6, 18), "fsdp and tp": (2, 4, 32)}
OTHERS = [(recipe,) for recipe in NON_BLOCK_RECIPES if recipe != "rowwise"]

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def build(recipe, *, gather=True, other_weights=False, layout="fsdp"):
    """Return the model of a layout, and an optimizer without state; a checkpoint must replace the other weights."""
    config = make_recipe_config(recipe, enable_fsdp_float8_all_gather=gather)
    by_rows = layout == "fsdp"
    model = convert_to_float8_training(make_model(layers=2), config=config) if by_rows else build_model(config)
    if other_weights:
        make_other(model)
    return model, adamw(model)


def shard(recipe, *, layout="fsdp", **options):
    """Build, and shard weights of 18, 42 and of 3 rows, which is less than 4 ranks have; "fsdp and tp": 2 x 2."""
    model, _ = build(recipe, layout=layout, **options)
    if layout == "fsdp":
        mesh = get_cached_mesh((dist.get_world_size(),))
    else:
        mesh = get_cached_mesh((2, 2), ("dp", "tp"))
        model = spread(model, mesh["tp"])
        mesh = mesh["dp"]
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=2e-3)


def make_other(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-7.0)


def train(model, optimizer, count, start=0, *, precompute=False, shape=SHAPES["fsdp"]):
    """Train steps `start` to `start + count`, each on a batch of another size; every rank takes the same."""
    batches = [draw(*shape, seed=step) * (1 + step) for step in range(start, start + count)]
    after = {"after": precompute_float8_dynamic_scale_for_fsdp} if precompute else {}
    return steps.train(model, optimizer, batches, **after)


def get_state(model, optimizer, options=None):
    return {
        "model": get_model_state_dict(model, options=options),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }


def set_state(model, optimizer, state, options=None):
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)


def save(model, optimizer, path):
    dcp.save({**get_state(model, optimizer), "float8": float8_scaling_state(model)}, checkpoint_id=path)


def load(model, optimizer, path, *, with_scales=True, **options):
    state = get_state(model, optimizer)
    if with_scales:
        state["float8"] = float8_scaling_state(model)
    dcp.load(state, checkpoint_id=path, **options)
    set_state(model, optimizer, state)


def copy_state(model):
    """Return the whole weights, and the scales and histories."""
    weights = {name: to_plain(weight).clone() for name, weight in get_model_state_dict(model).items()}
    return weights, copy_scaling(model)


def assert_plain(state, *, is_sharded):
    """Assert that all are plain tensors, or DTensors of them if `is_sharded`."""
    states = state["optimizer"]["state"].values()
    tensors = [*state["model"].values(), *(value for moments in states for value in moments.values())]
    assert tensors
    for tensor in tensors:
        assert type(tensor) in ((torch.Tensor, DTensor) if is_sharded else (torch.Tensor,))
        if isinstance(tensor, DTensor):
            assert type(tensor._local_tensor) is torch.Tensor


def _save(recipe, path, layout="fsdp"):
    """Train and save; return what is saved, and the losses and the state of the run that goes on.

    With "fsdp and tp" gate and up have names that share nothing, so one of them casts the input of both.
    """
    model, optimizer = shard(recipe, layout=layout)
    train(model, optimizer, BEFORE, precompute=True, shape=SHAPES[layout])
    state = get_state(model, optimizer)
    assert_plain(state, is_sharded=True)
    assert state["model"].keys() == build(recipe, layout=layout)[0].state_dict().keys()
    save(model, optimizer, path)
    gathered, saved = get_state(model, optimizer, FULL), copy_state(model)
    if dist.get_rank() == 0:  # the only rank that gets it
        assert_plain(gathered, is_sharded=False)
        assert_same(gathered["model"], saved[0])
    return saved, train(model, optimizer, AFTER, BEFORE, shape=SHAPES[layout]), copy_state(model)


def _load_and_go_on(recipe, path, make, gather, saved, losses=None, then=None, layout="fsdp"):
    model, optimizer = make(recipe, gather=gather, other_weights=True, layout=layout)
    if recipe in NON_BLOCK_RECIPES or not gather:  # over scales and moments of other weights; once into an empty state
        train(model, optimizer, 1, precompute=gather, shape=SHAPES[layout])
    load(model, optimizer, path)
    assert_same(copy_state(model), saved)
    if losses is not None:
        assert train(model, optimizer, AFTER, BEFORE, shape=SHAPES[layout]) == losses
        assert_same(copy_state(model), then)
    if make is shard and recipe in PERSISTENT_RECIPES:
        assert_same_scaling_on_all_ranks(model)
    return model, optimizer


def _load_on_ranks(*arguments):
    _load_and_go_on(*arguments)


@pytest.mark.parametrize(  # dynamic scales of two payloads, and persistent ones
    "recipe", ["rowwise", PERSISTENT_RECIPES[0], *at_night([PERSISTENT_RECIPES[1:], *OTHERS])]
)
def test_a_checkpoint_of_4_ranks_loads_on_2_and_1(recipe, tmp_path):
    """Weights, scales and histories are exact, and the steps that follow are those of the run that went on."""
    path = str(tmp_path)
    saved, *then = run(4, _save, recipe, path)[0]
    assert all((value[-BEFORE:] > 0).all() for name, value in saved[1].items() if name.endswith("history"))
    run(2, _load_on_ranks, recipe, path, shard, True, saved, *then)
    _load_and_go_on(recipe, path, build, False, saved, *then)
    plain = make_model(layers=2)
    make_other(plain)
    load(plain, adamw(plain), path, with_scales=False)
    assert_same(get_model_state_dict(plain), saved[0])


@pytest.mark.parametrize("recipe", ["rowwise", *at_night(OTHERS)])
@on_ranks(4)
def test_a_whole_state_is_loaded_on_4_ranks(recipe):
    """The state is that of an unconverted model, from every rank or from rank 0 alone."""
    state = {name: value * 3 for name, value in make_model(layers=2).state_dict().items()}
    for from_rank_0 in (False, True):
        model, optimizer = shard(recipe, other_weights=True)
        train(model, optimizer, 1, precompute=True)
        own_state = {} if from_rank_0 and dist.get_rank() else dict(state)
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank_0)
        set_model_state_dict(model, own_state, options=options)
        assert_same(get_model_state_dict(model), state)
        fresh, _ = shard(recipe)
        fresh.load_state_dict(get_model_state_dict(model))
        assert train(model, adamw(model), 2) == train(fresh, adamw(fresh), 2)


def _save_2d(recipe, path, layout):
    """Save, load and go on; a loss is that of a rank's part of the sequence, so the same ranks compare theirs."""
    saved, *then = _save(recipe, path, layout)
    _load_and_go_on(recipe, path, shard, True, saved, *then, layout=layout)
    return saved


@pytest.mark.parametrize("recipe", ["delayed", *at_night([("rowwise",), *OTHERS])])
def test_a_checkpoint_of_tensor_parallel_ranks_loads_on_one_process_and_back(recipe, tmp_path):
    layout, path = "fsdp and tp", str(tmp_path / "2d")
    saved = run(4, _save_2d, recipe, path, layout)[0]
    model, optimizer = _load_and_go_on(recipe, path, build, True, saved, None, None, layout)
    train(model, optimizer, 1, BEFORE, precompute=True, shape=SHAPES[layout])
    save(model, optimizer, str(tmp_path / "one"))
    run(4, _load_on_ranks, recipe, str(tmp_path / "one"), shard, True, copy_state(model), None, None, layout)


@on_ranks(2)
def test_a_checkpoint_without_scales_starts_as_a_new_model(tmp_path):
    """torch.distributed.checkpoint refuses it unless it is told that entries may be missing."""
    source, source_optimizer = shard("tensorwise")
    train(source, source_optimizer, BEFORE)
    dcp.save(get_state(source, source_optimizer), checkpoint_id=tmp_path)
    model, optimizer = shard("delayed", other_weights=True)
    with pytest.raises(CheckpointException, match="(?s)Missing key.*float8"):
        load(model, optimizer, tmp_path)
    load(model, optimizer, tmp_path, planner=DefaultLoadPlanner(allow_partial_load=True))
    assert not any(value.any() for value in copy_scaling(model).values())
    # The first step without a history is a dynamic one.
    assert train(model, optimizer, 1, BEFORE) == train(source, source_optimizer, 1, BEFORE)


@on_ranks(2)
def test_torch_refuses_a_history_of_another_length(tmp_path):
    """A model with dynamic scales loads the checkpoint without its histories.

    load_state_dict itself takes the newest entries of a history; when this fails, torch's checkpoints do as well.
    """
    source, source_optimizer = shard("delayed")
    train(source, source_optimizer, BEFORE)
    save(source, source_optimizer, tmp_path)
    model, optimizer = shard("tensorwise", other_weights=True)
    load(model, optimizer, tmp_path)
    assert_same(get_model_state_dict(model), get_model_state_dict(source))
    shorter = make_recipe_config("delayed", delayed_scaling_config=DelayedScalingConfig(history_len=2))
    other = convert_to_float8_training(make_model(layers=2), config=shorter)
    with pytest.raises(CheckpointException, match="(?i)size mismatch"):
        dcp.load({"float8": float8_scaling_state(other)}, checkpoint_id=tmp_path)

"""Checkpoints of delayed scaling: exact, from any number of ranks to any, and without them a start as in a new model.

As in test_checkpoint.py every rank takes the same batch, so that training is the same to the bit on 1, 2 and 4 ranks.
"""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from quaver import DelayedScalingConfig, convert_to_float8_training, float8_scaling_state
from quaver import sync_float8_amax_and_scale_history as sync
from tests.distributed.models import assert_same_scaling_on_all_ranks, config_of, make_model, scaling_snapshot
from tests.distributed.ranks import RanksError, run
from tests.distributed.test_checkpoint import (
    assert_equal_states,
    make_other,
    optimizer_of,
    set_state,
    sharded,
    state_of,
    whole,
)
from tests.distributed.test_delayed_tensor_parallel import assert_equal
from tests.distributed.test_tensor_parallel import model_of
from tests.reference import PERSISTENT_RECIPES

RECIPE = pytest.mark.parametrize("recipe", PERSISTENT_RECIPES)
BEFORE, AFTER = 3, 3

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def train(model, optimizer, steps, start=0, shape=(6, 18)):
    """The losses of steps `start` to `start + steps`, each with a batch of another size; every rank takes the same."""
    losses = []
    for step in range(start, start + steps):
        generator = torch.Generator().manual_seed(step)
        loss = model(torch.randn(shape, generator=generator) * (1 + step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sync(model)
        losses.append(loss.item())
    return losses


def one_process(recipe, *, gather=False, other_weights=False):
    config = config_of(recipe, enable_fsdp_float8_all_gather=gather)
    model = convert_to_float8_training(make_model(layers=2), config=config)
    if other_weights:
        make_other(model)
    return model, optimizer_of(model)


def save(model, optimizer, path):
    dcp.save({**state_of(model, optimizer), "float8": float8_scaling_state(model)}, checkpoint_id=path)


def load(model, optimizer, path, **options):
    state = {**state_of(model, optimizer), "float8": float8_scaling_state(model)}
    dcp.load(state, checkpoint_id=path, **options)
    set_state(model, optimizer, state)


# ---- any ranks to any ------------------------------------------------------------------------------------------------


def _save(recipe, path):
    """What is saved, what a run that was not interrupted has in the end, and the losses up to there."""
    model, optimizer = sharded(recipe)
    train(model, optimizer, BEFORE)
    save(model, optimizer, path)
    saved = scaling_snapshot(model)
    losses = train(model, optimizer, AFTER, BEFORE)
    return saved, losses, scaling_snapshot(model), whole(get_model_state_dict(model))


def _load_and_go_on(recipe, path, on_one_process, saved, losses, kept, weights):
    for gather in (True, False):
        make = one_process if on_one_process else sharded
        model, optimizer = make(recipe, gather=gather, other_weights=True)
        if not gather:  # over the scales, histories and moments of other weights, and into a model that has none
            train(model, optimizer, 1)
        load(model, optimizer, path)
        assert_equal(scaling_snapshot(model), saved)
        assert train(model, optimizer, AFTER, BEFORE) == losses
        assert_equal(scaling_snapshot(model), kept)
        assert_equal_states(get_model_state_dict(model), weights)
        if not on_one_process:
            assert_same_scaling_on_all_ranks(model)


@RECIPE
def test_saved_on_4_ranks_and_continued_on_2_and_1(recipe, tmp_path):
    """Scales and histories are exact, and so are the steps that follow: those of the run that went on."""
    path = str(tmp_path)
    saved, *then = run(4, _save, recipe, path)[0]
    assert all((value[-BEFORE:] > 0).all() for name, value in saved.items() if name.endswith("history"))
    for ranks in (2, 4):
        run(ranks, _load_and_go_on, recipe, path, False, saved, *then)
    _load_and_go_on(recipe, path, True, saved, *then)


def test_saved_on_1_process_and_continued_on_2_ranks(tmp_path):
    path = str(tmp_path)
    model, optimizer = one_process("delayed")
    train(model, optimizer, BEFORE)
    save(model, optimizer, path)
    saved = scaling_snapshot(model)
    losses = train(model, optimizer, AFTER, BEFORE)
    then = losses, scaling_snapshot(model), whole(get_model_state_dict(model))
    _load_and_go_on("delayed", path, True, saved, *then)
    run(2, _load_and_go_on, "delayed", path, False, saved, *then)


# ---- checkpoints that have no scales, or others ----------------------------------------------------------------------


def _load_without_scales(path):
    """A checkpoint of a run that scaled dynamically."""
    source, source_optimizer = sharded("tensorwise")
    train(source, source_optimizer, BEFORE)
    dcp.save(state_of(source, source_optimizer), checkpoint_id=path)
    model, optimizer = sharded("delayed", other_weights=True)
    try:
        load(model, optimizer, path)
    except CheckpointException as error:
        message = str(error)
    load(model, optimizer, path, planner=DefaultLoadPlanner(allow_partial_load=True))
    cold = not any(value.any() for value in scaling_snapshot(model).values())
    # The first step without a history is a dynamic one.
    dynamic = train(source, source_optimizer, 1, BEFORE)
    return message, cold, train(model, optimizer, 1, BEFORE) == dynamic


def test_a_checkpoint_without_scales_starts_as_a_new_model(tmp_path):
    """torch.distributed.checkpoint refuses it unless it is told that entries may be missing."""
    for message, cold, same in run(2, _load_without_scales, str(tmp_path)):
        assert "Missing key" in message
        assert "float8" in message
        assert cold
        assert same


def _load_scales_into_dynamic(path):
    """The other way round: what the model does not ask for is left where it is."""
    source, source_optimizer = sharded("delayed")
    train(source, source_optimizer, BEFORE)
    save(source, source_optimizer, path)
    model, optimizer = sharded("tensorwise", other_weights=True)
    load(model, optimizer, path)
    assert_equal_states(get_model_state_dict(model), get_model_state_dict(source))
    shorter = config_of("delayed", delayed_scaling_config=DelayedScalingConfig(history_len=2))
    other = convert_to_float8_training(make_model(layers=2), config=shorter)
    dcp.load({"float8": float8_scaling_state(other)}, checkpoint_id=path)


def test_torch_refuses_a_history_of_another_length(tmp_path):
    """load_state_dict itself takes the newest entries; when this fails, torch's checkpoints do as well."""
    with pytest.raises(RanksError, match="(?i)size mismatch"):
        run(2, _load_scales_into_dynamic, str(tmp_path))


# ---- with tensor parallelism -----------------------------------------------------------------------------------------

SHAPE_2D = (2, 4, 32)


def _save_2d(path):
    """gate and up have names that share nothing here, so one of them casts the input of both."""
    model, optimizer = sharded("delayed", layout="fsdp and tp")
    train(model, optimizer, BEFORE, shape=SHAPE_2D)
    save(model, optimizer, path)
    saved, losses = scaling_snapshot(model), train(model, optimizer, AFTER, BEFORE, shape=SHAPE_2D)
    model, optimizer = sharded("delayed", layout="fsdp and tp", other_weights=True)
    load(model, optimizer, path)
    assert_equal(scaling_snapshot(model), saved)
    assert train(model, optimizer, AFTER, BEFORE, shape=SHAPE_2D) == losses
    return saved


def _load_2d(path, saved):
    model, optimizer = sharded("delayed", layout="fsdp and tp", other_weights=True)
    load(model, optimizer, path)
    assert_equal(scaling_snapshot(model), saved)
    assert_same_scaling_on_all_ranks(model)
    train(model, optimizer, 1, BEFORE, shape=SHAPE_2D)


def test_tensor_parallel_to_one_process_and_back(tmp_path):
    saved = run(4, _save_2d, str(tmp_path / "2d"))[0]
    model = model_of(config_of("delayed"))
    make_other(model)
    optimizer = optimizer_of(model)
    load(model, optimizer, str(tmp_path / "2d"))
    assert_equal(scaling_snapshot(model), saved)
    train(model, optimizer, 1, BEFORE, shape=SHAPE_2D)
    save(model, optimizer, str(tmp_path / "one"))
    run(4, _load_2d, str(tmp_path / "one"), scaling_snapshot(model))

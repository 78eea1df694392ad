"""Tests cast_weights_once under FSDP2: one cast per shard and step, the same losses and bytes, and errors."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from quaver import cast_weights_once, convert_to_float8_training, set_high_precision_matmuls
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from quaver.fsdp import all_gather_weight
from tests.counting import CollectiveCounter
from tests.library.distributed.delayed_training import train
from tests.library.distributed.fsdp_models import (
    MICROBATCHES,
    change_weights,
    make_gathering_config,
    model_by,
    run_step,
)
from tests.library.distributed.models import compute_loss, get_batches, get_mesh, get_rank_part, make_model, shard_model
from tests.ranks import on_ranks
from tests.thinned import at_night

LINEARS = 5


SCOPES = (contextlib.nullcontext, cast_weights_once)
CASES = [("rowwise", "checkpointed"), ("delayed", "keep gathered")]
NIGHTLY = [("rowwise_with_gw_hp", "keep gathered"), ("delayed", "checkpointed"), ("delayed", "hsdp")]
NIGHTLY += [("rowwise_with_tensorwise_weight", "hsdp"), ("rowwise", "mixed precision")]
NIGHTLY += [("tensorwise", how) for how in ("cpu offload", "plain", "meta")]


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, CASES), *at_night([(1, CASES[:1]), (4, [*CASES, *NIGHTLY])])], ids=["2", "1", "4"]
)
@on_ranks()
def test_a_scope_changes_no_bit_of_the_losses(ranks, cases):
    for recipe, how in cases:
        options = {"steps": 2, "accumulate": MICROBATCHES, "precompute": recipe == "rowwise"}
        without, scoped = (
            train(model_by(how, make_gathering_config(recipe)), scope=scope, **options)[0] for scope in SCOPES
        )
        assert without == scoped
        assert len(set(without)) == len(without)


def _count(recipe, how, scope):
    """Return the casts of shards, and calls and bytes of collectives, of the microbatches of one step."""
    model = model_by(how, make_gathering_config(recipe))
    precompute_float8_dynamic_scale_for_fsdp(model)
    batch = get_batches(1, MICROBATCHES * dist.get_world_size())[0]
    spy = mock.patch.object(all_gather_weight, "cast_with_scale", wraps=all_gather_weight.cast_with_scale)
    with spy as cast, CollectiveCounter() as counter, scope(model):
        run_step(model, batch)
    return cast.call_count, dict(counter.calls), dict(counter.bytes)


@pytest.mark.parametrize(
    ("recipe", "payloads", "how"),
    [
        ("tensorwise", 1, "checkpointed"),
        ("rowwise", 2, "always reshard"),
        *at_night([("tensorwise", 1, "always reshard"), ("rowwise", 2, "checkpointed")]),
    ],
)
@on_ranks(2)
def test_a_scope_casts_each_shard_once_and_sends_the_same(recipe, payloads, how):
    casts, *sent = _count(recipe, how, SCOPES[0])
    casts_once, *sent_once = _count(recipe, how, SCOPES[1])
    assert casts_once == payloads * LINEARS
    assert casts > casts_once
    if how == "always reshard":
        assert casts == payloads * LINEARS * 2 * MICROBATCHES  # forward and backward
    assert sent_once == sent


ERRORS = dict.fromkeys(("step", "load", "in place", "each row", "around"), "changed")
ERRORS |= dict.fromkeys(("assign", "to dtype"), "replaced")


@pytest.mark.parametrize(("kind", "changes"), [("foreach", list(ERRORS)), ("fused", ["step"])])
@on_ranks(2)
def test_a_change_inside_is_an_error_at_the_next_all_gather_or_at_the_exit(kind, changes):
    batch = get_batches(1, dist.get_world_size())[0]
    for change in changes:
        for gathers_again in (True, False):
            model = shard_model(make_gathering_config("tensorwise"), model=make_model(1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **{kind: True})
            state_dict = copy.deepcopy(model.state_dict())
            message = f"was {ERRORS[change]} inside cast_weights_once; leave the scope"
            with pytest.raises(RuntimeError, match=message), cast_weights_once(model):
                run_step(model, batch, 1)
                change_weights(change, model, optimizer, state_dict)
                if gathers_again:
                    with contextlib.suppress(StopIteration):
                        model(get_rank_part(batch))
                        pytest.fail(f"{change}: the all-gather went through")
            model.load_state_dict(state_dict)
            with cast_weights_once(model):
                run_step(model, batch, 1)


@on_ranks(2)
def test_a_change_before_the_cast_is_never_stale():
    """A write around the parameter that precedes the cast is read by the cast; one through it is an error."""
    model, batch = shard_model(make_gathering_config("tensorwise")), get_batches(1, 2)[0]
    with torch.no_grad():
        state_dict = model.state_dict()
        with cast_weights_once(model):
            state_dict["0.up.weight"].to_local().mul_(2)
            scoped = model(get_rank_part(batch))
        with pytest.raises(RuntimeError, match="the weight of 1.up was changed inside"), cast_weights_once(model):
            model[1].up.weight.mul_(2)
            model(get_rank_part(batch))
        model[1].up.weight.div_(2)
        assert scoped.equal(model(get_rank_part(batch)))


@on_ranks(2)
def test_a_weight_that_was_replaced_after_fully_shard_is_named():
    model, batch = shard_model(make_gathering_config("tensorwise")), get_rank_part(get_batches(1, 2)[0])
    model(batch)
    model[0].up.weight = torch.nn.Parameter(model[0].up.weight.full_tensor().detach())
    with pytest.raises(RuntimeError, match="the weight of 0.up, which FSDP2 all-gathers .*, was replaced after"):
        model(batch)


@on_ranks(2)
def test_another_config_inside_is_an_error_at_the_next_all_gather():
    model, batch = shard_model(make_gathering_config("tensorwise")), get_rank_part(get_batches(1, 2)[0])
    with pytest.raises(RuntimeError, match="given another config"), cast_weights_once(model):
        model(batch)
        set_high_precision_matmuls(model, ["grad_weight"])
        with pytest.raises(RuntimeError, match="given another config"):
            model(batch)


@on_ranks(2)
def test_cast_weights_once_leaves_nothing_behind():
    model, batch = shard_model(make_gathering_config("rowwise"), reshard_after_forward=False), get_batches(1, 2)[0]
    states = [module.all_gather_state for module in model.modules() if getattr(module, "all_gather_state", None)]
    expected = model(get_rank_part(batch))
    with cast_weights_once(model):  # the weights are unsharded at the entry
        assert model(get_rank_part(batch)).equal(expected)
        with pytest.raises(RuntimeError, match="already open"), cast_weights_once(model):
            pass
        assert all(state.cast_once_shards for state in states)
        loss = compute_loss(model(get_rank_part(batch)))
    assert not any(state.cast_once_shards for state in states)
    loss.backward()  # its weights are still gathered, or gathered anew
    for module in (*model, model):
        module.reshard()
    with pytest.raises(RuntimeError, match="was changed inside"), cast_weights_once(model), torch.no_grad():
        shard = model[0].up.weight
        model(get_rank_part(batch))
        assert model[0].up.weight is not shard  # it is unsharded at the exit
        shard.mul_(1.0)
    with pytest.raises(ZeroDivisionError), cast_weights_once(model):
        raise ZeroDivisionError
    assert len(states) == LINEARS
    assert not any(state.cast_once_shards for state in states)


@on_ranks(2)
def test_weights_gathered_in_high_precision_are_left_alone():
    model = convert_to_float8_training(make_model(), config="tensorwise")
    fully_shard(model, mesh=get_mesh())
    with cast_weights_once(model):
        run_step(model, get_batches(1, MICROBATCHES * 2)[0])

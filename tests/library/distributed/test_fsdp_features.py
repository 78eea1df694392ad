"""Tests float8 all-gather with other features of FSDP2, scales that are never stale, and ranks that disagree."""

import copy
import functools
import itertools
import pickle
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from quaver import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    set_high_precision_matmuls,
)
from quaver.activations import CHECKPOINT_MODES, apply_activation_checkpointing
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from quaver.fsdp.all_gather_weight import Float8AllGatherWeight
from tests.library.distributed import fsdp_models, models
from tests.library.distributed.fsdp_models import make_gathering_config
from tests.ranks import RanksError, get_cached_mesh, on_ranks, refusal, run
from tests.recipes import NON_BLOCK_RECIPES, make_recipe_config
from tests.steps import assert_same, by_torch_save, compute_results, to_plain
from tests.thinned import at_night

STEPS = 2


def compute_losses(model, *, precompute=False, steps=STEPS, step=models.train_step):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer, losses = torch.optim.AdamW(trained, lr=models.LEARNING_RATE), []
    for batch in models.get_batches(steps, dist.get_world_size()):
        losses.append(step(model, optimizer, batch))
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
    return losses


def _compute_losses_with(how, recipe):
    model = fsdp_models.model_by(how, make_gathering_config(recipe))
    return compute_losses(model, precompute=how == "cpu offload", step=ODD_STEPS.get(how, models.train_step))


def _run_two_forwards(model, optimizer, batch):
    """Run a step with two graphs that are alive before the backward of either."""
    losses = [models.compute_loss(model(models.get_rank_part(batch))) for _ in range(2)]
    for loss in losses:
        (loss / 2).backward()
    return models.finish_step(losses[0], optimizer)


def _retain_graph(model, optimizer, batch):
    loss = models.compute_loss(model(models.get_rank_part(batch)))
    loss.backward(retain_graph=True)
    optimizer.zero_grad()
    loss.backward()
    return models.finish_step(loss, optimizer)


def _step_after_errors(model, optimizer, batch):
    """Run a step after a forward that raises half way, and one whose graph is dropped."""

    def fail(*_):
        raise ArithmeticError

    hook = model[1].register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        model(models.get_rank_part(batch))
    hook.remove()
    model(models.get_rank_part(batch))
    return models.train_step(model, optimizer, batch)


ODD_STEPS = {"two forwards": _run_two_forwards, "retained graph": _retain_graph, "after exceptions": _step_after_errors}


def _shard_columns(parameter):
    even = parameter.dim() == 2 and parameter.shape[1] % dist.get_world_size() == 0
    return torch.distributed.tensor.Shard(1 if even else 0)


WAYS = ["plain", "hsdp", "cpu offload", "meta"]
MORE_WAYS = ["keep gathered", "always reshard", "checkpointed", "checkpointed by op", *ODD_STEPS]


@pytest.mark.parametrize(
    ("ranks", "recipe", "ways"),
    [
        (4, "tensorwise", WAYS),  # some shards are empty
        (2, "rowwise", MORE_WAYS),
        *at_night((4, recipe, WAYS + MORE_WAYS) for recipe in NON_BLOCK_RECIPES),
    ],
)
@on_ranks()
def test_every_way_to_use_fsdp_trains_alike(ranks, recipe, ways):
    expected = models.compute_single_process_losses(make_recipe_config(recipe), STEPS, ranks, float8_all_gather=True)
    for how in ways:
        assert _compute_losses_with(how, recipe) == pytest.approx(expected, rel=1e-5), how


AMAXES_AND_VIEWS = [getattr(torch.ops.aten, name).default for name in ("amax", "max", "abs", "view", "gelu", "copy_")]
SAVE_MUCH = functools.partial(create_selective_checkpoint_contexts, [*fsdp_models.MATMULS, *AMAXES_AND_VIEWS])
CONTEXTS = {"matmuls": fsdp_models.SAVE_MATMULS, "much": SAVE_MUCH}


def _train_with_nested_groups(mode, recipe, gathers):
    """Return the gradients of two steps of blocks whose linears are FSDP2 groups; the second step knows the scales."""
    model, ranks = models.make_model(2, dim=32, hidden=64), dist.get_world_size()
    config = make_recipe_config(recipe, enable_fsdp_float8_all_gather=gathers)
    convert_to_float8_training(model, config=config)
    if mode in CHECKPOINT_MODES:
        apply_activation_checkpointing(model[:-1], mode=mode)
    for index, block in enumerate(model[:-1]):
        if mode in CONTEXTS:
            model[index] = checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT, context_fn=CONTEXTS[mode])
        fully_shard(block.up)
        fully_shard(block.down)
    models.shard_model(None, model=model)
    for batch in models.get_batches(2, ranks, dim=32):
        models.compute_loss(model(models.get_rank_part(batch))).backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


@on_ranks(2)
def test_a_policy_sees_no_operation_of_groups_inside_a_block():
    for recipe, gathers, *modes in (("tensorwise", True, "selective", *CONTEXTS), ("rowwise", False, "selective")):
        expected = _train_with_nested_groups("none", recipe, gathers)
        for mode in modes:
            assert_same(_train_with_nested_groups(mode, recipe, gathers), expected)


@pytest.mark.parametrize("ranks", [1, 2])
@on_ranks()
def test_weights_may_be_sharded_along_the_other_dim(ranks):
    model = models.shard_model(
        make_gathering_config("rowwise"), model=models.make_model(hidden=40), shard_placement_fn=_shard_columns
    )
    assert (
        fsdp_models.find_different_operands(model, models.make_model(hidden=40), make_gathering_config("rowwise")) == []
    )


@on_ranks(4)
def test_torch_refuses_an_int_reshard_after_forward_for_extended_tensors():
    """When this fails, torch has lifted its limit, and docs/distributed.md can say so."""
    message = refusal(compute_losses, models.shard_model(make_gathering_config("tensorwise"), reshard_after_forward=2))
    assert "only Tensors of floating point dtype" in message


@on_ranks(2)
def test_scales_of_frozen_weights_are_computed_once():
    model = models.make_model()
    for block in model[:2]:
        block.up.weight.requires_grad_(False)
    model = models.shard_model(make_gathering_config("tensorwise"), model=model)
    before = model[0].up.weight.to_local().get_plain().clone()
    losses = compute_losses(model)
    assert losses[-1] < losses[0]
    frozen, trained = model[0].up.weight, model[0].down.weight
    assert frozen.grad is None
    assert torch.equal(frozen.to_local().get_plain(), before)
    assert frozen._local_tensor.get_scales(frozen) is not None
    assert trained._local_tensor.get_scales(trained) is None


def _is_scale_stale(how, afterwards, optimizer_options):
    """Return whether the scale that is used after a change, and after what follows it, is not that of the weights."""
    model = models.shard_model(make_gathering_config("tensorwise"), model=models.make_model(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **optimizer_options)
    models.compute_loss(model(models.get_rank_part(models.get_batches(1, dist.get_world_size())[0]))).backward()
    double = {name: value * 2 for name, value in model.state_dict().items()}
    precompute_float8_dynamic_scale_for_fsdp(model)
    fsdp_models.change_weights(how, model, optimizer, double)
    if afterwards == "precompute":
        precompute_float8_dynamic_scale_for_fsdp(model)
    elif afterwards == "load":
        model.load_state_dict(model.state_dict())
    full = model.state_dict()["0.up.weight"].full_tensor()
    model[0].unshard()
    scale = model[0].up.weight.dequant_scale
    return not torch.equal(scale, models.quantize(full, make_gathering_config("tensorwise")).row.dequant_scale)


@on_ranks(2)
def test_a_precomputed_scale_is_not_used_after_the_weight_changes():
    cases = [
        (how, None, {"foreach": True}) for how in fsdp_models.CHANGES if how != "around"
    ]  # "around" alone is an error
    cases += [("step", None, {"fused": True}), ("around", "precompute", {}), ("around", "load", {})]
    assert [case for case in cases if _is_scale_stale(*case)] == []


@pytest.mark.parametrize("local", [True, False])
@on_ranks(2)
def test_a_write_around_the_parameter_is_an_error_and_not_a_stale_scale(local):
    """dcp.load, for example, writes into a state_dict's tensor after precompute, which the parameter does not see."""
    model, input = (
        models.shard_model(make_gathering_config("tensorwise")),
        models.get_rank_part(models.get_batches(1, 2)[0]),
    )
    state_dict = model.state_dict()
    precompute_float8_dynamic_scale_for_fsdp(model)
    (state_dict["0.up.weight"].to_local() if local else state_dict["0.up.weight"]).mul_(2)
    message = refusal(model, input)
    assert "was written to directly" in message
    assert "precompute_float8_dynamic_scale_for_fsdp" in message
    precompute_float8_dynamic_scale_for_fsdp(model)
    assert torch.isfinite(model(input)).all()


@pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)
@on_ranks(2)
def test_a_nan_on_one_rank_reaches_all(recipe):
    model = models.shard_model(make_gathering_config(recipe))
    with torch.no_grad():
        local = model[0].up.weight.to_local()
        if dist.get_rank() == 1:
            local[0, 0] = float("nan")
        else:
            local.mul_(1.0)
    assert model(models.get_rank_part(models.get_batches(1, 2)[0])).isnan().any()


DISAGREEMENT = "ranks disagree about the weights to all-gather in float8: rank"


def _disagree(how, precompute):
    other = dist.get_rank() == 1
    recipe = "rowwise" if how == "recipe" and other else "tensorwise"
    config = make_recipe_config(recipe, enable_fsdp_float8_all_gather=not (how == "flag" and other))
    model = convert_to_float8_training(models.make_model(1 if how == "layer" and other else 2), config=config)
    if precompute:
        precompute_float8_dynamic_scale_for_fsdp(model)  # compares nothing, because nothing is sharded yet
    models.shard_model(None, model=model)
    if precompute:
        precompute_float8_dynamic_scale_for_fsdp(model)
    model(models.get_rank_part(models.get_batches(1, dist.get_world_size())[0]))


@on_ranks(2)
def test_all_ranks_raise_when_they_disagree():
    for way in itertools.product(["layer", "recipe", "flag"], [True, False]):
        if way != ("flag", False):
            message = refusal(_disagree, *way)
            assert DISAGREEMENT in message, (way, message)
            assert way[0] != "recipe" or re.search(r"rank 0 has '\S+ output: [^;]*' and \d+ more, rank 1", message), (
                message
            )


@on_ranks(4)
def test_precompute_compares_replicas():
    config = make_gathering_config("rowwise" if dist.get_rank() > 1 else "tensorwise")
    model = models.shard_model(config, mesh=get_cached_mesh((2, 2), ("replicate", "shard")))
    assert DISAGREEMENT in refusal(precompute_float8_dynamic_scale_for_fsdp, model)


@on_ranks(4)
def test_a_replica_runs_the_first_forward_alone():
    model = models.shard_model(
        make_gathering_config("tensorwise"), mesh=get_cached_mesh((2, 2), ("replicate", "shard"))
    )
    if dist.get_rank() < 2:
        with torch.no_grad():
            model(models.get_batches(1, 1)[0])
    dist.barrier()
    model(models.get_batches(1, 1)[0]).sum().backward()


@pytest.mark.parametrize("others", [(1, 3), (3,)], ids=str)
@pytest.mark.parametrize("precompute", [False, True])
@on_ranks(4)
def test_tensor_parallel_ranks_that_disagree_get_an_error(others, precompute):
    """Ranks 0 and 2 are in one group of FSDP2, and ranks 1 and 3 in the other. All four raise.

    They agree about the first block, which is not tensor-parallel, so its scales have another collective.
    """
    mesh = get_cached_mesh((2, 2), ("fsdp", "tp"))
    model = convert_to_float8_training(models.make_model(), config=make_gathering_config("tensorwise"))
    parallelize_module(model[1], mesh["tp"], {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()})
    if dist.get_rank() in others:
        set_high_precision_matmuls(model, lambda name: ["grad_weight"] if name.startswith("1.") else [])
    models.shard_model(None, mesh=mesh["fsdp"], model=model)
    call = precompute_float8_dynamic_scale_for_fsdp if precompute else lambda model: model(models.get_batches(1, 1)[0])
    message = refusal(call, model)
    assert DISAGREEMENT in message
    first, other = (int(rank) for rank in re.findall(r"rank (\d) has", message))
    assert (first in others) != (other in others), message


def test_a_rank_without_float8_all_gather_ends_the_run_with_an_error():
    """That rank joins no check of the weights: collectives of the ranks do not match, or end by their time limit."""
    with pytest.raises(RanksError):
        run(2, _disagree, "flag", False, timeout=60, collective_timeout=3)


@on_ranks(2)
def test_linears_that_are_compiled_one_by_one_are_whole_graphs():
    """The sizes of the second one are symbolic in its trace, because both share the code of one forward."""
    model = convert_to_float8_training(models.make_model(1), config="tensorwise")
    for linear in (model[0].up, model[0].down):
        linear.compile(fullgraph=True, backend="aot_eager")
    models.shard_model(None, model=model)
    model(models.get_rank_part(models.get_batches(1, 2)[0])).sum().backward()
    assert {layer.backend for layer in conversion_report(model).converted} == {"exact"}


@pytest.mark.parametrize(
    ("recipe", "compiled"),
    [*((recipe, False) for recipe in NON_BLOCK_RECIPES), ("rowwise", True), *at_night([("tensorwise", True)])],
)
def test_without_fsdp_the_flag_changes_nothing(recipe, compiled):
    plain, wrapped = (
        convert_to_float8_training(models.make_model(0 if compiled else 1), config=config)
        for config in (make_recipe_config(recipe), make_gathering_config(recipe))
    )
    call = torch.compile(wrapped, fullgraph=True, backend="aot_eager") if compiled else None
    input = models.get_batches(1, 1)[0]
    assert_same(compute_results(wrapped, input, call=call), compute_results(plain, input))
    for model in (plain, wrapped):
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    assert list(wrapped.state_dict()) == list(plain.state_dict())
    assert_same(wrapped.state_dict(), plain.state_dict())
    assert {type(value) for value in wrapped.state_dict().values()} == {torch.Tensor}


def test_the_wrapper_survives_copies_and_leaves_with_the_conversion():
    model = models.make_model(1)
    reference = copy.deepcopy(model)
    convert_to_float8_training(model, config=make_gathering_config("rowwise"))
    input = models.get_batches(1, 1)[0]
    pickled = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), copy.deepcopy(model).to(torch.float64).to(torch.float32), pickled):
        assert torch.equal(model(input), other(input))
        assert other[0].up.all_gather_state is None
        other.load_state_dict(model.state_dict())
        other.load_state_dict(model.state_dict(), assign=True)
        assert isinstance(other[0].up.weight, Float8AllGatherWeight)
        assert torch.equal(model(input), other(input))
    convert_to_high_precision(model)
    assert type(model[0].up.weight) is torch.nn.Parameter
    assert torch.equal(model(input), reference(input))
    assert not model[0].up._state_dict_hooks
    assert not model[0].up._load_state_dict_post_hooks


def check_behaves_as(weight, plain):
    """Assert that methods and attributes of a parameter answer as the plain tensor inside."""
    assert weight.data_ptr() == plain.data_ptr() != 0
    assert weight.untyped_storage().data_ptr() == plain.untyped_storage().data_ptr()
    assert weight.untyped_storage().nbytes() == plain.untyped_storage().nbytes()
    for method in ("size", "stride", "storage_offset", "is_contiguous", "element_size", "numel", "is_shared"):
        assert getattr(weight, method)() == getattr(plain, method)(), method
    for attribute in ("dtype", "device", "layout", "is_leaf", "is_cpu", "nbytes"):
        assert getattr(weight, attribute) == getattr(plain, attribute), attribute
    assert torch.equal(weight, plain)
    assert weight.tolist() == plain.tolist()
    assert (weight.detach().numpy() == plain.detach().numpy()).all()
    assert (np.asarray(weight.detach().cpu()) == np.asarray(plain.detach())).all()
    assert torch.equal(torch.from_dlpack(weight.detach()), plain.detach())
    version = weight._version
    with torch.no_grad():
        weight.add_(0.0)
        weight.t().add_(0.0)
    assert weight._version == version + 2


def test_a_weight_to_all_gather_answers_as_its_tensor():
    model = convert_to_float8_training(models.make_model(1), config=make_gathering_config("tensorwise"))
    weight = model[0].up.weight
    check_behaves_as(weight, torch.nn.Parameter(weight.wrapped))
    with pytest.raises(RuntimeError, match="requires grad"):
        weight.numpy()
    with pytest.raises(RuntimeError, match="cannot assign to .data of a weight that is all-gathered in float8"):
        weight.data = torch.zeros_like(weight)
    for twin in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), by_torch_save(weight, weights_only=True)):
        assert isinstance(twin, Float8AllGatherWeight)
        assert isinstance(twin, torch.nn.Parameter)
        assert twin.requires_grad
        assert twin.data_ptr() != weight.data_ptr()
        assert torch.equal(twin, weight)
    tied = copy.deepcopy([weight, weight])
    assert tied[0] is tied[1]
    weight.share_memory_()
    assert weight.is_shared()
    assert weight.wrapped.is_shared()
    assert weight.data_ptr() == weight.wrapped.data_ptr()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    weight.grad = torch.ones_like(weight)
    before = weight.detach().clone()
    optimizer.step()
    assert torch.equal(weight.wrapped, before.wrapped - 1)


@on_ranks(2)
def test_a_shard_answers_as_its_tensor():
    model = models.shard_model(make_gathering_config("tensorwise"))
    for _ in range(2):  # before and after FSDP2 pads the shards
        for weight in (model[0].up.weight, model[-1].weight):
            local = weight.to_local()
            if local.numel():
                check_behaves_as(local.detach(), local.get_plain().detach())
                assert local.data_ptr() == weight._local_tensor.data_ptr()
        models.compute_loss(model(models.get_rank_part(models.get_batches(1, 2)[0]))).backward()


@on_ranks(2)
def test_what_sharded_models_refuse():
    model = models.shard_model(make_gathering_config("tensorwise"))
    with pytest.raises(RuntimeError, match="cannot be converted back"):
        convert_to_high_precision(model)
    with pytest.raises(RuntimeError, match="call the module that was given to it"):
        model[0].up(torch.randn(2, models.DIM))


@pytest.mark.parametrize("how", ["one rank, precomputed", "GradScaler", "GradScaler, precomputed"])
@on_ranks(2)
def test_a_step_that_is_left_out_leaves_no_stale_scale(how):
    """One rank's gradient is infinite. GradScaler leaves the step out on all ranks; else that rank does alone."""
    config = make_gathering_config("tensorwise")
    model, whole, moved = models.shard_model(config), models.make_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=models.LEARNING_RATE)
    scaler = torch.amp.GradScaler("cpu", enabled="GradScaler" in how)
    weight = model[0].up.weight
    for step, batch in enumerate(models.get_batches(2, 2)):
        scaler.scale(models.compute_loss(model(models.get_rank_part(batch)))).backward()
        before, is_bad = weight.to_local() * 1, step == 1 and dist.get_rank() == 0
        if is_bad:
            weight.grad.to_local().fill_(torch.inf)
        if scaler.is_enabled() or not is_bad:
            scaler.step(optimizer)
            scaler.update()
        moved.append(not torch.equal(weight.to_local() * 1, before))
        optimizer.zero_grad()
        if "precomputed" in how:
            precompute_float8_dynamic_scale_for_fsdp(model)
    assert moved == [True, "GradScaler" not in how and dist.get_rank() == 1]
    whole.load_state_dict({name: to_plain(value) for name, value in model.state_dict().items()})
    assert fsdp_models.find_different_operands(model, whole, config) == []

"""Float8 all-gather with everything else that FSDP2 does, scales that are never stale, and ranks that disagree."""

import copy
import functools
import io
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from quaver import convert_to_float8_training, convert_to_high_precision
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from quaver.distributed.fsdp import Float8AllGatherWeight
from tests.distributed.counting import CollectiveCounter
from tests.distributed.models import (
    DIM,
    LEARNING_RATE,
    batches,
    config_of,
    loss_of,
    make_model,
    quantized,
    single_process_losses,
)
from tests.distributed.ranks import RanksError, run
from tests.distributed.test_fsdp import operands_that_differ, part_of, shard_model, train_step
from tests.reference import RECIPES

STEPS = 3


def gathering(recipe):
    return config_of(recipe, enable_fsdp_float8_all_gather=True)


def losses_of(model, *, precompute=False, steps=STEPS, step=train_step):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)
    losses = []
    for batch in batches(steps, dist.get_world_size()):
        losses.append(step(model, optimizer, batch))
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
    return losses


def model_by(how, config):
    """The small model, with FSDP2 used in one particular way."""
    options, model = {}, None
    if how == "keep gathered":
        options["reshard_after_forward"] = False
    elif how == "always reshard":
        options["reshard_after_forward"] = True
    elif how == "hsdp":
        shape = (2, dist.get_world_size() // 2)
        options["mesh"] = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    elif how == "cpu offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    elif how == "mixed precision":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    elif how == "meta":
        with torch.device("meta"):
            model = make_model()
    elif how.startswith("checkpointed"):
        model = convert_to_float8_training(make_model(), config=config)
        config = None
        kind = CheckpointImpl.REENTRANT if "reentrant" in how else CheckpointImpl.NO_REENTRANT
        policy = {"context_fn": SAVE_MATMULS} if "by op" in how else {}
        for index, block in enumerate(model[:-1]):
            model[index] = checkpoint_wrapper(block, kind, **policy)
    model = shard_model(config, model=model, **options)
    if how == "meta":
        model.to_empty(device="cpu")
        model.load_state_dict(_sharded_like(model, make_model().state_dict()))
    return model


def _losses_with(how, recipe):
    """Losses of three steps."""
    model = model_by(how, gathering(recipe))
    return losses_of(model, precompute=how == "cpu offload", step=ODD_STEPS.get(how, train_step))


def _two_forwards(model, optimizer, batch):
    """Two graphs are alive before the backward of either."""
    losses = [loss_of(model(part_of(batch))) for _ in range(2)]
    for loss in losses:
        (loss / 2).backward()
    return _finish(losses[0], optimizer)


def _retained_graph(model, optimizer, batch):
    loss = loss_of(model(part_of(batch)))
    loss.backward(retain_graph=True)
    optimizer.zero_grad()
    loss.backward()
    return _finish(loss, optimizer)


def _after_exceptions(model, optimizer, batch):
    """A forward that raises half way, and one whose graph is dropped, precede the step."""

    def fail(*_):
        raise ArithmeticError

    hook = model[1].register_forward_hook(fail)
    with pytest.raises(ArithmeticError):
        model(part_of(batch))
    hook.remove()
    model(part_of(batch))
    return train_step(model, optimizer, batch)


def _finish(loss, optimizer):
    optimizer.step()
    optimizer.zero_grad()
    dist.all_reduce(mean := loss.detach().clone())
    return mean.item() / dist.get_world_size()


ODD_STEPS = {
    "two forwards": _two_forwards,
    "retained graph": _retained_graph,
    "after exceptions": _after_exceptions,
}
MATMULS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten._scaled_mm.default]
SAVE_MATMULS = functools.partial(create_selective_checkpoint_contexts, MATMULS)


def _shard_columns(parameter):
    even = parameter.dim() == 2 and parameter.shape[1] % dist.get_world_size() == 0
    return torch.distributed.tensor.Shard(1 if even else 0)


def _sharded_like(model, state_dict):
    return {
        name: torch.distributed.tensor.distribute_tensor(state_dict[name], like.device_mesh, like.placements)
        for name, like in model.state_dict().items()
    }


WAYS = ["plain", "keep gathered", "always reshard", "hsdp", "cpu offload", "meta", "checkpointed"]
WAYS += ["checkpointed by op", *ODD_STEPS]


def _all_ways(recipe, ways):
    return [_losses_with(how, recipe) for how in ways]


def check_ways(recipe, ways):
    expected = single_process_losses(config_of(recipe), STEPS, 4, float8_gather=True)
    for how, losses in zip(ways, run(4, _all_ways, recipe, ways)[0], strict=True):
        assert losses == pytest.approx(expected, rel=1e-5), how


@pytest.mark.parametrize(
    ("recipe", "ways"),
    [("tensorwise", WAYS), ("rowwise", WAYS[1::2]), ("rowwise_with_gw_hp", WAYS[::3]), (RECIPES[-1], WAYS[2::4])],
)
def test_every_way_to_use_fsdp_trains_alike(recipe, ways):
    check_ways(recipe, ways)


@pytest.mark.nightly
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_way_to_use_fsdp_by_every_recipe(recipe):
    check_ways(recipe, WAYS)


@pytest.mark.parametrize("ranks", [1, 2])
def test_shards_of_the_other_dim_and_a_group_of_one_rank(ranks):
    assert run(ranks, _codes_of_columns) == [[]] * ranks
    expected = single_process_losses(config_of("rowwise"), STEPS, ranks)
    if ranks == 1:
        assert run(1, _losses_with, "plain", "rowwise")[0] == pytest.approx(expected, rel=1e-5)


def _codes_of_columns():
    model = shard_model(gathering("rowwise"), model=make_model(hidden=40), shard_placement_fn=_shard_columns)
    return operands_that_differ(model, make_model(hidden=40), gathering("rowwise"))


def _int_reshard():
    model = shard_model(gathering("tensorwise"), reshard_after_forward=2)
    losses_of(model, steps=1)


def test_torch_refuses_an_int_reshard_after_forward_for_extended_tensors():
    """Its own limit; when this fails, torch has lifted it and docs/distributed.md can say so."""
    with pytest.raises(RanksError, match="in to_sharded_post_forward(.|\n)*only Tensors of floating point dtype"):
        run(4, _int_reshard)


def _accumulate(recipe):
    """Losses of two steps of two microbatches, gradients reduced after the second only; gathers of a microbatch."""
    model = shard_model(gathering(recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    ranks, losses = dist.get_world_size(), []
    for batch in batches(2, 2 * ranks):
        total = 0.0
        for index, half in enumerate(batch.chunk(2)):
            model.set_requires_gradient_sync(index == 1)
            counter = CollectiveCounter()
            with counter:
                loss = loss_of(model(part_of(half))) / 2
                loss.backward()
            assert counter.calls["all_reduce"] == (1 if index == 0 and losses else counter.calls["all_reduce"])
            assert counter.calls["all_reduce"] == 0 or index == 0  # scales are still known in the second
            assert (counter.calls["reduce_scatter"] > 0) == (index == 1)
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor(total)
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
    return losses


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_gradient_accumulation(recipe):
    expected = single_process_losses(config_of(recipe), 2, 4)
    assert run(2, _accumulate, recipe)[0] == pytest.approx(expected, rel=1e-5)


def _frozen():
    """A model with frozen weights trains what is left, and computes their scales once."""
    config = gathering("tensorwise")
    model = make_model()
    for block in model[:2]:
        block.up.weight.requires_grad_(False)
    model = shard_model(config, model=model)
    before = model[0].up.weight.to_local().plain().clone()
    losses = losses_of(model)
    frozen, trained = model[0].up.weight, model[0].down.weight
    return (
        losses,
        frozen.grad is None and torch.equal(frozen.to_local().plain(), before),
        frozen._local_tensor.scales() is not None,
        trained._local_tensor.scales() is None,
    )


def test_frozen_weights():
    for losses, unchanged, still_known, dropped in run(2, _frozen):
        assert losses[-1] < losses[0]
        assert unchanged
        assert still_known
        assert dropped


def _gathered_scale(model):
    model[0].unshard()
    scale = model[0].up.weight.dequant_scale.clone()
    model[0].reshard()
    return scale


def _scales_after(change):
    """The scale in use after `change`, that of the weights as they then are, and the collectives that it took."""
    config = gathering("tensorwise")
    model = shard_model(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=change != "fused", fused=change == "fused")
    loss_of(model(part_of(batches(1, dist.get_world_size())[0]))).backward()
    double = {name: value * 2 for name, value in model.state_dict().items()}
    precompute_float8_dynamic_scale_for_fsdp(model)
    weight = model[0].up.weight
    with torch.no_grad():
        if change in ("foreach", "fused"):
            optimizer.step()
        elif change == "load":
            model.load_state_dict(double)
        elif change == "assign":
            model.load_state_dict(double, assign=True)
        elif change == "in place":
            weight.mul_(2)
        elif change == "data":
            weight.data.mul_(2)
        elif change == "to_local":
            weight.to_local().mul_(2)
        elif change == "transposed":
            weight.to_local().t().mul_(2)
        elif change == "each row":
            for row in weight.to_local():
                row.mul_(2)
        elif change == "foreach multiply":
            torch._foreach_mul_(list(model.parameters()), 2.0)
        elif change == "to dtype":
            model.to(torch.bfloat16)
        elif change == "around, precompute":
            model.state_dict()["0.up.weight"].to_local().mul_(2)
            precompute_float8_dynamic_scale_for_fsdp(model)
        elif change == "around, load":
            model.state_dict()["0.up.weight"].to_local().mul_(2)
            model.load_state_dict(model.state_dict())
    full = model.state_dict()["0.up.weight"].full_tensor()
    got = _gathered_scale(model)
    return torch.equal(got, quantized(full, config).last.dequant_scale)


CHANGES = ["foreach", "fused", "load", "assign", "in place", "data", "to_local", "transposed", "each row"]
CHANGES += ["foreach multiply", "to dtype", "around, precompute", "around, load"]


def _scales_after_all():
    return [change for change in CHANGES if not _scales_after(change)]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_precomputed_scale_is_not_used_after_the_weight_changes(ranks):
    assert run(ranks, _scales_after_all) == [[]] * ranks


def _write_around():
    """A write into a state_dict's tensor after precompute, which no operation on the parameter shows."""
    model = shard_model(gathering("tensorwise"))
    state_dict = model.state_dict()
    precompute_float8_dynamic_scale_for_fsdp(model)
    state_dict["0.up.weight"].to_local().mul_(2)
    try:
        model(part_of(batches(1, dist.get_world_size())[0]))
    except RuntimeError as error:
        message = str(error)
    precompute_float8_dynamic_scale_for_fsdp(model)
    return message, torch.isfinite(model(part_of(batches(1, dist.get_world_size())[0]))).all().item()


def test_a_write_around_the_parameter_is_an_error_and_not_a_stale_scale():
    for message, works_again in run(2, _write_around):
        assert "was written to directly" in message
        assert "precompute_float8_dynamic_scale_for_fsdp" in message
        assert works_again


def _nan_on_one_rank(recipe):
    model = shard_model(gathering(recipe))
    with torch.no_grad():
        local = model[0].up.weight.to_local()
        if dist.get_rank() == 1:
            local[0, 0] = float("nan")
        else:
            local.mul_(1.0)
    return model(part_of(batches(1, dist.get_world_size())[0])).isnan().any().item()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_nan_on_one_rank_reaches_all(recipe):
    assert run(2, _nan_on_one_rank, recipe) == [True, True]


def _disagree(how, precompute):
    rank = dist.get_rank()
    layers = 2 if how == "layer" and rank == 1 else 3
    recipe = "rowwise" if how == "recipe" and rank == 1 else "tensorwise"
    gather = not (how == "flag" and rank == 1)
    model = make_model(layers)
    model = shard_model(config_of(recipe, enable_fsdp_float8_all_gather=gather), model=model)
    if precompute:
        precompute_float8_dynamic_scale_for_fsdp(model)
    model(part_of(batches(1, dist.get_world_size())[0]))


@pytest.mark.parametrize("precompute", [True, False])
@pytest.mark.parametrize("how", ["layer", "recipe", "flag"])
def test_ranks_that_disagree_get_an_error_and_no_hang(how, precompute):
    with pytest.raises(RanksError) as error:
        run(2, _disagree, how, precompute, timeout=60, collective_timeout=3)
    if (how, precompute) != ("flag", False):  # without float8 all-gather a rank joins no check
        assert all("ranks disagree about the weights to all-gather in float8: rank" in m for m in error.value.messages)
    else:
        assert any(error.value.messages)


def test_tied_weights_are_refused_and_nothing_is_changed():
    model = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(16, 16), "head": torch.nn.Linear(16, 16, bias=False)})
    model["head"].weight = model["embedding"].weight
    with pytest.raises(ValueError, match="the weight of head is tied to embedding, so it cannot be gathered in float8"):
        convert_to_float8_training(model, config=gathering("tensorwise"))
    assert type(model["head"]) is torch.nn.Linear
    assert model["head"].weight is model["embedding"].weight


@pytest.mark.parametrize(
    ("recipe", "compiled"), [*((recipe, False) for recipe in RECIPES), ("tensorwise", True), ("rowwise", True)]
)
def test_without_fsdp_the_flag_changes_nothing(recipe, compiled):
    models = [make_model(1), make_model(1)]
    input = batches(1, 1)[0]
    grads = []
    for model, config in zip(models, (config_of(recipe), gathering(recipe)), strict=True):
        convert_to_float8_training(model, config=config)
        run_model = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        loss_of(run_model(input)).backward()
        grads.append([parameter.grad for parameter in model.parameters()])
        torch.optim.AdamW(model.parameters(), lr=0.1).step()
    for plain, wrapped in zip(*grads, strict=True):
        assert torch.equal(plain, wrapped)
    state_dicts = [model.state_dict() for model in models]
    assert list(state_dicts[0]) == list(state_dicts[1])
    for name, value in state_dicts[0].items():
        assert type(state_dicts[1][name]) is torch.Tensor
        assert torch.equal(value, state_dicts[1][name])


def test_the_wrapper_survives_copies_and_leaves_with_the_conversion():
    model = make_model(1)
    reference = copy.deepcopy(model)
    convert_to_float8_training(model, config=gathering("rowwise"))
    input = batches(1, 1)[0]
    pickled = pickle.loads(pickle.dumps(model))
    for other in (copy.deepcopy(model), copy.deepcopy(model).to(torch.float64).to(torch.float32), pickled):
        assert torch.equal(model(input), other(input))
        assert other[0].up.gathering is None
        assert isinstance(other[0].up.weight, Float8AllGatherWeight)
        other.load_state_dict(model.state_dict())
        other.load_state_dict(model.state_dict(), assign=True)
        assert torch.equal(model(input), other(input))
    convert_to_high_precision(model)
    assert type(model[0].up.weight) is torch.nn.Parameter
    assert torch.equal(model(input), reference(input))
    assert not model[0].up._state_dict_hooks
    assert not model[0].up._load_state_dict_post_hooks


def check_behaves_as(weight, plain):
    """What others ask of a parameter is what the plain tensor inside answers."""
    assert weight.data_ptr() == plain.data_ptr() != 0
    assert weight.untyped_storage().data_ptr() == plain.untyped_storage().data_ptr()
    assert weight.untyped_storage().nbytes() == plain.untyped_storage().nbytes()
    for question in ("size", "stride", "storage_offset", "is_contiguous", "element_size", "numel", "is_shared"):
        assert getattr(weight, question)() == getattr(plain, question)(), question
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
    model = convert_to_float8_training(make_model(1), config=gathering("tensorwise"))
    weight = model[0].up.weight
    check_behaves_as(weight, torch.nn.Parameter(weight.wrapped))
    with pytest.raises(RuntimeError, match="requires grad"):
        weight.numpy()
    with pytest.raises(RuntimeError, match="cannot assign to .data of a weight that is all-gathered in float8"):
        weight.data = torch.zeros_like(weight)
    torch.save({"weight": weight}, file := io.BytesIO())
    file.seek(0)
    for copied in (copy.deepcopy(weight), pickle.loads(pickle.dumps(weight)), torch.load(file)["weight"]):
        assert isinstance(copied, Float8AllGatherWeight)
        assert isinstance(copied, torch.nn.Parameter)
        assert copied.requires_grad
        assert copied.data_ptr() != weight.data_ptr()
        assert torch.equal(copied, weight)
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


def _check_shards():
    model = shard_model(gathering("tensorwise"))
    for _ in range(2):  # before and after FSDP2 pads the shards
        for weight in (model[0].up.weight, model[-1].weight):
            local = weight.to_local()
            if local.numel():
                check_behaves_as(local.detach(), local.plain().detach())
                assert local.data_ptr() == weight._local_tensor.data_ptr()
        loss_of(model(part_of(batches(1, dist.get_world_size())[0]))).backward()


def test_a_shard_answers_as_its_tensor():
    run(2, _check_shards)


def _convert_back():
    model = shard_model(gathering("tensorwise"))
    try:
        convert_to_high_precision(model)
    except RuntimeError as error:
        return str(error)


def test_converting_back_after_fully_shard_is_refused():
    assert "cannot be converted back" in run(2, _convert_back)[0]


def _call_a_part():
    model = shard_model(gathering("tensorwise"))
    try:
        model[0].up(torch.randn(2, DIM))
    except RuntimeError as error:
        return str(error)


def test_calling_a_part_of_an_fsdp_module_says_what_to_call():
    assert "call the module that was given to it" in run(2, _call_a_part)[0]

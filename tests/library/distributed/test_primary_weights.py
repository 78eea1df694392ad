"""Tests that float8 primary weights under DDP equal ordinary ones, and the documented bytes per element."""

from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing import assert_close

from quaver import cast_weights_once, convert_to_float8_training, use_float8_primary_weights
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from quaver.fsdp import all_gather_weight
from quaver.fsdp.weight_group import get_all_gather_state
from quaver.linear import quantize
from quaver.recipes.config import ScalingGranularity
from quaver.weights.primary_weight import Float8PrimaryWeight
from tests.library.distributed import models
from tests.library.distributed.fsdp_models import MICROBATCHES, run_step
from tests.mixture import DIM as MIXTURE_DIM
from tests.mixture import make_mixture
from tests.ranks import on_ranks, run
from tests.recipes import make_recipe_config
from tests.steps import assert_same, draw, train

LAYERS = 2


def _train_under_ddp(recipe, master_dtype, **options):
    """Return the losses of three steps, and the weights; `master_dtype` is None for ordinary parameters."""
    model = convert_to_float8_training(models.make_model(LAYERS), config=recipe)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + dist.get_rank())  # DDP has to broadcast
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE)
    if master_dtype is not None:
        torch.manual_seed(dist.get_rank())
        optimizer = use_float8_primary_weights(model, optimizer, master_dtype=master_dtype)
    replicas = DistributedDataParallel(model, **options)
    parts = [
        torch.cat([models.get_rank_part(microbatch) for microbatch in batch.chunk(MICROBATCHES)])
        for batch in models.get_batches(3, MICROBATCHES * dist.get_world_size())
    ]
    losses = train(replicas, optimizer, parts, microbatches=MICROBATCHES)
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("recipe", "options"), [("tensorwise", {}), ("rowwise", {"gradient_as_bucket_view": True, "static_graph": True})]
)
@on_ranks(2)
def test_ddp_broadcasts_masters_and_trains_as_with_ordinary_parameters(recipe, options):
    expected = _train_under_ddp(recipe, None, **options)
    assert_same(_train_under_ddp(recipe, torch.float32, **options), expected)
    results = [None, None]
    dist.all_gather_object(results, _train_under_ddp(recipe, torch.bfloat16, **options))
    (losses, masters), (other_losses, other_masters) = results
    assert losses != other_losses
    assert_same(masters, other_masters)  # ranks round alike, however they were seeded


def build_shards():
    """Shard three experts, of which the second rank has one."""
    config = make_recipe_config("blockwise", enable_fsdp_float8_all_gather=True)
    model = models.shard_model(config, model=make_mixture())
    return model, torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE)


def build_whole():
    model = convert_to_float8_training(make_mixture(), config="blockwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE)
    return model, use_float8_primary_weights(model, optimizer)


def _train_mixture(folder, ranks, steps, load=None, save=None):
    """Train from and to a checkpoint, and return the losses of `steps`, the means over all ranks."""
    model, optimizer = build_shards() if ranks > 1 else build_whole()
    if load is not None:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(state, checkpoint_id=f"{folder}/{load}")
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    losses = []
    for step in steps:
        batch = draw(2 * MICROBATCHES * 8, MIXTURE_DIM, seed=step)
        with cast_weights_once(model):
            for microbatch in batch.chunk(MICROBATCHES):
                parts = [models.get_rank_part(microbatch)] if ranks > 1 else microbatch.chunk(2)
                for part in parts:  # gradients of the ranks are averaged
                    loss = models.compute_loss(model(part)) / len(parts)
                    loss.backward()
                    losses.append(loss.detach() * len(parts))
        optimizer.step()
        optimizer.zero_grad()
    if save is not None:
        state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(state, checkpoint_id=f"{folder}/{save}")
    means = torch.stack(losses).view(len(steps), -1).mean(1)
    dist.all_reduce(means.div_(ranks))
    return means.tolist()


def test_experts_train_alike_as_shards_and_as_primary_weights(tmp_path):
    """Runs take two steps, a checkpoint, and another step on as many ranks, or on others."""
    folder = str(tmp_path)
    losses, shard_losses = (
        run(ranks, _train_mixture, folder, ranks, range(2), None, f"of {ranks}")[0] for ranks in (1, 2)
    )
    expected, *resumed = (
        run(after, _train_mixture, folder, after, range(2, 3), f"of {before}")[0]
        for before, after in ((1, 1), (1, 2), (2, 1))
    )
    assert shard_losses == pytest.approx(losses, rel=1e-5)
    assert resumed == [pytest.approx(expected, rel=1e-5)] * 2
    assert expected != losses


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2)
def test_codes_follow_a_collective(async_op):
    model = convert_to_float8_training(torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False)), config="tensorwise")
    use_float8_primary_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        model[0].weight.fill_(dist.get_rank() + 1.0)
        work = dist.all_reduce(model[0].weight, async_op=async_op)
        if async_op:
            work.wait()
        assert_close(model(torch.ones(16, 32)), torch.full((16, 32), 96.0), rtol=1e-3, atol=0)


@on_ranks(2)
def test_wrapped_models_are_refused():
    model = convert_to_float8_training(models.make_model(LAYERS), config="tensorwise")
    with pytest.raises(ValueError, match="expected one outside of DistributedDataParallel"):
        use_float8_primary_weights(DistributedDataParallel(model), torch.optim.AdamW(model.parameters()))
    model = models.shard_model(make_recipe_config("tensorwise"))
    with pytest.raises(ValueError, match="it is a DTensor; under FSDP2 use cast_weights_once"):
        use_float8_primary_weights(model, torch.optim.AdamW(model.parameters()))


@on_ranks(2)
def test_all_ranks_raise_what_one_refuses_with_bfloat16_masters():
    model = convert_to_float8_training(models.make_model(LAYERS), config="tensorwise")
    optimizer = None if dist.get_rank() else torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match="^optimizer: expected .*, got NoneType"):
        use_float8_primary_weights(model, optimizer, master_dtype=torch.bfloat16)
    dist.barrier()


@on_ranks(2)
def test_weights_that_fully_shard_replaced_are_an_error():
    model = convert_to_float8_training(models.make_model(LAYERS), config="tensorwise")
    optimizer = use_float8_primary_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    fully_shard(model)
    with pytest.raises(RuntimeError, match="was replaced after use_float8_primary_weights"):
        optimizer.step()


def _make_ddp(dtype, master_dtype=None, scope=nullcontext):
    model = convert_to_float8_training(models.make_model(LAYERS).to(dtype), config="tensorwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE)
    if master_dtype is not None:
        optimizer = use_float8_primary_weights(model, optimizer, master_dtype=master_dtype)
    return DistributedDataParallel(model), optimizer, scope


def _make_fsdp2(dtype, gather, scope=nullcontext):
    options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16), "reshard_after_forward": True}
    config = make_recipe_config("tensorwise", enable_fsdp_float8_all_gather=gather)
    model = models.shard_model(config, model=models.make_model(LAYERS).to(dtype), **options)
    return model, torch.optim.AdamW(model.parameters(), lr=models.LEARNING_RATE), scope


F32, BF16 = torch.float32, torch.bfloat16
LAYOUTS = {
    ("float32", "DDP"): lambda: _make_ddp(F32),
    ("float32, `cast_weights_once`", "DDP"): lambda: _make_ddp(F32, scope=cast_weights_once),
    ("bfloat16", "DDP"): lambda: _make_ddp(BF16),
    ("float8, float32 masters", "DDP"): lambda: _make_ddp(F32, F32),
    ("float8, bfloat16 masters", "DDP"): lambda: _make_ddp(F32, BF16),
    ("float32, gathered in bfloat16", "FSDP2"): lambda: _make_fsdp2(F32, False),
    ("float32, gathered in float8", "FSDP2"): lambda: _make_fsdp2(F32, True),
    ("float32, gathered in float8, `cast_weights_once`", "FSDP2"): lambda: _make_fsdp2(F32, True, cast_weights_once),
    ("bfloat16, gathered in float8", "FSDP2"): lambda: _make_fsdp2(BF16, True),
}


@contextmanager
def record_casts():
    """Yield the shapes of all weights and shards that are cast."""
    shapes = []

    def record(cast):
        def recording(hp, *args):
            shapes.append(hp.shape)
            return cast(hp, *args)

        return recording

    with pytest.MonkeyPatch.context() as patch:
        for module in (quantize, all_gather_weight):
            patch.setattr(module, "cast_with_scale", record(module.cast_with_scale))
        tensorwise = ScalingGranularity.TENSORWISE
        patch.setitem(quantize.CASTS, tensorwise, record(quantize.CASTS[tensorwise]))
        yield shapes


def local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def count_bytes(linear):
    """Return the bytes of the parameter, the codes in a scope, the master and the gradient."""
    weight = linear.weight
    if isinstance(weight, Float8PrimaryWeight):
        return [weight.data_fp8.nbytes, 0, weight.wrapped.nbytes, weight.grad.nbytes]
    codes = 0
    if cast_once := linear.cast_once_weights.get("weight"):
        codes = cast_once.operands.row.data.nbytes
    elif linear.all_gather_state is not None and get_all_gather_state(linear).cast_once_shards:
        payloads = get_all_gather_state(linear).cast_once_shards["weight"]._inputs[0]  # type: ignore[attr-defined]
        codes = sum(payload.nbytes for payload in payloads)
    return [local(weight).nbytes, codes, 0, local(weight.grad).nbytes]


def _measure(make):
    """Return the columns of the table: bytes per element of a weight or its shard, and its casts in a step."""
    model, optimizer, scope = make()
    blocks = getattr(model, "module", model)
    linear, dtype = blocks[0].up, F32 if hasattr(model, "reshard") else blocks[0].norm.weight.dtype
    first, second = models.get_batches(2, MICROBATCHES * dist.get_world_size())
    run_step(model, first.to(dtype), scope=scope)
    optimizer.step()
    optimizer.zero_grad()
    precompute_float8_dynamic_scale_for_fsdp(model)
    with record_casts() as shapes:
        with scope(model):
            run_step(model, second.to(dtype))
            sizes = count_bytes(linear)
        optimizer.step()
    weight = linear.weight
    state = optimizer.state[weight.wrapped if isinstance(weight, Float8PrimaryWeight) else weight]
    sizes.append(sum(local(value).nbytes for value in state.values() if value.dim()))
    shape = local(weight).shape
    casts = (
        sum(cast_shape in (shape, (models.HIDDEN, models.DIM)) for cast_shape in shapes) // LAYERS
    )  # one in each layer
    unsharded = 0
    if hasattr(model, "reshard"):
        model[0].unshard()
        unsharded = getattr(linear.weight, "data_fp8", linear.weight).nbytes / linear.weight.numel()
    per_element = [size / shape.numel() for size in sizes]
    return [*per_element, sum(per_element), unsharded, casts]


@on_ranks(2)
def test_the_documented_bytes_are_those_of_each_layout():
    rows = {layout: _measure(make) for layout, make in LAYOUTS.items()}
    page = (Path(__file__).parents[3] / "docs" / "primary-weights.md").read_text()
    measured = [f"| {' | '.join([*layout, *(f'{number:g}' for number in row)])} |" for layout, row in rows.items()]
    documented = [line for line in page.splitlines() if line.startswith(("| float", "| bfloat"))]
    assert documented == measured, "\n".join(measured)

"""Tests that steps with tensor and sequence parallelism equal one process, and when amaxes are exchanged."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from quaver import (
    Float8Linear,
    convert_to_float8_training,
    float8_scaling_state,
    set_high_precision_matmuls,
    sync_float8_amax_and_scale_history,
)
from quaver.distributed import Float8ColwiseParallel, Float8RowwiseParallel, precompute_float8_dynamic_scale_for_fsdp
from quaver.linear.tensor import Float8Tensor
from tests.counting import CollectiveCounter
from tests.library.distributed.models import (
    assert_same_scaling_on_all_ranks,
    assert_same_snapshots,
    copy_scaling,
    get_mesh,
    train_in_parts,
)
from tests.library.distributed.parallel_models import (
    DIMS,
    STEPS,
    assert_same_losses,
    build_model,
    make_batches,
    make_sharing_config,
    spread,
    spread_by_torch,
    take_part,
)
from tests.ranks import get_cached_mesh, on_ranks, refusal, run
from tests.recipes import NON_BLOCK_RECIPES, PERSISTENT_RECIPES, make_recipe_config
from tests.thinned import at_night

BACKWARD_MODES = ("rowwise:dequantized", "tensorwise:dequantized", "rowwise:high_precision")


@functools.cache
def train_one_process(recipe, microbatches=1, compiled=None):
    """Return losses, and snapshots after each sync. Siblings that share an input have the name of the first.

    A compiled block has no attention, which would take half of the time of its compilation.
    """
    batches = make_batches(recipe)
    model = build_model(make_sharing_config(recipe), batches[0].shape[-1], attends=compiled is None)
    return train_in_parts(model, torch.optim.Adam(model.parameters(), lr=1e-2), batches, microbatches)


def train_ranks(model, parts, *, divided_by, compiled=None, precompute=False):
    """Return losses, snapshots, and the exchanges of amaxes in the forward and in the backward of each step.

    With `compiled`, all all-reduces count, and no step after the first may compile.
    """
    profiled = compiled is not None
    if compiled:
        for block in model:
            block.compile(fullgraph=True, backend=compiled)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses, snapshots, exchanged = [], [], []
    for step, batch in enumerate(parts):
        torch._dynamo.config.error_on_recompile = compiled is not None and step > 0
        with Exchanges(profiled) as forward:
            loss = model(batch).square().mean()
        with Exchanges(profiled) as backward:
            (loss / divided_by).backward()
        optimizer.step()
        optimizer.zero_grad()
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        sync_float8_amax_and_scale_history(model)
        assert_same_scaling_on_all_ranks(model)
        dist.all_reduce(mean := loss.detach().clone())
        losses.append(mean.item() / dist.get_world_size())
        snapshots.append(copy_scaling(model))
        exchanged.append((forward.count, backward.count))
    torch._dynamo.config.error_on_recompile = False
    return losses, snapshots, exchanged


class Exchanges:
    """Counts all-reduces as they run, or without `profiled` those of amaxes, by a dispatch mode."""

    def __init__(self, profiled):
        self.profiled = profiled
        activities = [torch.profiler.ProfilerActivity.CPU]
        self.counter = torch.profiler.profile(activities=activities) if profiled else CollectiveCounter()

    def __enter__(self):
        self.counter.__enter__()
        return self

    def __exit__(self, *error):
        self.counter.__exit__(*error)
        if self.profiled:
            self.count = sum(event.name == "gloo:all_reduce" for event in self.counter.events())
        else:
            self.count = count_amax_exchanges(self.counter)


def count_amax_exchanges(counter):
    return sum(dtype in (torch.int32, torch.int64) for dtype, _ in counter.of("all_reduce"))


def _train_tp(recipe, compiled=None, use_local_output=False, by_torch=False):
    batches = make_batches(recipe)
    model = build_model(make_sharing_config(recipe), batches[0].shape[-1], attends=compiled is None)
    model = spread_by_torch(model, get_mesh()) if by_torch else spread(model, get_mesh(), use_local_output)
    parts = [take_part(batch, 1) for batch in batches]
    return train_ranks(model, parts, divided_by=dist.get_world_size(), compiled=compiled)


def _train_2d(recipe, gather_float8, compiled=None, precompute=False, spread=spread):
    batches = make_batches(recipe)
    mesh = get_cached_mesh((2, 2), ("dp", "tp"))
    tp_rank, dp_rank = mesh["tp"].get_local_rank(), mesh["dp"].get_local_rank()
    gathering = make_sharing_config(recipe, enable_fsdp_float8_all_gather=gather_float8)
    model = spread(build_model(gathering, batches[0].shape[-1], attends=compiled is None), mesh["tp"])
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    parts = [batch.chunk(2)[dp_rank].chunk(2, 1)[tp_rank] for batch in batches]
    results = train_ranks(model, parts, divided_by=2, compiled=compiled, precompute=precompute)
    model[0].unshard()
    assert isinstance(model[0].mlp.down.weight.to_local(), Float8Tensor) == gather_float8
    model[0].reshard()
    return results


def check_against_one_process(result, recipe, what, *, in_2d=False, compiled=None):
    """Compare losses by `assert_same_losses`; scales and amaxes within the rounding of float32 sums in another order.

    With FSDP2 (`in_2d`) the ranks' grad_outputs are twice as large: it divides gradients where one process divides the
    loss.
    """
    losses, snapshots, _ = result
    parts = 2 if in_2d else 1
    expected_losses, expected_snapshots = train_one_process(recipe, parts, compiled)
    assert_same_losses(losses, expected_losses)
    assert_same_snapshots(snapshots, expected_snapshots, lambda step: 1e-5, what, parts)


def list_amax_exchanges(recipe, *, weights, inputs=4, linears=7):
    """Return the exchanges of amaxes in the forward and in the backward of each step; all weights take `weights`.

    Each input and grad_output of the linears is spread over the ranks.
    """
    agreement = 2 if weights == 1 else 0  # that the ranks of both groups gather alike, which is checked once
    first = (inputs + weights + agreement, linears)
    return [first] + [(0 if recipe == "delayed" else weights, 0)] * (STEPS - 1)


def _train_in_ways(recipe, ways):
    return [_train_2d(recipe, way == "float8") if way in IN_2D else _train_tp(recipe, None, way) for way in ways]


IN_2D = {"float8": 1, "high precision": 7}
"""What FSDP2 gathers; and the exchanges that the dynamic scales of all weights take: one where it gathers them."""


@pytest.mark.parametrize(
    ("recipe", "ranks", "ways"),
    [
        ("delayed", 2, [False, True]),
        ("delayed_with_dynamic_weight", 4, ["float8"]),  # test_train_distributed.py has delayed on 2 x 2 ranks
        *at_night([("delayed_with_dynamic_weight", 2, [False, True])]),
        *at_night((recipe, 4, [False, True, *IN_2D]) for recipe in PERSISTENT_RECIPES),
    ],
)
def test_steps_equal_one_process_and_exchange_nothing_once_scales_are_known(recipe, ranks, ways):
    """PrepareFloat8ModuleInput gives a DTensor or a local tensor; other ways add FSDP2."""
    for way, result in zip(ways, run(ranks, _train_in_ways, recipe, ways)[0], strict=True):
        check_against_one_process(result, recipe, f"way {way}", in_2d=way in IN_2D)
        assert result[2] == list_amax_exchanges(recipe, weights=IN_2D.get(way, 7)), way


@pytest.mark.parametrize("recipe", ["delayed", *at_night([PERSISTENT_RECIPES[1:]])])
def test_steps_with_the_styles_of_torch_equal_one_process(recipe):
    check_against_one_process(run(2, _train_tp, recipe, None, False, True)[0], recipe, "styles of torch")


@pytest.mark.parametrize(
    ("recipe", "use_local_output"),
    [  # the next test has the recipes of each granularity in each run
        ("rowwise_with_gw_hp", False),
        ("rowwise:dequantized", True),
        ("rowwise:high_precision", False),
        *at_night(itertools.product([*NON_BLOCK_RECIPES, "blockwise", "mxfp8", *BACKWARD_MODES], [False, True])),
    ],
)
def test_steps_with_dynamic_scales_equal_one_process(recipe, use_local_output):
    check_against_one_process(run(2, _train_tp, recipe, None, use_local_output)[0], recipe, "dynamic")


@pytest.mark.parametrize(
    ("recipe", "gather_float8", "precompute", "spread"),
    [
        ("tensorwise", True, True, spread),
        ("rowwise", True, True, spread_by_torch),
        ("blockwise", True, False, spread),
        *at_night((recipe, True, True, spread) for recipe in (*NON_BLOCK_RECIPES[1:], *DIMS)),
        *at_night((recipe, gather, False, spread) for recipe in NON_BLOCK_RECIPES for gather in (False, True)),
        *at_night((recipe, True, False, spread_by_torch) for recipe in ("tensorwise", "mxfp8")),
    ],
)
def test_steps_with_dynamic_scales_and_fsdp2_equal_one_process(recipe, gather_float8, precompute, spread):
    result = run(4, _train_2d, recipe, gather_float8, None, precompute, spread)[0]
    check_against_one_process(result, recipe, "fsdp2", in_2d=True)


@pytest.mark.parametrize(
    ("recipe", "backend", "in_2d"),
    [
        ("delayed", "aot_eager", False),
        *at_night(itertools.product(PERSISTENT_RECIPES, ("aot_eager", "inductor"), (False, True))),
    ],
)
def test_compiled_steps_equal_one_process_and_are_not_compiled_again(recipe, backend, in_2d):
    """One graph serves every step, and exchanges amaxes in the first only, as eager code does."""
    ranks, train, options = (4, _train_2d, [True]) if in_2d else (2, _train_tp, [])
    result = run(ranks, train, recipe, *options, backend, timeout=400)[0]
    check_against_one_process(result, recipe, backend, in_2d=in_2d, compiled=backend)
    eager = list_amax_exchanges(recipe, weights=1 if in_2d else 3, inputs=2, linears=3)
    differences, expected = (torch.tensor(first) - torch.tensor(second) for first, second in (result[2], eager))
    assert differences.tolist() == expected.tolist()


def _backward(model, batch):
    loss = model(take_part(batch, 1)).square().mean()
    loss.backward()
    return loss.item()


@on_ranks(2)
def test_ranks_exchange_amaxes_after_a_reset_and_not_after_a_load():
    model, batch = spread(build_model(make_sharing_config("delayed")), get_mesh()), torch.randn(2, 16, 32)
    _backward(model, batch)
    sync_float8_amax_and_scale_history(model)
    known, expected = copy_scaling(model), _backward(model, batch)
    float8_scaling_state(model).reset()  # as in a new model: all ranks exchange amaxes again
    with CollectiveCounter() as counter:
        _backward(model, batch)
    checks = 7  # that the ranks changed each linear alike
    assert count_amax_exchanges(counter) == sum(list_amax_exchanges("delayed", weights=7)[0]) + checks
    float8_scaling_state(model).load_state_dict(known)
    with CollectiveCounter() as counter:
        assert _backward(model, batch) == expected
    assert count_amax_exchanges(counter) == checks
    with CollectiveCounter() as counter:
        assert _backward(model, batch) == expected
    assert count_amax_exchanges(counter) == 0


def _change(change, spread, ranks):
    """Run a forward after these ranks have made a change."""
    model = spread(build_model(make_sharing_config("delayed")), get_mesh())
    batch = make_batches("delayed")[0]
    _backward(model, batch)
    sync_float8_amax_and_scale_history(model)
    if dist.get_rank() in ranks:
        change(model)
    return refusal(_backward, model, batch)


def _reset(model):
    float8_scaling_state(model).reset()


def _read_in_high_precision(model):
    set_high_precision_matmuls(model, ["output"])


def _freeze(model):
    model.requires_grad_(False)[0].mlp.down.bias.requires_grad_()


@pytest.mark.parametrize(
    ("change", "spread"), [(_reset, spread), (_read_in_high_precision, spread_by_torch), (_freeze, spread)]
)
def test_a_rank_that_changes_alone_raises(change, spread):
    alone, _ = run(2, _change, change, spread, [0], collective_timeout=4)
    assert "tensor-parallel linears changed on rank 0, and not every rank reported it: change modules" in alone
    assert run(2, _change, change, spread, [0, 1]) == ["no error"] * 2


def _change_compiled_and_eager():
    linear = parallelize_module(Float8Linear(64, 64, config="rowwise"), get_mesh(), Float8ColwiseParallel())
    if dist.get_rank() == 0:
        linear.compile(fullgraph=True, backend="aot_eager")
    linear(torch.ones(16, 64))
    set_high_precision_matmuls(linear, ["output"])
    return refusal(linear, torch.ones(16, 64))


def test_an_eager_rank_beside_a_compiled_one_is_told_that_it_reports_no_change():
    compiled, eager = run(2, _change_compiled_and_eager, collective_timeout=4)
    assert compiled == "no error"
    assert "and not every rank reported it" in eager
    assert "Compiled linears report no change: compile all ranks or none" in eager


@on_ranks(2)
def test_ranks_that_change_different_linears_of_one_shape_raise():
    """Nothing is exchanged between the forwards, so each rank checks its change while the other one does."""
    gate, up = (
        parallelize_module(Float8Linear(64, 64, config="rowwise"), get_mesh(), Float8ColwiseParallel())
        for _ in range(2)
    )
    (gate, up)[dist.get_rank()].requires_grad_(False)
    message = refusal(lambda: [linear(torch.ones(16, 64)) for linear in (gate, up)])
    assert "ranks disagree about tensor-parallel linears: rank 0 has 'linear" in message, message


@on_ranks(4)
def test_weights_on_equal_meshes_take_one_exchange():
    """PyTorch caches by mesh, so that a weight can hold the groups of an equal mesh that was made before."""
    config = make_recipe_config("tensorwise", enable_fsdp_float8_all_gather=True)

    def shard(*styles):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = torch.nn.Sequential(*(torch.nn.Linear(104, 88, bias=False) for _ in styles))
        convert_to_float8_training(model, config=config)
        for linear, style in zip(model, styles, strict=True):
            parallelize_module(linear, mesh["tp"], style)
        return fully_shard(model, mesh=mesh["dp"])

    before = shard(Float8ColwiseParallel())
    model = shard(Float8ColwiseParallel(), Float8RowwiseParallel())
    names = {linear.weight.device_mesh.get_group(1).group_name for linear in model}
    with CollectiveCounter() as counter:
        precompute_float8_dynamic_scale_for_fsdp(model)
    assert len(names) == 2, before
    sizes = [size for dtype, size in counter.of("all_reduce") if dtype in (torch.int32, torch.int64)]
    assert sizes == [16, 16, 2 * 4]  # that the ranks of both groups agree, and the scales

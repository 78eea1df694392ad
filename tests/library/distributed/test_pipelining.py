"""Tests that every schedule of torch.distributed.pipelining gives the numbers of one process.

The same holds where activations are stored in float8.
"""

import contextlib
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble
from torch.torch_version import TorchVersion

from quaver import convert_to_float8_training
from quaver.activations import store_activations_in_float8
from quaver.linear import function
from quaver.linear.quantize import Quantizer
from tests import ranks
from tests.library.distributed.models import Block, compute_loss
from tests.recipes import NON_BLOCK_RECIPES, make_recipe_config
from tests.steps import assert_same, draw
from tests.thinned import thinned

RANKS, MICROBATCHES, ROWS, DIM = 2, 4, 6, 18
SINGLE = ("ScheduleGPipe", "Schedule1F1B")
"""Schedules of one stage per rank; the others have two."""
V_SHAPED = (ScheduleZBVZeroBubble, ScheduleDualPipeV)
"""Rank r has stages r and 2 * RANKS - 1 - r; with the others r and r + RANKS."""
SCHEDULES = (
    *SINGLE,
    "ScheduleInterleaved1F1B",
    "ScheduleLoopedBFS",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
)

LAST_MICROBATCH_FIRST = ("ScheduleLoopedBFS",)
"""The order of these schedules' backwards, in which gradients are summed."""
CASTS_OF_SPLIT_BACKWARDS = {"ScheduleInterleavedZeroBubble": 24, "ScheduleZBVZeroBubble": 24, "ScheduleDualPipeV": 6}
"""How many times a linear's backward runs in two halves, each with its own cast of grad_output: 2 linears in each of
the 3 stages after the first, for all of the 4 microbatches; DualPipeV splits some of them."""


def build_parts(recipe, stores=False):
    """Return four modules that follow each other."""
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(2 * RANKS))
    convert_to_float8_training(model, config=make_recipe_config(recipe))
    if stores:
        store_activations_in_float8(model, modules=["?"], block_size=32)
    return model


def batch():
    return draw(MICROBATCHES * ROWS, DIM, seed=1)


def list_gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@contextlib.contextmanager
def count_calls():
    """Yield a function that returns the counts of float8 matmuls and of casts."""
    multiply = mock.patch.object(function, "multiply_operands", wraps=function.multiply_operands)
    cast = mock.patch.object(Quantizer, "apply_cast", autospec=True, side_effect=Quantizer.apply_cast)
    with multiply as matmuls, cast as casts:
        yield lambda: (matmuls.call_count, casts.call_count)


def train_one_process(recipe, last_first, stores=False):
    """Return the losses of the microbatches, gradients, matmuls and casts."""
    model, losses = build_parts(recipe, stores), []
    with count_calls() as counts:
        for hidden in batch().chunk(MICROBATCHES):
            for part in model:
                hidden = part(hidden)
            losses.append(compute_loss(hidden))
        for loss in reversed(losses) if last_first else losses:
            loss.backward()
    for parameter in model.parameters():
        parameter.grad.div_(MICROBATCHES)
    return [loss.item() for loss in losses], list_gradients(model), *counts()


def make_stage(module, index, stages):
    """Return a stage with examples of its tensors, without which the first step would run the model once more."""
    input, output = torch.empty(ROWS, DIM, requires_grad=index > 0), torch.empty(ROWS, DIM, requires_grad=True)
    return PipelineStage(module, index, stages, torch.device("cpu"), input_args=(input,), output_args=(output,))


def train_ranks(name, recipe, stores=False):
    """Return what `train_one_process` returns, of this rank's stages."""
    kind, rank, model = getattr(pipelining, name), dist.get_rank(), build_parts(recipe, stores)
    if name in SINGLE:
        mine, stages = {rank: nn.Sequential(*model[2 * rank : 2 * rank + 2])}, RANKS
    else:
        second = 2 * RANKS - 1 - rank if kind in V_SHAPED else rank + RANKS
        mine, stages = {index: model[index] for index in (rank, second)}, 2 * RANKS
    own_stages = [make_stage(module, index, stages) for index, module in mine.items()]
    stage = own_stages[0] if name in SINGLE else own_stages
    schedule = kind(stage, MICROBATCHES, loss_fn=lambda output, _: compute_loss(output))
    losses = []
    arguments = (batch(),) if 0 in mine else ()
    last = {"target": batch(), "losses": losses} if stages - 1 in mine else {}
    with count_calls() as counts:
        schedule.step(*arguments, **last)
    return [loss.item() for loss in losses], list_gradients(model), *counts()


STORING = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


@pytest.mark.parametrize(
    ("name", "recipe", "stores"),
    [*thinned(SCHEDULES, NON_BLOCK_RECIPES, [False], together=1), *((name, "rowwise", True) for name in STORING)],
)
def test_a_schedule_equals_one_process(name, recipe, stores):
    if name in CASTS_OF_SPLIT_BACKWARDS and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("PyTorch 2.11 splits no backward of an autograd.Function in Python")
    losses, gradients, matmuls, casts = train_one_process(recipe, name in LAST_MICROBATCH_FIRST, stores)
    results = zip(*ranks.run(RANKS, train_ranks, name, recipe, stores), strict=True)
    rank_losses, rank_gradients, rank_matmuls, rank_casts = results
    assert sum(rank_losses, []) == losses
    assert_same(rank_gradients[0] | rank_gradients[1], gradients)
    assert sum(rank_matmuls) == matmuls
    # Rowwise, grad_output has a cast for each matmul anyway; tensorwise, one cast serves both.
    assert sum(rank_casts) == casts + (recipe == "tensorwise") * CASTS_OF_SPLIT_BACKWARDS.get(name, 0)
    if stores:
        exact = train_one_process(recipe, last_first=False)[1]
        assert not all(torch.equal(exact[parameter], gradient) for parameter, gradient in gradients.items())


def train_sharded(name, is_float8):
    """Train stages under FSDP2 on one rank; return this rank's parameters without a gradient, and the warnings."""
    rank, mesh = dist.get_rank(), ranks.get_cached_mesh((RANKS, 1), ("pp", "dp"))["dp"]
    model = nn.ModuleList(Block() for _ in range(2 * RANKS))
    if is_float8:
        convert_to_float8_training(model, config=make_recipe_config("tensorwise", enable_fsdp_float8_all_gather=True))
    mine = {index: model[index] for index in (rank, rank + RANKS)}
    for part in mine.values():
        for module in (part.up, part.down, part):
            fully_shard(module, mesh=mesh)
    stages = [make_stage(module, index, 2 * RANKS) for index, module in mine.items()]
    schedule = getattr(pipelining, name)(stages, MICROBATCHES, loss_fn=lambda output, _: compute_loss(output))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule.step(*((batch(),) if rank == 0 else ()), **({} if rank == 0 else {"target": batch()}))
    missing = [name for part in mine.values() for name, parameter in part.named_parameters() if parameter.grad is None]
    return missing, [str(warning.message) for warning in caught if "zero-bubble" in str(warning.message)]


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="PyTorch 2.11 splits no backward of a Function")
@pytest.mark.parametrize("is_float8", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_zero_bubble_schedules_lose_gradients_under_fsdp2(is_float8):
    """docs/distributed.md says so, of nn.Linear too; a weight that FSDP2 gathered in float8 warns."""
    for name, loses in (("ScheduleInterleaved1F1B", False), ("ScheduleInterleavedZeroBubble", True)):
        missing, messages = zip(*ranks.run(RANKS, train_sharded, name, is_float8), strict=True)
        assert any(missing) == loses
        assert any(messages) == (loses and is_float8)

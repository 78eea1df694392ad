"""torch.distributed.pipelining: every schedule gives the numbers of one process, and makes as many float8 matmuls.

Also where activations are stored in float8."""

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

import quaver.linear.module
from quaver import convert_to_float8_training
from quaver.checkpointing import store_activations_in_float8
from quaver.linear.quantize import Quantizer
from tests import ranks
from tests.library.distributed.models import Block, config_of, loss_of
from tests.reference import RECIPES
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


def parts_of_model(recipe, stores=False):
    """Four modules that follow each other."""
    torch.manual_seed(0)
    model = nn.ModuleList(Block() for _ in range(2 * RANKS))
    convert_to_float8_training(model, config=config_of(recipe))
    if stores:
        store_activations_in_float8(model, modules=["?"], block_size=32)
    return model


def batch():
    return draw(MICROBATCHES * ROWS, DIM, seed=1)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class Counter:
    """The float8 matmuls and casts of a block of code."""

    def __enter__(self):
        self.matmuls = self.casts = 0
        multiply, cast = quaver.linear.function.mm, Quantizer.cast

        def counted_mm(*arguments):
            self.matmuls += 1
            return multiply(*arguments)

        def counted_cast(*arguments):
            self.casts += 1
            return cast(*arguments)

        of_mm = mock.patch.object(quaver.linear.function, "mm", counted_mm)
        self.patches = of_mm, mock.patch.object(Quantizer, "cast", counted_cast)
        for each in self.patches:
            each.start()
        return self

    def __exit__(self, *error):
        for each in self.patches:
            each.stop()


def one_process(recipe, last_first, stores=False):
    """Losses of the microbatches, gradients, matmuls and casts."""
    model, losses = parts_of_model(recipe, stores), []
    with Counter() as counter:
        for hidden in batch().chunk(MICROBATCHES):
            for part in model:
                hidden = part(hidden)
            losses.append(loss_of(hidden))
        for loss in reversed(losses) if last_first else losses:
            loss.backward()
    for gradient in gradients(model).values():
        gradient.div_(MICROBATCHES)
    return [loss.item() for loss in losses], gradients(model), counter.matmuls, counter.casts


def stage(module, index, stages):
    """Without examples of its tensors, the first step would run the model once more to see them."""
    input, output = torch.empty(ROWS, DIM, requires_grad=index > 0), torch.empty(ROWS, DIM, requires_grad=True)
    return PipelineStage(module, index, stages, torch.device("cpu"), input_args=(input,), output_args=(output,))


def pipelined(name, recipe, stores=False):
    """The same of this rank's stages."""
    kind, rank, model = getattr(pipelining, name), dist.get_rank(), parts_of_model(recipe, stores)
    if name in SINGLE:
        mine, stages = {rank: nn.Sequential(*model[2 * rank : 2 * rank + 2])}, RANKS
    else:
        second = 2 * RANKS - 1 - rank if kind in V_SHAPED else rank + RANKS
        mine, stages = {index: model[index] for index in (rank, second)}, 2 * RANKS
    made = [stage(module, index, stages) for index, module in mine.items()]
    schedule = kind(made[0] if name in SINGLE else made, MICROBATCHES, loss_fn=lambda output, _: loss_of(output))
    losses = []
    arguments = (batch(),) if 0 in mine else ()
    last = {"target": batch(), "losses": losses} if stages - 1 in mine else {}
    with Counter() as counter:
        schedule.step(*arguments, **last)
    mine_of_model = {name: grad for name, grad in gradients(model).items() if grad is not None}
    return [loss.item() for loss in losses], mine_of_model, counter.matmuls, counter.casts


STORING = ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


@pytest.mark.parametrize(
    ("name", "recipe", "stores"),
    [*thinned(SCHEDULES, RECIPES, [False], together=1), *((name, "rowwise", True) for name in STORING)],
)
def test_a_schedule_equals_one_process(name, recipe, stores):
    if name in CASTS_OF_SPLIT_BACKWARDS and TorchVersion(torch.__version__) < "2.13":
        pytest.skip("PyTorch 2.11 splits no backward of an autograd.Function in Python")
    losses, expected, matmuls, casts = one_process(recipe, name in LAST_MICROBATCH_FIRST, stores)
    results = ranks.run(RANKS, pipelined, name, recipe, stores)
    losses_of, gradients_of, matmuls_of, casts_of = zip(*results, strict=True)
    assert sum(losses_of, []) == losses
    found = {name: grad for of_rank in gradients_of for name, grad in of_rank.items()}
    assert_same(found, expected)
    assert sum(matmuls_of) == matmuls
    # Row-wise, grad_output has a cast for each matmul anyway; tensorwise, one cast serves both.
    assert sum(casts_of) == casts + (recipe == "tensorwise") * CASTS_OF_SPLIT_BACKWARDS.get(name, 0)
    if stores:
        kept = one_process(recipe, last_first=False)[1]
        assert not all(torch.equal(kept[parameter], gradient) for parameter, gradient in found.items())


def sharded(name, is_float8):
    """The parameters of this rank's stages that have no gradient, each under FSDP2 on one rank, and the warnings."""
    rank, mesh = dist.get_rank(), ranks.mesh_of((RANKS, 1), ("pp", "dp"))["dp"]
    model = nn.ModuleList(Block() for _ in range(2 * RANKS))
    if is_float8:
        convert_to_float8_training(model, config=config_of("tensorwise", enable_fsdp_float8_all_gather=True))
    mine = {index: model[index] for index in (rank, rank + RANKS)}
    for part in mine.values():
        for each in (part.up, part.down, part):
            fully_shard(each, mesh=mesh)
    schedule = getattr(pipelining, name)(
        [stage(module, index, 2 * RANKS) for index, module in mine.items()],
        MICROBATCHES,
        loss_fn=lambda output, _: loss_of(output),
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        schedule.step(*((batch(),) if rank == 0 else ()), **({} if rank == 0 else {"target": batch()}))
    missing = [f"{index}.{n}" for index, part in mine.items() for n, p in part.named_parameters() if p.grad is None]
    return missing, [str(each.message) for each in caught if "zero-bubble" in str(each.message)]


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="PyTorch 2.11 splits no backward of a Function")
@pytest.mark.parametrize("is_float8", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_zero_bubble_schedules_lose_gradients_under_fsdp2(is_float8):
    """With nn.Linear too: docs/distributed.md says so, and a weight that FSDP2 gathered in float8 warns."""
    for name, loses in (("ScheduleInterleaved1F1B", False), ("ScheduleInterleavedZeroBubble", True)):
        missing, warned = (sum(each, []) for each in zip(*ranks.run(RANKS, sharded, name, is_float8), strict=True))
        assert bool(missing) == loses
        assert bool(warned) == (loses and is_float8)

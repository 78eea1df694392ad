"""The monitor over ranks: the statistics of the whole tensors, in one collective per sampled step."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from quaver import convert_to_float8_training
from quaver.distributed import Float8ColwiseParallel, Float8RowwiseParallel
from quaver.numerics.monitor import monitor
from tests.distributed.models import config_of
from tests.distributed.ranks import run
from tests.distributed.test_fsdp import part_of, world_mesh
from tests.distributed.test_tensor_parallel import tp_mesh

EXACT = ("numel", "amax", "smallest", "underflow", "saturated", "scale_min", "scale_median", "scale_max", "nonfinite")
CLOSE = ("rms", "zeros", "sqnr_db")
STEPS = 3


def make(recipe, gathers_in_float8=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.ReLU(), nn.Linear(48, 16, bias=False))
    return convert_to_float8_training(model, config=config_of(recipe, enable_fsdp_float8_all_gather=gathers_in_float8))


@contextlib.contextmanager
def counted_collectives():
    """How many tensors this rank sends to gather statistics."""
    calls, gather = [], dist.gather
    dist.gather = lambda *args, **options: (calls.append(args[0].shape), gather(*args, **options))[1]
    try:
        yield calls
    finally:
        dist.gather = gather


def sampled(model, batches):
    lines = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    with counted_collectives() as calls, monitor(model, every=2, sink=lines.append, extras_every=1):
        for batch in batches:
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return lines, len(calls)


def batches():
    torch.manual_seed(3)
    return [torch.randn(24, 32) * torch.logspace(-3, 1, 24)[:, None] for _ in range(STEPS)]


def of_ranks(parallelism, recipe):
    model, parts = make(recipe, parallelism == "float8 fsdp"), batches()
    if parallelism == "tp":
        styles = {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()}
        parallelize_module(model, tp_mesh(), styles)
    else:
        parts = [part_of(batch) for batch in parts]
        fully_shard(model, mesh=world_mesh())
    return sampled(model, parts)


def by_name(lines):
    header, *samples = lines
    names = [(each["layer"], each["operand"], each["cast"]) for each in header["tensors"]]
    return [
        {name: {key: sample[key][at] for key in header["statistics"]} for at, name in enumerate(names)}
        for sample in samples
    ]


@pytest.mark.parametrize("parallelism", ["fsdp", "tp"])
def test_statistics_of_ranks_are_those_of_the_whole_tensors(parallelism):
    one, _ = sampled(make("rowwise"), batches())
    (lines, calls), (of_other, other_calls) = run(2, of_ranks, parallelism, "rowwise")
    assert calls == other_calls == 2  # steps 1 and 2 are sampled, step 3 is not
    assert of_other == []
    assert lines[0]["ranks"] == 2
    assert lines[0]["tensors"] == one[0]["tensors"]
    for got, expected in zip(by_name(lines), by_name(one), strict=True):
        for name, values in expected.items():
            layer, operand, cast = name
            if cast == "result":
                continue  # of this rank's rows
            if parallelism == "fsdp" and cast == "column" and operand != "weight":
                continue  # each rank scales the columns of its own rows
            if values["numel"] is None:  # the first input needs no gradient
                assert got[name]["numel"] is None
                continue
            copies = 2 if parallelism == "tp" and (layer, operand) in {("0", "input"), ("2", "grad_output")} else 1
            for key in EXACT:
                if key in ("numel", "nonfinite"):
                    assert got[name][key] == copies * values[key], (name, key)
                else:
                    assert got[name][key] == values[key], (name, key)
            for key in CLOSE:
                assert got[name][key] == pytest.approx(values[key], rel=2e-6), (name, key)


def test_weights_that_were_gathered_in_float8_have_scales_and_no_sqnr():
    one, _ = sampled(make("tensorwise"), batches())
    (lines, _), _ = run(2, of_ranks, "float8 fsdp", "tensorwise")
    for name, got in by_name(lines)[0].items():
        if name[1] == "weight":
            assert got["scale_max"] == by_name(one)[0][name]["scale_max"]
            assert got["sqnr_db"] is None

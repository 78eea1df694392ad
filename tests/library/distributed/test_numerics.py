"""Tests the monitor over ranks: statistics of whole tensors in one collective per sampled step, and unlike replicas."""

import contextlib
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from quaver import convert_to_float8_training, sync_float8_amax_and_scale_history
from quaver.distributed import Float8ColwiseParallel, Float8RowwiseParallel
from quaver.numerics.alarm_sink import AlarmSink
from quaver.numerics.alarms import Alarms
from quaver.numerics.monitoring import monitor
from quaver.numerics.rank_statistics import gather_tallies
from quaver.runtime.agreement import find_collective_device
from tests.library.distributed.expert_models import concatenate, convert, make_tokens, parallelize, step
from tests.library.distributed.models import get_mesh, get_rank_part
from tests.ranks import on_ranks, refusal, run
from tests.recipes import make_recipe_config

EXACT = ("numel", "amax", "smallest", "underflow", "saturated", "scale_min", "scale_median", "scale_max", "nonfinite")
CLOSE = ("rms", "zeros", "sqnr_db", "kurtosis")
STEPS = 3


def make(recipe, gathers_in_float8=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48, bias=False), nn.ReLU(), nn.Linear(48, 16, bias=False))
    return convert_to_float8_training(
        model, config=make_recipe_config(recipe, enable_fsdp_float8_all_gather=gathers_in_float8)
    )


def count_gathers():
    """Return a context manager of a mock that counts the tensors that this rank sends to gather statistics."""
    return mock.patch.object(dist, "gather", wraps=dist.gather)


def sample(model, batches):
    """Return the lines of a monitor of some steps, and the number of its collectives."""
    lines = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    with count_gathers() as gather, monitor(model, every=2, sink=lines.append, extras_every=1):
        for batch in batches:
            model(batch).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return lines, gather.call_count


def get_batches():
    torch.manual_seed(3)
    return [torch.randn(24, 32) * torch.logspace(-3, 1, 24)[:, None] for _ in range(STEPS)]


def sample_ranks(parallelism, recipe):
    model, parts = make(recipe, parallelism == "float8 fsdp"), get_batches()
    if parallelism == "tp":
        styles = {"0": Float8ColwiseParallel(), "2": Float8RowwiseParallel()}
        parallelize_module(model, get_mesh(), styles)
    else:
        parts = [get_rank_part(batch) for batch in parts]
        fully_shard(model, mesh=get_mesh())
    return sample(model, parts)


def by_name(lines):
    """Return the statistics of each sample, by layer, operand and cast."""
    header, *samples = lines
    names = [(tensor["layer"], tensor["operand"], tensor["cast"]) for tensor in header["tensors"]]
    return [
        {name: {key: sample[key][index] for key in header["statistics"]} for index, name in enumerate(names)}
        for sample in samples
    ]


@pytest.mark.parametrize("parallelism", ["fsdp", "tp"])
def test_statistics_of_ranks_are_those_of_the_whole_tensors(parallelism):
    one, _ = sample(make("rowwise"), get_batches())
    (lines, calls), (other_lines, other_calls) = run(2, sample_ranks, parallelism, "rowwise")
    assert calls == other_calls == 2  # steps 1 and 2 are sampled, step 3 is not
    assert other_lines == []
    assert lines[0]["ranks"] == 2
    assert not any("disagree" in line for line in lines)
    assert lines[0]["tensors"] == one[0]["tensors"]
    for statistics, expected in zip(by_name(lines), by_name(one), strict=True):
        for name, values in expected.items():
            layer, operand, cast = name
            if cast == "result":
                continue  # of this rank's rows
            if parallelism == "fsdp" and cast == "column" and operand != "weight":
                continue  # each rank scales the columns of its own rows
            if values["numel"] is None:  # the first input needs no gradient
                assert statistics[name]["numel"] is None
                continue
            copies = 2 if parallelism == "tp" and (layer, operand) in {("0", "input"), ("2", "grad_output")} else 1
            for key in EXACT:
                factor = copies if key in ("numel", "nonfinite") else 1
                assert statistics[name][key] == factor * values[key], (name, key)
            for key in CLOSE:
                assert statistics[name][key] == pytest.approx(values[key], rel=2e-6), (name, key)


def test_weights_that_were_gathered_in_float8_have_scales_and_no_sqnr():
    one, _ = sample(make("tensorwise"), get_batches())
    (lines, _), _ = run(2, sample_ranks, "float8 fsdp", "tensorwise")
    for name, values in by_name(lines)[0].items():
        if name[1] == "weight":
            assert values["scale_max"] == by_name(one)[0][name]["scale_max"]
            assert values["sqnr_db"] is None


def sample_replicas(changed):
    """Sample two replicas, of which the second one has another weight if it is `changed`."""
    model, parts = DistributedDataParallel(make("rowwise")), get_batches()
    if dist.get_rank() == 1 and changed:
        with torch.no_grad():
            model.module[2].weight[3, 5] += 1e-3
    return sample(model, [get_rank_part(batch) for batch in parts])[0]


@pytest.mark.parametrize("changed", [True, False])
def test_a_rank_with_another_weight_raises_the_alarm(changed):
    (header, *samples), _ = run(2, sample_replicas, changed)
    alarms = Alarms()
    events = [event for line in samples for event in alarms.update(header, line)]
    assert [(event.rule, event.layer, event.rank) for event in events] == [("ranks", "module.2", 1)] * changed
    assert all("differs on rank 1 from its replicas" in event.message for event in events)


def sample_with_one_batch_a_step(by_hand):
    """Sample steps in which one of two ranks has no batch."""
    model, lines = make("tensorwise"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0)
    with monitor(model, every=1, sink=lines.append, steps_by_hand=by_hand) as watching:
        for number, batch in enumerate(get_batches()):
            if dist.get_rank() != number % 2:
                model(batch).square().sum().backward()
            optimizer.step()
            watching.step()
        with watching.repeating():
            if dist.get_rank() == 0:
                model(batch).square().sum().backward()
    return lines


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_rank_without_a_batch_joins_the_collectives(by_hand):
    lines, other_lines = run(2, sample_with_one_batch_a_step, by_hand)
    assert [line["step"] for line in lines[1:]] == [1, 2, 3]
    assert [next(iter(statistics.values()))["numel"] for statistics in by_name(lines)] == [24 * 32] * STEPS
    assert not other_lines


def sample_to_a_sink_that_fails():
    model, lines = make("tensorwise"), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0)

    def sink(line):
        if line["step"] == failing:
            raise OSError(28, "No space left on device")
        lines.append(line)

    failing, errors = 1, []
    with contextlib.suppress(OSError, RuntimeError):
        monitor(model, every=1, sink=sink)
        errors.append("no error")
    failing = 2
    with count_gathers() as gather, monitor(model, every=1, sink=sink) as watching:
        for batch in get_batches():
            model(batch).square().sum().backward()
            optimizer.step()
    return (
        errors,
        gather.call_count,
        [line["step"] for line in lines],
        model[0].probes is None and not watching._is_open,
    )


def test_a_sink_that_fails_on_the_first_rank_ends_the_monitor_on_all():
    assert run(2, sample_to_a_sink_that_fails) == [([], 2, [1, 1], True), ([], 2, [], True)]


@pytest.mark.parametrize("case", ["sink", "model", "every"])
@on_ranks(2)
def test_what_one_rank_refuses_is_raised_on_all(case):
    rank = dist.get_rank()
    model = nn.Linear(32, 32) if case == "model" and rank == 1 else make("tensorwise")
    sink = 5 if case == "sink" and rank == 0 else None
    every = 0 if case == "every" and rank == 1 else 1
    expected = "RuntimeError: the monitor did not start"
    if rank == (0 if case == "sink" else 1):
        expected = {
            "sink": "TypeError: sink: expected a path",
            "model": "ValueError: expected a model with float8",
            "every": "ValueError: every: expected a number of steps",
        }[case]
    assert refusal(lambda: monitor(model, sink=sink, every=every)).startswith(expected)
    with monitor(make("tensorwise")):  # the ranks are still in step
        pass


@pytest.mark.parametrize("kind", [ValueError, SystemExit])
@on_ranks(2)
def test_what_a_callback_raises_ends_the_step_on_all_ranks(kind):
    def stop(event):
        raise kind("the loss is gone")

    model = make("tensorwise")
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    optimizer, is_first = torch.optim.SGD(model.parameters(), lr=0), dist.get_rank() == 0
    expected = kind("the loss is gone") if is_first else RuntimeError("a callback of an alarm ended the step")
    with monitor(model, every=1, sink=AlarmSink(on_event=stop)) as watching:
        model(get_batches()[0]).sum().backward()
        assert refusal(optimizer.step).startswith(f"{type(expected).__name__}: {expected}")
        model(get_batches()[0]).sum().backward()  # the alarm is not raised twice
        optimizer.step()
        assert watching._is_open


def sample_experts(splits):
    experts, parts, lines = convert("rowwise"), make_tokens(2, 2), []
    tokens = parts[dist.get_rank()] if splits else concatenate(parts)
    if splits:
        parallelize(experts)
    with monitor(experts, every=1, extras_every=0, sink=lines.append) as watching:
        step(experts, *tokens)
        watching.step()
    return lines


def test_split_experts_have_the_statistics_of_whole_ones():
    (whole, _), (lines, _) = (run(2, sample_experts, splits) for splits in (False, True))
    assert not any("disagree" in line for line in [*whole, *lines])
    for (name, values), expected in zip(by_name(lines)[0].items(), by_name(whole)[0].values(), strict=True):
        _, operand, cast = name
        if operand == "weight":
            del values["scale_worst"], expected["scale_worst"]  # an index on its rank
            assert values == pytest.approx(expected, rel=1e-5), name
        else:
            key = "scale_max" if cast == "row" else "amax"
            assert values[key] == expected[key], name


@pytest.mark.parametrize(
    ("differing", "pattern"),
    [
        ("every", "'every=1, extras_every=20, .*', rank 1 has 'every=2, "),
        ("layers", "'0 .* and 5 more, rank 1 has nothing"),
    ],
)
@on_ranks(2)
def test_ranks_that_monitor_different_things_are_refused(differing, pattern):
    is_second = dist.get_rank() == 1
    model = make("tensorwise")
    if is_second and differing == "layers":
        model[0] = nn.Linear(32, 48)
    message = refusal(lambda: monitor(model, every=2 if is_second and differing == "every" else 1))
    assert re.match(f"RuntimeError: ranks disagree about what they monitor: rank 0 has {pattern}", message), message
    with monitor(make("tensorwise")):  # the ranks are still in step, and no probe stays
        assert model[2].probes is None


@on_ranks(2)
def test_collectives_run_on_a_device_of_the_group():
    assert find_collective_device(dist.new_group(backend="cuda:gloo")) == torch.device("cuda")
    assert find_collective_device(None) == torch.device("cpu")
    devices = []
    with (
        mock.patch.object(dist, "get_backend_config", return_value="meta:gloo"),
        mock.patch.object(dist, "all_reduce", lambda tensor, *_: devices.append(tensor.device.type)),
        mock.patch.object(dist, "gather", lambda tensor, *_, **options: devices.append(tensor.device.type)),
    ):
        for collective in (monitor, sync_float8_amax_and_scale_history):
            refusal(collective, nn.Identity())  # which has no parameters; no value of a meta tensor is known
        refusal(gather_tallies, torch.zeros(1, 4), None, None)
    assert devices == ["meta"] * 3

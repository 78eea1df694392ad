"""Tests that the monitor samples what the linears computed with, in eager and compiled code, and changes no run."""

import copy
import gc
import math
import weakref
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

import quaver
from quaver import Float8Linear, convert_to_float8_training, convert_to_high_precision, set_high_precision_matmuls
from quaver.experts.module_weight import ModuleWeight
from quaver.linear.quantize import Quantizer
from quaver.numerics import monitoring, observe
from quaver.numerics.monitoring import monitor
from quaver.numerics.probe import Probe
from quaver.numerics.record import Record
from quaver.numerics.sampling import Sampling
from quaver.numerics.statistics import observe_matrix, summarize_tallies
from quaver.numerics.step_ends import StepEndDetector
from quaver.optim import CombinedOptimizer
from tests import steps
from tests.library.numerics.samples import compare_sums
from tests.recipes import DYNAMIC_RECIPES
from tests.reference import sqnr_db
from tests.thinned import at_night
from tests.virtual_gpu.runtime import simulate_capture


class Model(nn.Module):
    def __init__(self, mode="eager"):
        super().__init__()
        self.up, self.down, self.mode = nn.Linear(48, 64), nn.Linear(64, 32, bias=False), mode

    def block(self, hidden):
        return self.down(nn.functional.relu(self.up(hidden)))

    def forward(self, hidden):
        if self.mode == "checkpoint":
            return checkpoint(self.block, hidden, use_reentrant=False)
        return self.block(hidden)


def step(model):
    """Run a forward and a backward."""
    model(torch.randn(4, 48).bfloat16()).sum().backward()


def make_model(recipe="tensorwise", mode="eager"):
    torch.manual_seed(0)
    model = convert_to_float8_training(Model(mode).bfloat16(), config=recipe)
    if mode in ("inductor", "aot_eager"):
        model.compile(fullgraph=True, backend=mode)
    return model


def train(model, count=3, microbatches=1):
    torch.manual_seed(1)
    batches = [torch.randn(40 * microbatches, 48).bfloat16().requires_grad_() for _ in range(count)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return steps.train(model, optimizer, batches, microbatches=microbatches)


def train_and_monitor(model, every=2, count=3, microbatches=1, **options):
    """Return the losses, and the lines of the record."""
    lines = []
    with monitor(model, every=every, sink=lines.append, **options):
        losses = train(model, count, microbatches)
    return losses, lines


@pytest.mark.parametrize("recipe", [*DYNAMIC_RECIPES, "delayed"])
def test_a_sample_is_what_the_linear_computed_with(recipe):
    model = make_model(recipe)
    hps = {"weight": model.up.weight.detach().clone()}
    model.up.register_forward_hook(lambda module, inputs, output: hps.update(input=inputs[0].detach().clone()))
    model.up.register_full_backward_hook(lambda module, grads, outputs: hps.update(grad_output=outputs[0].clone()))
    losses, (header, sample) = train_and_monitor(model, count=1)
    assert losses == train(make_model(recipe), count=1)
    assert header["recipe"] == recipe
    casts = model.up.config.casts
    for index, tensor in enumerate(header["tensors"]):
        if tensor["layer"] != "up" or tensor["cast"] == "result":
            continue
        operand_casts, is_column = getattr(casts, tensor["operand"]), tensor["cast"] == "column"
        cast = operand_casts.column if is_column else operand_casts.row
        assert tensor["dtype"] == str(cast.float8_dtype).removeprefix("torch.")
        hp = hps[tensor["operand"]]
        operands = Quantizer(operand_casts, hp.dtype)(hp, row=not is_column, column=is_column)
        expected = summarize_tallies(observe_matrix(hp, operands.row or operands.column)[None], [None])
        for name in header["statistics"]:
            assert sample[name][index] == expected[name][0], (tensor, name)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_results_are_compared_with_high_precision(recipe):
    model, hps = make_model(recipe), {}
    down = model.down
    down.register_forward_hook(lambda module, inputs, output: hps.update(x=inputs[0].detach(), output=output.detach()))
    down.register_full_backward_hook(lambda module, grads, outputs: hps.update(grad_input=grads[0], grad=outputs[0]))
    with monitor(model, every=1) as watch:
        model(torch.randn(40, 48).bfloat16()).float().square().mean().backward()
        watch.step()
    (sample,) = watch.samples
    x, grad, weight = hps["x"].double(), hps["grad"].double(), down.weight.detach().double()
    rows, columns = torch.arange(16) * 40 // 16, torch.arange(16) * 64 // 16
    expected = {
        "output": sqnr_db((x @ weight.t())[rows], hps["output"][rows]),
        "grad_input": sqnr_db((grad @ weight)[rows], hps["grad_input"][rows]),
        "grad_weight": sqnr_db((grad.t() @ x)[:, columns], down.weight.grad[:, columns]),
    }
    sampled = {
        tensor["operand"]: value
        for tensor, value in zip(watch.header["tensors"], sample["sqnr_db"], strict=True)
        if tensor["layer"] == "down" and tensor["cast"] == "result"
    }
    assert sampled == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("mode", "recipe"),
    [
        ("aot_eager", "delayed"),
        ("checkpoint", "rowwise"),
        *at_night([("inductor", "tensorwise"), ("aot_eager", "rowwise"), ("aot_eager", "blockwise_with_gw_hp")]),
        *at_night([("checkpoint", "tensorwise"), ("checkpoint", "delayed")]),
    ],
)
def test_compiled_and_checkpointed_samples_are_those_of_eager_code(mode, recipe):
    torch._dynamo.utils.counters.clear()
    expected = train_and_monitor(make_model(recipe), count=4, extras_every=2, emulate_sums_of="h100")
    assert train_and_monitor(make_model(recipe, mode), count=4, extras_every=2, emulate_sums_of="h100") == expected
    if mode != "checkpoint":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]


def test_equal_layers_share_one_compiled_graph():
    torch._dynamo.utils.counters.clear()
    model = nn.Sequential(*[convert_to_float8_training(nn.Sequential(nn.Linear(48, 48))) for _ in range(3)])
    for block in model:
        block.compile(fullgraph=True, backend="eager")
    with monitor(model, every=1):
        model(torch.randn(8, 48, requires_grad=True)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2  # the first input, too, is one with a gradient


def test_microbatches_merge_into_one_sample():
    (_, (header, sample)) = train_and_monitor(make_model("rowwise"), count=1, microbatches=3)
    casts = ((tensor["operand"], tensor["cast"]) for tensor in header["tensors"])
    numel = dict(zip(casts, sample["numel"], strict=True))
    assert numel["input", "row"] == 3 * 40 * 64
    assert numel["weight", "row"] == 32 * 64


def test_every_kth_step_is_sampled_and_linears_take_turns_with_extras():
    _, lines = train_and_monitor(make_model(), every=2, count=8, extras_every=2)
    assert [line["step"] for line in lines[1:]] == [1, 2, 4, 6, 8]
    layers = [tensor["layer"] for tensor in lines[0]["tensors"]]
    for line, expected in zip(lines[1:], [{"up", "down"}, {"down"}, {"up"}, {"down"}, {"up"}], strict=True):
        for values in (line["whatif"]["rowwise"], line["histogram"]["before"]):
            assert {name for name, value in zip(layers, values, strict=True) if value is not None} == expected
    assert lines[2]["amax"] != lines[3]["amax"]
    _, lines = train_and_monitor(make_model(), every=2, count=3, completed_steps=10, extras_every=0)
    assert [line["step"] for line in lines[1:]] == [12]
    assert lines[0]["step"] == 11


def test_sums_of_a_gpu_follow_its_accumulation():
    """Only the samples with extras have sums, and a matmul in high precision has none."""
    model = make_model("rowwise_with_gw_hp")
    weight = model.up.weight.detach().clone()
    losses, (header, *samples) = train_and_monitor(model, every=1, count=2, extras_every=2, emulate_sums_of="H100")
    assert losses == train(make_model("rowwise_with_gw_hp"), count=2)
    assert header["sums_of"] == "h100"
    sums = {}
    for index, tensor in enumerate(header["tensors"]):
        values = [samples[0]["sums"][name][index] for name in ("casts", "fast", "exact")]
        if values != [None] * 3:
            sums[tensor["layer"], tensor["operand"]] = values
            assert tensor["use_fast_accum"] == (tensor["operand"] == "output")
    assert set(sums) == {(layer, matmul) for layer in ("up", "down") for matmul in ("output", "grad_input")}
    torch.manual_seed(1)
    input = torch.randn(40, 48).bfloat16()
    assert sums["up", "output"] == pytest.approx(list(compare_sums("rowwise_with_gw_hp", input, weight)), abs=0.01)
    sampled = zip(header["tensors"], samples[1]["sums"]["fast"], strict=True)
    assert {tensor["layer"] for tensor, value in sampled if value is not None} == {"up"}
    assert "sums" not in train_and_monitor(make_model(), every=1, count=1)[1][1]
    h200 = train_and_monitor(make_model(), every=1, count=1, emulate_sums_of="h200", extras_every=1)[1][1]
    assert h200["sums"]["exact"][-1] > 60


def test_without_a_monitor_nothing_is_called(monkeypatch):
    calls = []
    for name in ("observe_operand", "observe_output", "observe_grad_input", "observe_grad_weight"):
        monkeypatch.setattr(observe, name, lambda *_: calls.append(1))
    model = make_model()
    train(model)
    with monitor(model):
        pass
    train(model)
    assert not calls
    with monitor(model, every=10, completed_steps=8):
        train(model, count=1)  # not sampled
        assert not calls
        train(model, count=1)
    assert len(calls) == 2 * 6  # three operands and three results of each linear


def test_freed_memory_is_not_read():
    sampling, freed = Sampling(is_on=True), torch.randn(600, 400)
    probe = Probe(sampling.assign_number(), ModuleWeight(Float8Linear(4, 4)), torch.device("cpu"))
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="was freed before it was used"):
        probe.observe_output(torch.randn(600, 4), freed, torch.randn(4, 400), None)
    sampling.close()
    probe.observe_output(torch.randn(600, 4), freed, torch.randn(4, 400), None)  # of no monitor


def test_validation_is_not_sampled():
    model = make_model()
    with monitor(model, every=1) as watch:
        step(model.eval())
        watch.step()
        assert not watch.samples
        train(model.train(), count=1)
    assert [sample["step"] for sample in watch.samples] == [1]


@pytest.mark.parametrize("by_hand", [False, True])
def test_training_in_eval_mode_is_named_once(by_hand, caplog):
    model = make_model().eval()
    with monitor(model, every=1, steps_by_hand=by_hand) as watch:
        for _ in range(2):
            train(model, count=1)
            watch.step()
    assert [message.partition(";")[0] for message in caplog.messages] == [
        "the monitor sampled nothing in step 1: all float8 layers are in eval() mode, which it takes for validation"
    ]


def test_step_ends_a_step_without_an_optimizer_once():
    model = make_model()
    with monitor(model, every=1) as watch:
        for _ in range(2):
            step(model)
            watch.step()
            watch.step()
    assert [sample["step"] for sample in watch.samples] == [1, 2]


def step_in_turn(model, optimizers, other):
    """Step the other model's optimizer between the forward and the backward."""
    loss = model(torch.randn(4, 48).bfloat16()).sum()
    other.step()
    loss.backward()
    optimizers[0].step()


def step_halves(model, optimizers, other):
    """Step two optimizers, each after a separate backward."""
    other.step()
    for part, optimizer in zip((model.up, model.down), optimizers, strict=True):
        part(torch.randn(4, part.in_features).bfloat16()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def step_both(model, optimizers, other):
    """Step an optimizer that combines two, after one backward."""
    step(model)
    CombinedOptimizer(*optimizers).step()
    other.step()


@pytest.mark.parametrize("run_step", [step_in_turn, step_halves, step_both])
def test_a_step_ends_once_beside_other_optimizers(run_step):
    model, other = make_model(), make_model()
    parts = [model] if run_step is step_in_turn else [model.up, model.down]
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in parts]
    other_optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with monitor(model, every=1) as watch, monitor(other, every=1) as other_watch:
        for _ in range(4):
            step(other)
            run_step(model, optimizers, other_optimizer)
    for record in watch, other_watch:
        assert [sample["step"] for sample in record.samples] == [1, 2, 3, 4]
        results = [index for index, tensor in enumerate(record.header["tensors"]) if tensor["operand"] == "grad_weight"]
        assert all(sample["numel"][index] for sample in record.samples for index in results)


MONITORED = [("tensorwise", "eager"), ("rowwise", "eager"), ("tensorwise", "aot_eager")]


@pytest.mark.parametrize(("recipe", "mode"), MONITORED)
def test_matmuls_that_change_their_precision_begin_another_header(recipe, mode):
    """A sample is that of a monitor which is opened for its step alone."""
    model, twin = make_model(recipe, mode), make_model(recipe, mode)
    lines, expected = [], []
    with monitor(model, every=np.int64(1), sink=lines.append):
        for completed, matmuls in enumerate(([], ["output"], ["grad_weight"], ["grad_weight"], [])):
            set_high_precision_matmuls(model, matmuls)
            train(model, count=1)
            set_high_precision_matmuls(twin, matmuls)
            expected += train_and_monitor(twin, every=1, count=1, completed_steps=completed)[1]
    del expected[6]  # the header of step 4, whose precision is that of step 3
    assert str(lines) == str(expected)  # NaN equals no number


def test_an_optimizer_of_replaced_parameters_ends_no_step():
    model, sampling = nn.Linear(4, 4), Sampling(has_run=True)
    stale = torch.optim.SGD(model.parameters())
    ends = StepEndDetector(model, bool)
    assert ends.count_ended_steps(stale, sampling) == 1
    model.weight, model.bias = nn.Parameter(model.weight.detach()), nn.Parameter(model.bias.detach())
    assert [ends.count_ended_steps(stale, sampling) for _ in range(2)] == [0, 0]


def test_a_step_that_is_repeated_is_sampled():
    model = make_model()
    with monitor(model, every=100, completed_steps=6) as watch:
        train(model, count=1)
        assert not watch.samples
        for _ in range(2):
            with watch.repeating():
                model(torch.full((4, 48), math.inf).bfloat16()).sum().backward()
    (sample,) = watch.samples
    assert sample["step"] == 7
    assert sample["nonfinite"][0] == 4 * 48
    assert sample["amax"][0] is None


def test_a_record_is_written_and_resumed(tmp_path):
    model = make_model()
    for completed in (0, 2):
        with monitor(model, every=1, sink=tmp_path / "numerics.jsonl", completed_steps=completed, extras_every=3):
            train(model, count=3)
    record = Record.read(tmp_path)
    assert record.steps.tolist() == [1, 2, 3, 4, 5]
    assert record.statistics["amax"].shape == (5, 12)
    assert list(record.histograms) == [0, 1, 2, 4]  # of both linears, then in turns: steps 2, 3 and 5
    assert [header["step"] for header in record.headers] == [1, 3]


def test_a_copy_and_a_converted_model_have_no_probes():
    model = make_model()
    with monitor(model, every=1):
        assert copy.deepcopy(model).up.probes is None
        convert_to_high_precision(model)
        train(model, count=2)
    assert "probes" not in vars(model.up)


def test_layers_that_are_converted_again_are_sampled_from_the_next_step(caplog):
    model = make_model()
    with monitor(model, every=1) as watch:
        convert_to_high_precision(model)
        convert_to_float8_training(model, config="rowwise")
        train(model)
        assert monitor.find(model) is watch
    assert [sample["step"] for sample in watch.samples] == [2, 3]
    assert watch.header["recipe"] == "rowwise"
    assert "converted while it is open: up, down;" in caplog.text


def test_a_weight_that_was_cast_once_is_observed():
    model = make_model("rowwise")
    with monitor(model, every=1) as watch, quaver.cast_weights_once(model):
        step(model)
        watch.step()
    for tensor, decibels in zip(watch.header["tensors"], watch.samples[0]["sqnr_db"], strict=True):
        if (tensor["operand"], tensor["cast"]) == ("weight", "row"):
            assert decibels == pytest.approx(31.5, abs=1.5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"every": 0}, ValueError, "every: expected a number of steps of 1 or more, got 0"),
        ({"every": True}, ValueError, "every: expected"),
        ({"every": 2.0}, ValueError, "every: expected"),
        ({"history_len": -1}, ValueError, "history_len: expected a number of 0 or more, got -1"),
        ({"completed_steps": "8"}, ValueError, "completed_steps: expected a number of 0 or more, got '8'"),
        ({"extras_every": -1}, ValueError, "extras_every: expected a number of samples"),
        ({"emulate_sums_of": "b200"}, ValueError, r"emulate_sums_of: expected .* known \(h100, h200\), got 'b200'"),
        ({"emulate_sums_of": "h100", "extras_every": 0}, ValueError, "emulate_sums_of: expected extras_every of 1"),
        ({"sink": 3}, TypeError, "sink: expected a path, a function or an object"),
    ],
)
def test_bad_arguments_are_refused(options, error, message):
    model = make_model()
    with pytest.raises(error, match=message):
        monitor(model, **options)
    assert model.up.probes is None


class Failing:
    """A sink that raises after so many lines."""

    def __init__(self, error, lines=2):
        self.error, self.lines = error, lines

    def write(self, line):
        if not self.lines:
            raise self.error
        self.lines -= 1

    def close(self):
        raise self.error


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("no network\nat all")])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_sink_that_fails_ends_the_monitor_and_not_the_training(error, by_hand, caplog):
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters())
    with monitor(model, every=1, sink=Failing(error), steps_by_hand=by_hand) as watch:
        after = register_optimizer_step_post_hook(lambda *_: None)  # torch goes on to it after the monitor's own
        for _ in range(4):
            step(model)
            optimizer.step()
            watch.step()
        with watch.repeating():
            step(model)
    after.remove()
    assert [sample["step"] for sample in watch.samples] == [1, 2]
    line, closing = caplog.messages
    assert line.startswith(f"the monitor ends after step 2: its sink raised {type(error).__name__}: ")
    assert "\n" not in line
    assert "may be incomplete" in closing
    with monitor(model):  # there are no probes left
        pass
    ended, error.__traceback__ = weakref.ref(watch), None
    del watch, optimizer
    gc.collect()
    assert ended() is None


def test_a_sample_that_cannot_be_made_is_not_blamed_on_the_sink(monkeypatch, caplog):
    monkeypatch.setattr(monitoring, "find_disagreements", lambda *_: 1 // 0)
    model, lines = make_model(), []
    with monitor(model, every=1, sink=lines.append, steps_by_hand=True) as watch:
        step(model)
        watch.step()
    assert caplog.messages == ["the monitor ends after step 1: the sample could not be made"]
    assert caplog.records[0].exc_info[0] is ZeroDivisionError


def test_a_sample_after_a_stop_is_not_blamed_on_the_sink(monkeypatch, caplog):
    def stop(line):
        if line["kind"] == "sample":
            raise KeyboardInterrupt

    model = make_model()
    with monitor(model, every=1, sink=stop, steps_by_hand=True) as watch:
        step(model)
        with pytest.raises(KeyboardInterrupt):
            watch.step()
        monkeypatch.setattr(monitoring, "find_disagreements", lambda *_: 1 // 0)
        watch.step()  # ends the step that was stopped
        step(model)
        watch.step()
    assert [message.partition(": ")[2] for message in caplog.messages] == ["the sample could not be made"]


def test_ctrl_c_while_a_monitor_starts_leaves_no_probes(monkeypatch):
    model = make_model()
    monkeypatch.setattr(monitoring, "StepEndDetector", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        monitor(model)
    assert "probes" not in vars(model.up)


@pytest.mark.parametrize("sink", ["missing/numerics.jsonl", "damaged.jsonl", Failing(RuntimeError("mine"), lines=0)])
def test_a_monitor_whose_header_cannot_be_written_leaves_no_probes(tmp_path, sink):
    (tmp_path / "damaged.jsonl").write_text("hello\n")
    model = make_model()
    for _ in range(2):
        with pytest.raises((OSError, ValueError, RuntimeError), match="No such file|not a record|mine"):
            monitor(model, sink=tmp_path / sink if isinstance(sink, str) else sink)
    assert "probes" not in vars(model.up)


def test_a_monitor_may_be_closed_by_its_sink_and_then_samples_no_more():
    model, lines = make_model(), []
    watch = monitor(model, every=1, sink=lambda line: (lines.append(line), len(lines) == 2 and watch.close()))
    after = register_optimizer_step_post_hook(lambda *_: None)  # torch goes on to it after the monitor's own
    train(model, count=3)
    after.remove()
    watch.step()
    assert [line["step"] for line in lines] == [1, 1]


def test_a_model_without_float8_and_a_second_monitor_are_refused():
    with pytest.raises(ValueError, match="no float8 linears|got none"):
        monitor(nn.Linear(4, 4))
    model = make_model()
    assert monitor.find(model) is None
    monitor(model)
    with pytest.raises(
        RuntimeError, match=r"another monitor watches this model; .* quaver.monitor.find\(model\).close"
    ):
        monitor(model)
    monitor.find(model).close()
    with monitor(Float8Linear(16, 16)):
        pass


def test_a_sample_in_a_cuda_graph_is_refused():
    model, message = make_model(), "a CUDA graph cannot repeat: compile without mode='reduce-overhead'"
    with monitor(model), simulate_capture(), pytest.raises(RuntimeError, match=message):
        model(torch.randn(4, 48).bfloat16())

"""Tests that the monitor observes each group of experts as the linear of its expert, eager and compiled."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from quaver import Float8LinearConfig, convert_to_float8_training, freeze_to_float8
from quaver.experts.function import multiply_by_weight
from quaver.linear.quantize import Quantizer
from quaver.numerics.accumulation import get_accumulation
from quaver.numerics.alarms import Alarms
from quaver.numerics.monitoring import monitor
from quaver.numerics.probe import Probe, list_sites
from quaver.numerics.sampling import Sampling
from quaver.numerics.statistics import STATISTICS, make_tallies, merge_tallies, observe_matrix, summarize_tallies
from tests.library.experts.operands import ENDS, make_operands
from tests.mixture import make_mixture
from tests.recipes import DYNAMIC_RECIPES
from tests.steps import assert_same, train

CPU = torch.device("cpu")
QUOTIENTS = ("rms", "sqnr_db", "scale_worst_sqnr_db", "underflow", "saturated", "zeros", "kurtosis")


@pytest.fixture
def sampling():
    sampling = Sampling(is_on=True)
    yield sampling
    sampling.close()


def summarize_casts(site, casts, matrices):
    """Return the merged statistics of the casts that linears would make of the matrices."""
    tallies = make_tallies(1, CPU)
    for hp in matrices:
        operands = Quantizer(casts, hp.dtype)(hp, row=site.cast != "column", column=site.cast == "column")
        merge_tallies(tallies, observe_matrix(hp, operands.row or operands.column)[None])
    return summarize_tallies(tallies, [None])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", DYNAMIC_RECIPES)
def test_a_sample_is_that_of_the_experts_linears(recipe, transposed, sampling):
    config = Float8LinearConfig.from_recipe_name(recipe)
    a, b_t, ends = make_operands(transposed=transposed)
    weight = b_t if transposed else b_t.transpose(1, 2).contiguous()
    grad_output = torch.randn(310, 160, dtype=a.dtype)
    probe = Probe(sampling.assign_number(), SimpleNamespace(config=config), CPU)
    multiply_by_weight(a, weight, ends, config, transposed=transposed, probe=probe).backward(grad_output)
    groups = [slice(start, stop) for start, stop in zip([0, *ENDS], ENDS, strict=False) if start < stop]
    hps = {
        "input": [a.detach()[group] for group in groups],
        "grad_output": [grad_output[group] for group in groups],
        "weight": list(b_t.detach().transpose(1, 2).contiguous()),
    }
    for site in list_sites(config, True):
        actual = summarize_tallies(probe.get_tally(site)[None], [None])
        if site.cast == "result":
            continue
        expected = summarize_casts(site, getattr(config.casts, site.operand), hps[site.operand])
        for name in STATISTICS:
            value = pytest.approx(expected[name][0], rel=1e-5) if name in QUOTIENTS else expected[name][0]
            assert name == "scale_worst" or actual[name][0] == value, (site, name)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_results_and_extras_are_those_of_the_experts_linears(recipe, transposed):
    config = Float8LinearConfig.from_recipe_name(recipe)
    a, b_t, ends = make_operands(transposed=transposed)
    grad_output = torch.randn(310, 160, dtype=a.dtype)
    samplings = [Sampling(get_accumulation("h100"), is_on=True) for _ in range(2)]
    probes = []
    for sampling in samplings:
        number = sampling.assign_number()
        sampling.start_step(is_on=True, with_extras=frozenset([number]), with_sums=frozenset([number]))
        probes.append(Probe(number, SimpleNamespace(config=config), CPU))
    weight = b_t if transposed else b_t.transpose(1, 2).contiguous()
    multiply_by_weight(a, weight, ends, config, transposed=transposed, probe=probes[0]).backward(grad_output)
    linear = convert_to_float8_training(torch.nn.Linear(*b_t.shape[1:], bias=False, dtype=a.dtype), config=config)
    linear.probes = {"weight": probes[1]}
    for matrix, start, stop in zip(b_t.detach(), [0, *ENDS], ENDS, strict=False):
        if start < stop:
            with torch.no_grad():
                linear.weight.copy_(matrix.t())
            linear(a.detach()[start:stop].requires_grad_()).backward(grad_output[start:stop])
    for site in list_sites(config, True):
        actual, expected = (summarize_tallies(probe.get_tally(site)[None], [None])["sqnr_db"][0] for probe in probes)
        assert actual is not None
        if site.operand != "weight":
            assert actual == pytest.approx(expected, abs=1e-3), site
            extras = [
                sampling.extras.get((probe.weight_number, site.name))
                for sampling, probe in zip(samplings, probes, strict=True)
            ]
            assert (extras[0] is None) == (extras[1] is None), site
            assert extras[0] is None or torch.allclose(*extras, rtol=1e-5), site
    for sampling in samplings:
        sampling.close()


@pytest.mark.parametrize("recipe", ["rowwise", "mxfp8"])
def test_the_worst_scale_is_named_by_its_index_among_those_of_all_groups(recipe, sampling):
    config = Float8LinearConfig.from_recipe_name(recipe)
    a, b_t, ends = make_operands()
    with torch.no_grad():
        a[250] = 1e-7  # of the last group, rows 200 to 300
        a[250, 3] = 1e7
    probe = Probe(sampling.assign_number(), SimpleNamespace(config=config), CPU)
    multiply_by_weight(a, b_t.transpose(1, 2).contiguous(), ends, config, transposed=False, probe=probe)
    site = list_sites(config, True)[0]
    worst = summarize_tallies(probe.get_tally(site)[None], [None])["scale_worst"][0]
    assert worst in (range(250, 251) if recipe == "rowwise" else range(250 * 3, 251 * 3))


def test_results_are_those_of_rows_with_an_expert(sampling):
    config = Float8LinearConfig()
    a, b_t, ends = make_operands()
    weight = b_t.detach().transpose(1, 2).contiguous().requires_grad_()
    probe = Probe(sampling.assign_number(), SimpleNamespace(config=config), CPU)
    output = multiply_by_weight(a, weight, ends, config, transposed=False, probe=probe)
    output.square().sum().backward()
    results = {"output": output[: ENDS[-1]], "grad_input": a.grad[: ENDS[-1]], "grad_weight": weight.grad}
    for site in list_sites(config, True)[-3:]:
        summary, matrix = summarize_tallies(probe.get_tally(site)[None], [None]), results[site.operand]
        assert summary["numel"] == [matrix.numel()]
        assert summary["amax"] == [matrix.abs().max().item()]
        assert summary["zeros"] == [pytest.approx((matrix == 0).double().mean().item())]
        assert 20 < summary["sqnr_db"][0] < 40


def make_model(recipe, mode="eager"):
    model = convert_to_float8_training(make_mixture(layers=1), config=recipe)
    if mode == "compiled":
        model[0].experts.compile(fullgraph=True, backend="aot_eager")
    return model


def train_mixture(model, recomputed=False, change=lambda model, step: None, steps=3):
    """Return the losses. Calls `change` with the model and the number of each step before it."""
    torch.manual_seed(1)
    batches = [torch.randn(64, 40, requires_grad=True) for _ in range(steps)]
    optimizer, next_steps = torch.optim.SGD(model.parameters(), lr=1e-3), iter(range(2, steps + 2))
    change(model, 1)
    call = (lambda tokens: checkpoint(model, tokens, use_reentrant=False)) if recomputed else None
    return train(model, optimizer, batches, call=call, after=lambda model: change(model, next(next_steps)))


def train_and_monitor(model, **options):
    """Return the losses, and the lines of the record."""
    lines = []
    with monitor(model, every=1, extras_every=0, sink=lines.append):
        return train_mixture(model, **options), lines


def test_compiled_and_checkpointed_samples_are_those_of_eager_code():
    expected = train_and_monitor(make_model("rowwise"))
    layers = dict.fromkeys(tensor["layer"] for tensor in expected[1][0]["tensors"])
    assert list(layers) == ["0.experts.gate_up_proj", "0.experts.down_proj", "0.out"]
    assert all(None not in line["amax"] for line in expected[1][1:])
    assert train_and_monitor(make_model("rowwise"), recomputed=True) == expected
    assert train_and_monitor(make_model("rowwise", "compiled")) == expected


def test_a_monitor_changes_nothing_and_leaves_nothing():
    model, other = make_model("tensorwise"), make_model("tensorwise")
    losses, _ = train_and_monitor(model)
    assert "probes" not in vars(model[0].experts)
    assert losses == train_mixture(other)
    assert_same(model.state_dict(), other.state_dict())


def starve_first_expert(model, step):
    with torch.no_grad():
        if step == 1:
            model[0].norm.bias[0] = 8  # the first feature of every token is positive
        if step == 12:
            model[0].router[0, 0] = -1e3


def test_an_expert_without_tokens_raises_the_alarm():
    _, (header, *samples) = train_and_monitor(make_model("tensorwise"), change=starve_first_expert, steps=16)
    alarms = Alarms()
    raised = [event for sample in samples for event in alarms.update(header, sample) if event.rule == "dead"]
    assert (raised[0].layer, raised[0].operand) == ("0.experts.down_proj", "grad_weight")
    assert raised[0].since == 12


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise"])
def test_frozen_modules_have_operands_and_the_scales_of_weights(recipe):
    model = freeze_to_float8(make_mixture(layers=1), config=recipe)
    _, (header, sample, *_) = train_and_monitor(model, steps=1)
    layers = {"0.experts.gate_up_proj", "0.experts.down_proj", "0.out"}
    assert {tensor["layer"] for tensor in header["tensors"]} == layers
    for tensor, amax, scale in zip(header["tensors"], sample["amax"], sample["scale_max"], strict=True):
        assert tensor["operand"] != "grad_weight"
        assert (amax is None) == (tensor["operand"] == "weight"), tensor
        assert (scale is None) == (tensor["cast"] == "result"), tensor


def test_experts_of_a_copy_have_no_probes():
    model = make_model("tensorwise")
    with monitor(model):
        assert model[0].experts.probes.keys() == {"gate_up_proj", "down_proj"}
        assert copy.deepcopy(model)[0].experts.probes is None

"""Tests delayed scaling on one device: the rule, what is recorded when, and tensors that grow."""

import contextlib
import copy
import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from quaver import (
    CastConfig,
    DelayedScalingConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    cast_weights_once,
    convert_to_float8_training,
    float8_linear,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.kernels import cpu
from quaver.linear import scale_state
from quaver.linear.scale_state import ConversionScaleSlots
from tests.counting import CollectiveCounter, count_saved_bytes
from tests.library.conversion.delayed import (
    INF,
    NAN,
    Ffn,
    Net,
    copy_scales,
    find_report,
    make_delayed_config,
    make_linear,
    read_scale,
    step,
)
from tests.recipes import E4M3, PERSISTENT_RECIPES
from tests.reference import MAX
from tests.steps import assert_same
from tests.thinned import at_night, thinned

RECIPE = pytest.mark.parametrize("recipe", PERSISTENT_RECIPES)


def compute_transformer_engine_scales(amaxes, config, largest):
    """Return a tensor's scale after each step by TransformerEngine's rule in NumPy, and the last history.

    The scale starts at 0, where TransformerEngine's starts at 1. TransformerEngine does not skip amaxes that are not
    finite; here such a step changes nothing.
    """
    history, scale, scales = [0.0] * config.history_len, np.float32(0), []
    for amax in amaxes:
        if config.nonfinite_amax == "keep_scale" or math.isfinite(amax):
            history = [*history[1:], amax]
            expected = np.float32(np.max(history)) if config.scale_fn_name == "max" else np.float32(amax)
            with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
                fits = np.float32(largest) / expected / np.float32(2**config.margin)
            if expected > 0 and np.isfinite(expected):
                scale = np.float32(np.finfo(np.float32).max) if np.isinf(fits) else fits
        scales.append(float(scale))
    return scales, history


SEQUENCES = {
    "grows and falls": [1.0, 2.0, 4.0, 8.0, 3.0, 1.0, 0.5, 0.25, 0.1, 0.1, 0.1],
    "zero first": [0.0, 0.0, 3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 2.0],
    "inf": [1.5, INF, 0.7, 0.7, 0.7, 0.7, 0.7],
    "inf first": [INF, 0.7, 0.7, 0.7, 0.7, 0.7],
    "inf again": [1.0, 3.0, INF, 0.5, INF, 0.25, 0.25],
    "nan": [1.5, NAN, 0.7, 0.6, 0.5, 0.4, 0.3],
    "nan again": [1.0, 3.0, NAN, 0.5, NAN, 0.25, 0.25],
    "tiny": [1e-30, 1e-37, 1e-38, 1e-40, 1e-45],
    "huge": [3e38, 1e38, 1.0],
    "odd": [448 / 3, 0.3, 1 / 3, 7e-5],
}


def run_rule(amaxes, config, *, cast=None, power_of_2=False):
    linear_config = replace(Float8LinearConfig.from_recipe_name("delayed"), delayed_scaling_config=config)
    linear_config = replace(linear_config, round_scales_to_power_of_2=power_of_2)
    conversion_slots = ConversionScaleSlots([cast or linear_config.casts.input.row], linear_config, torch.device("cpu"))
    scales = []
    for amax in amaxes:
        conversion_slots.amax_buffer[0] = torch.tensor([amax, 0.0])
        conversion_slots.sync(None)
        scales.append(conversion_slots.quant_scale[0].item())
    return scales, conversion_slots.history[0].tolist()


@pytest.mark.parametrize(
    ("sequence", "scale_fn_name", "margin", "operand"),
    thinned(SEQUENCES, ("max", "most_recent"), (0, 3), ("input", "grad_output")),
)
def test_the_rule_is_transformer_engines(sequence, scale_fn_name, margin, operand):
    amaxes = SEQUENCES[sequence]
    cast = getattr(Float8LinearConfig.from_recipe_name("delayed").casts, operand).row
    for history_len, nonfinite_amax in itertools.product((1, 4), ("skip", "keep_scale")):
        config = DelayedScalingConfig(history_len, scale_fn_name, margin, nonfinite_amax=nonfinite_amax)
        scales, history = run_rule(amaxes, config, cast=cast)
        expected_scales, expected_history = compute_transformer_engine_scales(amaxes, config, MAX[cast.float8_dtype])
        assert scales == expected_scales
        np.testing.assert_array_equal(np.array(history, np.float32), np.array(expected_history, np.float32))


def test_headroom_and_powers_of_2_change_the_scale():
    amaxes = [1.0, 3.0, 0.1]
    plain, _ = run_rule(amaxes, DelayedScalingConfig())
    assert run_rule(amaxes, DelayedScalingConfig(headroom=2.0))[0] == [scale / 2 for scale in plain]
    rounded, _ = run_rule(amaxes, DelayedScalingConfig(), power_of_2=True)
    assert rounded == [2.0 ** math.floor(math.log2(scale)) for scale in plain]


@RECIPE
@pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_the_first_step_is_that_of_dynamic_scaling(recipe, hp_dtype, autocast):
    """Microbatches of the first step have the bits of dynamic scaling; the sync records the largest amax."""
    module = make_linear(recipe=recipe, dtype=hp_dtype, bias=True)
    dynamic = convert_to_float8_training(nn.Linear(64, 32, dtype=hp_dtype))
    dynamic.load_state_dict(module.state_dict())
    for factor in (1.0, 0.01, 100.0):
        input, grad_output = torch.randn(48, 64).to(hp_dtype) * factor, torch.randn(48, 32).to(hp_dtype) * factor
        results = step(module, input, grad_output, sync=False, autocast=autocast)
        assert results[0].dtype is (torch.bfloat16 if autocast else hp_dtype)
        assert_same(results, step(dynamic, input, grad_output, autocast=autocast))
    sync_float8_amax_and_scale_history(module)
    assert find_report(module, "input").amax == input.abs().max().item()
    assert read_scale(module, "input") == pytest.approx(448 / find_report(module, "input").amax)
    dynamic_operands = [tensor.is_dynamic for tensor in float8_scaling_state(module).report()]
    assert dynamic_operands == [True] * (3 - (recipe != "delayed"))


@pytest.mark.parametrize(
    ("options", "factors", "used_over_ideal"),
    [
        ({}, [1, 2, 4, 8, 16, 16, 16], [1, 2, 2, 2, 2, 1, 1]),  # growth saturates, until one step after it ends
        ({"headroom": 2.0}, [1, 2, 4, 8], [1, 1, 1, 1]),
        # A spike makes scales small for as long as it is remembered.
        ({"history_len": 5}, [1, 1e3] + [1] * 7, [1, 1e3] + [1e-3] * 5 + [1] * 2),
        ({"history_len": 5, "scale_fn_name": "most_recent"}, [1, 1e3] + [1] * 7, [1, 1e3, 1e-3] + [1] * 6),
    ],
)
def test_scales_follow_the_amaxes_one_step_late(options, factors, used_over_ideal):
    module, clean = make_linear(**options), torch.randn(64, 64)
    for factor, expected in zip(factors, used_over_ideal, strict=True):
        step(module, clean * factor)
        tensor = find_report(module, "input")
        assert tensor.used_over_ideal == pytest.approx(expected)
        assert tensor.saturated == int((clean.abs() * factor * tensor.quant_scale > 464).sum())
        assert (tensor.saturated > 0) == (expected > 464 / 448)


@pytest.mark.parametrize("bad", [INF, NAN])
def test_a_non_finite_input_reaches_the_output_and_not_the_scale(bad):
    module, clean = make_linear(), torch.randn(8, 64)
    step(module, clean)
    before = copy_scales(module)
    broken = clean.clone()
    broken[3, 5] = bad
    output, grad_input, grad_weight = step(module, broken)
    assert output[3].isnan().all()
    assert output[:3].isfinite().all()
    assert grad_weight[:, 5].isnan().all()
    assert find_report(module, "input").used_over_ideal == pytest.approx(bad, nan_ok=True)
    assert find_report(module, "input").saturated == 0
    for name in ("input.quant_scale", "input.amax_history"):
        assert torch.equal(copy_scales(module)[name], before[name])
    assert step(module, clean)[0].isfinite().all()


@RECIPE
@pytest.mark.parametrize("how", ["reentrant", "non-reentrant"])
def test_recomputation_is_bitwise_what_it_repeats_and_records_nothing_new(recipe, how):
    plain, recomputed = (
        convert_to_float8_training(Net(name), config=make_delayed_config(recipe)) for name in (None, how)
    )
    for seed in range(4):
        torch.manual_seed(seed)
        input = torch.randn(32, 64) * 2**seed
        assert_same(step(recomputed, input), step(plain, input))
        assert_same(copy_scales(recomputed), copy_scales(plain))
        assert float8_scaling_state(plain).report() == float8_scaling_state(recomputed).report()


def test_microbatches_and_repeated_calls_record_their_maximum():
    module = make_linear()
    inputs = [torch.randn(8, 64) * factor for factor in (1.0, 5.0, 0.1)]
    for order in itertools.permutations(inputs):
        for input in order:
            step(module, input, sync=False)
        sync_float8_amax_and_scale_history(module)
        assert find_report(module, "input").amax == max(input.abs().max().item() for input in inputs)
    twice, input = make_linear(64, 64), torch.randn(8, 64)
    middle = twice(input)
    twice(middle).sum().backward()
    sync_float8_amax_and_scale_history(twice)
    assert find_report(twice, "input").amax == max(input.abs().max().item(), middle.abs().max().item())


@RECIPE
def test_code_without_gradients_uses_the_scales_and_records_nothing(recipe):
    module, input = make_linear(recipe=recipe), torch.randn(8, 64)
    step(module, input)
    recorded_amax = module.scale_slots.conversion_slots.amax_buffer.clone()
    trained = module(input)
    module.zero_grad()
    module.scale_slots.conversion_slots.amax_buffer.copy_(recorded_amax)
    with torch.no_grad():
        assert torch.equal(module(input), trained)
        module(input * 100)
    with torch.inference_mode():
        assert torch.equal(module(input), trained)
    assert torch.equal(module.scale_slots.conversion_slots.amax_buffer, recorded_amax)


@pytest.mark.parametrize("reentrant", [None, True, False])
def test_scales_follow_a_module_in_eval_mode_that_takes_gradients(reentrant):
    """Covers a forgotten `train()`, a frozen layer in eval, and `eval()` between forward and recomputation."""
    trained, other = (make_linear(recipe="delayed") for _ in range(2))
    other.load_state_dict(trained.state_dict())
    other.requires_grad_(False)
    for factor in (1.0, 10.0, 100.0):
        input = (torch.randn(8, 64) * factor).requires_grad_()
        trained(input).square().sum().backward()
        other.train(reentrant is not None)
        output = other(input) if reentrant is None else checkpoint(other, input, use_reentrant=reentrant)
        other.eval()
        output.square().sum().backward()
        for module in (trained, other):
            sync_float8_amax_and_scale_history(module)
    assert_same(copy_scales(other), copy_scales(trained))


def test_a_module_that_did_not_run_keeps_its_history():
    model = convert_to_float8_training(
        nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)]), config=make_delayed_config()
    )
    for number in range(4):
        for index in (0, 1) if number == 1 else (0,):
            model[index](torch.randn(4, 32) * (number + 1)).sum().backward()
        if number == 2:
            before = copy_scales(model)
        sync_float8_amax_and_scale_history(model)
    after = copy_scales(model)
    for name in after:
        if name.startswith("1."):
            assert torch.equal(before[name], after[name])
        elif name.endswith("history"):
            assert before[name][-1] == after[name][-3]
    assert find_report(model, "1.input").amax == -1
    assert math.isnan(find_report(model, "1.input").used_over_ideal)
    assert find_report(model, "1.input").saturated == 0


INPUT, WEIGHT, OUTPUT = 16 * 64, 32 * 64, 16 * 32
"""Elements of the tensors whose reads are counted."""


def count_reads(module, steps=1, **options):
    """Return how many elements steps read, as the C extension counts them."""
    before = cpu.count_elements_read()
    for _ in range(steps):
        step(module, torch.randn(16, 64), torch.randn(16, 32), **options)
    return cpu.count_elements_read() - before


@pytest.mark.skipif(not cpu.HAS_EXTENSION, reason="counted by the C extension")
@pytest.mark.parametrize(
    ("options", "weight_reads"),
    [
        ({}, 2),  # in the forward and in the backward
        ({"recipe": "delayed_with_dynamic_weight"}, 3),
        ({"enable": {"keep_float8_weight_for_backward": True}}, 1),
    ],
)
def test_each_cast_reads_its_tensor_once_its_scale_is_known(options, weight_reads):
    module = make_linear(64, 32, **options)
    assert count_reads(module) == 2 * INPUT + (2 if weight_reads == 1 else 3) * WEIGHT + 2 * OUTPUT
    assert count_reads(module) == INPUT + weight_reads * WEIGHT + OUTPUT


@pytest.mark.skipif(not cpu.HAS_EXTENSION, reason="counted by the C extension")
def test_cast_weights_once_reads_a_weight_once():
    module = make_linear(64, 32)
    count_reads(module)
    before = cpu.count_elements_read()
    with cast_weights_once(module):
        count_reads(module, steps=3, sync=False)
    assert cpu.count_elements_read() - before == WEIGHT + 3 * (INPUT + OUTPUT)
    sync_float8_amax_and_scale_history(module)
    assert find_report(module, "weight").amax == module.weight.abs().max().item()


ENTRIES = {
    "training": lambda module: contextlib.nullcontext(),
    "eval": lambda module: contextlib.nullcontext(module.eval()),
    "no_grad": lambda module: torch.no_grad(),
    "inference_mode": lambda module: torch.inference_mode(),
}


@pytest.mark.parametrize(
    ("entry", "compiled"),
    [
        *((entry, False) for entry in ENTRIES),
        ("eval", True),
        *at_night((entry, True) for entry in ENTRIES if entry != "eval"),
    ],
)
def test_a_scope_records_what_trains_in_it_whatever_the_mode_at_its_entry(entry, compiled):
    """After an evaluation transformers' Trainer begins a step in eval mode."""
    torch.compiler.reset()
    module, input = make_linear(64, 32), torch.randn(16, 64)
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if compiled else module
    for factor, trains in ((1.0, True), (3.0, True), (5.0, False)):
        with torch.no_grad():
            module.weight.mul_(factor)
        with contextlib.ExitStack() as scope:
            with ENTRIES[entry](module):
                scope.enter_context(cast_weights_once(module))
            for mode in (False, trains):
                module.train(mode)
                with torch.set_grad_enabled(mode):
                    output = run(input)
                if mode:
                    output.sum().backward()
        sync_float8_amax_and_scale_history(module)
        history = copy_scales(module)["weight.amax_history"]
        assert (find_report(module, "weight").amax == module.weight.abs().max().item()) == trains
        assert (find_report(module, "weight").amax == -1) != trains
    assert (history > 0).sum() == 2


@pytest.mark.parametrize("options", [{}, {"scale_fn_name": "most_recent"}], ids=str)
def test_a_sync_takes_as_many_operations_for_many_linears_as_for_one(options):
    counts = []
    for linears in (1, 10, 100):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(linears)))
        convert_to_float8_training(model, config=make_delayed_config(**options))
        model(torch.randn(2, 16)).sum().backward()
        with CollectiveCounter() as counter:
            sync_float8_amax_and_scale_history(model)
        counts.append(counter.kernels.total())
    assert counts == [counts[0]] * 3
    assert counts[0] <= 46, counts


@pytest.mark.parametrize(
    ("names", "casts", "compiled"),
    [(("w1", "w3", "w2"), 1, False), (("w1", "w3", "w2"), 1, True), (("a", "b", "c"), 2, False)],
)
def test_siblings_that_read_one_input_cast_and_save_it_once(names, casts, compiled):
    model = Ffn(names)
    convert_to_float8_training(model, config=make_delayed_config())
    forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    input = torch.randn(16, 64)
    for _ in range(2):
        forward(input).sum().backward()
        sync_float8_amax_and_scale_history(model)
    before = cpu.count_elements_read() if cpu.HAS_EXTENSION else 0
    saved = count_saved_bytes(lambda: forward(input))
    if cpu.HAS_EXTENSION:  # the C extension counts
        assert cpu.count_elements_read() - before == casts * 16 * 64 + 16 * 96 + 3 * 64 * 96
    if not compiled:
        assert saved[E4M3] == casts * 16 * 64 + 16 * 96
    assert len(float8_scaling_state(model)) == 9 - (casts == 1)


@pytest.fixture
def few_forwards(monkeypatch):
    """Warn after 3 forwards without a sync."""
    monkeypatch.setattr(scale_state, "MAX_FORWARDS_WITHOUT_SYNC", 3)
    return 3


@pytest.mark.parametrize("several", [False, True])
def test_a_forgotten_sync_warns_once(several, few_forwards):
    model = copy.deepcopy(convert_to_float8_training(Net(), config=make_delayed_config())) if several else make_linear()
    for _ in range(2):
        for number in range(1, 4 * few_forwards):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                step(model, torch.randn(4, 64), sync=False)
            places = [(warning.category, warning.filename) for warning in caught]
            assert places == [(RuntimeWarning, step.__code__.co_filename)] * (number == few_forwards)
            assert all("3 forwards with gradients without sync_float8_amax_and_scale_hist" in str(w) for w in caught)
        sync_float8_amax_and_scale_history(model)


def test_steps_without_need_of_a_sync_do_not_warn(few_forwards):
    """Steps with a sync, compiled or not, evaluation, and models whose scales no sync changes do not warn."""
    module = make_linear()
    syncs = sync_float8_amax_and_scale_history, torch.compile(sync_float8_amax_and_scale_history, backend="aot_eager")
    static = replace(CastConfig(), scaling_type=ScalingType.STATIC, static_quant_scale=2.0)
    never = convert_to_float8_training(nn.Linear(64, 64), config=Float8LinearConfig(cast_config_input=static))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for sync in syncs * few_forwards:
            step(module, torch.randn(4, 64), sync=False)
            step(never, torch.randn(4, 64), sync=False)
            sync(module)
        with torch.no_grad():
            for _ in range(2 * few_forwards):
                module(torch.randn(4, 64))


def test_a_linear_without_a_state_says_what_to_do():
    linear = Float8Linear(8, 8, config=make_delayed_config())
    with pytest.raises(RuntimeError, match="give the model to convert_to_float8_training"):
        linear(torch.randn(2, 8))
    convert_to_float8_training(linear, config=make_delayed_config())
    linear(torch.randn(2, 8)).sum().backward()
    with pytest.raises(ValueError, match="use a Float8Linear"):
        float8_linear(torch.randn(2, 8), torch.randn(8, 8), config=make_delayed_config())


def test_a_model_without_persistent_scales_is_left_alone():
    model = convert_to_float8_training(nn.Linear(8, 8))
    sync_float8_amax_and_scale_history(model)
    with pytest.raises(ValueError, match="fp8_layers: expected Float8Linears, got Linear"):
        sync_float8_amax_and_scale_history(model, fp8_layers=[nn.Linear(8, 8)])
    with pytest.raises(TypeError, match="group: expected a ProcessGroup with this rank, got str"):
        sync_float8_amax_and_scale_history(model, group="x")
    assert len(float8_scaling_state(model)) == 0
    assert float8_scaling_state(model).state_dict() == {}

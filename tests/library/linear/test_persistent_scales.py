"""Tests persistent scales in copies, checkpoints, devices and a compiled sync, and static scales."""

import copy
import pickle
import warnings
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn

from quaver import (
    CastConfig,
    DelayedScalingConfig,
    Float8Linear,
    Float8LinearConfig,
    ScalingType,
    calibrate_float8_static_scales,
    convert_to_float8_training,
    convert_to_high_precision,
    float8_scaling_state,
    sync_float8_amax_and_scale_history,
)
from quaver.compat.delayed_buffers import load_delayed_buffers
from quaver.fsdp.shard import find_mesh_device
from quaver.linear.scale_state import ConversionScaleSlots
from quaver.runtime.devices import simulate_gpu
from tests.library.conversion.delayed import (
    INF,
    NAN,
    Ffn,
    Net,
    copy_scales,
    find_report,
    make_delayed_config,
    make_linear,
    make_old_checkpoint,
    read_scale,
    step,
)
from tests.reference import lowest_sqnr_db, reference_linear, sqnr_db
from tests.steps import assert_same, by_torch_save, compute_results
from tests.thinned import thinned

STATIC = CastConfig(scaling_type=ScalingType.STATIC)


def knows_all_scales(model):
    """Return whether all scales are known, and assert that the host's flags are those of the scales."""
    linear_slots = [module.scale_slots for module in model.modules() if isinstance(module, Float8Linear)]
    with simulate_gpu((9, 0)):
        on_gpu = copy.deepcopy(linear_slots)
    for slots, is_on_gpu in [*((slots, True) for slots in on_gpu), *((slots, False) for slots in linear_slots)]:
        for scale in filter(None, (*slots.recorded, *slots.unrecorded)):
            assert bool(scale.is_known) is bool(scale.quant_scale > 0)
            assert scale.is_known_to_compiler is (is_on_gpu and bool(scale.is_known))
    return all(
        all(slots.conversion_slots.is_known_to_compiler[slot] for slot in slots.slots if slot is not None)
        for slots in linear_slots
    )


@pytest.mark.parametrize("copy_model", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), by_torch_save])
def test_a_copy_has_a_separate_state_which_its_linears_share(copy_model):
    model = convert_to_float8_training(Net(), config=make_delayed_config())
    step(model, torch.randn(8, 64))
    copied = copy_model(model)
    before = copy_scales(model)
    assert_same(copy_scales(copied), before)
    assert_same(step(copied, torch.ones(8, 64)), step(copy.deepcopy(model), torch.ones(8, 64)))
    assert_same(before, copy_scales(model))
    (slots,) = {module.scale_slots.conversion_slots for module in copied.modules() if isinstance(module, Float8Linear)}
    assert slots is not model.layers[0].w1.scale_slots.conversion_slots
    assert copied.layers[0].w1.scale_slots.recorded.input is copied.layers[0].w3.scale_slots.recorded.input
    assert knows_all_scales(copied)
    assert [t.amax > 0 for t in float8_scaling_state(copied).report()] == [True] * 16


@pytest.mark.parametrize("operand", ["weight", "input"])
def test_an_infinity_reaches_both_matmuls(operand):
    """The backward casts the weight again, with the scale of the forward."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 16)), config=make_delayed_config())
    step(model, torch.randn(8, 32))
    input = torch.randn(8, 32, requires_grad=True)
    with torch.no_grad():
        (model[0].weight if operand == "weight" else input)[3, 5] = torch.inf
    output = model(input)
    output.sum().backward()
    assert output.isnan().any()
    assert (input if operand == "weight" else model[0].weight).grad.isnan().any()


def test_the_models_state_dict_is_that_of_linears_and_conversion_goes_back():
    plain = Net()
    model = convert_to_float8_training(copy.deepcopy(plain), config=make_delayed_config())
    step(model, torch.randn(8, 64))
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert not list(model.buffers())
    plain.load_state_dict(model.state_dict())
    back = convert_to_high_precision(model)
    assert len(float8_scaling_state(back)) == 0
    assert type(back.layers[0].w1) is nn.Linear
    assert not hasattr(back.layers[0].w1, "scale_slots")


def test_a_second_conversion_keeps_the_state_and_new_linears_get_another():
    model = convert_to_float8_training(
        Net(), config=make_delayed_config(), module_filter_fn=lambda _, name: "layers.0" in name
    )
    step(model, torch.randn(8, 64))
    before = copy_scales(model)
    convert_to_float8_training(model, config=make_delayed_config())
    assert_same({name: value for name, value in copy_scales(model).items() if name in before}, before)
    assert len(float8_scaling_state(model)) == 16
    step(model, torch.randn(8, 64))
    assert all(t.amax > 0 for t in float8_scaling_state(model).report())


def test_a_checkpoint_without_history_starts_cold_and_says_so(caplog):
    model = convert_to_float8_training(Net(), config=make_delayed_config())
    dynamic = convert_to_float8_training(Net())
    step(model, torch.randn(8, 64))
    state = float8_scaling_state(model)
    state.load_state_dict({name: value for name, value in copy_scales(model).items() if name.startswith("layers.0.w1")})
    assert caplog.messages == [
        "26 of 32 entries of persistent scales are not in the checkpoint: their tensors are scaled dynamically until "
        "the first sync (static scales must be calibrated)"
    ]
    assert read_scale(model, "layers.0.w1.input") > 0
    assert read_scale(model, "layers.1.w2.weight") == 0
    assert not knows_all_scales(model)
    state.load_state_dict({})
    assert_same(step(model, torch.ones(8, 64)), step(dynamic, torch.ones(8, 64)))
    caplog.clear()
    state.load_state_dict(copy_scales(model) | {"of another model": torch.zeros(3)})
    assert caplog.messages == [
        "1 entries of the checkpoint belong to no persistent scale of the model, and are not loaded: of another model"
    ]


def test_a_history_of_another_length_keeps_its_newest_entries():
    short, long = make_linear(history_len=3), make_linear(history_len=5)
    for factor in (1.0, 2.0, 3.0, 4.0, 5.0, 6.0):
        step(long, torch.full((2, 64), factor))
    float8_scaling_state(short).load_state_dict(copy_scales(long))
    assert copy_scales(short)["input.amax_history"].tolist() == [4.0, 5.0, 6.0]
    float8_scaling_state(long).load_state_dict(copy_scales(short))
    assert copy_scales(long)["input.amax_history"].tolist() == [0.0, 0.0, 4.0, 5.0, 6.0]


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        *((bad, "a tensor of 0 dims") for bad in (3.0, torch.zeros(2), "x")),
        *((torch.tensor(bad, dtype=torch.float64), "a finite scale in float32") for bad in (INF, NAN, 1e300)),
        *((torch.ones((), dtype=dtype), "floating point") for dtype in (torch.complex64, torch.bool)),
        (torch.empty((), device="meta"), "a tensor with values"),
    ],
    ids=str,
)
def test_a_bad_entry_is_refused_and_nothing_is_loaded(bad, expected):
    module = make_linear()
    step(module, torch.randn(2, 64))
    before = copy_scales(module)
    entries = {name: value * 2 for name, value in before.items()} | {"grad_output.quant_scale": bad}
    with pytest.raises(ValueError, match=f"grad_output.quant_scale: expected {expected}, got"):
        float8_scaling_state(module).load_state_dict(entries)
    for amax in (INF, NAN):
        with pytest.raises(ValueError, match="input.amax_history: expected finite amaxes in float32, got"):
            float8_scaling_state(module).load_state_dict(before | {"input.amax_history": torch.tensor([1.0, amax])})
    for no_state in ([], None):
        with pytest.raises(TypeError, match="state_dict: expected a mapping from names to tensors, got"):
            float8_scaling_state(module).load_state_dict(no_state)
    with pytest.raises(
        ValueError, match=r"expected names such as input.quant_scale, got model, float8; pass the entry"
    ):
        float8_scaling_state(module).load_state_dict({"model": {}, "float8": before})
    assert_same(before, copy_scales(module))


def test_an_infinite_amax_that_the_config_keeps_is_loaded():
    module = make_linear(nonfinite_amax="keep_scale")
    step(module, torch.full((2, 64), INF))
    saved = copy_scales(module)
    assert saved["input.amax_history"][-1] == INF
    float8_scaling_state(module).load_state_dict(saved)
    assert_same(saved, copy_scales(module))
    with pytest.raises(ValueError, match="input.amax_history: expected finite amaxes in float32"):
        float8_scaling_state(make_linear()).load_state_dict(saved)


def test_wrappers_do_not_change_names():
    model = convert_to_float8_training(nn.Sequential(Ffn()), config=make_delayed_config())
    names = float8_scaling_state(model).state_dict().keys()
    assert float8_scaling_state(torch.compile(model)).state_dict().keys() == names
    assert "0.w1.input.quant_scale" in names


def compiled_sync(module, input):
    step(module, input * 8, sync=False)
    torch.compile(sync_float8_amax_and_scale_history, fullgraph=True, backend="aot_eager")(module)


CHANGES = {
    "sync after growth": lambda module, input: step(module, input * 8),
    "compiled sync": compiled_sync,
    "load": lambda module, input: float8_scaling_state(module).load_state_dict(
        {name: value / 3 for name, value in copy_scales(module).items()}
    ),
    # What torch.distributed.checkpoint does.
    "copy into the views": lambda module, input: float8_scaling_state(module).state_dict()["input.quant_scale"].div_(3),
    "reset": lambda module, input: float8_scaling_state(module).reset(),
    "load of torchao's": lambda module, input: load_delayed_buffers(
        module, make_old_checkpoint(module, {"input": [1.0, 20.0], "weight": [0.5], "grad_output": [1.0]})
    ),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_reused_tensor_is_cast_with_the_current_scale(change):
    module, input = make_linear(), torch.randn(16, 64)
    step(module, input * 1.7)
    before = module(input)
    change(module, input)
    assert knows_all_scales(module) is (change is not CHANGES["reset"])
    after = module(input)
    assert torch.equal(after, module(input.clone()))
    assert not torch.equal(after, before)


def test_a_calibration_changes_the_cast_of_a_tensor_that_is_used_again():
    module, input = convert_to_float8_training(nn.Linear(64, 32), config=make_static_config()), torch.randn(16, 64)
    for factor in (1.7, 5.0):
        with calibrate_float8_static_scales(module):
            module(input).sum().backward()
            assert not knows_all_scales(module)
            module(input * factor).sum().backward()
        assert knows_all_scales(module)
        assert torch.equal(module(input), module(input.clone()))


def test_scales_of_unused_slots_are_read_on_the_host_rarely(monkeypatch):
    model = convert_to_float8_training(Net(), config=make_delayed_config())
    read = mock.Mock(side_effect=ConversionScaleSlots.refresh_known)
    monkeypatch.setattr(ConversionScaleSlots, "refresh_known", lambda conversion_slots: read(conversion_slots))
    counts = []
    for _ in range(10):
        step(model.layers[0], torch.randn(8, 64), sync=False)
        sync_float8_amax_and_scale_history(model)
        counts.append(read.call_count)
    assert counts == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4]
    assert knows_all_scales(model.layers[0])
    assert not knows_all_scales(model)
    float8_scaling_state(model).load_state_dict(copy_scales(model))
    step(model, torch.randn(8, 64))
    assert read.call_count == counts[-1] + 2  # the load, and the first sync after it
    assert knows_all_scales(model)


def test_gpu_code_compiles_twice_and_shows_a_wrongly_known_scale():
    model = make_linear()
    twin, state = copy.deepcopy(model), float8_scaling_state(model)
    torch._dynamo.utils.counters.clear()
    with simulate_gpu((8, 0)):  # casts and multiplies in PyTorch
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            for factor in (1.0, 3.0, 2.0):
                input = torch.randn(8, 64) * factor
                results = compute_results(model, input, grad_output=1.0, call=compiled)
                sync_float8_amax_and_scale_history(model)
                assert_same(results, step(twin, input))
                assert_same(copy_scales(model), copy_scales(twin))
            state.reset()
            float8_scaling_state(twin).reset()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
        step(compiled, input)
        for view in state.state_dict().values():
            view.zero_()  # and no load that says so
        output, *gradients = compute_results(model, input, grad_output=1.0, call=compiled)
        assert not any(tensor.isfinite().any() for tensor in (output, *gradients))


@pytest.mark.parametrize(
    ("options", "given_layers"),
    [({}, True), ({"scale_fn_name": "most_recent", "nonfinite_amax": "keep_scale", "margin": 1}, False)],
)
def test_a_compiled_sync_is_one_graph_with_the_bits_of_eager(options, given_layers):
    model = convert_to_float8_training(Net(), config=make_delayed_config(**options))
    twin = copy.deepcopy(model)
    sync = torch.compile(
        sync_float8_amax_and_scale_history, fullgraph=True, backend="inductor" if given_layers else "aot_eager"
    )
    layers = [[module for module in twin.modules() if isinstance(module, Float8Linear)]] if given_layers else []
    torch._dynamo.utils.counters.clear()
    for factor in (1.0, 10.0, 100.0, float("inf"), 1.0):
        input = torch.randn(8, 64) * factor
        step(model, input)
        step(twin, input, sync=False)
        sync(twin, *layers)
        torch.testing.assert_close(copy_scales(model), copy_scales(twin), rtol=0, atol=0, equal_nan=True)
        assert repr(float8_scaling_state(model).report()) == repr(float8_scaling_state(twin).report())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_compiled_sync_tells_ranks_what_is_known_and_counts_as_a_sync():
    module = make_linear()
    module.scale_slots.conversion_slots.ranks_read_is_known = True
    sync = torch.compile(sync_float8_amax_and_scale_history, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(3):
            step(module, torch.randn(4, 64), sync=False)
            sync(module)
            optimizer.step()
    assert module.scale_slots.conversion_slots.is_known.all()


def test_a_negative_scale_of_an_earlier_version_is_unknown():
    """It meant: scale this tensor dynamically for one step, and then by its history."""
    module, twin, input = make_linear(), make_linear(), torch.randn(8, 64)
    twin.load_state_dict(module.state_dict())
    step(module, input)
    step(twin, input)
    saved = copy_scales(module)
    float8_scaling_state(module).load_state_dict(saved | {"input.quant_scale": -saved["input.quant_scale"]})
    assert read_scale(module, "input") == 0
    step(module, input * 3)
    step(twin, input * 3)
    assert find_report(module, "input").is_dynamic
    assert find_report(module, "input").saturated == 0 < find_report(twin, "input").saturated
    assert_same(copy_scales(module), copy_scales(twin))
    for view in float8_scaling_state(module).state_dict().values():  # torch.distributed.checkpoint loads into these
        if view.dim() == 0:
            view.neg_()
    step(module, input * 3)
    assert find_report(module, "input").is_dynamic
    assert read_scale(module, "input") > 0


def test_a_state_that_is_made_or_moved_in_inference_mode_can_train():
    module = nn.Linear(64, 32, bias=False)
    with torch.inference_mode():
        convert_to_float8_training(module, config=make_delayed_config())
        module.scale_slots.conversion_slots.to(torch.device("cpu"))
    step(module, torch.randn(4, 64))
    step(module, torch.randn(4, 64))
    assert read_scale(module, "input") > 0


def test_the_state_follows_the_linears_to_their_device():
    with torch.device("meta"):
        module = nn.Linear(8, 8)
    convert_to_float8_training(module, config=make_delayed_config())
    conversion_slots = module.scale_slots.conversion_slots
    assert conversion_slots.device == torch.device("cpu")
    module.to_empty(device="cpu")
    nn.init.ones_(module.weight)
    nn.init.ones_(module.bias)
    step(module, torch.ones(2, 8))
    assert read_scale(module, "input") == 448
    moved = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(conversion_slots), "to", lambda self, device: moved.append(device))
        module.scale_slots.move_to(torch.device("cuda"))
        module.scale_slots.move_to(torch.device("meta"))
        module.scale_slots.move_to(torch.device("cpu"))
    assert moved == [torch.device("cuda", 0)]


@pytest.mark.parametrize("current", [0, 1])
def test_the_state_moves_to_another_device_only(current, monkeypatch):
    """FSDP2's meshes have a device type without an index, which is that of the current device."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    mesh_device = find_mesh_device(SimpleNamespace(device_type="cuda"))
    assert mesh_device == torch.device("cuda", current)
    moved = []
    monkeypatch.setattr(ConversionScaleSlots, "device", torch.device("cuda", 0))
    monkeypatch.setattr(ConversionScaleSlots, "to", lambda self, device: moved.append(device))
    module = make_linear()
    for device in (torch.device("cuda"), mesh_device):
        module.scale_slots.move_and_get_scales(device)
    assert moved == ([mesh_device] * 2 if current else [])


def test_training_on_two_devices_is_refused(monkeypatch):
    """A backward on the first device would record into a buffer that the slots have left."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config=make_delayed_config())
    conversion_slots, cuda, moved = model[1].scale_slots.conversion_slots, torch.device("cuda", 0), []
    monkeypatch.setattr(ConversionScaleSlots, "to", lambda self, device: moved.append(device))
    model[0](torch.ones(2, 8)).sum().backward()
    model[1].scale_slots.move_and_get_scales(cuda)
    assert moved == [cuda]
    with pytest.raises(NotImplementedError, match="trained on cpu and cuda:0: convert the part of each device"):
        model[1].scale_slots.begin_forward_and_get_scales(cuda, None)
    conversion_slots.sync(None)
    model[1].scale_slots.begin_forward_and_get_scales(cuda, None)
    assert moved == [cuda, cuda]


def test_views_follow_a_move():
    module = make_linear()
    before = module.scale_slots.recorded.input
    module.scale_slots.conversion_slots.to(torch.device("meta"))
    moved = module.scale_slots.recorded.input
    assert moved.quant_scale.is_meta
    assert moved.is_known is not None
    assert not moved.is_known.is_meta
    assert not before.quant_scale.is_meta


def test_a_dtype_change_of_the_model_leaves_the_scales_in_float32():
    module = make_linear().to(torch.bfloat16)
    step(module, torch.randn(4, 64).bfloat16())
    assert {value.dtype for value in copy_scales(module).values()} == {torch.float32}


OPERANDS = ("input", "weight", "grad_output")
CAST_OPTIONS = tuple(f"cast_config_{operand}" for operand in OPERANDS)


def make_static_config(**scales):
    casts = (CastConfig(ScalingType.STATIC, static_quant_scale=scales.get(operand)) for operand in OPERANDS)
    return Float8LinearConfig(**dict(zip(CAST_OPTIONS, casts, strict=True)))


def test_given_static_scales_are_used_and_stay():
    module = convert_to_float8_training(
        nn.Linear(64, 32, bias=False), config=make_static_config(input=100.0, weight=2000.0, grad_output=5000.0)
    )
    input = torch.randn(16, 64)
    for _ in range(2):
        step(module, input)
    assert {t.quant_scale for t in float8_scaling_state(module).report()} == {100.0, 2000.0, 5000.0}
    assert find_report(module, "input").used_over_ideal == pytest.approx(100 * input.abs().max().item() / 448)
    assert copy_scales(module) == {}  # a checkpoint cannot overrule the config
    float8_scaling_state(module).load_state_dict({"input.quant_scale": torch.tensor(1.0)})
    float8_scaling_state(module).reset()
    assert module.scale_slots.conversion_slots.quant_scale.tolist() == [100.0, 2000.0, 5000.0]


def test_calibration_measures_the_largest_amax_of_its_batches():
    model = convert_to_float8_training(Net(), config=make_static_config())
    with pytest.raises(RuntimeError, match="static scales that were never measured"):
        model(torch.randn(4, 64))
    batches = [torch.randn(8, 64) * factor for factor in (1.0, 7.0, 2.0)]
    with calibrate_float8_static_scales(model):
        for batch in batches:
            model.eval()(batch).sum().backward()
    model.train()
    amax = max(nn.functional.normalize(batch, dim=-1).abs().max().item() for batch in batches)
    assert read_scale(model, "layers.0.w1.input") == pytest.approx(448 / amax)
    assert read_scale(model, "layers.1.w2.weight") == pytest.approx(448 / model.layers[1].w2.weight.abs().max().item())
    before = copy_scales(model)
    outputs = [step(model, batches[1])[0] for _ in range(2)]
    assert torch.equal(*outputs)
    assert_same(before, copy_scales(model))
    dynamic = convert_to_float8_training(Net())
    casts = 2 * 2 * sum(isinstance(module, nn.Linear) for module in model.modules())  # two operands, by two scales
    assert sqnr_db(step(dynamic, batches[1])[0], outputs[0]) > lowest_sqnr_db(*[3] * casts)
    other = convert_to_float8_training(Net(), config=make_static_config())
    float8_scaling_state(other).load_state_dict(before)
    assert torch.equal(step(other, batches[1])[0], outputs[0])


def test_a_calibration_that_saw_too_little_changes_nothing_and_says_what():
    module = convert_to_float8_training(nn.Linear(8, 8), config=make_static_config())

    def calibrate(run):
        with calibrate_float8_static_scales(module):
            run()

    with pytest.raises(RuntimeError, match=r"grad_output was not cast. .*; no scale was changed"):
        calibrate(lambda: module(torch.randn(2, 8)))
    with pytest.raises(RuntimeError, match=r"\binput \(and 1 more\) had an amax of 0.0; no scale"):
        calibrate(lambda: module(torch.zeros(2, 8)).mul(0).sum().backward())
    with pytest.raises(RuntimeError, match="input had an amax of inf"):
        calibrate(lambda: module(torch.full((2, 8), torch.inf)).sum().backward())
    with pytest.raises(RuntimeError, match=r"would discard the amaxes .*: call it after that block"):
        calibrate(lambda: sync_float8_amax_and_scale_history(module))
    with pytest.raises(RuntimeError, match="would discard the loaded scales: load them after that block"):
        calibrate(float8_scaling_state(module).reset)
    with pytest.raises(RuntimeError, match="never measured"):
        module(torch.randn(2, 8))
    with pytest.raises(ZeroDivisionError):
        calibrate(lambda: 1 / 0)
    with pytest.raises(RuntimeError, match="static_scales is already open for this model; leave it before you enter"):
        calibrate(lambda: calibrate(lambda: None))
    with pytest.raises(ValueError, match="nothing to calibrate"), calibrate_float8_static_scales(make_linear()):
        pass


def test_a_calibration_of_an_inner_module_leaves_its_siblings_unchanged():
    model = convert_to_float8_training(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), config=make_static_config())
    with calibrate_float8_static_scales(model):
        step(model, torch.ones(2, 8), sync=False)
    before = copy_scales(model)
    with calibrate_float8_static_scales(model[0]):
        step(model[0], torch.full((2, 8), 4.0), sync=False)
    after = copy_scales(model)
    assert after.pop("0.input.quant_scale") == 448 / 4 < before["0.input.quant_scale"]
    assert_same([after[name] for name in after if name[0] == "1"], [before[name] for name in before if name[0] == "1"])
    model(torch.ones(2, 8))


def test_calibration_leaves_delayed_scales_unchanged():
    """Nor does it change what was recorded for them since the last sync."""
    config = replace(
        make_delayed_config(), cast_config_weight=STATIC, delayed_scaling_config=DelayedScalingConfig(headroom=2.0)
    )
    module = convert_to_float8_training(nn.Linear(64, 32, bias=False), config=config)
    with calibrate_float8_static_scales(module):
        step(module, torch.randn(4, 64), sync=False)
    recorded_amax = module.scale_slots.conversion_slots.amax_buffer.fill_(2.0).clone()
    with calibrate_float8_static_scales(module):
        step(module, torch.randn(4, 64), sync=False)
    assert torch.equal(module.scale_slots.conversion_slots.amax_buffer, recorded_amax)
    module.scale_slots.conversion_slots.reset_amax_buffer()
    assert read_scale(module, "weight") == pytest.approx(448 / 2 / module.weight.abs().max().item())
    assert read_scale(module, "input") == 0
    step(module, torch.full((4, 64), 3.0))
    assert read_scale(module, "input") == pytest.approx(448 / 6)
    assert "weight.amax_history" not in copy_scales(module)


SCALING = {"dynamic": CastConfig(), "delayed": CastConfig(ScalingType.DELAYED), "static": STATIC}


@pytest.mark.parametrize(
    ("input", "weight", "grad_output", "hp_grad_weight"), thinned(SCALING, SCALING, SCALING, (False, True))
)
def test_every_operand_may_be_scaled_in_its_own_way(input, weight, grad_output, hp_grad_weight):
    kinds = [input, weight, grad_output]
    options = {option: SCALING[kind] for option, kind in zip(CAST_OPTIONS, kinds, strict=True)}
    if hp_grad_weight:
        hp = CastConfig(ScalingType.DISABLED)
        options |= {"cast_config_input_for_grad_weight": hp, "cast_config_grad_output_for_grad_weight": hp}
    module = convert_to_float8_training(nn.Linear(256, 256, bias=False), config=Float8LinearConfig(**options))
    if "static" in kinds:
        with calibrate_float8_static_scales(module):
            step(module, torch.randn(256, 256), torch.randn(256, 256), sync=False)
    # Casts to e4m3 and e5m2 have 3 and 2 mantissa bits; a sum in float32 rounds 256 times to 23.
    decibels = (
        lowest_sqnr_db(3, 3),
        lowest_sqnr_db(2, 3),
        lowest_sqnr_db(*[23] * 256) if hp_grad_weight else lowest_sqnr_db(2, 3),
    )
    for _ in range(2):
        input, grad_output = torch.randn(256, 256), torch.randn(256, 256)
        results = step(module, input, grad_output)
        expected = reference_linear(input, module.weight.detach(), grad_output)
        for result, reference, floor in zip(results, expected, decibels, strict=True):
            assert sqnr_db(reference, result) > floor
    assert len(float8_scaling_state(module)) == 3 - kinds.count("dynamic")
    assert sum(name.endswith("history") for name in copy_scales(module)) == kinds.count("delayed")

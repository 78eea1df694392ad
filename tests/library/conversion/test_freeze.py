"""Tests frozen float8 weights: one byte per element, both matmuls on the same codes, and a usable parameter."""

import copy
import itertools
import math
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.checkpoint import checkpoint

from quaver import (
    Float8Linear,
    FrozenFloat8Experts,
    FrozenFloat8Linear,
    cast_weights_once,
    conversion_report,
    convert_to_float8_training,
    convert_to_high_precision,
    freeze_to_float8,
    use_float8_primary_weights,
)
from quaver.conversion.freeze import make_blockwise_config, store_float8_weight
from quaver.experts.function import get_frozen_operands, multiply_by_weight
from quaver.linear import gemm
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.gemm import float8_mm
from quaver.linear.quantize import Quantizer
from quaver.recipes.config import CastConfig, Float8LinearConfig, ScaleCalculationMode, ScalingGranularity
from quaver.recipes.scaling import dynamic_cast_blocks
from tests.mixture import make_mixture
from tests.recipes import E4M3
from tests.reference import BACKEND, lowest_sqnr_db, sqnr_db
from tests.steps import assert_same, by_torch_save, compute_results, draw
from tests.thinned import at_night
from tests.virtual_gpu import virtual_gpu

CONFIGS = ("blockwise", "mxfp8", "tensorwise", "rowwise")
STORED = {"blockwise": "blockwise 128 x 128", "mxfp8": "blockwise 32 x 32"}
CONFIG = pytest.mark.parametrize("config", CONFIGS)
TRACED = pytest.mark.parametrize("config", ["blockwise", *at_night((config,) for config in CONFIGS[1:])])


class Wide(nn.Linear):
    """A subclass of nn.Linear."""


def build_model(dtype=torch.bfloat16):
    """Return linears with ragged blocks of unlike magnitude, and the same weights on every call."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 200), nn.GELU(), Wide(200, 130, bias=False))
    with torch.no_grad():
        for linear in (net[0], net[2]):
            linear.weight.mul_(torch.logspace(-1, 1, linear.out_features).view(-1, 1))
    return net.to(dtype)


def draw_batch(dtype=torch.bfloat16):
    return draw(2, 32, 300, seed=1).to(dtype).requires_grad_()


def step(net, input, call=None):
    """Return the output and the gradient of the input."""
    return compute_results(net, input, call=call)[:2]


def get_codes(net):
    return [(linear.weight.data_fp8.view(torch.uint8), linear.weight.dequant_scale) for linear in (net[0], net[2])]


@CONFIG
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_both_matmuls_read_the_codes_that_are_stored(config, dtype):
    linear = freeze_to_float8(build_model(dtype)[0], config=config)
    casts = linear.config.casts.grad_output
    input = draw_batch(dtype)
    output, grad_input, *_ = compute_results(linear, input, grad_output=draw(2, 32, 200, seed=2).to(dtype))
    codes, scale = linear.weight.data_fp8, linear.weight.dequant_scale
    power_of_2 = linear.config.round_scales_to_power_of_2
    quantizer = Quantizer(linear.config.casts.input, dtype)
    input_fp8, input_scale, *_ = quantizer(input.detach(), row=True, column=False).row
    how = {"out_dtype": dtype, "scales_are_powers_of_2": power_of_2}
    scale_t = scale if scale.dim() == 0 else scale.t()
    expected = float8_mm(input_fp8, codes.t(), input_scale, scale_t, bias=linear.bias, **how)
    assert output.flatten(0, 1).equal(expected)
    grad_output = draw(*output.shape, seed=2).to(output).flatten(0, 1)
    grad_fp8, grad_scale, *_ = Quantizer(casts, dtype)(grad_output, row=True, column=False).row
    assert grad_input.flatten(0, 1).equal(float8_mm(grad_fp8, codes, grad_scale, scale, **how))


@CONFIG
def test_a_frozen_forward_equals_float8_training(config):
    config = make_blockwise_config() if config == "blockwise" else config
    frozen = freeze_to_float8(build_model(), config=config)
    training = convert_to_float8_training(build_model(), config=config)
    (output, grad_input), (expected, expected_grad) = step(frozen, draw_batch()), step(training, draw_batch())
    assert output.equal(expected)
    if config == "rowwise":  # training casts the columns of each of the two weights for grad_input
        assert sqnr_db(expected_grad, grad_input) > lowest_sqnr_db(*[3, 3] * 2)
    else:
        assert grad_input.equal(expected_grad)


def test_power_of_2_scales_cost_nothing():
    hp = build_model(torch.float32)[0].weight.detach()
    configs = [make_blockwise_config(power_of_2=power_of_2) for power_of_2 in (True, False)]
    linears = [freeze_to_float8(build_model(torch.float32)[0], config=config) for config in configs]
    power_of_2, float32 = (sqnr_db(hp, linear.weight.to_high_precision()) for linear in linears)
    assert linears[0].weight.has_power_of_2_scales
    assert power_of_2 > float32 - 0.5


def test_blocks_of_zeros_are_stored_with_the_smallest_scale_of_e8m0():
    linear = nn.Linear(64, 64, bias=False)
    linear.weight.data[:32, :32] = 0
    hp = linear.weight.detach().clone()
    frozen = freeze_to_float8(linear, config="mxfp8")
    assert frozen.weight.dequant_scale[0, 0] == 2.0**-127
    assert frozen.weight.has_power_of_2_scales
    assert not frozen.weight.to_high_precision()[:32, :32].any()
    frozen.weight.data.copy_(2 * hp)
    assert frozen.weight.dequant_scale.shape == (2, 2)
    assert sqnr_db(2 * hp, frozen.weight.to_high_precision()) > 31


@CONFIG
def test_a_frozen_weight_takes_a_byte_per_element_at_rest_and_in_the_backward(config):
    linear = nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)
    before = linear.weight.nbytes
    freeze_to_float8(linear, config=config)
    weight = linear.weight
    assert weight.nbytes <= 0.51 * before
    assert weight.nelement() * weight.element_size() == weight.data_fp8.nbytes == before // 2
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        linear(torch.randn(4, 1024, dtype=torch.bfloat16, requires_grad=True))
    assert {t.data_ptr() for t in saved} == {weight.data_fp8.data_ptr(), weight.dequant_scale.data_ptr()}


@BACKEND
@TRACED
def test_compiled_and_checkpointed_code_computes_the_same(config, backend):
    net = freeze_to_float8(build_model(), config=config)
    compiled = torch.compile(copy.deepcopy(net), fullgraph=True, backend=backend)
    expected = step(net, draw_batch())
    for call in (compiled, lambda input: checkpoint(net, input, use_reentrant=False)):
        assert_same(step(net, draw_batch(), call), expected)


@CONFIG
def test_a_frozen_weight_presents_a_high_precision_parameter(config):
    net = freeze_to_float8(build_model(), config=config)
    weight = net[0].weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.dtype, tuple(weight.shape), weight.requires_grad) == (torch.bfloat16, (200, 300), False)
    assert weight.data_fp8.dtype is E4M3
    assert net[0].bias.requires_grad
    assert STORED.get(config, config) in repr(weight)
    assert torch.equal(weight + 0, weight.to_high_precision())
    with pytest.raises(RuntimeError, match="cannot require a gradient"):
        net.requires_grad_(True)
    with pytest.raises(RuntimeError, match="cannot require a gradient"):
        weight.requires_grad = True
    with pytest.raises(RuntimeError, match="cannot be written to: its scales are those of other rows"):
        weight[:8].data = torch.zeros(8, 300, dtype=weight.dtype)
    for view in (lambda w: w.t(), lambda w: w[0], lambda w: w[:, :5], lambda w: w.view(100, 600)):
        with pytest.raises(NotImplementedError, match="no views in high precision"):
            view(weight)
    with cast_weights_once(net):
        net(draw_batch())


@CONFIG
def test_copies_and_moves_keep_the_codes(config):
    net = freeze_to_float8(build_model(), config=config)
    expected = net(draw_batch())
    for other in (copy.deepcopy(net), by_torch_save(net)):  # torch's float8 tensors do not pickle otherwise
        assert type(other[2]) is type(net[2])
        assert isinstance(other[2].weight, nn.Parameter)
        assert other[0].weight.data_fp8.data_ptr() != net[0].weight.data_fp8.data_ptr()
        assert other(draw_batch()).equal(expected)
    as_float32 = copy.deepcopy(net).to(torch.float32)
    assert as_float32[0].weight.dtype is torch.float32
    assert_same(get_codes(as_float32), get_codes(net))
    assert as_float32.to(torch.bfloat16)(draw_batch()).equal(expected)
    on_meta = copy.deepcopy(net).to("meta")
    assert on_meta[0].weight.data_fp8.is_meta
    assert on_meta[0].weight.dequant_scale.is_meta
    assert type(on_meta.to_empty(device="cpu")[0].weight) is FrozenFloat8Weight


def freeze_other_model(config):
    other = build_model()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-3)
    return freeze_to_float8(other, config=config)


@CONFIG
@pytest.mark.parametrize("assign", [False, True])
def test_state_dicts_hold_high_precision_for_others_and_codes_for_frozen_models(config, assign):
    net = freeze_to_float8(build_model(), config=config)
    expected, state = net(draw_batch()), net.state_dict()
    assert list(state) == list(build_model().state_dict())
    assert state["0.weight"].dtype is torch.bfloat16
    assert state["0.weight"].data_fp8 is net[0].weight.data_fp8  # until someone asks for the memory
    plain = build_model()
    plain.load_state_dict(state)
    assert_same(plain.state_dict(), convert_to_high_precision(copy.deepcopy(net)).state_dict())
    assert net(draw_batch()).equal(expected)
    for duplicate in (by_torch_save(state, weights_only=True), copy.deepcopy(state)):
        other = freeze_other_model(config)
        other.load_state_dict(duplicate, assign=assign)
        assert type(other[0].weight) is FrozenFloat8Weight
        assert_same(get_codes(other), get_codes(net))
    other.load_state_dict(build_model().state_dict(), assign=assign)  # in high precision: quantized
    assert type(other[0].weight) is FrozenFloat8Weight
    assert other(draw_batch()).equal(expected)


@CONFIG
def test_the_memory_of_a_state_has_values_in_high_precision(config, tmp_path):
    """safetensors reads `data_ptr()`; a model that loads the file has the same codes."""
    net = freeze_to_float8(build_model(), config=config)
    expected = convert_to_high_precision(copy.deepcopy(net)).state_dict()
    save_file(net.state_dict(), tmp_path / "x.safetensors")
    saved = load_file(tmp_path / "x.safetensors")
    assert_same(saved, expected)
    loading = freeze_to_float8(build_model(), config=config)
    loading.load_state_dict(saved)
    assert_same(get_codes(loading), get_codes(net))
    as_float32 = net.float()
    plain = convert_to_high_precision(copy.deepcopy(as_float32))[0].weight.detach()
    for read in (lambda x: x.view(-1)[5:], lambda x: x[3], lambda x: x.t(), lambda x: x * 2, lambda x: x.numpy()):
        assert_same(torch.as_tensor(read(as_float32.state_dict()["0.weight"])), torch.as_tensor(read(plain)))


@CONFIG
def test_a_write_to_a_state_reaches_the_model(config):
    """EMA and swaps of weights do so: `for name, value in model.state_dict().items(): value.copy_(...)`."""
    net, other = freeze_to_float8(build_model(), config=config), freeze_other_model(config)
    for source, target, views_first in ((net, other, False), (other, net, False), (other, net, True)):
        target = copy.deepcopy(target)
        for name, value in target.state_dict().items():
            if views_first:
                value.view(-1)[0].item()
            value.copy_(source.state_dict()[name] * 1)
        source, target = (convert_to_high_precision(copy.deepcopy(model)) for model in (source, target))
        assert_same(target.state_dict(), source.state_dict())


def put_another_recipe(state):
    state |= freeze_to_float8(build_model(), config="tensorwise").state_dict()


def put_float32_scales(state):
    state |= freeze_to_float8(build_model(), config=make_blockwise_config(power_of_2=False)).state_dict()


def put_nan(state):
    state["0.weight"].data_fp8.view(torch.uint8)[3, 4] = 0x7F


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.update({"0.weight": s["0.weight"].data_fp8}), "in high precision, .* got torch.float8_e4m3fn"),
        (lambda s: s.update({"0.weight": torch.ones(200, 299)}), r"expected \[200, 300\] in .*, got torch.float32"),
        (lambda s: s.update({"0.weight": s["0.weight"][:5]}), "size mismatch for 0.weight"),
        (lambda s: s.pop("0.weight"), "Missing key.*0.weight"),
        (lambda s: s["0.weight"].dequant_scale[1, 2].fill_(torch.nan), "expected finite dequant_scales above 0"),
        (put_another_recipe, "expected blockwise 128 x 128 torch.float8_e4m3fn codes, got FrozenFloat8Weight"),
        (put_float32_scales, "expected scales that are powers of two"),
        (put_nan, "expected finite codes, got NaN or inf"),
    ],
)
@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_frozen_states_that_does_not_fit_is_refused(change, message, assign):
    net = freeze_to_float8(build_model())
    before, state = net(draw_batch()), copy.deepcopy(net.state_dict())
    change(state)
    with pytest.raises(RuntimeError, match=message):
        net.load_state_dict(state, assign=assign)
    assert net[0].weight.granularity == "blockwise 128 x 128"
    assert net(draw_batch()).equal(before)


WRITES_OF_NAN = {
    "copy_": lambda net, weight, bad: weight.copy_(bad),
    "fill_": lambda net, weight, bad: weight.fill_(torch.inf),
    "masked": lambda net, weight, bad: weight.masked_fill_(torch.isnan(bad), torch.nan),
    "merge": lambda net, weight, bad: weight.data.add_(bad),
    "data": lambda net, weight, bad: setattr(weight, "data", bad),
    "foreach": lambda net, weight, bad: torch._foreach_copy_([weight], [bad]),
    "out": lambda net, weight, bad: torch.mul(bad, 2, out=weight),
    "state": lambda net, weight, bad: net.state_dict()["0.weight"].copy_(bad),
    "load": lambda net, weight, bad: net.load_state_dict({**net.state_dict(), "0.weight": bad}),
}


@CONFIG
@pytest.mark.parametrize("way", WRITES_OF_NAN)
def test_nan_and_inf_are_not_written(config, way):
    """One of them would make all values that share its scale NaN."""
    net = freeze_to_float8(build_model(), config=config)
    before, weight = net(draw_batch()), net[0].weight
    bad = weight.to_high_precision().clone()
    bad[3, 4] = torch.nan
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError), match=r"expected finite values for a frozen"):
        WRITES_OF_NAN[way](net, weight, bad)
    assert weight.requantized_sqnr_db is None
    assert net(draw_batch()).equal(before)


@CONFIG
def test_a_slice_of_a_frozen_weight_raises_with_the_remedy(config):
    weight = freeze_to_float8(build_model(), config=config)[0].weight
    with pytest.raises(RuntimeError, match=r"\(a slice, .* slice weight.to_high_precision\(\)"):
        weight[:2] + 0
    assert weight.to_high_precision()[:2].shape == (2, 300)


@CONFIG
def test_a_write_is_quantized_again_and_reported(config):
    net = freeze_to_float8(build_model(), config=config)
    linear = net[0]
    before = get_codes(copy.deepcopy(net))
    with torch.no_grad():  # the same values change nothing
        linear.weight.copy_(linear.weight.to_high_precision())
        linear.weight.data = linear.weight.data
    assert_same(get_codes(net), before)
    assert linear.weight.requantized_sqnr_db is None
    delta = 0.02 * torch.randn(200, 300)
    merged, delta = linear.weight.to_high_precision().float() + delta, delta.bfloat16()
    linear.weight.data += delta
    measured = sqnr_db(merged, linear.weight.to_high_precision())
    assert linear.weight.requantized_sqnr_db == pytest.approx(measured, abs=0.2)
    assert measured > 28  # the noise of one cast
    assert f"at {linear.weight.requantized_sqnr_db:.1f} dB SQNR" in conversion_report(net).layers[0].reason
    if config != "tensorwise":
        assert linear.weight.has_power_of_2_scales
    assert net(draw_batch()).isfinite().all()


@CONFIG
def test_a_frozen_model_is_reported_and_converted_back(config):
    options = {"config": config, "module_filter_fn": lambda module, name: name == "0"}
    net = freeze_to_float8(build_model(), **options)
    reasons = [layer.reason for layer in conversion_report(net).layers]
    assert reasons == [f"frozen, stored in {STORED.get(config, config)} e4m3", "filter"]
    assert freeze_to_float8(net, **options) is net
    values = net[0].weight.to_high_precision()
    convert_to_high_precision(net)
    assert type(net[0]) is nn.Linear
    assert type(net[0].weight) is nn.Parameter
    assert net[0].weight.equal(values)


@CONFIG
def test_the_report_names_the_backends_that_multiply(config, monkeypatch):
    """On an H100 no matmul reads rowwise scales along the contracted dim, as grad_input does of codes stored once."""
    matmuls = {"native": mock.Mock(wraps=gemm.native_mm), "exact": mock.Mock(wraps=gemm.exact_float8_mm)}
    monkeypatch.setattr(gemm, "native_mm", matmuls["native"])
    monkeypatch.setattr(gemm, "exact_float8_mm", matmuls["exact"])
    net = freeze_to_float8(build_model(), config=config)
    with virtual_gpu("h100"):
        step(net, draw_batch())
    backends = {layer.backend for layer in conversion_report(net).converted}
    assert backends == {" and ".join(backend for backend, matmul in matmuls.items() if matmul.called)}


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_of_row_codes_compute_grad_input_exactly(is_transposed):
    net = build_mixture(is_transposed, "rowwise")
    with virtual_gpu("h100") as card:
        output = net(torch.randn(24, 160, requires_grad=True))
        before = card.calls.copy()
        output.sum().backward()
    assert before["_scaled_grouped_mm", "rowwise"] == 1 + 2  # the trial, and two weights
    assert card.calls == before
    assert {layer.backend for layer in conversion_report(net).converted} == {"native and exact"}


def test_a_model_that_trains_in_float8_can_be_frozen():
    net = convert_to_float8_training(build_model(), config="rowwise")
    expected = net(draw_batch())
    assert freeze_to_float8(net, config="rowwise")(draw_batch()).equal(expected)
    assert isinstance(net[2], FrozenFloat8Linear)
    assert isinstance(net[2], Wide)


def build_mixture(is_transposed, config=None):
    """Return experts that cut blocks of all sizes, with places of scales between experts (experts/groups.py)."""
    net = make_mixture(layers=1, dim=160, hidden=75, is_transposed=is_transposed)
    return net if config is None else freeze_to_float8(net, config=config)


def get_expert_weights(net):
    return [net[0].experts.gate_up_proj, net[0].experts.down_proj]


@pytest.mark.parametrize("is_transposed", [False, True])
@CONFIG
def test_experts_multiply_by_the_codes_that_are_stored(config, is_transposed):
    """The forward is that of float8 training, and each expert is a frozen linear, to the bit."""
    trained = convert_to_float8_training(build_mixture(is_transposed), config=config)
    net, tokens = build_mixture(is_transposed, config), torch.randn(24, 160)
    assert net(tokens).equal(trained(tokens))
    assert all(weight.nbytes < 1.08 * weight.numel() for weight in get_expert_weights(net))

    ends = torch.tensor([9, 9, 22], dtype=torch.int32)  # a group without rows, and rows without a group
    for weight, plain in zip(get_expert_weights(net), get_expert_weights(build_mixture(is_transposed)), strict=True):
        hp = torch.randn(24, weight.shape[1 if is_transposed else 2], requires_grad=True)
        operands = get_frozen_operands(weight)
        actual = multiply_by_weight(
            hp, weight, ends, net[0].experts.float8_config, transposed=is_transposed, operands=operands
        )
        actual.backward(torch.ones_like(actual))
        for matrix, rows in zip(plain, (slice(0, 9), slice(9, 9), slice(9, 22)), strict=True):
            matrix = matrix.t() if is_transposed else matrix
            linear = nn.Linear(*reversed(matrix.shape), bias=False)
            linear.weight.data.copy_(matrix)
            tokens = hp[rows].detach().requires_grad_()
            expected = freeze_to_float8(linear, config=config)(tokens)
            expected.backward(torch.ones_like(expected))
            assert actual[rows].equal(expected)
            assert hp.grad[rows].equal(tokens.grad)


@TRACED
def test_compiled_experts_compute_the_same(config):
    torch.compiler.reset()
    net, tokens = build_mixture(True, config), torch.randn(12, 160)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert_same(step(net, tokens, compiled), step(net, tokens))


@pytest.mark.parametrize("is_transposed", [False, True])
@CONFIG
def test_frozen_experts_load_copy_and_take_writes(config, is_transposed):
    net, tokens = build_mixture(is_transposed, config), torch.randn(24, 160)
    state, other = copy.deepcopy(net.state_dict()), build_mixture(is_transposed, config)
    expected, weights = net(tokens), get_expert_weights(other)
    assert state["0.experts.down_proj"].dtype is get_expert_weights(net)[1].dtype
    with torch.no_grad():
        for weight in weights:
            weight.data = weight.data  # as PEFT does
            weight.mul_(-2)  # the codes are the same, and so is their signal-to-noise ratio
            assert weight.requantized_sqnr_db == math.inf
            weight.add_(torch.randn(weight.shape) * 0.1)
            assert 25 < weight.requantized_sqnr_db < 45
            with pytest.raises(ValueError, match="got NaN or inf; the weight is unchanged"):
                weight.fill_(torch.nan)
    assert "quantized again after a write at" in str(conversion_report(other))
    other.load_state_dict(state)
    loaded = freeze_to_float8(build_mixture(is_transposed), config=config)
    loaded.load_state_dict(build_mixture(is_transposed).state_dict())  # in high precision
    for duplicate in (other, loaded, copy.deepcopy(net), by_torch_save(net)):
        assert duplicate(tokens).equal(expected)
    codes = get_expert_weights(net)[1].data_fp8
    refused = "in high precision, or a frozen weight.* got torch.float8_e4m3fn"
    for wrong, message in ((codes, refused), ("a name", "expected torch.Tensor or Tensor-like object")):
        with pytest.raises(RuntimeError, match=message):
            other.load_state_dict({**state, "0.experts.down_proj": wrong})
    plain = convert_to_high_precision(net)
    assert type(plain[0].experts) is type(build_mixture(is_transposed)[0].experts)
    assert get_expert_weights(plain)[1].equal(get_expert_weights(loaded)[1].to_high_precision())


def test_experts_are_asked_of_the_filter():
    net = freeze_to_float8(build_mixture(False), module_filter_fn=lambda module, name: name.endswith("out"))
    assert isinstance(net[0].out, FrozenFloat8Linear)
    assert not isinstance(net[0].experts, FrozenFloat8Experts)
    net(torch.randn(4, 160)).sum().backward()
    assert net[0].experts.down_proj.grad is not None
    with pytest.raises(TypeError, match="module_filter_fn fails for .* if it is written for linears"):
        freeze_to_float8(build_mixture(False), module_filter_fn=lambda module, name: module.in_features > 8)
    bad = build_mixture(True)
    bad[0].experts.down_proj.data[1, 2, 3] = torch.inf
    with pytest.raises(ValueError, match=r"the weight of 0\.experts\.down_proj holds NaN or inf"):
        freeze_to_float8(bad)


def tie_weights():
    net = nn.Sequential(nn.Linear(8, 8), nn.Embedding(8, 8))
    net[1].weight = net[0].weight
    return net


FLOOR = CastConfig(
    scaling_granularity=ScalingGranularity.BLOCKWISE,
    block_size=(32, 32),
    scale_calculation_mode=ScaleCalculationMode.FLOOR,
)
MXFP8_FLOOR = Float8LinearConfig(cast_config_weight=FLOOR, round_scales_to_power_of_2=True)


def build_not_finite():
    net = build_model()
    net[2].weight.data[3, 4] = torch.nan
    return net


def freeze_partly():
    net = build_model()
    net[0].requires_grad_(False)
    return net


def make_primary():
    net = convert_to_float8_training(build_model(), config="tensorwise")
    use_float8_primary_weights(net, torch.optim.SGD(net.parameters()))
    return net


def test_nothing_to_freeze_is_a_warning():
    with pytest.warns(UserWarning, match="nothing to freeze: all 2 matmul weights were skipped"):
        freeze_to_float8(build_model(), module_filter_fn=lambda module, name: False)


@pytest.mark.parametrize(
    ("make", "config", "message"),
    [
        (make_primary, "tensorwise", "the weight of 0 is a float8 primary weight; freeze instead of use_float8_prim"),
        (build_not_finite, None, "the weight of 2 holds NaN or inf"),
        (tie_weights, None, "the weight of 0 is tied to 1, so it cannot be stored in float8; untie them, or filter"),
        (
            freeze_partly,
            None,
            "'2' requires a gradient and other weights do not: call freeze_to_float8 before adapters",
        ),
        (lambda: build_model().to("meta"), None, "the weight of 0 is on the meta device; load it first"),
        (lambda: build_model().double(), None, "the weight of 0: expected torch.float32.*got torch.float64"),
        (lambda: nn.Linear(32, 32, device="meta"), None, "the weight of the module is on the meta device"),
        (
            lambda: convert_to_float8_training(build_model(), config="tensorwise"),
            None,
            "freeze_to_float8 expects a model in high precision: '0' is already converted; call convert_to_high_prec",
        ),
        (build_model, "delayed", "freeze_to_float8 scales dynamically"),
        (build_model, "rowwise_with_gw_hp", "stores a weight once: expected one float8 cast for both of its matmuls"),
        (build_model, MXFP8_FLOOR, "expected the scales of RCEIL, got dynamic blockwise 32 x 32 E8M0 floor e4m3"),
        (build_model, "int8", "unknown recipe 'int8'"),
        (
            lambda: freeze_to_float8(build_model(), config="tensorwise"),
            "rowwise",
            "the weight of 0 is frozen already, with another config",
        ),
    ],
)
def test_refusals_leave_the_model_as_it_was(make, config, message):
    net = make()
    before = [(type(module), id(module._parameters.get("weight"))) for module in net.modules()]
    with pytest.raises(ValueError, match=message):
        freeze_to_float8(net, config=config)
    assert [(type(module), id(module._parameters.get("weight"))) for module in net.modules()] == before


def test_an_error_half_way_leaves_layers_frozen_or_unchanged(monkeypatch):
    net, expected, made = build_model(), freeze_to_float8(build_model()), iter([FrozenFloat8Weight.from_codes])
    with monkeypatch.context() as patch, pytest.raises(StopIteration):
        patch.setattr(FrozenFloat8Weight, "from_codes", lambda *given: next(made)(*given))
        freeze_to_float8(net)
    assert [type(net[0]), type(net[2]), type(net[2].weight)] == [FrozenFloat8Linear, Wide, nn.Parameter]
    assert_same(get_codes(freeze_to_float8(net)), get_codes(expected))


def test_a_weight_is_not_multiplied_under_another_recipe():
    net = freeze_to_float8(build_model(), config="blockwise")
    net[0].config = Float8LinearConfig.from_recipe_name("tensorwise")
    with pytest.raises(RuntimeError, match="is stored as blockwise 128 x 128 .* casts weights as"):
        net(draw_batch())


def test_codes_of_a_checkpoint_become_a_frozen_weight():
    hp, config = torch.randn(130, 257), make_blockwise_config(power_of_2=False)
    codes, _, scale = dynamic_cast_blocks(hp, E4M3)
    linear = nn.Linear(257, 130, bias=False, device="meta")
    store_float8_weight(linear, codes, scale, config=config, dtype=torch.bfloat16)
    assert linear.weight.data_fp8.data_ptr() == codes.data_ptr()
    expected = freeze_to_float8(nn.Linear(257, 130, bias=False), config=config)
    expected.load_state_dict({"weight": hp})
    input = torch.randn(4, 257)
    assert linear(input).equal(expected(input))
    good = {"codes": codes, "dequant_scale": scale, "config": config, "dtype": hp.dtype}
    for change, message in [
        ({"codes": hp}, "codes: expected a float8 matrix"),
        ({"codes": codes[0], "dequant_scale": torch.tensor(1.0)}, r"codes: expected a float8 matrix.*of \[257\]"),
        (
            {"dequant_scale": scale[:1]},
            r"dequant_scale: expected float32 of shape \[\] \(tensorwise\), .* \[5, 9\] \(blockwise 32 x 32\)",
        ),
        ({"dtype": E4M3}, "dtype: expected torch.float32"),
        ({"dequant_scale": torch.ones(130, 1)}, "expected a blockwise 128 x 128 weight of"),
        ({"config": make_blockwise_config()}, "expected scales that are powers of two"),
        ({"dequant_scale": scale * torch.inf}, "expected finite dequant_scales above 0"),
        ({"dequant_scale": scale * 0}, "expected finite dequant_scales above 0"),
        ({"codes": torch.full_like(hp, torch.nan).to(E4M3)}, "expected finite codes, got NaN or inf"),
        ({"codes": codes.t(), "dequant_scale": scale.t()}, r"expected a blockwise 128 x 128 weight of \[130, 257\]"),
    ]:
        other = nn.Linear(257, 130, bias=False)
        with pytest.raises(ValueError, match=message):
            store_float8_weight(other, **{**good, **change})
        assert type(other) is nn.Linear


def test_a_weight_of_one_row_has_blocks():
    linear = freeze_to_float8(nn.Linear(300, 1), config="blockwise")
    assert linear.weight.granularity == "blockwise 128 x 128"
    assert linear(draw(4, 300)).isfinite().all()


def test_a_shard_has_the_blocks_of_the_whole_weight():
    """With 32 columns, a row has one block of either size."""
    for recipe, stored in (*STORED.items(), ("rowwise", "rowwise"), ("tensorwise", "tensorwise")):
        weight = freeze_to_float8(nn.Linear(32, 64), config=recipe).weight
        for part in (*weight.split(32), weight[5:7], copy.deepcopy(weight[40:])):
            assert part.is_part
            assert part.granularity == stored
            assert stored in repr(part)


def test_data_of_another_weight_has_its_shape_and_brings_its_dtype():
    linear = freeze_to_float8(nn.Linear(300, 200))
    weight, message = linear.weight, r"\.data of a frozen float8 weight: expected \[200, 300\], got \[130, 300\]"
    with pytest.raises(RuntimeError, match=message):
        weight.data = freeze_to_float8(nn.Linear(300, 130)).weight
    other = freeze_to_float8(nn.Linear(300, 200, dtype=torch.bfloat16)).weight
    weight.data = other
    assert weight is linear.weight
    assert isinstance(weight, nn.Parameter)
    assert weight.dtype is torch.bfloat16
    assert_same(weight.data_fp8.view(torch.uint8), other.data_fp8.view(torch.uint8))


def test_layerwise_casting_to_float8_leaves_frozen_modules_out_or_is_refused():
    """diffusers' enable_layerwise_casting casts each leaf, except for skip_modules_classes."""
    net = freeze_to_float8(build_model(), config="blockwise")
    before = get_codes(copy.deepcopy(net))
    for linear in (net[0], net[2]):
        with pytest.raises(ValueError, match=r"got torch.float8_e4m3fn; exclude its module from layerwise casting"):
            linear.to(E4M3)
        with pytest.raises(ValueError, match=r"got torch.float64; call convert_to_high_precision before"):
            linear.double()
    assert_same(get_codes(net), before)


def test_every_pair_of_dtypes_multiplies():
    for config, dtype in itertools.product(CONFIGS, (torch.bfloat16, torch.float16)):
        linear = freeze_to_float8(nn.Linear(32, 16, dtype=dtype), config=config)
        assert isinstance(linear, Float8Linear)
        assert linear(torch.randn(3, 32)).dtype is torch.float32

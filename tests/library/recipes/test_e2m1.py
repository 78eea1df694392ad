"""Tests e2m1 in blocks of 1 x 16 from the cast to the matmuls of a linear, on one device and gathered from shards."""

import copy

import pytest
import torch
from torch import nn

from quaver import Float8LinearConfig, conversion_report, convert_to_float8_training
from quaver.experts.grouped_mm_method import to_float8_grouped_mm
from quaver.experts.module import Float8Experts
from quaver.kernels.cast import cast_blockwise
from quaver.linear.gemm import multiply_operands
from quaver.linear.tensor import Float8Tensor
from quaver.recipes import e2m1, scaling
from quaver.recipes.cast_config import CastConfig, ScalingGranularity
from quaver.recipes.formats import E2M1, E4M3
from quaver.recipes.linear_casts import MatmulOptions
from quaver.recipes.scale_layout import ScaleLayout
from tests.counting import count_saved_bytes
from tests.mixture import GroupedExperts, make_mixture
from tests.ranks import on_ranks
from tests.steps import assert_same, compute_results

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
BLOCKS = {"scaling_granularity": ScalingGranularity.BLOCKWISE, "target_dtype": E2M1.dtype}
ALONG, SQUARE = CastConfig(**BLOCKS, block_size=(1, 16)), CastConfig(**BLOCKS, block_size=(16, 16))


def make_config(weight=ALONG, **options):
    casts = {"cast_config_input": ALONG, "cast_config_weight": weight, "cast_config_grad_output": ALONG}
    return Float8LinearConfig(**casts, **options)


def cast(hp, layout=(1, 16)):
    return cast_blockwise(hp, E2M1.dtype, True, True, False, *layout, "")


def dequantize(operand):
    """Return the values by the definition, in float64."""
    codes = operand.data.view(torch.uint8)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    numbers = torch.cat([VALUES, -VALUES]).double()[nibbles]
    down, across = operand.layout.get_block_shape(numbers.shape)
    scale = operand.dequant_scale.double().repeat_interleave(down, 0).repeat_interleave(across, 1)
    return numbers * scale[: numbers.shape[0], : numbers.shape[1]] * operand.outer_scale.double()


def test_the_scales_of_e2m1_are_not_powers_of_two():
    config = make_config(round_scales_to_power_of_2=True)
    assert not any(matmul.scales_are_powers_of_2 for matmul in config.matmuls)
    assert not config.weight_scales_are_powers_of_2


def test_codes_are_the_nearest_numbers_ties_to_even():
    steps = torch.arange(-7, 7, 1 / 64).clamp(-6, 6)
    codes = e2m1.unpack(e2m1.pack(steps[None])).float()[0]
    distance = (steps[:, None] - torch.cat([-VALUES, VALUES])).abs()
    assert torch.equal((codes - steps).abs(), distance.amin(1))
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 8.0]])
    assert e2m1.unpack(e2m1.pack(ties.clamp(max=6))).tolist() == [[0, 1, 1, 2, 2, 4, 4, 6]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [(1, 16), (16, 16)])
def test_a_cast_has_two_codes_a_byte_and_two_levels_of_scales(layout, dtype):
    hp = (torch.randn(40, 70) * torch.logspace(-2, 2, 70)).to(dtype)
    hp[:16, :16] = 0
    row, column = cast(hp, layout)
    for operand, size in ((row, layout), (column, layout[::-1])):
        assert operand.data.shape == (40, 35)
        assert operand.size == (40, 70)
        assert operand.layout == ScaleLayout(*size, rows_of_byte=1, columns_of_byte=2)
        assert operand.dequant_scale.dtype is E4M3.dtype
        assert operand.dequant_scale.shape == operand.layout.get_scale_shape(40, 70)
        expected, options = dequantize(operand), {"layout": operand.layout, "outer_scale": operand.outer_scale}
        actual = scaling.dequantize(operand.data, operand.dequant_scale, **options)
        torch.testing.assert_close(actual.double(), expected, rtol=1e-6, atol=0)
        assert (expected - hp.double()).norm() / hp.double().norm() < 0.12
    assert (row is column) == (layout == (16, 16))
    assert cast(torch.zeros(16, 16)).row.outer_scale == 1
    for bad in (torch.inf, torch.nan):
        hp[3, 5] = bad
        assert dequantize(cast(hp).row).isnan().all()


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("shape", [(33, 70, 22), (5, 12, 4), (1100, 64, 16)])
def test_the_matmul_is_exact(shape, pad):
    m, k, n = shape
    a, b = cast(torch.randn(m, k)).row, cast(torch.randn(n, k)).row
    out = multiply_operands(a, b.t(), MatmulOptions(pad=pad), torch.float32)
    torch.testing.assert_close(out.double(), dequantize(a) @ dequantize(b).t(), rtol=1e-4, atol=1e-4)
    float8 = cast_blockwise(torch.randn(n, k), E4M3.dtype, True, False, False, 1, 32, "").row
    assert multiply_operands(a, float8.t(), MatmulOptions(), torch.bfloat16).shape == (m, n)


@pytest.mark.parametrize("weight", [ALONG, SQUARE], ids=["1x16", "16x16"])
@pytest.mark.parametrize("keep", [False, True])
def test_a_linear_trains_with_it(weight, keep):
    config = make_config(weight, keep_float8_weight_for_backward=keep)
    linear = convert_to_float8_training(nn.Linear(70, 50), config=config)
    input, grad_output = torch.randn(34, 70), torch.randn(34, 50)
    assert count_saved_bytes(lambda: linear(input))[E2M1.dtype] >= 34 * 35
    output, *gradients = compute_results(linear, input, grad_output=grad_output)
    i, w, g = cast(input), cast(linear.weight.detach(), weight.block_size), cast(grad_output)
    expected = (
        dequantize(i.row) @ dequantize(w.row).t() + linear.bias.detach().double(),
        dequantize(g.row) @ dequantize(w.column),
        dequantize(g.column).t() @ dequantize(i.column),
    )
    for actual, reference in zip((output, *gradients[:2]), expected, strict=True):
        torch.testing.assert_close(actual.double(), reference, rtol=1e-4, atol=1e-4)


def test_compiled_steps_have_eager_bits():
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 48)), config=make_config(SQUARE))
    input, compiled = torch.randn(32, 64), torch.compile(model, backend="aot_eager", fullgraph=True)
    assert_same(compute_results(model, input, call=compiled), compute_results(model, input))


def test_a_float8_tensor_holds_it():
    hp = torch.randn(34, 70)
    row, column = cast(hp)
    tensor = Float8Tensor.from_operands(row, column, torch.bfloat16)
    assert tensor.shape == hp.shape
    view = tensor.view(2, 17, 70).detach()
    assert (view.shape, view.data_fp8.shape) == ((2, 17, 70), (2, 17, 35))
    torch.testing.assert_close(view.to_high_precision().double().view(34, 70), dequantize(row), rtol=2**-7, atol=0)
    names, meta = tensor.__tensor_flatten__()
    assert names[2::3] == ["outer_scale", "column_outer_scale"]
    inner = {name: getattr(tensor, name) for name in names}
    same = Float8Tensor.__tensor_unflatten__(inner, meta, None, None)
    assert [operand.layout for operand in same.get_operands()] == [row.layout, column.layout]
    assert torch.equal(dequantize(same.get_operands().column), dequantize(column))


@pytest.mark.parametrize("weight", [ALONG, SQUARE], ids=["1x16", "16x16"])
@on_ranks(2)
def test_shards_gather_the_codes_of_the_whole_weight(weight):
    from torch.distributed.fsdp import fully_shard

    plain, input = nn.Sequential(nn.Linear(70, 50, bias=False)), torch.randn(34, 70)
    whole = convert_to_float8_training(copy.deepcopy(plain), config=make_config(weight))
    config = make_config(weight, enable_fsdp_float8_all_gather=True)
    sharded = fully_shard(convert_to_float8_training(plain, config=config))
    expected, actual = whole(input), sharded(input)
    assert torch.equal(actual, expected)
    expected.sum().backward()
    actual.sum().backward()
    assert torch.equal(sharded[0].weight.grad.full_tensor(), whole[0].weight.grad)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": (1, 128)}, r"block_size: expected one of \(16, 16\), \(1, 16\), got \(1, 128\)"),
        ({"scaling_granularity": ScalingGranularity.ROWWISE}, "target_dtype: expected float8 without blocks"),
    ],
)
def test_other_configs_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        CastConfig(**{**BLOCKS, **options})


def test_exports_and_experts_refuse_codes_of_four_bits():
    with pytest.raises(NotImplementedError, match="export: expected codes of eight bits"):
        ALONG.require_layout("export")
    experts = make_mixture(layers=1)
    convert_to_float8_training(experts, config=make_config())
    assert not any(isinstance(module, Float8Experts) for module in experts.modules())
    assert "experts: expected codes of eight bits" in str(conversion_report(experts))
    with pytest.raises(ValueError, match="experts: expected codes of eight bits"):
        to_float8_grouped_mm(GroupedExperts(), make_config())
    with pytest.raises(ValueError, match=r"rows of an even length, got \[2, 5\]"):
        cast(torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"rows of an even length, got \[4, 3\]"):  # a shard's, on every rank
        ALONG.layout.get_codes_shape((4, 3))

"""Tests the predicted time of a linear."""

from dataclasses import astuple, replace

import pytest

from quaver.kernels.native_mm import ScaleKind
from quaver.roofline.cost import KERNEL_LAUNCH_S, compute_cast_costs, predict_linear_cost
from quaver.roofline.device_specs import DEVICE_SPECS, find_device_spec
from quaver.roofline.matmul import MATMUL_SHARES, MEMORY_SHARE
from quaver.roofline.scaled_matmul import get_scales_share
from tests.recipes import NON_BLOCK_RECIPES, PERSISTENT_RECIPES

H100 = find_device_spec("NVIDIA H100 80GB HBM3")


@pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)
def test_larger_layers_gain_more_and_never_more_than_the_hardware(recipe):
    speedups = [predict_linear_cost(16384, size, size, recipe, H100).speedup for size in (256, 1024, 4096, 16384)]
    assert speedups == sorted(speedups)
    assert speedups[0] < 1 < speedups[-1] < 2


def speedup(recipe, **options):
    return predict_linear_cost(16384, 4096, 14336, recipe, H100, **options).speedup


def test_recipes_rank_by_what_they_read_and_multiply():
    """`delayed` reads once; `rowwise_with_gw_hp` has only two float8 matmuls. The others move nearly the same bytes."""
    assert speedup("delayed") > speedup("delayed_with_dynamic_weight") > speedup("tensorwise")
    assert speedup("tensorwise") > speedup("rowwise") > speedup("rowwise_with_gw_hp") > 1
    assert speedup("tensorwise") == pytest.approx(speedup("rowwise", shares={}), rel=0.02)


@pytest.mark.parametrize(
    ("recipe", "apart", "at_once"),  # bytes per element and kernels for input, weight and grad_output
    [
        ("tensorwise", ((6, 8, 6), (2, 3, 2)), ((6, 6, 6), (2, 2, 2))),
        ("rowwise", ((6, 6, 6), (2, 2, 2)), ((6, 6, 6), (2, 2, 2))),
        ("rowwise_with_gw_hp", ((3, 6, 3), (1, 3, 1)), ((3, 6, 3), (1, 3, 1))),
        ("rowwise_with_tensorwise_weight", ((6, 8, 6), (2, 3, 2)), ((6, 6, 6), (2, 2, 2))),
        ("delayed", ((4, 6, 4), (2, 3, 2)), ((4, 4, 4), (2, 2, 2))),
        ("delayed_with_dynamic_weight", ((4, 8, 4), (2, 3, 2)), ((4, 6, 4), (2, 2, 2))),
    ],
)
def test_casts_cost_the_documented_bytes_and_kernels(recipe, apart, at_once):
    """The casts of a weight are made apart for each of its matmuls, or at once for both."""
    for microbatches, expected in ((None, apart), (1, at_once)):
        casts = compute_cast_costs(recipe, microbatches=microbatches)
        assert tuple(zip(*((cast.bytes_per_element, cast.kernels) for cast in casts), strict=True)) == expected


def test_casts_are_divided_between_their_readers():
    input, weight, grad_output = compute_cast_costs("tensorwise", microbatches=4, input_readers=3)
    assert (input.bytes_per_element, weight.bytes_per_element, grad_output.bytes_per_element) == (2, 1.5, 6)
    assert speedup("tensorwise") < speedup("tensorwise", microbatches=1) < speedup("tensorwise", microbatches=8)
    assert speedup("tensorwise") < speedup("tensorwise", input_readers=3)


def test_each_part_of_a_cost_is_that_of_the_formulas():
    """A device of round numbers, each part from the formulas: 2 MKN / FLOP/s, and bytes / bandwidth."""
    round_numbers = replace(H100, bfloat16_tflops=1.0, float8_tflops=2.0, memory_gb_per_s=1000.0)
    shares = MATMUL_SHARES["H100"]
    m, k, n = 1024, 512, 256
    cost = predict_linear_cost(m, k, n, "delayed", round_numbers)
    bytes_per_s = 1e12 * MEMORY_SHARE
    flops = 2 * m * k * n
    for part in ("output_s", "grad_input_s", "grad_weight_s"):
        assert getattr(cost.bfloat16, part) == pytest.approx(flops / (1e12 * shares.bfloat16))
        assert getattr(cost.float8, part) == pytest.approx(flops / (2e12 * shares.float8))
    assert cost.float8.input_casts_s == pytest.approx(4 * m * k / bytes_per_s)
    assert cost.float8.weight_casts_s == pytest.approx(6 * k * n / bytes_per_s)
    assert cost.float8.grad_output_casts_s == pytest.approx(4 * m * n / bytes_per_s)
    assert cost.bfloat16.launches_s == pytest.approx(3 * KERNEL_LAUNCH_S)
    assert cost.float8.launches_s == pytest.approx((3 + 2 + 3 + 2) * KERNEL_LAUNCH_S)
    bfloat16_casts = (cost.bfloat16.input_casts_s, cost.bfloat16.weight_casts_s, cost.bfloat16.widening_s)
    assert bfloat16_casts == (0, 0, 0)
    assert cost.float8.total_s == pytest.approx(sum(astuple(cost.float8)))
    rowwise = predict_linear_cost(m, k, n, "rowwise", round_numbers)
    half = predict_linear_cost(m, k, n, "rowwise", round_numbers, shares={"output": 0.5})
    assert rowwise.float8.output_s == pytest.approx(1.07 * cost.float8.output_s)
    assert astuple(half.float8)[:2] == pytest.approx((2 * cost.float8.output_s, cost.float8.grad_input_s))


@pytest.mark.parametrize(
    ("device", "kind", "share"),
    [
        ("H200", ScaleKind.TENSORWISE, 1),
        ("H100", ScaleKind.ROWWISE, 1 / 1.07),
        ("L40S", ScaleKind.ROWWISE, 0.8),
        ("B200", ScaleKind.ROWWISE, 0.6),
        ("MI300X", ScaleKind.ROWWISE, 1 / 1.07),
        ("H100", ScaleKind.BLOCKS_OF_128, 0.95),
        ("B200", ScaleKind.BLOCKS_OF_32, 0.9),
        ("H100", None, 1),
    ],
)
def test_scales_have_a_share_of_the_rate(device, kind, share):
    """Rowwise by cuBLAS on compute capability 9.x, by CUTLASS on others of NVIDIA's."""
    assert get_scales_share(kind, find_device_spec(device)) == share


def test_a_matmul_of_few_tokens_is_limited_by_memory():
    """It reads the weight: 2 bytes per element in bfloat16, 1 in float8."""
    cost = predict_linear_cost(16, 8192, 8192, "tensorwise", H100)
    assert cost.bfloat16.output_s == pytest.approx(2 * cost.float8.output_s, rel=0.01)
    assert cost.bfloat16.output_s > 2 * 8192**2 / (H100.memory_gb_per_s * 1e9)


def test_grad_weight_in_high_precision_takes_bfloat16_time():
    cost = predict_linear_cost(16384, 4096, 4096, "rowwise_with_gw_hp", H100)
    assert cost.float8.grad_weight_s == cost.bfloat16.grad_weight_s
    assert cost.float8.grad_input_s < cost.bfloat16.grad_input_s


@pytest.mark.parametrize("recipe", [*NON_BLOCK_RECIPES, *PERSISTENT_RECIPES])
def test_without_float8_hardware_everything_is_slower(recipe):
    a100 = find_device_spec("A100")
    for size in (1024, 4096, 16384):
        cost = predict_linear_cost(16384, size, size, recipe, a100)
        assert cost.speedup < 1
        assert cost.float8.output_s == cost.bfloat16.output_s
        assert cost.float8.widening_s > 0
    assert predict_linear_cost(16384, 4096, 4096, recipe, H100).float8.widening_s == 0


def test_every_device_has_its_shares():
    assert set(MATMUL_SHARES) == {spec.name for spec in DEVICE_SPECS}
    assert all(0.5 < share < 0.9 for shares in MATMUL_SHARES.values() for share in shares)


@pytest.mark.parametrize("name", ["tokens", "in_features", "out_features", "microbatches", "input_readers"])
def test_a_number_below_1_is_refused(name):
    numbers = {"tokens": 16, "in_features": 16, "out_features": 16, name: 0}
    with pytest.raises(ValueError, match=f"{name}: expected 1 or more, got 0"):
        predict_linear_cost(**numbers, recipe="tensorwise", spec=H100)

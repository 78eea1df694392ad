"""Tests float8_grouped_mm: every expert is bit-identical to a float8 linear on its tokens, on every path."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from quaver import Float8LinearConfig, float8_grouped_mm, float8_linear, serving_config
from quaver.experts import function, gemm, gpu_gemm
from quaver.experts.cast import cast_groups
from quaver.experts.gemm import ExpertMatmul
from quaver.experts.groups import count_scale_rows, find_first_scale_row, find_group_bounds
from quaver.kernels.native_mm import ScaleKind
from quaver.kernels.operands import Operand
from quaver.recipes.linear_casts import MatmulOptions
from quaver.recipes.scale_layout import ALL, ROWWISE
from quaver.runtime.devices import simulate_gpu
from quaver.runtime.slow_paths import list_slow_paths
from tests.library.experts.operands import ENDS, make_operands, step
from tests.recipes import DYNAMIC_RECIPES
from tests.reference import assert_same_bits
from tests.steps import assert_same
from tests.thinned import at_night, thinned
from tests.virtual_gpu import grouped_matmuls, virtual_gpu

BACKWARD_MODES = ["tensorwise:dequantized", "rowwise:dequantized", "mxfp8:dequantized", "rowwise:high_precision"]
SERVINGS = ["vllm-per-token-kernel", "vllm-per-tensor", "vllm-block", "compressed-tensors"]


def step_each_expert(a, b_t, ends, grad_output, config):
    """Return what `step` returns, from one float8 linear for each expert."""
    out, grad_a, grad_b_t = (torch.zeros_like(tensor) for tensor in (grad_output, a, b_t))
    for expert, (start, stop) in enumerate(find_group_bounds(ends, len(ends), len(a))):
        tokens = a.detach()[start:stop].requires_grad_()
        weight = b_t.detach()[expert].t().contiguous().requires_grad_()
        out[start:stop] = output = float8_linear(tokens, weight, config=config)
        output.backward(grad_output[start:stop])
        grad_a[start:stop], grad_b_t[expert] = tokens.grad, weight.grad.t()
    return out, grad_a, grad_b_t


@pytest.mark.parametrize(
    ("recipe", "dtype", "sizes", "transposed"),
    thinned(
        [*DYNAMIC_RECIPES, *BACKWARD_MODES],
        (torch.bfloat16, torch.float32, torch.float16),
        ((96, 160), (70, 33), (130, 1)),
        (False, True),
    ),
)
def test_each_expert_is_a_float8_linear(recipe, dtype, sizes, transposed):
    k, n = sizes
    a, b_t, ends = make_operands(k=k, n=n, dtype=dtype, transposed=transposed)
    grad_output = torch.randn(310, n, dtype=dtype)
    results, expected = step(a, b_t, ends, grad_output, recipe), step_each_expert(a, b_t, ends, grad_output, recipe)
    if recipe in BACKWARD_MODES and dtype is torch.float16 and transposed:
        # PyTorch adds the products with a strided float16 weight in another order.
        torch.testing.assert_close(results[1], expected[1], rtol=2**-10, atol=0.01)
        results, expected = results[::2], expected[::2]
    assert_same(results, expected)


CONFIGS = {
    "weight kept": replace(Float8LinearConfig.from_recipe_name("rowwise"), keep_float8_weight_for_backward=True),
    "square blocks kept": replace(Float8LinearConfig.from_recipe_name("mxfp8"), keep_float8_weight_for_backward=True),
    "float32 scales": replace(Float8LinearConfig.from_recipe_name("blockwise"), round_scales_to_power_of_2=False),
    "padded": Float8LinearConfig(pad_inner_dim=True),
    "float32 scales, dequantized": replace(
        Float8LinearConfig.from_recipe_name("blockwise:dequantized"), round_scales_to_power_of_2=False
    ),
}


@pytest.mark.parametrize(
    ("name", "ends"),
    [*((name, ENDS) for name in CONFIGS), *itertools.product(DYNAMIC_RECIPES, ([0] * 4, [0, 0, 0, 310], [310] * 4))],
    ids=str,
)
def test_each_expert_is_a_float8_linear_with_options_and_empty_groups(name, ends):
    (a, b_t, _), config = make_operands(k=70, n=33), CONFIGS.get(name, name)
    ends, grad_output = torch.tensor(ends, dtype=torch.int32), torch.randn(310, 33, dtype=a.dtype)
    assert_same(step(a, b_t, ends, grad_output, config), step_each_expert(a, b_t, ends, grad_output, config))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise_with_gw_hp", "blockwise"])
def test_rows_past_the_last_group_are_ignored(recipe):
    a, b_t, ends = make_operands()
    grad_output = torch.randn(310, 160, dtype=a.dtype)
    expected = step(a, b_t, ends, grad_output, recipe)
    with torch.no_grad():
        a[ENDS[-1] :], grad_output[ENDS[-1] :] = torch.nan, torch.inf
    results = step(a, b_t, ends, grad_output, recipe)
    assert_same(results, expected)
    assert not results[0][ENDS[-1] :].any()
    assert not results[1][ENDS[-1] :].any()


def test_no_tokens_give_empty_results_and_zero_weight_gradients():
    a, b_t, ends = make_operands(rows=0)
    output, grad_a, grad_b_t = step(a, b_t, ends * 0, torch.empty(0, 160, dtype=a.dtype), "rowwise")
    assert output.shape == (0, 160)
    assert grad_a.shape == (0, 96)
    assert not grad_b_t.any()


def test_gradients_may_be_expanded_or_missing():
    a, b_t, ends = make_operands()
    _, grad_a, grad_b_t = step(a, b_t, ends, torch.ones(310, 160, dtype=a.dtype), "rowwise")
    for inputs, expected in (
        ((a, b_t), (grad_a, grad_b_t)),
        ((a, b_t.detach()), (grad_a, None)),
        ((a.detach(), b_t), (None, grad_b_t)),
    ):
        a.grad = b_t.grad = None
        float8_grouped_mm(*inputs, ends, config="rowwise").sum().backward()
        assert_same((a.grad, b_t.grad), expected)


def test_results_are_the_same_without_gradients():
    a, b_t, ends = make_operands(dtype=torch.float32)
    recorded = float8_grouped_mm(a, b_t, ends, config="blockwise")
    with torch.no_grad():
        assert_same_bits(float8_grouped_mm(a, b_t, ends, config="blockwise"), recorded.detach())
    with torch.autocast("cpu", torch.bfloat16):
        assert float8_grouped_mm(a, b_t, ends, config="blockwise").dtype is torch.bfloat16


def test_a_backward_in_two_halves_makes_two_matmuls():
    a, b_t, ends = make_operands()
    grad_output = torch.randn(310, 160, dtype=torch.bfloat16)
    expected = step(a, b_t, ends, grad_output, "rowwise")[1:]
    output = float8_grouped_mm(a, b_t, ends, config="rowwise")
    with mock.patch.object(function, "grouped_mm", wraps=function.grouped_mm) as matmul:
        halves = [torch.autograd.grad(output, input, grad_output, retain_graph=True)[0] for input in (a, b_t)]
    assert matmul.call_count == 2
    assert_same(halves, expected)


def test_second_derivatives_are_refused():
    a, b_t, ends = make_operands()
    (grad,) = torch.autograd.grad(float8_grouped_mm(a, b_t, ends).sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad.sum().backward()
    scale = torch.ones((), requires_grad=True)
    (grad,) = torch.autograd.grad((float8_grouped_mm(a, b_t, ends) * scale).sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(grad.sum(), scale)


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        ("rowwise_with_gw_hp", "inductor"),
        ("blockwise", "aot_eager"),
        *at_night([("blockwise", "inductor"), ("tensorwise", "inductor"), ("mxfp8", "inductor")]),
    ],
)
def test_one_graph_serves_any_ends(recipe, backend):
    a, b_t, _ = make_operands()
    grad_output = torch.randn(310, 160, dtype=a.dtype)
    compiled = torch.compile(float8_grouped_mm, fullgraph=True, backend=backend)
    for stops in (ENDS, [5, 100, 100, 310]):
        ends = torch.tensor(stops, dtype=torch.int32)
        eager = step(a, b_t, ends, grad_output, recipe)
        with torch.compiler.set_stance("default" if stops is ENDS else "fail_on_recompile"):
            assert_same(step(a, b_t, ends, grad_output, recipe, compiled), eager)


def test_operations_have_fake_kernels_and_flops():
    a, b_t, ends = make_operands()
    cast = Float8LinearConfig.from_recipe_name("blockwise").casts.input.column
    args = a.detach(), cast.float8_dtype, ends, 4, True, True, True, "blockwise", 1, 128, ""
    torch.library.opcheck(torch.ops.quaver.cast_groups, args, test_utils="test_faketensor")
    tokens = cast_groups(a.detach(), cast, ends, 4, row=False, column=True, power_of_2=True).column
    args = tokens.data, tokens.data, tokens.dequant_scale, tokens.dequant_scale, ends, "grad_weight", False
    args += ([128, 1], [128, 1], torch.bfloat16, False, True, False, False)
    torch.library.opcheck(torch.ops.quaver.grouped_mm, args, test_utils="test_faketensor")
    with FlopCounterMode(display=False) as counter:
        step(a, b_t, ends, torch.randn(310, 160, dtype=a.dtype), "rowwise")
    assert counter.get_total_flops() == 3 * 2 * 310 * 96 * 160


@pytest.mark.parametrize("recipe", DYNAMIC_RECIPES)
def test_experts_on_the_meta_device_have_shapes(recipe):
    a, b_t, ends = (tensor.detach().to("meta") for tensor in make_operands())
    a.requires_grad_()
    output = float8_grouped_mm(a, b_t.requires_grad_(), ends, config=recipe)
    output.sum().backward()
    assert (output.shape, a.grad.shape, b_t.grad.shape) == ((310, 160), a.shape, b_t.shape)
    assert list_slow_paths() == []


def list_used_scales(block_rows, ends, rows=310):
    """Return the rows of the scales that groups use, in the order of the groups."""
    used = []
    for group, (start, stop) in enumerate(find_group_bounds(ends, len(ends), rows)):
        first = find_first_scale_row(block_rows, group, start)
        used += range(first, first + (1 if block_rows == ALL else -(-(stop - start) // block_rows)))
    return used


@pytest.mark.parametrize("direction", ["row", "column"])
@pytest.mark.parametrize("operand", ["input", "weight", "grad_output"])
@pytest.mark.parametrize("recipe", [*DYNAMIC_RECIPES, *SERVINGS])
def test_the_reference_gives_the_codes_and_scales_of_the_cpu(recipe, operand, direction):
    config = serving_config(recipe) if recipe in SERVINGS else Float8LinearConfig.from_recipe_name(recipe)
    if recipe in SERVINGS and (operand, direction) not in (("input", "row"), ("weight", "row")):
        pytest.skip("as in a recipe")
    cast = config.casts.get(operand, direction)
    if cast.is_disabled:
        pytest.skip("in high precision")
    hp = torch.randn(310, 70, dtype=torch.bfloat16)
    hp[3, 3], hp[50, 2], hp[210:240] = torch.inf, torch.nan, 0
    for ends, stops in ((ENDS, ENDS), (None, range(62, 311, 62))):
        arguments = hp, cast, ends and torch.tensor(ends, dtype=torch.int32), len(stops)
        options = {"row": True, "column": True, "power_of_2": config.casts.input.power_of_2}
        operand = getattr(cast_groups(*arguments, **options), direction)
        with simulate_gpu((8, 0)):
            expected = getattr(cast_groups(*arguments, **options), direction)
        codes, expected_codes = (result.data[: stops[-1]].float() for result in (operand, expected))
        torch.testing.assert_close(codes, expected_codes, rtol=0, atol=0, equal_nan=True)
        assert operand.layout == expected.layout
        assert operand.dequant_scale.shape == expected.dequant_scale.shape
        used = list_used_scales(operand.layout.rows, torch.tensor(stops, dtype=torch.int32))
        scales, expected_scales = operand.dequant_scale[used], expected.dequant_scale[used]
        torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("recipe", DYNAMIC_RECIPES)
def test_the_reference_takes_no_rows(recipe):
    casts = Float8LinearConfig.from_recipe_name(recipe).casts
    for cast in {casts.input.row, casts.input.column} - {cast for cast in casts.list_casts() if cast.is_disabled}:
        arguments = torch.zeros(0, 70), cast, torch.zeros(4, dtype=torch.int32), 4
        operand = cast_groups(*arguments, row=True, column=True, power_of_2=True).row
        with simulate_gpu((8, 0)):
            expected = cast_groups(*arguments, row=True, column=True, power_of_2=True).row
        assert operand.data.shape == expected.data.shape == (0, 70)
        assert operand.dequant_scale.shape == expected.dequant_scale.shape


def cast_operands(matmul, recipe, transposed):
    """Return both operands of one of the three matmuls, and the ends of the groups."""
    a, b_t, ends = make_operands(k=70, n=33)
    grad_output = torch.randn(310, 33, dtype=a.dtype)
    casts = Float8LinearConfig.from_recipe_name(recipe).casts

    def cast_one(hp, operand, direction, *, stored=None, ends=ends):
        """Cast along `direction`, which is `stored` in the memory of `hp`."""
        cast, stored = casts.get(operand, direction), stored or direction
        directions = {"row": stored == "row", "column": stored == "column"}
        return getattr(cast_groups(hp, cast, ends, 4, **directions, power_of_2=casts.input.power_of_2), stored)

    def cast_weight(direction):
        matrices = (b_t if transposed else b_t.transpose(1, 2)).detach().flatten(0, 1)
        stored = {"row": "column", "column": "row"}[direction] if transposed else direction
        return cast_one(matrices, "weight", direction, stored=stored, ends=None)

    if matmul is ExpertMatmul.OUTPUT:
        return cast_one(a.detach(), "input", "row"), cast_weight("row"), ends
    if matmul is ExpertMatmul.GRAD_INPUT:
        return cast_one(grad_output, "grad_output", "row"), cast_weight("column"), ends
    return cast_one(grad_output, "grad_output", "column"), cast_one(a.detach(), "input", "column"), ends


TRANSPOSED = pytest.mark.parametrize("transposed", [False, True], ids=["[E, N, K]", "[E, K, N]"])
FORM = pytest.mark.parametrize("matmul", ExpertMatmul)


def assert_near(output, expected):
    torch.testing.assert_close(output.float(), expected, rtol=2**-7, atol=float(expected.abs().max()) * 2**-10)


@TRANSPOSED
@FORM
@pytest.mark.parametrize(
    "recipe", ["rowwise", "rowwise_with_gw_hp", "rowwise_with_tensorwise_weight", "blockwise", "mxfp8"]
)
def test_widened_groups_multiply_on_torchs_grouped_matmul(recipe, matmul, transposed):
    left, right, ends = cast_operands(matmul, recipe, transposed)
    dtype = torch.bfloat16 if left.dequant_scale is None else torch.float32
    expected = gemm.grouped_mm(left, right, ends, matmul, MatmulOptions(False, True), dtype, transposed).float()
    output = gpu_gemm.multiply_widened(left, right, ends, matmul, transposed)
    assert output.dtype is torch.bfloat16
    assert_near(output, expected)


@TRANSPOSED
@FORM
@pytest.mark.parametrize("recipe", ["rowwise", "rowwise_with_tensorwise_weight", "tensorwise"])
def test_scaled_groups_multiply_as_the_hardware_reads_them(recipe, matmul, transposed):
    left, right, ends = cast_operands(matmul, recipe, transposed)
    with virtual_gpu("h100"):
        output = gpu_gemm.multiply_scaled(left, right, ends, matmul, transposed, use_fast_accum=False)
    if recipe == "tensorwise" and matmul is not ExpertMatmul.OUTPUT:
        assert output is None  # e5m2
        return
    assert_near(output, gemm.grouped_mm(left, right, ends, matmul, MatmulOptions(), torch.float32, transposed))


@pytest.mark.parametrize(
    ("result", "failure"),
    [
        (1.1, "gave a wrong result"),
        (float("nan"), "gave a wrong result"),
        (RuntimeError("needs sm_90\nat line 1"), "needs sm_90"),
        (torch.OutOfMemoryError("CUDA out of memory"), None),
    ],
    ids=str,
)
def test_a_trial_finds_whether_the_hardware_is_native(result, failure, monkeypatch):
    def multiply(*args, **options):
        if isinstance(result, Exception):
            raise result
        return grouped_matmuls.scaled_grouped_mm(*args, **options) * result

    monkeypatch.setitem(grouped_matmuls.OPERATOR_MODELS, "_scaled_grouped_mm", multiply)
    with virtual_gpu("h100"):
        if failure is None:
            with pytest.raises(RuntimeError, match="out of memory"):
                gemm.try_native_grouped_mm(torch.device("cpu"), ScaleKind.GROUPS)
        else:
            assert gemm.try_native_grouped_mm(torch.device("cpu"), ScaleKind.GROUPS).endswith(failure)


def test_the_hardware_reads_no_scales_that_vary_along_the_contracted_dim():
    tokens, weight, ends = cast_operands(ExpertMatmul.OUTPUT, "blockwise", False)
    assert gpu_gemm.multiply_scaled(tokens, weight, ends, ExpertMatmul.OUTPUT, False, use_fast_accum=False) is None
    stored_once = Operand(weight.data, torch.ones(4 * 33, 1), ROWWISE)
    grad_output = Operand(tokens.data[:, :33].contiguous(), torch.ones(310, 1), ROWWISE)
    arguments = grad_output, stored_once, ends, ExpertMatmul.GRAD_INPUT
    assert gpu_gemm.multiply_scaled(*arguments, False, use_fast_accum=False) is None


def test_scales_of_groups_do_not_overlap():
    generator = torch.Generator().manual_seed(0)
    for _ in range(200):
        rows = int(torch.randint(0, 400, (), generator=generator))
        ends = torch.randint(0, rows + 1, (5,), generator=generator).sort().values.int()
        for block_rows in (32, 128):
            used = list_used_scales(block_rows, ends, rows)
            assert len(used) == len(set(used))
            assert all(place < count_scale_rows(block_rows, 5, rows) for place in used)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offs": torch.tensor([37, 20, 200, 300], dtype=torch.int32)}, "ends that ascend"),
        ({"offs": torch.tensor([37, 37, 200, 311], dtype=torch.int32)}, "at most the 310 rows"),
        ({"offs": torch.tensor([-1, 37, 200, 300], dtype=torch.int32)}, "ends that ascend"),
        ({"offs": torch.tensor(ENDS)}, r"offs: expected int32 of shape \[4\]"),
        ({"offs": torch.tensor(ENDS[1:], dtype=torch.int32)}, r"offs: expected int32 of shape \[4\]"),
        ({"a": torch.zeros(310, 95)}, r"expected a of \[T, K\]"),
        ({"a": torch.zeros(310, 96, dtype=torch.float64)}, "a: expected"),
        ({"b_t": torch.zeros(4, 96, 160, dtype=torch.int8)}, "b_t: expected"),
        ({"b_t": torch.zeros(4, 96, 160, device="meta")}, "expected a, b_t, offs on one device, got cpu, meta"),
        ({"config": "delayed"}, "scaled dynamically"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_bad_input_is_refused(change, message):
    a, b_t, ends = make_operands()
    with pytest.raises(ValueError, match=message):
        float8_grouped_mm(**{"a": a, "b_t": b_t, "offs": ends, "config": "rowwise"} | change)


@pytest.mark.parametrize("name", ["a", "b_t", "offs"])
def test_dtensors_are_refused(name, one_rank):
    tensors = dict(zip(("a", "b_t", "offs"), make_operands(), strict=True))
    tensors[name] = DTensor.from_local(tensors[name], init_device_mesh("cpu", (1,)))
    with pytest.raises(TypeError, match=rf"{name}: expected no DTensor; use Float8Experts, or pass {name}.to_local"):
        float8_grouped_mm(**tensors)


def test_ranges_are_padded_no_further_than_to_multiples_of_16(monkeypatch):
    multiply = mock.Mock(wraps=gpu_gemm.grouped_mm)
    monkeypatch.setattr(gpu_gemm, "grouped_mm", multiply)
    tokens, ends = torch.ones(37, 32).bfloat16(), torch.tensor([1, 1, 18, 35], dtype=torch.int32)
    with virtual_gpu("h100"):
        gpu_gemm.multiply_widened(Operand(tokens), Operand(tokens), ends, ExpertMatmul.GRAD_WEIGHT, False)
    (left, right), padded_ends = multiply.call_args.args, multiply.call_args.kwargs["offs"]
    assert padded_ends.tolist() == [16, 16, 48, 80]
    assert left.shape[1] == right.shape[0] == 112  # the most that four groups of 37 rows can take
    rows = [0, *range(16, 33), *range(48, 65)]
    assert left[0].nonzero().flatten().tolist() == rows

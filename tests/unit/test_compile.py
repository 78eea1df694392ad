"""torch.compile: whole graphs, no recompilation, eager's codes, float8 kept for backward."""

import pytest
import torch
from torch import nn

from quaver import Float8Linear, Float8LinearConfig, cast_weights_once, float8_linear
from quaver.kernels.cast import cast_rowwise, cast_tensorwise, cast_with_scale
from tests.reference import RECIPES, sqnr_db
from tests.thinned import thinned
from tests.unit.test_linear import make, run

RECIPE = pytest.mark.parametrize("recipe", RECIPES)
E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("recipe", "hp_dtype", "bias"), thinned(RECIPES, (torch.float32, torch.bfloat16), (False, True), together=1)
)
def test_one_linear_agrees_with_eager(recipe, hp_dtype, bias):
    """The same codes go into the same exact matmul, so a result differs by nothing but the order of its sums."""
    module = make(recipe, 96, 160, dtype=hp_dtype, bias=bias)
    input, grad_output = torch.randn(128, 96).to(hp_dtype), torch.randn(128, 160).to(hp_dtype)
    expected = run(module, input, grad_output)
    got = run(torch.compile(module, fullgraph=True), input, grad_output)
    for e, g in zip((expected[0], expected[1], *expected[2]), (got[0], got[1], *got[2]), strict=True):
        torch.testing.assert_close(g, e, rtol=2 * torch.finfo(hp_dtype).eps, atol=1e-3 * e.abs().max().item())
        assert sqnr_db(e, g) > 50


@RECIPE
def test_no_recompilation_from_step_to_step_or_microbatch_to_microbatch(recipe):
    config = Float8LinearConfig.from_recipe_name(recipe)
    model = nn.Sequential(Float8Linear(64, 96, config=config), nn.SiLU(), Float8Linear(96, 64, config=config))
    compiled = torch.compile(model, fullgraph=True, backend="inductor" if recipe == "tensorwise" else "aot_eager")

    def step(scoped):
        model.zero_grad()
        for _ in range(2):
            if scoped:
                with cast_weights_once(model):
                    compiled(torch.randn(32, 64)).sum().backward()
            else:
                compiled(torch.randn(32, 64)).sum().backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)

    step(False)
    step(True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            step(True)
            step(False)


def test_qkv_share_one_float8_input_in_compiled_code():
    """The compiler keeps one byte per element of the shared input for backward, and no high-precision copy."""
    m, k = 256, 64
    config = Float8LinearConfig()
    weights = [nn.Parameter(torch.randn(64, k, dtype=torch.bfloat16)) for _ in range(3)]

    @torch.compile(fullgraph=True)
    def qkv(hidden):
        normed = torch.nn.functional.rms_norm(hidden, (k,))
        return [float8_linear(normed, w, config=config) for w in weights]

    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hidden = torch.randn(m, k, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = qkv(hidden)
    by_dtype = {}
    for tensor in kept.values():
        if tensor.numel() == m * k:
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + 1
    assert by_dtype.get(E4M3, 0) <= 1
    assert by_dtype.get(torch.bfloat16, 0) <= 1  # `hidden`, which rms_norm keeps in any case
    assert torch.float32 not in by_dtype
    sum(o.sum() for o in outputs).backward()


@RECIPE
def test_dynamic_shapes(recipe):
    module = make(recipe)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for tokens in (48, 80, 112):
        input = torch.randn(tokens, 64).bfloat16()
        torch.testing.assert_close(compiled(input), module(input), rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    ("float8_dtype", "dim", "power_of_2"), thinned((E4M3, torch.float8_e5m2), (None, 0, 1), (False, True))
)
def test_codes_are_eagers_also_behind_a_fused_producer(float8_dtype, dim, power_of_2):
    """The cast reads the bfloat16 tensor that eager code would read, not what its producer had in float32."""

    def produce_and_cast(x):
        hp = x * 1.7
        if dim is None:
            codes, _, quant_scale, dequant_scale = cast_tensorwise(hp, float8_dtype, True, False, power_of_2)
            return codes, quant_scale, dequant_scale, cast_with_scale(hp, float8_dtype, quant_scale, None)[0]
        made = cast_rowwise(hp, float8_dtype, dim == 1, dim == 0, power_of_2)
        codes, quant_scale, dequant_scale = made[:3] if dim == 1 else made[3:]
        scales = (quant_scale, None) if dim == 1 else (None, quant_scale)
        return codes, quant_scale, dequant_scale, cast_with_scale(hp, float8_dtype, *scales)[1 - dim]

    x = torch.randn(120, 200).bfloat16()
    compiled = torch.compile(produce_and_cast, fullgraph=True)
    for expected, got in zip(produce_and_cast(x), compiled(x), strict=True):
        assert got.float().equal(expected.float())  # every float8 value is a float32 value


@pytest.mark.parametrize("power_of_2", [False, True])
def test_casts_along_both_dims_are_one_operation_and_eagers_codes(power_of_2):
    def produce_and_cast(x):
        return cast_rowwise(x * 1.7, E4M3, True, True, power_of_2)

    x = torch.randn(120, 200).bfloat16()
    compiled = torch.compile(produce_and_cast, fullgraph=True)
    rows, columns = (cast_rowwise(x * 1.7, E4M3, rows, not rows, power_of_2) for rows in (True, False))
    separate = (*rows[:3], *columns[3:])
    for expected, eager, got in zip(separate, produce_and_cast(x), compiled(x), strict=True):
        assert got.float().equal(expected.float())
        assert eager.float().equal(expected.float())


def test_the_cast_operations_have_faithful_fakes():
    ops = torch.ops.quaver
    x, scale = torch.randn(17, 33).bfloat16(), torch.tensor(2.0)

    def check(operation, *args):
        torch.library.opcheck(operation, args, test_utils="test_faketensor")

    for hp in (x, x.t(), torch.empty(0, 5)):
        row_scale, column_scale = torch.ones(hp.shape[0], 1), torch.ones(1, hp.shape[1])
        for rows, columns in ((True, False), (False, True)):
            check(ops.cast_tensorwise, hp, E4M3, rows, columns, True)
            check(ops.cast_with_persistent_scale, hp, scale, E4M3, rows, columns, True)
            check(ops.cast_with_scale, hp, E4M3, scale if rows else None, scale if columns else None)
            check(ops.cast_with_scale, hp, E4M3, row_scale if rows else None, column_scale if columns else None)
        for rows, columns in ((True, False), (False, True), (True, True)):
            check(ops.cast_rowwise, hp, E4M3, rows, columns, True)

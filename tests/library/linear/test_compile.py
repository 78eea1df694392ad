"""Tests torch.compile: whole graphs, no recompilation, eager's codes, float8 saved for backward."""

import contextlib
import copy

import pytest
import torch
from torch import nn

from quaver import Float8LinearConfig, cast_weights_once, convert_to_float8_training, float8_linear
from quaver.kernels.cast import cast_rowwise, cast_tensorwise, cast_with_scale
from quaver.recipes.scaling import compute_scales
from tests.counting import count_saved_bytes
from tests.library.conversion.delayed import Net, copy_scales, make_delayed_config
from tests.library.distributed.models import DIM, Block
from tests.library.linear.linears import make_linear
from tests.recipes import DYNAMIC_RECIPES, E4M3, PERSISTENT_RECIPES
from tests.steps import assert_same, compute_results, train
from tests.thinned import at_night, thinned

TRACED_ANEW = ("rowwise_with_gw_hp", "mxfp8")
"""Recipes with casts or matmuls that the others lack."""


@pytest.mark.parametrize(
    ("recipe", "how", "by_layer", "backend"),
    [
        ("blockwise", None, True, "aot_eager"),
        ("delayed", "non-reentrant", True, "aot_eager"),
        *at_night(
            [
                ("rowwise_with_gw_hp", None, True, "aot_eager"),
                ("delayed_with_dynamic_weight", None, True, "aot_eager"),
                ("rowwise", None, True, "aot_eager"),
                ("rowwise_with_tensorwise_weight", None, True, "aot_eager"),
                ("delayed", None, False, "aot_eager"),
                ("tensorwise", None, False, "aot_eager"),
                ("tensorwise", None, False, "inductor"),
                ("delayed", None, False, "inductor"),
                ("delayed_with_dynamic_weight", "non-reentrant", False, "aot_eager"),
            ]
        ),
    ],
)
def test_no_recompilation_from_the_cold_start_on(recipe, how, by_layer, backend):
    """Updates, autocast, microbatches, recomputation and scopes included; one graph serves all layers by themselves."""
    model = convert_to_float8_training(Net(how), config=make_delayed_config(recipe))
    reference = copy.deepcopy(model)
    if by_layer:
        for layer in model.layers:
            layer.compile(fullgraph=True, backend=backend)
        forward = model
    else:
        forward = torch.compile(model, fullgraph=True, backend=backend)

    def train_step(model, forward, seed, scope=contextlib.nullcontext):
        torch.manual_seed(seed)
        batch = (torch.randn(64, 64) * (seed + 1)).requires_grad_()
        call = torch.autocast("cpu", torch.bfloat16)(forward)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return train(model, optimizer, [batch], microbatches=2, scope=scope, call=call)

    scopes = [contextlib.nullcontext] if recipe in PERSISTENT_RECIPES else [contextlib.nullcontext, cast_weights_once]
    torch._dynamo.utils.counters.clear()
    compiled = [train_step(model, forward, 0, scope) for scope in scopes]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == len(scopes)  # rows of a layer are tensors
    steps = [(seed, scope) for seed in range(1, 4) for scope in scopes]
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled += [train_step(model, forward, *step) for step in steps]
    eager = [train_step(reference, reference, seed) for seed in range(4) for _ in scopes]
    torch.testing.assert_close(torch.tensor(compiled), torch.tensor(eager), rtol=1e-2, atol=0)
    for name, scale in copy_scales(model).items():
        torch.testing.assert_close(scale, copy_scales(reference)[name], rtol=0.3, atol=0)


@pytest.mark.parametrize("recipe", ["delayed", *at_night([("tensorwise",)])])
def test_equal_blocks_share_one_graph(recipe):
    """Dynamo guards on the keys of the hooks of modules inside the compiled one, so those may not differ."""

    model = convert_to_float8_training(nn.Sequential(*(nn.Sequential(Block()) for _ in range(3))), config=recipe)
    for block in model:
        block.compile(fullgraph=True, backend="aot_eager")
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(2):
            model(torch.randn(4, DIM, requires_grad=True)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_qkv_share_one_float8_input_in_compiled_code():
    """The compiler keeps one byte per element of the shared input for backward, and no high-precision copy."""
    m, k = 256, 64
    config = Float8LinearConfig()
    weights = [nn.Parameter(torch.randn(64, k, dtype=torch.bfloat16)) for _ in range(3)]

    @torch.compile(fullgraph=True, backend="aot_eager_decomp_partition")  # Inductor's partitioner, without its code
    def qkv(hidden):
        normed = torch.nn.functional.rms_norm(hidden, (k,))
        return [float8_linear(normed, w, config=config) for w in weights]

    hidden, outputs = torch.randn(m, k, dtype=torch.bfloat16, requires_grad=True), []
    saved = count_saved_bytes(lambda: outputs.extend(qkv(hidden)))
    assert saved.get(E4M3, 0) <= m * k + 3 * 64 * k
    assert saved.get(torch.bfloat16, 0) <= 2 * m * k + 3 * weights[0].nbytes  # rms_norm keeps `hidden` in any case
    assert saved.get(torch.float32, 0) < 4 * m * k
    sum(o.sum() for o in outputs).backward()


@pytest.mark.parametrize(
    ("recipe", "backend"),
    [
        *((recipe, "aot_eager") for recipe in TRACED_ANEW),
        *at_night([("rowwise", "inductor")]),
        *at_night((recipe, "aot_eager") for recipe in DYNAMIC_RECIPES if recipe not in TRACED_ANEW),
    ],
)
def test_dynamic_shapes_compile_once(recipe, backend):
    linear = make_linear(recipe, 200, 150)
    compiled = torch.compile(linear, fullgraph=True, dynamic=True, backend=backend)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (300, 130, 511):  # up to 128 there is one block of tokens, and sizes of 1 are compiled anew
            input = torch.randn(tokens, 200).bfloat16()
            results = compute_results(linear, input), compute_results(linear, input, call=compiled)
            assert_same(*results) if backend == "aot_eager" else torch.testing.assert_close(*results)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f: torch.func.grad(lambda x: f(x).sum()),
        *at_night(
            [(lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),), (lambda f: lambda x: torch.func.vjp(f, x)[0],)]
        ),
    ],
)
def test_functorch_transforms_are_refused(transformed):
    """Dynamo would drop the backward, and return zeros."""
    compiled = torch.compile(transformed(lambda x: float8_linear(x, torch.ones(16, 16))), backend="eager")
    with pytest.raises(RuntimeError, match=r"float8 matmuls do not support torch\.func\.grad"):
        compiled(torch.ones(16, 16))


@pytest.mark.parametrize(
    ("float8_dtype", "dims", "power_of_2"),
    thinned((E4M3, torch.float8_e5m2), ((), (0,), (1,), (1, 0)), (False, True), together=1),
)
def test_codes_are_eagers_also_behind_a_fused_producer(float8_dtype, dims, power_of_2):
    """The cast reads the bfloat16 tensor that eager code would read, not what its producer had in float32.

    Casts along both dims are one operation, with the codes of two.
    """

    def produce_and_cast(x, dims):
        hp = x * 1.7
        if not dims:
            codes, dequant_scale, _, quant_scale, _ = cast_tensorwise(hp, float8_dtype, True, False, power_of_2, "").row
            return codes, quant_scale, dequant_scale, cast_with_scale(hp, float8_dtype, quant_scale, None, "")[0]
        operands, results = cast_rowwise(hp, float8_dtype, 1 in dims, 0 in dims, power_of_2, ""), ()
        for dim in dims:
            codes, dequant_scale, _, quant_scale, _ = operands.row if dim == 1 else operands.column
            scales = (quant_scale, None) if dim == 1 else (None, quant_scale)
            results += codes, quant_scale, dequant_scale, cast_with_scale(hp, float8_dtype, *scales, "")[1 - dim]
        return results

    x = torch.randn(120, 200).bfloat16()
    compiled = torch.compile(produce_and_cast, fullgraph=True)(x, dims)
    separate = [tensor for dim in dims for tensor in produce_and_cast(x, (dim,))] or produce_and_cast(x, ())
    for expected, eager, result in zip(separate, produce_and_cast(x, dims), compiled, strict=True):
        assert result.float().equal(expected.float())  # every float8 value is a float32 value
        assert eager.float().equal(expected.float())


def test_the_cast_operations_have_faithful_fakes():
    ops = torch.ops.quaver
    x, scale = torch.randn(17, 33).bfloat16(), torch.tensor(2.0)

    def check(operation, *args):
        torch.library.opcheck(operation, args, test_utils="test_faketensor")

    for hp in (x, x.t(), torch.empty(0, 5)):
        row_scale, column_scale = torch.ones(hp.shape[0], 1), torch.ones(1, hp.shape[1])
        for rows, columns in ((True, False), (False, True)):
            check(ops.cast_tensorwise, hp, E4M3, rows, columns, True, "")
            check(ops.cast_with_persistent_scale, hp, E4M3, rows, columns, True, scale)
            check(ops.cast_with_scale, hp, E4M3, scale if rows else None, scale if columns else None, "")
            check(ops.cast_with_scale, hp, E4M3, row_scale if rows else None, column_scale if columns else None, "")
        for rows, columns in ((True, False), (False, True), (True, True)):
            check(ops.cast_rowwise, hp, E4M3, rows, columns, True, "")


class ScalesInside(torch.autograd.Function):
    """An autograd function that computes scales itself, as that of a tensor-parallel linear does."""

    @staticmethod
    def forward(ctx, values, power_of_2):
        return torch.stack(compute_scales(values.abs().amax(), torch.float8_e4m3fn, power_of_2)[:2])

    @staticmethod
    def backward(ctx, grad):
        return grad.new_zeros(8), None


@pytest.mark.parametrize("power_of_2", [True, *at_night([(False,)])])
def test_dynamic_shapes_make_no_inputs_of_the_constants_of_scales(power_of_2):
    compiled = torch.compile(ScalesInside.apply, dynamic=True, backend="aot_eager", fullgraph=True)
    values = torch.randn(8, requires_grad=True)
    assert_same(compiled(values, power_of_2), ScalesInside.apply(values, power_of_2))

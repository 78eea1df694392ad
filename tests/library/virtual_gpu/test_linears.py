"""Tests what multiplies linears and experts on virtual GPUs, and compares the results with a CPU."""

import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.profiler import profile

pytest.importorskip("triton")

from quaver import convert_to_float8_training, float8_grouped_mm, float8_linear, serving_config
from quaver.fsdp.all_gather_weight import quantize_shard
from quaver.fsdp.shard import LocatedShard
from quaver.recipes.scale_layout import COLUMNWISE, ROWWISE
from quaver.runtime.devices import has_cuda
from quaver.runtime.slow_paths import clear_slow_paths, list_slow_paths
from tests.models import Block, rope_tables
from tests.recipes import DYNAMIC_RECIPES
from tests.reference import lowest_sqnr_db, sqnr_db
from tests.thinned import at_night, by_day
from tests.virtual_gpu import virtual_gpu


def run_step(call, *tensors, module=None):
    """Return the output and the gradients of the tensors and of the module's parameters."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = call(*leaves)
    output.backward(torch.linspace(-1, 1, output.numel()).view(output.shape).to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in (*leaves, *(module.parameters() if module else ())))]


def _run_linear(recipe, shape, dtype, has_bias, backend):
    tokens, k, n = shape
    tensors = torch.randn(tokens, k), torch.randn(n, k), *([torch.randn(n)] if has_bias else [])
    function = functools.partial(float8_linear, config=recipe)
    return run_step(compile_on_card(function, backend), *(tensor.to(dtype) for tensor in tensors))


def _run_experts(recipe, transposed, backend):
    tokens, weights = torch.randn(50, 40).bfloat16(), torch.randn(3, 40, 24).bfloat16()
    weights = weights.transpose(1, 2).contiguous().transpose(1, 2) if transposed else weights
    ends = torch.tensor([20, 20, 43], dtype=torch.int32)
    function = compile_on_card(lambda a, b_t: float8_grouped_mm(a, b_t, ends, config=recipe), backend)
    return run_step(function, tokens, weights)


def _run_block(recipe):
    block = convert_to_float8_training(Block(64, 96, heads=2, kv_heads=1), config=recipe)
    call = compile_on_card(lambda hidden: block(hidden, *rope_tables(32, 32, "cpu")), "aot_eager")
    return run_step(call, torch.randn(1, 32, 64), module=block)


def _run_one_row_shard():
    shard = LocatedShard(torch.randn(1, 48).bfloat16(), (3, 48), 0, 2, None, None, None, torch.device("cpu"), ((), ()))
    scales = torch.rand(3, 1) + 1, torch.rand(1, 48) + 1
    return [
        quantize_shard(shard, scale, torch.float8_e4m3fn, layout)
        for scale, layout in zip(scales, (ROWWISE, COLUMNWISE), strict=True)
    ]


def compile_on_card(function, backend):
    """Return the function, compiled on a card; a CPU runs it eagerly."""
    return torch.compile(function, fullgraph=True, backend=backend) if backend and has_cuda() else function


@np.errstate(all="ignore")
def on_card(name, make, *args):
    """Return the results on a virtual GPU and on the CPU, the vendor's matmuls that ran, and the slow paths."""
    torch.manual_seed(0)
    expected = make(*args)
    torch.manual_seed(0)
    clear_slow_paths()
    with virtual_gpu(name) as card:
        results = make(*args)
    torch.compiler.reset()
    return results, expected, dict(card.calls), list_slow_paths()


def assert_near(results, expected, *mantissa_bits):
    """Check that the SQNR of each result is that of roundings to these numbers of mantissa bits, or higher."""
    for result, reference in zip(results, expected, strict=True):
        assert result.shape == reference.shape
        assert result.isfinite().all()
        assert sqnr_db(reference.float(), result.float()) > lowest_sqnr_db(*mantissa_bits)


@pytest.mark.parametrize("recipe", ["tensorwise", *at_night([("blockwise",)])])
def test_a_compiled_block_has_the_gradients_of_a_cpu(interpreter, recipe):
    results, expected, *_ = interpreter(on_card, "h100", _run_block, recipe)
    assert_near(results, expected, 3, 3)  # a native matmul of blocks rounds to bfloat16, so the next codes differ


def test_a_shard_of_one_row_has_the_codes_of_a_cpu(interpreter):
    results, expected, *_ = interpreter(on_card, "h100", _run_one_row_shard)
    assert [codes.view(torch.uint8).tolist() for codes in results] == [
        codes.view(torch.uint8).tolist() for codes in expected
    ]


NATIVE = {
    "h100": {"tensorwise", "rowwise", "BlockWise1x128 x BlockWise128x128", "BlockWise1x128 x BlockWise1x128"},
    "b200": {"tensorwise", "rowwise", "BlockWise1x32 x BlockWise1x32"},
    "rtx5090": {"tensorwise"},
    "a100": set(),
}
"""The kinds of scales that each card multiplies."""
NATIVE_RECIPES = {
    "tensorwise": ("h100", "b200", "rtx5090"),
    "blockwise": ("h100",),
    "blockwise_with_gw_hp": ("h100",),
    "mxfp8": ("b200",),
    "mxfp8_with_gw_hp": ("b200",),
}


@pytest.mark.parametrize(
    ("recipe", "name", "shape", "dtype", "has_bias", "backend"),
    [
        *((recipe, "h100", (48, 272, 144), torch.bfloat16, False, None) for recipe in DYNAMIC_RECIPES),
        ("tensorwise", "h100", (33, 40, 24), torch.float32, True, None),
        *at_night([("rowwise", "h100", (33, 40, 24), torch.bfloat16, True, "aot_eager")]),
        (serving_config("vllm-per-token-kernel"), "h100", (33, 40, 24), torch.bfloat16, True, "aot_eager"),
        ("mxfp8", "b200", (33, 100, 60), torch.bfloat16, False, None),
        ("rowwise", "rtx5090", (48, 64, 32), torch.bfloat16, False, None),
        ("tensorwise", "a100", (48, 64, 32), torch.bfloat16, True, None),
    ],
)
def test_a_linear_has_the_results_of_a_cpu(interpreter, recipe, name, shape, dtype, has_bias, backend):
    results, expected, calls, _ = interpreter(on_card, name, _run_linear, recipe, shape, dtype, has_bias, backend)
    assert_near(results, expected, 7, 7)  # both may round to bfloat16, sums in different orders
    assert {kind for _, kind in calls} <= NATIVE[name]
    assert bool(calls) == (name in NATIVE_RECIPES.get(recipe, ("h100", "b200")))


@pytest.mark.parametrize(
    ("recipe", "name", "transposed", "backend"),
    [
        *((recipe, "h100", False, None) for recipe in DYNAMIC_RECIPES),
        ("rowwise_with_gw_hp", "h100", True, "aot_eager"),
        ("rowwise", "b200", True, None),
        ("rowwise", "a100", False, None),
    ],
)
def test_experts_have_the_results_of_a_cpu(interpreter, recipe, name, transposed, backend):
    results, expected, _, slow_paths = interpreter(on_card, name, _run_experts, recipe, transposed, backend)
    assert_near(results, expected, 7, 7)  # both may round to bfloat16, sums in different orders
    assert any("waits for the sizes" in path for path in slow_paths) == (name == "a100" or recipe == "tensorwise")


def _count_copies(recipe, backend, length):
    """Return the number of a linear's native matmuls, and of copies between a matmul and the vendor's operator."""
    torch.compiler.reset()
    function = compile_on_card(functools.partial(float8_linear, config=recipe), backend)
    tensors = torch.randn(length, 4 * length).bfloat16(), torch.randn(4 * length, 4 * length).bfloat16()
    with virtual_gpu("h100") as card:
        run_step(function, *tensors)
        card.calls.clear()
        with profile() as recorded:
            run_step(function, *tensors)
    torch.compiler.reset()
    copies = [event for event in recorded.events() if event.name in ("aten::copy_", "aten::constant_pad_nd")]
    callers = [set(names_around(copy)) for copy in copies]
    ours = [names for names in callers if {"quaver::gemm", "quaver::native_block_mm"} & names and not VENDORS & names]
    return card.calls.total(), len(ours)


VENDORS = {"aten::_scaled_mm", "aten::_scaled_mm_v2"}


def names_around(event):
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event.name


@pytest.mark.parametrize(
    ("recipe", "backend", "length"), [("tensorwise", None, 16), ("rowwise", None, 16), ("blockwise", "aot_eager", 128)]
)
def test_matmuls_read_codes_and_scales_as_the_casts_wrote_them(interpreter, recipe, backend, length):
    assert interpreter(_count_copies, recipe, backend, length) == (3, 0)


@pytest.mark.parametrize("recipe", by_day(("delayed", "mxfp8"), (*DYNAMIC_RECIPES, "delayed")))
def test_graphs_of_dynamic_shapes_hold_several_linears(recipe):
    """Dynamo makes inputs of the floats and ints of modules, which a second autograd function cannot take."""
    torch.compiler.reset()
    model = convert_to_float8_training(nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)).bfloat16(), config=recipe)
    graphs = []

    def keep(graph, _):
        graphs.append(graph)
        return graph

    with virtual_gpu("b200"):
        step = torch.compile(model, fullgraph=True, dynamic=True, backend=keep)
        for rows in (256, 384):
            step(torch.randn(rows, 64).bfloat16().requires_grad_())
    assert len(graphs) == 1

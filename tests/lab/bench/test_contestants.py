"""Tests quaver bench gemm, cast, host and block: operands, bytes of a cast, operations, the block's step."""

import logging
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from quaver.conversion.convert import convert_to_float8_training
from quaver.lab.bench import cast
from quaver.lab.bench.block import BlockBenchmark
from quaver.lab.bench.block_step import build_block, make_steps
from quaver.lab.bench.cast import CAST_KINDS
from quaver.lab.bench.gemm import GRANULARITIES, Matmul, compute_share_of_peak, list_matmuls
from quaver.lab.bench.host import count_operations
from quaver.lab.bench.linear import LinearBenchmark
from quaver.lab.bench.peer import is_peer_recipe, make_torchao_linear
from quaver.lab.bench.results import BFLOAT16
from quaver.lab.bench.shapes import Shape, make_model
from quaver.lab.recorder.allocator import measure_usage
from quaver.lab.settings.float8 import RECIPES
from quaver.linear.module import Float8Linear
from quaver.roofline.device_specs import PeakFlops

CPU = torch.device("cpu")
SHAPE = Shape((32, 48, 64))


def test_torchao_has_no_recipe_with_a_backward():
    recipes = ("rowwise", "axiswise", "rowwise:float8", "rowwise:dequantized", "mxfp8")
    assert list(map(is_peer_recipe, recipes)) == [True, True, True, False, False]


def test_torchao_leaves_the_levels_of_logs_as_they_were():
    pytest.importorskip("torchao")
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.INFO)
        make_torchao_linear(torch.nn.Linear(16, 16), "tensorwise", device=CPU)
        assert [logger.level for logger in loggers] == [logging.INFO] * 2
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def test_the_three_matmuls_are_those_of_autograd():
    input, weight = torch.randn(32, 48, requires_grad=True), torch.randn(64, 48, requires_grad=True)
    output = input @ weight.t()
    sizes = {matmul.name: matmul.sizes[::2] for matmul in list_matmuls(SHAPE)}
    assert sizes == {"output": output.shape, "grad_input": input.shape, "grad_weight": weight.shape}
    for matmul in list_matmuls(SHAPE):
        m, k, n = matmul.sizes
        assert m * k * n == 32 * 48 * 64
        left, right = matmul.make_hp_operands(CPU)
        assert (left.shape, right.shape) == ((m, k), (k, n))


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_float8_operands_multiply_to_what_bfloat16_does(granularity, monkeypatch):
    for matmul in list_matmuls(SHAPE):
        hp = matmul.make_hp_operands(CPU)
        monkeypatch.setattr(Matmul, "make_hp_operands", lambda self, device, hp=hp: hp)
        a, b, a_scale, b_scale = matmul.make_float8_operands(granularity, CPU)
        expected = hp[0].float() @ hp[1].float()
        output = (a.float() * a_scale) @ (b.float() * b_scale)
        assert (output - expected).norm() < 0.1 * expected.norm()
        assert a_scale.shape == ((matmul.sizes[0], 1) if granularity == "rowwise" else ())
        is_gradient = matmul.name != "output"
        e5m2 = torch.float8_e5m2 if is_gradient and granularity == "tensorwise" else torch.float8_e4m3fn
        assert (a.dtype, b.dtype) == (e5m2, torch.float8_e4m3fn)
        monkeypatch.undo()


def test_the_share_is_of_the_precisions_own_peak():
    peak = PeakFlops(100e12, "data sheet", 200e12)
    assert compute_share_of_peak(50e12, "bfloat16", peak) == 0.5
    assert compute_share_of_peak(50e12, "rowwise", peak) == 0.25
    assert compute_share_of_peak(50e12, "rowwise", PeakFlops(100e12, "data sheet")) is None


def test_the_floor_of_a_cpu_and_of_hardware_that_multiplies_float8(monkeypatch):
    floors = {name: kind.count_floor_bytes(2, CPU) for name, kind in CAST_KINDS.items()}
    assert floors == {"tensorwise": 5, "delayed": 3, "rowwise": 3, "rowwise_both": 6}
    monkeypatch.setattr(cast, "needs_contracted_dim_contiguous", lambda device: True)
    floors = {name: kind.count_floor_bytes(2, torch.device("cuda")) for name, kind in CAST_KINDS.items()}
    assert floors == {"tensorwise": 6, "delayed": 4, "rowwise": 3, "rowwise_both": 6}


def test_operations_are_counted_by_name():
    a = torch.zeros(2, 3)
    assert count_operations(lambda: (a + 1 + a).t()) == {"aten.add.Tensor": 2, "aten.t.default": 1}


def test_the_step_trains_all_parameters_and_leaves_nothing_behind():
    (step,) = make_steps(make_model("debug", divisor=4), 2, 32, ["quaver rowwise"], CPU, compiled=False).values()
    assert sum(isinstance(module, Float8Linear) for module in step.block.modules()) == 7
    before = [parameter.clone() for parameter in step.block.parameters()]
    step()
    assert not any(torch.equal(old, new) for old, new in zip(before, step.block.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in step.block.parameters())
    with measure_usage(CPU) as measured:  # raises if the step leaves memory behind
        step(measured.mark)
    assert measured.usage.saved_bytes > 0


def test_every_precision_has_the_same_weights():
    steps = make_steps(make_model("debug", divisor=4), 2, 32, [BFLOAT16, "quaver tensorwise"], CPU, compiled=False)
    plain, float8 = (step.block for step in steps.values())
    assert all(map(torch.equal, plain.parameters(), float8.parameters()))
    hidden = steps[BFLOAT16].sources.next()
    with torch.autocast("cpu", torch.bfloat16):
        expected, output = plain(hidden).float(), float8(hidden).float()
    assert 0 < (output - expected).norm() < 0.1 * expected.norm()
    assert expected.shape == steps[BFLOAT16].grad_output.shape


@pytest.mark.parametrize("compiled", [False, True])
def test_compiled_is_compiled(compiled):
    block = build_block(make_model("debug", divisor=4), BFLOAT16, 32, CPU, compiled=compiled)
    assert (block._compiled_call_impl is not None) == compiled


def test_one_case_compiles_every_recipe():
    def compile_recipes(case):
        for recipe in RECIPES:
            linear = convert_to_float8_training(nn.Linear(16, 16), config=recipe)
            torch.compile(linear, fullgraph=True, backend="eager")(torch.randn(16, 16))
        return [{"recipes": case}]

    assert LinearBenchmark().run_cases([("all",)], compile_recipes)["rows"] == [{"recipes": "all"}]


def test_a_divisor_shrinks_the_shape_of_a_model():
    model = make_model("llama-70b", divisor=16)
    assert (model.dim, model.n_heads, model.n_kv_heads, model.hidden_dim, model.head_dim) == (512, 4, 1, 1792, 128)


def test_blocks_too_large_for_a_gpu_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    options = {"model": "llama-70b", "device": "cuda", "output": str(tmp_path / "x.json")}
    with pytest.raises(ValueError, match="2 blocks .* take 25.5 GiB, and this GPU has 16 GiB; name fewer --recipes"):
        BlockBenchmark(**options, recipes=("rowwise",)).prepare()
    BlockBenchmark(**options, divisor=2, recipes=("rowwise",)).prepare()

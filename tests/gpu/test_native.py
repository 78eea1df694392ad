"""Tests on a GPU the native backend against float64 and the exact one, its codes, and that nothing synchronizes."""

import contextlib

import pytest
import torch

from quaver import Float8Linear, Float8LinearConfig, cast_weights_once
from quaver.kernels.native_mm import ScaleKind
from quaver.linear.backends import GemmBackend, choose_backend, find_native_failure
from quaver.linear.gemm import float8_mm
from quaver.recipes.scaling import dynamic_cast
from quaver.runtime.devices import get_compute_capability
from tests.gpu.device import BACKEND, DEVICE, host, host_and_gpu, host_sync_refused, smaller
from tests.recipes import E4M3, E5M2, NON_BLOCK_RECIPES
from tests.reference import assert_matmul_exact, lowest_sqnr_db, sqnr_db
from tests.steps import assert_same, compute_results

pytestmark = pytest.mark.gpu
RECIPE = pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)
HP = pytest.mark.parametrize("hp_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
SUM = 7
"""Mantissa bits of a rounding that loses what a sum may on Hopper: 57 dB for 4096 products (docs/numerics.md)."""


@pytest.mark.parametrize("kind", [ScaleKind.TENSORWISE, ScaleKind.ROWWISE])
def test_the_trial_finds_native_float8(kind):
    if get_compute_capability(None) < (8, 9):
        pytest.skip("this GPU multiplies no float8")
    assert find_native_failure(0, kind) is None
    assert choose_backend(torch.device(DEVICE), kind) is GemmBackend.NATIVE


@pytest.mark.parametrize(
    ("recipe", "kind"), [("blockwise", ScaleKind.BLOCKS_OF_128), ("mxfp8", ScaleKind.BLOCKS_OF_32)]
)
@pytest.mark.parametrize("shape", [smaller((256, 512, 384), (64, 256, 128)), (33, 200, 300)])
@pytest.mark.parametrize("compiled", [False, True])
def test_blocks_are_right_on_either_backend(recipe, kind, shape, compiled, record_property):
    """The backend is native where the trial succeeds, on Hopper for 128 and on Blackwell for 32; exact elsewhere."""
    tokens, k, n = shape
    record_property("failure", str(find_native_failure(0, kind)))
    linear = Float8Linear(k, n, config=recipe, device=DEVICE, dtype=torch.bfloat16)
    if compiled:
        linear.compile(fullgraph=True, backend=BACKEND)
    input = torch.randn(tokens, k, device=DEVICE, dtype=torch.bfloat16)
    grad_output = torch.randn(tokens, n, device=DEVICE, dtype=torch.bfloat16)
    results = compute_results(linear, input, grad_output=grad_output)
    x, w, g = (tensor.detach().double() for tensor in (input, linear.weight, grad_output))
    for result, expected in zip(results[:3], (x @ w.t() + linear.bias, g @ w, g.t() @ x), strict=True):
        assert sqnr_db(expected, result) > lowest_sqnr_db(3, 3, SUM, 7)  # two e4m3 operands, a bfloat16 result


@HP
@pytest.mark.parametrize("float8_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("dim", [None, 0, 1])
@pytest.mark.parametrize("power_of_2", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_codes_and_scales_are_those_of_a_cpu(hp_dtype, float8_dtype, dim, power_of_2, compiled):
    hp = (torch.randn(300, 130) * torch.logspace(-3, 3, 130)).to(hp_dtype)
    cast = torch.compile(dynamic_cast, fullgraph=True, backend=BACKEND) if compiled else dynamic_cast
    on_gpu = cast(hp.to(DEVICE), float8_dtype, dim, power_of_2=power_of_2)
    on_cpu = dynamic_cast(hp, float8_dtype, dim, power_of_2=power_of_2)
    assert_same([tensor.cpu() for tensor in on_gpu], on_cpu)


@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(64, 64, 64), (33, 17, 5), (1, 128, 48), (256, 1000, 520)], ids=str)
@pytest.mark.parametrize("bias_dtype", [None, torch.bfloat16, torch.float32])
def test_native_matmuls_are_near_exact_ones(rowwise, out_dtype, shape, bias_dtype):
    m, k, n = shape
    a, _, a_scale = dynamic_cast(torch.randn(m, k, device=DEVICE), E4M3, 1 if rowwise else None)
    b, _, b_scale = dynamic_cast(torch.randn(k, n, device=DEVICE), E5M2, 0 if rowwise else None)
    bias = None if bias_dtype is None else torch.randn(n, device=DEVICE, dtype=bias_dtype)
    out = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, bias=bias)
    expected = (a.double() * a_scale) @ (b.double() * b_scale) + (0 if bias is None else bias.double())
    assert out.dtype is out_dtype
    assert sqnr_db(expected.cpu(), out.cpu()) > lowest_sqnr_db(SUM, 7, 7)  # bfloat16 before and after the bias


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_exact_backend_is_exact_on_a_gpu(out_dtype):
    a, _, a_scale = dynamic_cast(torch.randn(256, 300, device=DEVICE), E4M3)
    b, _, b_scale = dynamic_cast(torch.randn(300, 128, device=DEVICE), E4M3)
    out = float8_mm(a, b, a_scale, b_scale, out_dtype=out_dtype, emulate=True)
    assert_matmul_exact(out.cpu(), a.cpu(), b.cpu(), a_scale.cpu(), b_scale.cpu())


@RECIPE
@HP
@pytest.mark.parametrize("mode", ["eager", "compiled", "scoped"])
def test_linear_agrees_with_the_cpu(recipe, hp_dtype, mode):
    on_cpu = Float8Linear(144, 80, dtype=hp_dtype, config=recipe)
    on_gpu = Float8Linear(144, 80, dtype=hp_dtype, config=recipe, device=DEVICE)
    on_gpu.load_state_dict(on_cpu.state_dict())
    forward = torch.compile(on_gpu, fullgraph=True, backend=BACKEND) if mode == "compiled" else on_gpu
    input, grad_output = torch.randn(50, 144).to(hp_dtype), torch.randn(50, 80).to(hp_dtype)
    results = []
    for device, module, call in zip(host_and_gpu(), (on_cpu, on_gpu), (on_cpu, forward), strict=True):
        with cast_weights_once(module) if mode == "scoped" and module is on_gpu else contextlib.nullcontext():
            tensors = compute_results(module, input.to(device), grad_output=grad_output.to(device), call=call)
        results.append([tensor.cpu() for tensor in tensors])
    for expected, actual in zip(*results, strict=True):
        assert sqnr_db(expected, actual) > lowest_sqnr_db(SUM, 7, 7)  # bfloat16 on each device


@RECIPE
def test_no_synchronization_in_forward_or_backward(recipe):
    size = smaller(256, 64)
    module = Float8Linear(size, size, dtype=torch.bfloat16, device=DEVICE, config=recipe)
    input = torch.randn(128, size, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    module(input).sum().backward()
    with host_sync_refused():
        module(input).sum().backward()


def test_emulate_is_honoured_on_a_gpu():
    input = torch.randn(64, 64, device=DEVICE, dtype=torch.bfloat16)
    for emulate in (False, True):
        config = Float8LinearConfig(emulate=emulate)
        module = Float8Linear(64, 64, bias=False, device=DEVICE, dtype=torch.bfloat16, config=config)
        with torch.profiler.profile() as profile:
            module(input)
        is_native = not emulate and find_native_failure(0, ScaleKind.TENSORWISE) is None
        assert any("_scaled_mm" in event.key for event in profile.key_averages()) == is_native


@RECIPE
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16])
def test_autocast_sets_the_dtype_of_outputs(recipe, autocast_dtype):
    module = Float8Linear(64, 32, device=DEVICE, config=recipe)
    input = torch.randn(48, 64, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE, dtype=autocast_dtype):
        output = module(input)
    output.float().sum().backward()
    assert output.dtype is autocast_dtype
    assert input.grad.dtype is module.weight.grad.dtype is torch.float32
    expected = torch.nn.functional.linear(input, module.weight, module.bias).detach().cpu()
    assert sqnr_db(expected, output.detach().cpu()) > lowest_sqnr_db(3, 3, SUM, 7)


@RECIPE
def test_a_module_may_move(recipe):
    module = Float8Linear(64, 32, config=recipe)
    input = torch.randn(48, 64)
    with host():
        on_cpu = module(input)
    on_gpu = module.to(DEVICE)(input.to(DEVICE))
    assert sqnr_db(on_cpu.detach(), on_gpu.detach().cpu()) > lowest_sqnr_db(SUM, 7)  # scales of rows: in bfloat16
    with host():
        assert module.cpu()(input).equal(on_cpu)

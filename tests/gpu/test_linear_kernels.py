"""Tests on a GPU what a linear launches, that a CUDA graph can hold it, and the compiler's modes that build graphs."""

import pytest
import torch

from quaver import Float8Linear, Float8LinearConfig
from quaver.linear.gemm import needs_contracted_dim_contiguous
from tests.gpu.device import DEVICE, Graph, needs_silicon, side_stream, smaller
from tests.recipes import NON_BLOCK_RECIPES
from tests.reference import lowest_sqnr_db, sqnr_db
from tests.steps import assert_same, compute_results

pytestmark = pytest.mark.gpu
RECIPE = pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)
MAX_KERNELS = 16
SIZE, TOKENS = smaller(256, 64), smaller(512, 48)


def make(recipe, bias=False):
    if not needs_contracted_dim_contiguous(torch.device(DEVICE)):
        pytest.skip("this GPU multiplies no float8")
    config = Float8LinearConfig.from_recipe_name(recipe)
    return Float8Linear(SIZE, SIZE, bias=bias, dtype=torch.bfloat16, device=DEVICE, config=config)


def step(module, input):
    output = module(input)
    output.backward(torch.ones_like(output))
    return output


@needs_silicon("which kernels its libraries launch")
@RECIPE
def test_a_step_launches_few_kernels(recipe):
    module = make(recipe)
    input = torch.randn(TOKENS, SIZE, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    grad_output = torch.randn(TOKENS, SIZE, device=DEVICE, dtype=torch.bfloat16)
    module(input).backward(grad_output)
    module.weight.grad = input.grad = None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        module(input).backward(grad_output)
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert 0 < len(kernels) <= MAX_KERNELS, kernels
    assert not any("transpose" in name.lower() for name in kernels), kernels


@RECIPE
@pytest.mark.parametrize("bias", [False, True])
def test_a_cuda_graph_holds_forward_and_backward(recipe, bias):
    module = make(recipe, bias)
    input = torch.randn(TOKENS, SIZE, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def run_step():
        module.zero_grad()
        input.grad = None
        return [step(module, input).detach(), input.grad, module.weight.grad]

    with side_stream():
        for _ in range(3):
            run_step()
    module.zero_grad()
    input.grad = None
    graph = Graph(run_step)
    with torch.no_grad():
        input.copy_(torch.randn_like(input))
    graph.replay()
    replayed = [tensor.clone() for tensor in graph.results]
    assert_same(replayed, run_step())


@needs_silicon("what Inductor makes of its modes")
@RECIPE
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_gradients_of_each_compiler_mode_are_near_eager_ones(recipe, mode):
    module = make(recipe)
    compiled = torch.compile(module, mode=mode, fullgraph=True)
    for _ in range(3):
        input = torch.randn(TOKENS, SIZE, device=DEVICE, dtype=torch.bfloat16)
        torch.compiler.cudagraph_mark_step_begin()
        _, *gradients = compute_results(module, input, grad_output=1.0, call=compiled)
        _, *expected = compute_results(module, input, grad_output=1.0)
        for gradient, reference in zip(gradients, expected, strict=True):
            assert sqnr_db(reference.cpu(), gradient.cpu()) > lowest_sqnr_db(7, 7)  # bfloat16 in each


@RECIPE
def test_the_bias_gradient_is_that_of_a_sum_in_float32(recipe):
    module = make(recipe, bias=True)
    grad_output = torch.randn(smaller(4096, 512), SIZE, device=DEVICE, dtype=torch.bfloat16)
    module(torch.randn_like(grad_output)).backward(grad_output)
    expected = grad_output.double().sum(0)
    assert (module.bias.grad.double() - expected).abs().max() <= 2**-8 * expected.abs().max()

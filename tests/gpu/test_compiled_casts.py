"""On a GPU: compiled linears with either maker of casts have eager's codes, step after step; graphs hold them."""

import pytest
import torch
from torch import nn

from quaver import Float8LinearConfig, convert_to_float8_training, sync_float8_amax_and_scale_history
from quaver.gemm import reads_along_contracted
from quaver.kernels import layout_ops
from tests.reference import KEPT_RECIPES, RECIPES, sqnr_db

pytestmark = pytest.mark.gpu
RECIPE = pytest.mark.parametrize("recipe", [*RECIPES, *KEPT_RECIPES])


@pytest.fixture(params=[False, True], ids=["compiler", "kernels"], autouse=True)
def _who_casts(request, monkeypatch):
    if not reads_along_contracted(torch.device("cuda")):
        pytest.skip("this GPU multiplies no float8")
    monkeypatch.setattr(layout_ops, "COMPILED_CODE_CALLS_KERNELS", request.param)


def make(recipe):
    torch.manual_seed(0)
    config = Float8LinearConfig.from_recipe_name(recipe)
    linear = nn.Linear(256, 384, bias=False, dtype=torch.bfloat16, device="cuda")
    return convert_to_float8_training(nn.Sequential(linear), config=config)


def steps(module, forward, inputs):
    """The float8 that is kept, as bytes; and results with gradients, of a few steps of training."""
    kept, results = [], []

    def pack(tensor):
        if tensor.dtype.itemsize == 1:
            kept.append(tensor.contiguous().view(torch.uint8).cpu())
        return tensor

    for rows in inputs:
        rows = rows.detach().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = forward(rows)
        results += train(module, rows, output)
    return kept, results


def train(module, rows, output):
    """The end of a step: its results and gradients."""
    results = [output.detach().clone()]
    output.backward(torch.ones_like(output).mul_(1.5))
    results += [rows.grad.clone(), module[0].weight.grad.clone()]
    module[0].weight.grad = None
    sync_float8_amax_and_scale_history(module)
    return results


@RECIPE
def test_codes_are_eagers(recipe):
    inputs = [torch.randn(512, 256, device="cuda", dtype=torch.bfloat16) * scale for scale in (1, 3, 2, 0.5, 1)]
    module = make(recipe)
    expected_codes, expected = steps(module, module, inputs)
    module = make(recipe)
    codes, results = steps(module, torch.compile(module, fullgraph=True), inputs)
    assert len(codes) == len(expected_codes)
    for got, want in zip(codes, expected_codes, strict=True):
        assert got.equal(want)
    for got, want in zip(results, expected, strict=True):
        assert sqnr_db(want, got) > 50


@RECIPE
def test_a_cuda_graph_of_the_compiler_holds_a_step(recipe):
    inputs = [torch.randn(512, 256, device="cuda", dtype=torch.bfloat16) * scale for scale in (1, 3, 2, 0.5, 1)]
    module = make(recipe)
    _, expected = steps(module, module, inputs)
    module = make(recipe)
    compiled = torch.compile(module, fullgraph=True, mode="reduce-overhead")
    results = []
    for rows in inputs:
        rows.requires_grad_()
        torch.compiler.cudagraph_mark_step_begin()
        results += train(module, rows, compiled(rows))
    for got, want in zip(results, expected, strict=True):
        assert sqnr_db(want, got) > 50


@RECIPE
def test_a_number_of_rows_that_changes(recipe):
    module = make(recipe)
    compiled = torch.compile(module, fullgraph=True, dynamic=True)
    for rows in (48, 80, 112):
        hidden = torch.randn(rows, 256, device="cuda", dtype=torch.bfloat16)
        torch.testing.assert_close(compiled(hidden), module(hidden), rtol=0.02, atol=0.02)

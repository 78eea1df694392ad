"""Tests that SwiGLU and RMSNorm before float8 linears have PyTorch's results and save their inputs only."""

import copy

import pytest
import torch
import torch.nn.functional as F

from quaver import convert_to_float8_training
from quaver.lab.model.float8 import fuse_producers
from quaver.lab.model.functional import embedding, rms_norm, swiglu
from quaver.lab.model.llama import Block, make_rope_tables
from quaver.lab.settings import Model

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
CONFIG = Model(dim=64, n_heads=2, n_kv_heads=1, hidden_dim=224, n_layers=1)


def record_saved(function):
    """Return the result of `function`, and the tensors that autograd saves for it, each once."""
    saved = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.setdefault(id(t), t), lambda t: t):
        result = function()
    return result, list(saved.values())


@DTYPES
def test_swiglu_is_pytorchs_to_the_bit(dtype):
    gate, up = (torch.randn(3, 5, 32, dtype=dtype, requires_grad=True) for _ in range(2))
    grad = torch.randn(3, 5, 32, dtype=dtype)
    (result, saved), expected = record_saved(lambda: swiglu(gate, up)), F.silu(gate) * up
    assert result.equal(expected)
    assert {id(tensor) for tensor in saved} == {id(gate), id(up)}
    gradients = (torch.autograd.grad(output, (gate, up), grad) for output in (result, expected))
    assert all(map(torch.equal, *gradients))


@DTYPES
def test_swiglu_computes_only_the_gradients_that_are_needed(dtype):
    gate, up = torch.randn(4, 8, dtype=dtype), torch.randn(4, 8, dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(swiglu(gate, up).sum(), up)
    assert grad.equal(F.silu(gate))


@DTYPES
def test_the_gradient_of_an_embedding_is_rounded_once(dtype):
    tokens, weight = torch.randint(3, (4, 500)), torch.randn(5, 16, dtype=dtype, requires_grad=True)
    result, grad = embedding(tokens, weight), torch.randn(4, 500, 16, dtype=dtype)
    assert result.equal(F.embedding(tokens, weight))
    result.backward(grad)
    exact = torch.zeros(5, 16, dtype=torch.float64).index_add_(0, tokens.flatten(), grad.flatten(0, 1).double())
    assert weight.grad.dtype == dtype
    # Sums of about 700 in float32; in bfloat16 they err by some percent of the largest.
    torch.testing.assert_close(weight.grad.double(), exact, rtol=2**-8, atol=1e-4)


@DTYPES
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_is_pytorchs(dtype, weight_dtype):
    hidden = (torch.randn(3, 5, 64) * torch.logspace(-3, 3, 15).view(3, 5, 1)).to(dtype).requires_grad_()
    weight = torch.randn(64, dtype=weight_dtype, requires_grad=True)
    result, saved = record_saved(lambda: rms_norm(hidden, weight, 1e-5, torch.bfloat16))
    expected = F.rms_norm(hidden, (64,), weight.to(dtype), 1e-5).to(torch.bfloat16)
    assert result.equal(expected)
    assert {id(tensor) for tensor in saved} == {id(hidden), id(weight)}
    grad = torch.randn_like(result)
    # The reference in float64: PyTorch's own gradients from bfloat16 are rounded on the way.
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    formula = exact[0] * (exact[0].square().mean(-1, keepdim=True) + 1e-5).rsqrt() * exact[1]
    expected, operands = torch.autograd.grad(formula, exact, grad.double()), (hidden, weight)
    gradients = torch.autograd.grad(result, operands, grad)
    for gradient, reference, operand in zip(gradients, expected, operands, strict=True):
        assert gradient.dtype is operand.dtype
        tolerance = 2e-6 if operand.dtype is torch.float32 else 2**-8
        assert (gradient.double() - reference).norm() <= tolerance * reference.norm()


def test_double_backward_is_refused():
    gate, up, weight = (torch.randn(2, 6, requires_grad=True) for _ in range(3))
    for output in (swiglu(gate, up), rms_norm(gate, weight[0], 1e-5)):
        (grad,) = torch.autograd.grad(output.sum(), gate, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
            grad.sum().backward()


def train_step(block, hidden, tables):
    block.zero_grad()
    hidden = hidden.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output, saved = record_saved(lambda: block(hidden, *tables))
    output.sum().backward()
    return output, hidden.grad, [parameter.grad for parameter in block.parameters()], saved


def test_a_float8_block_keeps_less_and_computes_the_same():
    tables = make_rope_tables(16, CONFIG.head_dim, CONFIG.rope_theta, torch.device("cpu"))
    plain = convert_to_float8_training(Block(CONFIG))
    fused = copy.deepcopy(plain)
    fuse_producers(fused)
    hidden = torch.randn(2, 16, CONFIG.dim)
    output, grad, grads, saved = train_step(plain, hidden, tables)
    fused_output, fused_grad, fused_grads, fused_saved = train_step(fused, hidden, tables)
    assert fused_output.equal(output)
    for gradient, expected in zip([fused_grad, *fused_grads], [grad, *grads], strict=True):
        assert (gradient - expected).norm() <= 2e-2 * expected.norm()

    def count_bytes(tensors):
        return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())

    tokens = 2 * 16
    silu, normalized = 2 * tokens * CONFIG.hidden_dim, 2 * 2 * 4 * tokens * CONFIG.dim  # x / rms, and that times 1
    assert count_bytes(saved) - count_bytes(fused_saved) >= silu + normalized // 2


def test_only_what_feeds_float8_is_fused():
    block = Block(CONFIG)
    fuse_producers(block)
    assert not any(module.feeds_float8 for module in (block.mlp, block.input_layernorm))
    some = ("mlp.gate_proj", "mlp.up_proj", "self_attn.q_proj")
    convert_to_float8_training(block, module_filter_fn=lambda module, name: name in some)
    fuse_producers(block)
    assert block.post_attention_layernorm.feeds_float8
    assert not any(module.feeds_float8 for module in (block.mlp, block.input_layernorm))

"""Tests that what a float8 linear inside a checkpoint saves is freed when nn.Linear's is."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, noop_context_fn

from quaver import convert_to_float8_training
from quaver.activations.policy import make_selective_contexts

CONTEXTS = pytest.mark.parametrize("contexts", [noop_context_fn, make_selective_contexts], ids=["full", "op"])
RECIPE = pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed"])


def find_inputs_alive_in_backward(recipe, contexts):
    """Return for each of four checkpointed blocks which blocks' inputs are alive when its gradient is computed."""
    linear = nn.Linear(64, 64)
    if recipe:
        convert_to_float8_training(linear, config=recipe)
    inputs, alive = [], []
    hidden = torch.randn(32, 64, requires_grad=True) * 1
    for _ in range(4):
        inputs.append(weakref.ref(hidden))
        hidden.register_hook(lambda grad: alive.append([input() is not None for input in inputs]))
        hidden = checkpoint(lambda x: F.silu(linear(x)), hidden, use_reentrant=False, context_fn=contexts)
    hidden.sum().backward()
    return alive


@CONTEXTS
@RECIPE
def test_a_block_frees_its_input_when_its_backward_ends(recipe, contexts):
    """One block in its own test cannot show it: every block's input would live until the last backward ends."""
    expected = find_inputs_alive_in_backward(None, contexts)
    assert expected[-1] == [False] * 4
    assert find_inputs_alive_in_backward(recipe, contexts) == expected


@CONTEXTS
def test_a_retained_graph_goes_backward_again(contexts):
    linear = convert_to_float8_training(nn.Linear(64, 64), config="tensorwise")
    x = torch.randn(32, 64, requires_grad=True)
    loss = checkpoint(linear, x, use_reentrant=False, context_fn=contexts).square().sum()
    first = torch.autograd.grad(loss, [x, linear.weight], retain_graph=True)
    second = torch.autograd.grad(loss, [x, linear.weight])
    assert all(map(torch.equal, first, second))
    with pytest.raises(RuntimeError, match="backward through the graph a second time|already been freed"):
        torch.autograd.grad(loss, [x, linear.weight])

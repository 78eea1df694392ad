"""An order for a compiler: grad_input depends on grad_weight in the graph, nothing is computed otherwise or besides."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from quaver import Float8Linear, Float8LinearConfig
from quaver.checkpointing.policy import MATMULS
from quaver.linear import function
from quaver.runtime.compile_hints import add_dependency
from tests.steps import assert_same
from tests.thinned import at_night

FLOAT8 = ["tensorwise", "rowwise_with_gw_hp"]


def backward_of(linear: nn.Module) -> tuple[torch.fx.Graph, list[torch.Tensor]]:
    """The graph of the backward of `linear`, compiled, and the gradients that it gives."""
    graphs = []

    def take(graph_module, _):
        graphs.append(graph_module.graph)
        return make_boxed_func(graph_module.forward)

    torch.compiler.reset()
    forward = aot_autograd(fw_compiler=lambda module, _: make_boxed_func(module.forward), bw_compiler=take)
    torch.manual_seed(0)
    input = torch.randn(64, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = torch.compile(linear, backend=forward, fullgraph=True)(input)
    output.square().mean().backward()
    return graphs[0], [input.grad, linear.weight.grad]


def depends_on(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    return any(each is other or depends_on(each, other) for each in node.all_input_nodes)


@pytest.mark.parametrize("recipe", [FLOAT8[0], *at_night([(recipe,) for recipe in FLOAT8[1:]])])
def test_grad_input_depends_on_grad_weight_and_no_bit_changes(recipe, monkeypatch):
    torch.manual_seed(1)
    linear = Float8Linear(32, 48, bias=False, config=Float8LinearConfig.from_recipe_name(recipe))
    twin = copy.deepcopy(linear)
    graph, gradients = backward_of(linear)
    first, second = (node for node in graph.nodes if node.target in MATMULS)
    assert list(first.meta["val"].shape) == [48, 32]
    assert depends_on(second, first)
    monkeypatch.setattr(function, "add_dependency", lambda waiting, computed: None)
    graph, expected = backward_of(twin)
    first, second = (node for node in graph.nodes if node.target in MATMULS)
    assert not depends_on(second, first)
    assert_same(gradients, expected)


def test_eager_code_has_an_order_and_is_not_asked_to_wait(monkeypatch):
    monkeypatch.setattr(torch.ops.quaver, "wait_for", None)
    waiting, computed = torch.ones(3), torch.zeros(3)
    add_dependency(waiting, computed)
    assert waiting.eq(1).all()


def test_what_waits_is_not_copied():
    """The functional graph has a new tensor for it, which Inductor gives the old one's memory."""
    from torch._inductor.utils import run_and_get_code

    def step(a, b):
        scale = a.amax().clamp(min=1.0)
        product = a @ b
        add_dependency(scale, product)
        return product, (b @ a) * scale

    a, b = torch.randn(32, 32), torch.randn(32, 32)
    results, (code, *_) = run_and_get_code(torch.compile(step, fullgraph=True), a, b)
    assert all(torch.allclose(x, y, atol=1e-4) for x, y in zip(results, step(a, b), strict=True))
    called = code[code.index("def call") : code.index("return (")]
    before, after = called.split("torch.ops.quaver.wait_for.default(")
    waiting = after.split(",")[0]
    assert "extern_kernels.mm(" in before
    assert f"{waiting})" in after.split("\n", 1)[1]  # the kernel that multiplies reads it where it was
    assert called.count("empty_strided_cpu((),") == 1

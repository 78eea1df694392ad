"""Tests that add_dependency makes grad_input depend on grad_weight in the backward's graph and changes no result."""

import copy

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd

from quaver import Float8Linear, Float8LinearConfig
from quaver.activations.policy import MATMUL_OPS
from quaver.linear import function
from quaver.runtime.compile_hints import add_dependency
from tests.steps import assert_same
from tests.thinned import by_day


def compile_backward(linear: nn.Module) -> tuple[torch.fx.Graph, list[torch.Tensor]]:
    """Return the graph of the compiled backward of `linear`, and its gradients."""
    graphs = []

    def keep_graph(graph_module, _):
        graphs.append(graph_module.graph)
        return make_boxed_func(graph_module.forward)

    torch.compiler.reset()
    forward = aot_autograd(fw_compiler=lambda module, _: make_boxed_func(module.forward), bw_compiler=keep_graph)
    torch.manual_seed(0)
    input = torch.randn(64, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        output = torch.compile(linear, backend=forward, fullgraph=True)(input)
    output.square().mean().backward()
    return graphs[0], [input.grad, linear.weight.grad]


def depends_on(node: torch.fx.Node, other: torch.fx.Node) -> bool:
    return any(input is other or depends_on(input, other) for input in node.all_input_nodes)


@pytest.mark.parametrize("recipe", by_day(["tensorwise"], ["tensorwise", "rowwise_with_gw_hp"]))
def test_grad_input_depends_on_grad_weight_and_no_bit_changes(recipe, monkeypatch):
    torch.manual_seed(1)
    linear = Float8Linear(32, 48, bias=False, config=Float8LinearConfig.from_recipe_name(recipe))
    twin = copy.deepcopy(linear)
    graph, gradients = compile_backward(linear)
    first, second = (node for node in graph.nodes if node.target in MATMUL_OPS)
    assert list(first.meta["val"].shape) == [48, 32]
    assert depends_on(second, first)
    monkeypatch.setattr(function, "add_dependency", lambda waiting, computed: None)
    graph, expected = compile_backward(twin)
    first, second = (node for node in graph.nodes if node.target in MATMUL_OPS)
    assert not depends_on(second, first)
    assert_same(gradients, expected)


def test_eager_code_does_not_call_the_operator(monkeypatch):
    monkeypatch.setattr(torch.ops.quaver, "wait_for", None)
    waiting, computed = torch.ones(3), torch.zeros(3)
    add_dependency(waiting, computed)
    assert waiting.eq(1).all()


def test_add_dependency_copies_no_tensor():
    """The functional graph has a new tensor for it, to which Inductor gives the memory of the old one."""
    from torch._inductor.utils import run_and_get_code

    def step(a, b):
        scale = a.amax().clamp(min=1.0)
        product = a @ b
        add_dependency(scale, product)
        return product, (b @ a) * scale

    a, b = torch.randn(32, 32), torch.randn(32, 32)
    results, (code, *_) = run_and_get_code(torch.compile(step, fullgraph=True), a, b)
    torch.testing.assert_close(results, step(a, b), rtol=1e-5, atol=1e-4)
    called = code[code.index("def call") : code.index("return (")]
    before, after = called.split("torch.ops.quaver.wait_for.default(")
    waiting = after.split(",")[0]
    assert "extern_kernels.mm(" in before
    assert f"{waiting})" in after.split("\n", 1)[1]  # the kernel that multiplies reads it where it was
    assert called.count("empty_strided_cpu((),") == 1

"""Tests that the first non-finite operand is found wherever it is planted."""

import pytest
import torch
from torch import Tensor, nn

from quaver import Float8Linear
from quaver.lab.trainer.nonfinite import NonFiniteOperand, find_nonfinite


class Spoil(torch.autograd.Function):
    """Identity whose gradient has one NaN."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        grad = grad.clone()
        grad.view(-1)[0] = torch.nan
        return grad


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8, bias=False)
        self.spoils_backward = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.spoils_backward:
            x = Spoil.apply(x)
        return self.second(x)


def find_operand(net: Net, x: Tensor | None = None) -> NonFiniteOperand | None:
    x = torch.ones(4, 8) if x is None else x
    return find_nonfinite(net, lambda: net(x).sum().backward())


def test_a_search_in_a_finite_model_names_nothing_and_leaves_no_hooks_or_gradients():
    net = Net()
    assert find_operand(net) is None
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(not parameter._backward_hooks for parameter in net.parameters())
    for module in net.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        assert not any(hooks)


SPOILED = {
    "first weight": lambda net, x: net.first.weight[0, 3].fill_(torch.inf),
    "first bias": lambda net, x: net.first.bias[3].fill_(torch.inf),
    "second weight": lambda net, x: net.second.weight[0, 3].fill_(torch.inf),
    "first input": lambda net, x: x[1, 2].fill_(torch.inf),
    # An output and a gradient that overflow from finite operands.
    "second output": lambda net, x: (net.second.weight.fill_(3e38), net.first.bias.fill_(10.0)),
    "second grad_weight": lambda net, x: (
        net.second.weight.zero_(),
        net.first.weight.zero_(),
        net.first.bias.fill_(3e38),  # the output is 3e38 each, and the gradient sums four of them
    ),
    "first grad_output": lambda net, x: setattr(net, "spoils_backward", True),
}


@pytest.mark.parametrize("operand", SPOILED)
def test_the_first_nonfinite_operand_is_named(operand):
    net, x = Net(), torch.ones(4, 8)
    with torch.no_grad():
        SPOILED[operand](net, x)
    assert find_operand(net, x) == NonFiniteOperand(*operand.split())


def test_the_first_operand_of_a_float8_module_is_named_too():
    net = Net()
    net.second = Float8Linear(8, 8, bias=False)
    with torch.no_grad():
        net.first.weight[0, 3] = torch.inf
    operand = find_operand(net)
    assert (operand, operand.in_float8) == (NonFiniteOperand("first", "weight"), NonFiniteOperand("second", "input"))


def test_compiled_modules_are_looked_into():
    net = Net()
    net.compile(backend="eager", fullgraph=True)
    net(torch.ones(4, 8))
    with torch.no_grad():
        net.second.weight[0, 0] = torch.nan
    assert find_operand(net) == NonFiniteOperand("second", "weight")


def test_a_sum_of_finite_gradients_over_micro_batches_is_looked_at_last():
    net = Net()
    with torch.no_grad():
        net.second.weight.zero_()

    def run_two_micro_batches():
        for _ in range(2):
            (net(torch.ones(1, 8)).sum() * 0 + net.first.bias.sum() * 3e38).backward()

    assert find_nonfinite(net, run_two_micro_batches) == NonFiniteOperand("first", "grad_bias")
    assert net.first.bias.grad is None


def test_check_numbers_order_the_operands_of_ranks():
    early, late = Net(), Net()
    with torch.no_grad():
        early.first.weight[0, 0] = torch.nan
        late.second.weight[0, 0] = torch.nan
    assert find_operand(early).check_number < find_operand(late).check_number

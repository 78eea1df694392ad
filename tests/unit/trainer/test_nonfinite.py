"""The first non-finite operand, planted in each place it can be."""

import pytest
import torch
from torch import Tensor, nn

from quaver.trainer.nonfinite import NonFiniteOperand, find_nonfinite


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


def find(net: Net, x: Tensor | None = None) -> NonFiniteOperand | None:
    x = torch.ones(4, 8) if x is None else x
    return find_nonfinite(net, lambda: net(x).sum().backward())


def test_finite_finds_nothing_and_leaves_no_hooks_or_gradients():
    net = Net()
    assert find(net) is None
    assert all(parameter.grad is None for parameter in net.parameters())
    assert all(not parameter._backward_hooks for parameter in net.parameters())
    for module in net.modules():
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        assert not any(hooks)


@pytest.mark.parametrize("operand", ["first.weight", "first.bias", "second.weight"])
def test_parameters(operand):
    net = Net()
    with torch.no_grad():
        net.get_parameter(operand).view(-1)[3] = torch.inf
    assert find(net) == NonFiniteOperand(*operand.split("."))


def test_input():
    x = torch.ones(4, 8)
    x[1, 2] = torch.inf
    assert find(Net(), x) == NonFiniteOperand("first", "input")


def test_output_overflows_from_finite_operands():
    net = Net()
    with torch.no_grad():
        net.second.weight.fill_(3e38)
        net.first.bias.fill_(10.0)
    assert find(net) == NonFiniteOperand("second", "output")


def test_backward_comes_after_forward_and_names_the_gradient():
    net = Net()
    net.spoils_backward = True
    assert find(net) == NonFiniteOperand("first", "grad_output")


def test_grad_weight_overflows_from_finite_operands():
    net = Net()
    with torch.no_grad():
        net.second.weight.zero_()
        net.first.weight.zero_()
        net.first.bias.fill_(3e38)  # output 3e38 each; grad_weight of second sums four of them
    assert find(net) == NonFiniteOperand("second", "grad_weight")


def test_compiled_modules_are_looked_into():
    net = Net()
    net.compile(backend="eager", fullgraph=True)
    net(torch.ones(4, 8))
    with torch.no_grad():
        net.second.weight[0, 0] = torch.nan
    assert find(net) == NonFiniteOperand("second", "weight")


def test_a_sum_of_finite_gradients_over_micro_batches_is_looked_at_last():
    net = Net()
    with torch.no_grad():
        net.second.weight.zero_()

    def twice():
        for _ in range(2):
            (net(torch.ones(1, 8)).sum() * 0 + net.first.bias.sum() * 3e38).backward()

    assert find_nonfinite(net, twice) == NonFiniteOperand("first", "grad_bias")
    assert net.first.bias.grad is None


def test_positions_order_what_ranks_find():
    early, late = Net(), Net()
    with torch.no_grad():
        early.first.weight[0, 0] = torch.nan
        late.second.weight[0, 0] = torch.nan
    assert find(early).position < find(late).position

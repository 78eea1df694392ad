"""Makes parameters, gradients and steps of an optimizer, and compares states."""

import torch
from torch import nn

from quaver.optim import Float8AdamW
from tests.steps import assert_same

SHAPES = [(64, 512), (100, 300), (300,), (4, 50, 100), (16, 32, 3, 3), (70, 1000), ()]


def build_parameters(optimizer=Float8AdamW, shapes=SHAPES, dtype=torch.float32, **options):
    """Return parameters and their optimizer."""
    torch.manual_seed(0)
    parameters = [nn.Parameter((torch.randn(shape) * 0.1).to(dtype)) for shape in shapes]
    return parameters, optimizer(parameters, **{"lr": 1e-2, **options})


def give_gradients(parameters, seed):
    """Set gradients whose magnitudes differ within a block."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        values = torch.randn(2, *parameter.shape, generator=generator)
        parameter.grad = (values[0] * 10 ** values[1]).to(parameter.dtype)


def make_steps(parameters, optimizer, seeds):
    """Make one step for each seed of gradients, and return the parameters and the optimizer."""
    for seed in seeds:
        give_gradients(parameters, seed)
        optimizer.step()
    return parameters, optimizer


def train(optimizer=Float8AdamW, steps=3, **options):
    return make_steps(*build_parameters(optimizer, **options), seeds=range(steps))


def assert_same_states(ours, theirs):
    """Assert that the parameters and states of two (parameters, optimizer) have equal bits."""
    ours, theirs = ([(p, optimizer.state[p]) for p in parameters] for parameters, optimizer in (ours, theirs))
    assert_same(ours, theirs)


def count_state_bytes(optimizer, parameter):
    """Return the bytes of the state per element of the parameter."""
    return sum(tensor.nbytes for tensor in optimizer.state[parameter].values() if tensor.dim()) / parameter.numel()


MUON = {"shapes": [(16, 300), (300, 16), (16, 512), (30, 40)], "masters": "float32"}

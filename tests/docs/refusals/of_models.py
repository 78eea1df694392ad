"""Lists what pages about models and tools of the library say is refused."""

import torch
from torch import nn

from quaver import assert_float8_training, convert_to_float8_training
from quaver.checkpointing import store_activations_in_float8
from quaver.export import save_float8
from tests.docs.refusals import Case, Pages
from tests.docs.refusals.of_weights import converted, forward, linear


def stored():
    model = nn.Sequential(nn.Sequential(nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 256)))
    convert_to_float8_training(model, config="rowwise")
    assert store_activations_in_float8(model, modules=["0"]) == ["0"]
    return model


def double_backward(model):
    input = torch.randn(256, 64, requires_grad=True)
    torch.autograd.grad(model(input).square().sum(), input, create_graph=True)[0].sum().backward()


def gradient_of(model, features=64):
    torch.func.grad(lambda input: model(input).sum())(torch.randn(256, features))


def tangent():
    torch.func.jvp(converted(), (torch.ones(16, 64),), (torch.ones(16, 64),))


def vmapped():
    torch.func.vmap(converted())(torch.randn(2, 16, 64))


def in_place_of_the_saved_input():
    model, input = converted("rowwise_with_gw_hp"), torch.randn(16, 64)
    output = model(input)
    input.mul_(2)
    output.sum().backward()


def in_32_columns():
    model = convert_to_float8_training(nn.Sequential(nn.Linear(48, 64, bias=False)), config="mxfp8")
    save_float8(model, "never-written", config={}, format="compressed-tensors-mxfp8")


PAGES: Pages = {
    "activations.md": {
        "| double backward, `torch.func.grad` | refused": [
            Case(lambda: gradient_of(stored(), 256), "don't yet support saved tensor hooks"),
        ],
    },
    "from-torchao.md": {
        "quaver raises `ValueError` with what it expected and got": [
            Case(lambda: forward(converted().double()), "expected .*, got torch.float", kinds=(ValueError,)),
        ],
    },
    "export.md": {
        "A weight whose columns are not a multiple of 32 is refused": [
            Case(in_32_columns, r"a multiple of 32, got 0 \[64, 48\]")
        ],
    },
    "integrations.md": {
        "It raises with a list if no linear is in float8": [
            Case(lambda: assert_float8_training(linear()), "no linear is in float8", lines=2),
            Case(
                lambda: assert_float8_training(converted(), torch.optim.SGD(linear().parameters())),
                "float8 weights that the optimizer does not hold: 0",
                lines=3,
            ),
        ],
    },
    "limitations.md": {
        "`grad` and `jvp` raise": [
            Case(lambda: double_backward(converted()), "has no second derivative"),
            Case(lambda: converted()(torch.zeros(16, 64, dtype=torch.float64)), "got torch.float64"),
            Case(lambda: gradient_of(converted()), "support no torch.func.grad"),
            Case(tangent, "support no torch.func.grad", is_slow=True),
            Case(vmapped, "support no torch.func.grad"),
        ],
        "eager code raises": [Case(in_place_of_the_saved_input, "modified by an inplace operation")],
    },
}

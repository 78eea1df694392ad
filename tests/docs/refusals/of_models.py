"""What pages about models, optimizers and tools of the library refuse."""

from functools import partial

import torch
from torch import nn

from quaver import (
    CastConfig,
    ScalingGranularity,
    ScalingType,
    assert_float8_training,
    convert_to_float8_training,
    error_on_slow_path,
)
from quaver.checkpointing import store_activations_in_float8
from quaver.export import save_float8
from quaver.optim import Float8AdamW, Float8Muon
from tests.docs.refusals import Case, Pages
from tests.docs.refusals.of_weights import converted, forward, frozen, linear


def stored():
    model = nn.Sequential(nn.Sequential(nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, 256)))
    convert_to_float8_training(model, config="rowwise")
    assert store_activations_in_float8(model, ["0"]) == ["0"]
    return model


def double_backward(model, features=64):
    input = torch.randn(256, features, requires_grad=True)
    torch.autograd.grad(model(input).square().sum(), input, create_graph=True)[0].sum().backward()


def gradient_of(model, features=64):
    torch.func.grad(lambda input: model(input).sum())(torch.randn(256, features))


def tangent():
    torch.func.jvp(converted(), (torch.ones(16, 64),), (torch.ones(16, 64),))


def vmapped():
    torch.func.vmap(converted())(torch.randn(2, 16, 64))


def with_a_forward_of_its_own():
    model = nn.Sequential(nn.Sequential(nn.Linear(256, 256)))
    model[0].forward = len
    store_activations_in_float8(model, ["0"])


def replaced_forward():
    model = converted()
    forward(model)
    model[0].forward = len
    assert_float8_training(model)


def in_place_of_the_saved_input():
    model, input = converted("rowwise_with_gw_hp"), torch.randn(16, 64)
    output = model(input)
    input.mul_(2)
    output.sum().backward()


def in_32_columns():
    model = convert_to_float8_training(nn.Sequential(nn.Linear(48, 64, bias=False)), config="mxfp8")
    save_float8(model, "never-written", config={}, format="compressed-tensors-mxfp8")


def dequantized_where_slow_paths_are_errors():
    with error_on_slow_path():
        frozen()[0].weight + 1


def parameter(*shape, dtype=torch.float32):
    return nn.Parameter(torch.zeros(shape or (64, 64), dtype=dtype))


def sparse_step(optimizer):
    weight = parameter()
    stepped = optimizer([weight])
    weight.grad = torch.zeros(64, 64).to_sparse()
    stepped.step()


def loaded_by_adamw(make, **options):
    weight = parameter()
    Float8AdamW([weight]).load_state_dict(make([weight], **options).state_dict())


def of_both(message, make):
    """A case for each optimizer."""
    return [Case(partial(make, optimizer), message) for optimizer in (Float8AdamW, Float8Muon)]


PAGES: Pages = {
    "activations.md": {
        "| double backward, `torch.func.grad` | refused": [
            Case(lambda: double_backward(stored(), 256), "support no double backward", is_slow=True),
            Case(lambda: gradient_of(stored(), 256), "don't yet support saved tensor hooks"),
        ],
        "| a module whose `forward` was replaced on the instance | refused": [
            Case(with_a_forward_of_its_own, "0 has a forward of its own instance"),
        ],
    },
    "from-torchao.md": {
        "quaver raises `ValueError` with what it expected and got": [
            Case(
                lambda: converted("rowwize"),
                "unknown recipe 'rowwize': expected one of tensorwise",
                kinds=(ValueError,),
            ),
            Case(
                lambda: CastConfig(target_dtype=torch.int8),
                "target_dtype: expected .*got torch.int8",
                kinds=(ValueError,),
            ),
            Case(lambda: forward(converted().double()), "expected .*, got torch.float", kinds=(ValueError,)),
        ],
    },
    "export.md": {
        "A weight whose columns are no multiple of 32 is refused": [
            Case(in_32_columns, r"a multiple of them, got 0 \[64, 48\]")
        ],
    },
    "integrations.md": {
        "It raises with a list if no linear is in float8": [
            Case(lambda: assert_float8_training(linear()), "no linear is in float8", lines=2),
            Case(replaced_forward, "0: its forward was replaced on the instance, and it has not run since", lines=2),
            Case(
                lambda: assert_float8_training(converted(), torch.optim.SGD(linear().parameters())),
                "float8 weights that the optimizer does not hold: 0",
                lines=3,
            ),
        ],
    },
    "limitations.md": {
        "- Row-wise delayed or static scaling is refused": [
            Case(partial(CastConfig, kind, ScalingGranularity.ROWWISE), "expected tensorwise, got rowwise")
            for kind in (ScalingType.DELAYED, ScalingType.STATIC)
        ],
        "`grad` and `jvp` raise": [
            Case(lambda: double_backward(converted()), "has no second derivative"),
            Case(lambda: converted()(torch.zeros(16, 64, dtype=torch.float64)), "got torch.float64"),
            Case(lambda: gradient_of(converted()), "support no torch.func.grad"),
            Case(tangent, "support no torch.func.grad", is_slow=True),
            Case(vmapped, "support no torch.func.grad"),
        ],
        "eager code raises": [Case(in_place_of_the_saved_input, "modified by an inplace operation")],
    },
    "optimizer.md": {
        "`exp_avg` in float8 with `exp_avg_sq` in bfloat16 or float32": [
            Case(partial(Float8AdamW, [parameter()], exp_avg_sq=storage), f"expected 'float8' .*got '{storage}'")
            for storage in ("bfloat16", "float32")
        ],
        "Refused: complex and float16 parameters": [
            *of_both("got torch.complex64", lambda made: made([parameter(dtype=torch.complex64)])),
            *of_both("got torch.float16", lambda made: made([parameter(dtype=torch.float16)])),
            *of_both("expected a dense gradient", sparse_step),
            *(
                Case(partial(optimizer, [parameter()], **{name: True}), name, kinds=(TypeError,))
                for optimizer in (Float8AdamW, Float8Muon)
                for name in ("amsgrad", "maximize", "capturable", "differentiable")
            ),
            *of_both("maximize: expected no such", lambda made: made([{"params": [parameter()], "maximize": True}])),
            Case(lambda: loaded_by_adamw(torch.optim.AdamW, amsgrad=True), "amsgrad: expected no such option"),
            Case(lambda: loaded_by_adamw(torch.optim.AdamW, maximize=True), "maximize: expected no such option"),
            Case(lambda: loaded_by_adamw(torch.optim.Adam, weight_decay=0.1), "expected the decoupled one"),
            Case(lambda: Float8Muon([parameter(4, 64, 64)]), "expected matrices"),
        ],
    },
    "profiling.md": {
        "`quaver.error_on_slow_path()`, raises a RuntimeError for each": [
            Case(dequantized_where_slow_paths_are_errors, "dequantizes a whole frozen float8 weight"),
        ],
    },
}

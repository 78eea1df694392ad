"""Lists what pages about the weights of a linear and their scales say is refused."""

from dataclasses import replace

import torch
from torch import nn

from quaver import (
    CastConfig,
    Float8LinearConfig,
    calibrate_float8_static_scales,
    cast_weights_once,
    convert_to_float8_training,
    freeze_to_float8,
    use_float8_primary_weights,
)
from quaver.recipes.config import ScalingType
from tests.docs.refusals import Case, Pages


def linear():
    return nn.Sequential(nn.Linear(64, 48, bias=False))


def converted(recipe="tensorwise", **changes):
    return convert_to_float8_training(linear(), config=replace(Float8LinearConfig.from_recipe_name(recipe), **changes))


def frozen():
    return freeze_to_float8(linear(), config="blockwise")


def primary():
    model = converted()
    return model, use_float8_primary_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))


def forward(model):
    return model(torch.randn(16, 64))


def assigned_in_the_scope():
    with cast_weights_once(model := converted()):
        model[0].weight.data = model[0].weight.data * 2
        forward(model)


def static():
    config = Float8LinearConfig(cast_config_input=CastConfig(scaling_type=ScalingType.STATIC))
    return convert_to_float8_training(linear(), config=config)


def calibrated_by(*batches):
    with calibrate_float8_static_scales(model := static()):
        for batch in batches:
            model(batch).sum().backward()


def compiled_with_another_dtype():
    model = converted().requires_grad_(False)
    input = torch.randn(16, 64, requires_grad=True)
    output = torch.compile(model, backend="aot_eager")(input)
    model[0].weight.data = model[0].weight.data.to(torch.int8)
    output.sum().backward()


@torch.no_grad()
def out_of_another_shape():
    torch.mul(torch.ones(3), 2, out=primary()[0][0].weight)


PAGES: Pages = {
    "weights.md": {
        "of another shape) is an error": [
            Case(lambda: frozen()[0].weight.set_(torch.ones(48, 64)), "would change the shape or the memory"),
            Case(lambda: primary()[0][0].weight.detach().t_(), "would change the shape or the memory"),
            Case(lambda: primary()[0][0].weight.detach().resize_(2, 2), "would change the shape or the memory"),
            Case(out_of_another_shape, "expected out= of"),
            Case(
                lambda: frozen()[0].weight.view(-1).mul_(2),
                "a write to this view would not reach the frozen float8 weight",
            ),
        ],
        "An assignment to `.data` inside it is an error": [
            Case(assigned_in_the_scope, "changed"),
        ],
        "a dtype that is not high precision is an error": [
            Case(compiled_with_another_dtype, "expected a tensor of", is_slow=True)
        ],
    },
    "scaling.md": {
        "A forward before the calibration raises": [
            Case(calibrated_by, "calibrat"),
            Case(lambda: calibrated_by(torch.full((16, 64), torch.inf)), "had an amax of inf"),
        ],
    },
    "fine-tuning.md": {
        "| views of a frozen weight": [Case(lambda: frozen()[0].weight.t(), "has no views in high precision")],
    },
}

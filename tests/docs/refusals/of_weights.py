"""What pages about the weights of a linear and their scales refuse."""

from dataclasses import replace

import torch
from torch import nn

from quaver import (
    CastConfig,
    Float8LinearConfig,
    calibrate_float8_static_scales,
    cast_weights_once,
    convert_to_float8_training,
    convert_to_high_precision,
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
    return freeze_to_float8(linear(), "blockwise")


def primary():
    model = converted()
    return model, use_float8_primary_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))


def forward(model):
    return model(torch.randn(16, 64))


def written_in_the_scope(write):
    model = converted()
    with cast_weights_once(model):
        write(model[0])
        forward(model)


def static():
    config = Float8LinearConfig(cast_config_input=CastConfig(scaling_type=ScalingType.STATIC))
    return convert_to_float8_training(linear(), config=config)


def calibrated_by(*batches):
    with calibrate_float8_static_scales(model := static()):
        for batch in batches:
            model(batch).sum().backward()


def replaced_master():
    model, optimizer = primary()
    model.load_state_dict(linear().state_dict(), assign=True)
    optimizer.step()


def under_another_config():
    model, _ = primary()
    model[0].config = Float8LinearConfig.from_recipe_name("rowwise")
    forward(model)


def converted_again():
    model, _ = primary()
    convert_to_float8_training(convert_to_high_precision(model), config="rowwise")


def converted_in_the_scope():
    with cast_weights_once(model := converted()):
        convert_to_high_precision(model)


def tied():
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    model[1].weight = model[0].weight
    freeze_to_float8(model)


def with_adapters():
    model = linear().requires_grad_(False).append(nn.Linear(48, 4))
    freeze_to_float8(model)


def with_nan():
    model = linear()
    model[0].weight.data[1, 2] = torch.nan
    freeze_to_float8(model)


def compiled_with_another_dtype():
    model = converted().requires_grad_(False)
    input = torch.randn(16, 64, requires_grad=True)
    output = torch.compile(model, backend="aot_eager")(input)
    model[0].weight.data = model[0].weight.data.to(torch.int8)
    output.sum().backward()


@torch.no_grad()
def out_of_another_shape():
    torch.mul(torch.ones(3), 2, out=primary()[0][0].weight)


def changed_before_backward():
    model = converted()
    output = model(torch.randn(16, 64, requires_grad=True))
    with torch.no_grad():
        model[0].weight.mul_(2)
    output.sum().backward()


PAGES: Pages = {
    "weights.md": {
        "of another shape) is an error": [
            Case(lambda: frozen()[0].weight.set_(torch.ones(48, 64)), "would change the shape or the memory"),
            Case(lambda: primary()[0][0].weight.detach().t_(), "would change the shape or the memory"),
            Case(lambda: primary()[0][0].weight.detach().resize_(2, 2), "would change the shape or the memory"),
            Case(out_of_another_shape, "expected out= of"),
            Case(lambda: frozen()[0].weight.view(-1).mul_(2), "this is a view of a frozen float8 weight"),
        ],
        "An assignment to `.data` inside it is an error": [
            Case(
                lambda: written_in_the_scope(lambda each: setattr(each.weight, "data", each.weight.data * 2)), "changed"
            ),
        ],
        "the scope's exit. A write inside is an error": [
            Case(lambda: written_in_the_scope(lambda each: each.weight.detach().mul_(2)), "was changed inside"),
        ],
        "where their config would quantize a primary or frozen weight in another way": [
            Case(under_another_config, "was quantized under another config"),
            Case(converted_again, "was quantized under another config"),
        ],
        "a conversion back and another config are errors": [
            Case(converted_in_the_scope, "cannot be converted back inside cast_weights_once"),
            Case(
                lambda: written_in_the_scope(lambda each: setattr(each, "config", converted("rowwise")[0].config)),
                "config",
            ),
        ],
        "a dtype that is not high precision is an error": [
            Case(compiled_with_another_dtype, "expected a tensor of", is_slow=True)
        ],
    },
    "scaling.md": {
        "A forward before the calibration raises": [
            Case(lambda: forward(static()), "static scales that were never measured"),
            Case(calibrated_by, "calibrat"),
            Case(lambda: calibrated_by(torch.zeros(16, 64)), "had an amax of 0.0"),
            Case(lambda: calibrated_by(torch.full((16, 64), torch.inf)), "had an amax of inf"),
        ],
    },
    "primary-weights.md": {"the next `optimizer.step()` raises": [Case(replaced_master, "was replaced after")]},
    "fine-tuning.md": {
        "| a gradient for a frozen weight": [
            Case(lambda: frozen()[0].weight.requires_grad_(), "cannot require a gradient"),
        ],
        "| freezing after adapters are added": [Case(with_adapters, "call freeze_to_float8 before adapters")],
        "| a tied weight": [Case(tied, "is tied to")],
        "| NaN or inf in a weight": [Case(with_nan, "holds NaN or inf")],
        "| a recipe with two weight casts": [
            Case(lambda: freeze_to_float8(linear(), "rowwise_with_gw_hp"), "one float8 cast for both"),
            Case(lambda: freeze_to_float8(linear(), "delayed"), "no delayed or static scaling"),
        ],
        "| views of a frozen weight": [Case(lambda: frozen()[0].weight.t(), "has no views in high precision")],
    },
    "numerics.md": {
        "autograd refuses a weight that was changed in between": [
            Case(changed_before_backward, "modified by an inplace operation")
        ],
    },
}

"""Forms of a weight x ways to write to it x who looks: each sees the write, or one line refuses it."""

import copy
import itertools
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from quaver import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    cast_weights_once,
    convert_to_float8_training,
    float8_grouped_mm,
    float8_linear,
    freeze_to_float8,
    use_float8_primary_weights,
)
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
from quaver.export import load_float8, save_float8
from quaver.weights.frozen import FrozenFloat8Weight
from tests.thinned import thinned


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 48, bias=False))


def converted(recipe, **changes):
    model = linear()
    config = replace(Float8LinearConfig.from_recipe_name(recipe), **changes)
    return convert_to_float8_training(model, config=config)


def plain(recipe, scope):
    return converted(recipe)


def gathered(recipe, scope):
    model = converted(recipe, enable_fsdp_float8_all_gather=True)
    fully_shard(model[0])
    fully_shard(model)
    precompute_float8_dynamic_scale_for_fsdp(model)
    return model


def frozen(recipe, scope):
    return freeze_to_float8(linear(), recipe)


def primary(recipe, scope):
    model = converted(recipe)
    use_float8_primary_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def cast_once(recipe, scope):
    model = converted(recipe)
    scope.enter_context(cast_weights_once(model))
    return model


FORMS = {form.__name__: form for form in (plain, gathered, frozen, primary, cast_once)}


def values(model):
    """The values of the weight, as what an optimizer would compute from it: a DTensor where the weight is one."""
    weight = model[0].weight.detach()
    return weight.to_high_precision() if isinstance(weight, FrozenFloat8Weight) else (weight.t() * 1).t()


def loaded(model, **options):
    model.load_state_dict({"0.weight": values(model) * 2}, **options)


def averaged(model):
    source = copy.deepcopy(model)
    source[0].weight.mul_(2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.0))
    average.n_averaged.fill_(1)
    average.update_parameters(source)
    return average.module


def as_vector(model):
    vector = nn.utils.parameters_to_vector(model.parameters()) * 2
    nn.utils.vector_to_parameters(vector, model.parameters())


WRITES = {
    "in place": lambda model: model[0].weight.mul_(2),
    "copy_": lambda model: model[0].weight.copy_(values(model) * 2),
    "foreach mul": lambda model: torch._foreach_mul_([model[0].weight], 2.0),
    "foreach copy": lambda model: torch._foreach_copy_([model[0].weight], [values(model) * 2]),
    "foreach lerp": lambda model: torch._foreach_lerp_([model[0].weight], [values(model) * 2], 1.0),
    "foreach itself": lambda model: torch._foreach_add_([model[0].weight], [model[0].weight]),
    "out=": lambda model: torch.mul(values(model), 2, out=model[0].weight),
    "out= itself": lambda model: torch.mul(model[0].weight, 2, out=model[0].weight),
    "out= of another shape": lambda model: torch.mul(torch.ones(3), 2, out=model[0].weight),
    "detached": lambda model: model[0].weight.detach().mul_(2),
    "view": lambda model: model[0].weight.view(-1).mul_(2),
    "rows": lambda model: [row.mul_(2) for row in model[0].weight.split(16)],
    ".data =": lambda model: setattr(model[0].weight, "data", values(model) * 2),
    ".data in place": lambda model: model[0].weight.data.mul_(2),
    "vector": as_vector,
    "set_": lambda model: model[0].weight.set_(values(model) * 2),
    "t_": lambda model: model[0].weight.t_().mul_(2),
    "resize_": lambda model: model[0].weight.requires_grad_(False).resize_(48, 32),
    "another parameter": lambda model: setattr(model[0], "weight", nn.Parameter(values(model) * 2)),
    "swap_tensors": lambda model: torch.utils.swap_tensors(model[0].weight, nn.Parameter(values(model) * 2)),
    "state dict": lambda model: model.state_dict()["0.weight"].mul_(2),
    "load_state_dict": loaded,
    "load assigned": lambda model: loaded(model, assign=True),
    "averaging": averaged,
    "numpy": lambda model: np.multiply(model[0].weight.detach().numpy(), 2, out=model[0].weight.detach().numpy()),
}
RESHAPES = {"t_", "resize_", "out= of another shape"}
REFUSED = {
    "plain": set(),
    "gathered": RESHAPES
    | {"foreach copy", "set_", "numpy", "averaging"}  # DTensor's, or FSDP2's
    | {"another parameter", "swap_tensors", "state dict"},
    "frozen": RESHAPES | {"view", "rows", "set_", "numpy"},
    "primary": RESHAPES | {"set_", "numpy"},
    "cast_once": {*WRITES} - {"averaging"},
}
LOST = {("gathered", ".data ="), ("gathered", "vector"), ("cast_once", ".data in place"), ("cast_once", "numpy")}
"""DTensor ignores an assignment to `.data`, as with nn.Linear; a scope was promised that nobody writes unseen."""


def output(model, folder):
    return model(torch.ones(16, 64)).detach()


def grad_input(model, folder):
    input = torch.ones(16, 64, requires_grad=True)
    model(input).sum().backward()
    return input.grad


def exported(model, folder):
    folder = folder / str(len(list(folder.iterdir())))
    save_float8(model, folder, config={})
    return load_float8(folder, dtype=torch.float32)["0.weight"]


def in_checkpoint(model, folder):
    torch.save(model.state_dict(), folder / "model.pt")
    state = torch.load(folder / "model.pt", weights_only=False)
    weight = state["0.weight"]
    if isinstance(weight, FrozenFloat8Weight):
        return weight.to_high_precision()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


LOOKS = {look.__name__: look for look in (output, grad_input, exported, in_checkpoint)}


def _attempt(function, *arguments):
    """The result, or the error that refuses it in one line."""
    try:
        return function(*arguments)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        return str(error).splitlines()


def _outcome(before, after):
    if isinstance(after, list):
        return "refused" if len(after) == 1 else "refused at length"
    return {2.0: "right", 1.0: "lost"}.get((after / before).nanmean().item(), "wrong")


CELLS = [
    (form, write)
    for form, write in itertools.product(FORMS, WRITES)
    if (form, write) not in LOST and not (write in RESHAPES and form in {"plain", "cast_once"})
]


@pytest.mark.parametrize(("recipe", "cell"), thinned(["tensorwise", "rowwise", "blockwise"], CELLS, together=1))
def test_who_looks_sees_the_write_or_it_is_refused_in_one_line(one_rank, tmp_path, recipe, cell):
    form, write = cell
    with ExitStack() as scope:
        model = FORMS[form](recipe, scope)
        before = {name: look(model, tmp_path) for name, look in LOOKS.items()}
        with torch.no_grad():
            written = _attempt(WRITES[write], model)
        if isinstance(written, nn.Module):
            model = written
        is_refused = isinstance(written, list) and isinstance(written[0], str)
        after = {name: written if is_refused else _attempt(look, model, tmp_path) for name, look in LOOKS.items()}
        outcomes = {name: _outcome(before[name], after[name]) for name in LOOKS}
        _attempt(scope.close)  # cast_weights_once has seen the write
    may_be_refused = write in REFUSED[form]
    assert outcomes["output"] == outcomes["grad_input"] == ("refused" if may_be_refused else "right"), after
    allowed = {"right", "refused"} if may_be_refused else {"right"}
    assert {*outcomes.values()} <= allowed, outcomes


DYNAMIC = [recipe.value for recipe in Float8LinearRecipeName if not recipe.value.startswith("delayed")]


@pytest.mark.parametrize("recipe", DYNAMIC)
@pytest.mark.parametrize("experts", [False, True])
def test_the_backward_reads_the_memory_that_the_forward_read(recipe, experts):
    """Also where `.data` is exchanged in between, as diffusers' layerwise casting does; nn.Linear saves a view."""
    weight = nn.Parameter(torch.randn(2, 64, 48) if experts else torch.randn(48, 64), requires_grad=False)
    input = torch.randn(32, 64, requires_grad=True)
    ends = torch.tensor([16, 32], dtype=torch.int32)

    def gradient(exchange):
        if experts:
            output = float8_grouped_mm(input, weight, ends, config=recipe)
        else:
            output = float8_linear(input, weight, config=recipe)
        before, weight.data = weight.data, exchange(weight.data)
        (grad,) = torch.autograd.grad(output.square().sum(), input)
        weight.data = before
        return grad

    expected = gradient(lambda data: data)
    for exchange in (lambda data: data.to(torch.int8), lambda data: data * 3, lambda data: torch.empty(0)):
        assert gradient(exchange).equal(expected)

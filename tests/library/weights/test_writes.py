"""Tests forms of a weight x ways to write to it x readers: each reader sees the write, or one line refuses it."""

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
from quaver.linear.frozen_weight import FrozenFloat8Weight
from tests.thinned import thinned


class Experts(nn.Module):
    """Two experts of two matmuls with nothing in between, so that results are linear in each of the weights."""

    has_gate, has_bias, num_experts = False, False, 2

    def __init__(self, is_transposed):
        super().__init__()
        self.is_transposed = is_transposed
        for name, shape in (("up_proj", (2, 48, 64)), ("down_proj", (2, 64, 48))):
            weight = torch.randn(shape)
            setattr(self, name, nn.Parameter(weight.mT.contiguous() if is_transposed else weight))

    def _apply_gate(self, inner):
        return inner

    act_fn = _apply_gate


Llama4TextExperts = type("Llama4TextExperts", (Experts,), {})
"""A name by which an export knows that a transposed stack is linears in a checkpoint."""

MODULES = {
    "linear": lambda: nn.Linear(64, 48, bias=False),
    "experts": lambda: Experts(False),
    "transposed experts": lambda: Llama4TextExperts(True),
}


def build_model(kind):
    torch.manual_seed(0)
    return nn.Sequential(MODULES[kind]())


def convert(kind, recipe, **changes):
    config = replace(Float8LinearConfig.from_recipe_name(recipe), **changes)
    return convert_to_float8_training(build_model(kind), config=config)


def gather(kind, recipe, scope):
    model = convert(kind, recipe, enable_fsdp_float8_all_gather=True)
    fully_shard(model[0])
    fully_shard(model)
    precompute_float8_dynamic_scale_for_fsdp(model)
    return model


def make_primary(kind, recipe, scope):
    model = convert(kind, recipe)
    use_float8_primary_weights(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return model


def cast_once(kind, recipe, scope):
    model = convert(kind, recipe)
    scope.enter_context(cast_weights_once(model))
    return model


FORMS = {
    "plain": lambda kind, recipe, scope: convert(kind, recipe),
    "gathered": gather,
    "frozen": lambda kind, recipe, scope: freeze_to_float8(build_model(kind), config=recipe),
    "primary": make_primary,
    "cast_once": cast_once,
}


def get_name(model):
    """Return the name of the weight that is written to: the linear's, or the first one of the experts."""
    return next(name for name, _ in model.named_parameters())


def get_weight(model):
    return model.get_parameter(get_name(model))


def double(weight):
    """Return the values of a weight times two, as an optimizer computes them: a DTensor where the weight is one."""
    weight = weight.detach()
    values = weight.to_high_precision() if isinstance(weight, FrozenFloat8Weight) else (weight.mT * 1).mT
    return values * 2


def load(model, weight, **options):
    model.load_state_dict({**model.state_dict(), get_name(model): double(weight)}, **options)


def average_models(model, weight):
    source = copy.deepcopy(model)
    get_weight(source).mul_(2)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.0))
    average.n_averaged.fill_(1)
    average.update_parameters(source)
    return average.module


def write_vector(model, weight):
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([weight]) * 2, [weight])


WRITES = {
    "in place": lambda model, weight: weight.mul_(2),
    "copy_": lambda model, weight: weight.copy_(double(weight)),
    "foreach mul": lambda model, weight: torch._foreach_mul_([weight], 2.0),
    "foreach copy": lambda model, weight: torch._foreach_copy_([weight], [double(weight)]),
    "foreach lerp": lambda model, weight: torch._foreach_lerp_([weight], [double(weight)], 1.0),
    "foreach itself": lambda model, weight: torch._foreach_add_([weight], [weight]),
    "out=": lambda model, weight: torch.mul(double(weight), 1, out=weight),
    "out= itself": lambda model, weight: torch.mul(weight, 2, out=weight),
    "out= of another shape": lambda model, weight: torch.mul(torch.ones(3), 2, out=weight),
    "detached": lambda model, weight: weight.detach().mul_(2),
    "view": lambda model, weight: weight.view(-1).mul_(2),
    "rows": lambda model, weight: [rows.mul_(2) for rows in weight.split(len(weight) // 2)],
    ".data =": lambda model, weight: setattr(weight, "data", double(weight)),
    ".data in place": lambda model, weight: weight.data.mul_(2),
    "vector": write_vector,
    "set_": lambda model, weight: weight.set_(double(weight)),
    "transpose_": lambda model, weight: weight.transpose_(-1, -2).mul_(2),
    "resize_": lambda model, weight: weight.requires_grad_(False).resize_(*weight.shape[:-1], weight.shape[-1] // 2),
    "another parameter": lambda model, weight: setattr(
        model[0], get_name(model).removeprefix("0."), nn.Parameter(double(weight))
    ),
    "swap_tensors": lambda model, weight: torch.utils.swap_tensors(weight, nn.Parameter(double(weight))),
    "state dict": lambda model, weight: model.state_dict()[get_name(model)].mul_(2),
    "load_state_dict": load,
    "load assigned": lambda model, weight: load(model, weight, assign=True),
    "averaging": average_models,
    "numpy": lambda model, weight: np.multiply(weight.detach().numpy(), 2, out=weight.detach().numpy()),
}
RESHAPES = {"transpose_", "resize_", "out= of another shape"}
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
"""DTensor ignores an assignment to `.data`, as with nn.Linear; a scope cannot see writes to memory."""


def compute_output(model, folder):
    return model(torch.ones(16, 64)).detach()


def compute_grad_input(model, folder):
    input = torch.ones(16, 64, requires_grad=True)
    model(input).sum().backward()
    return input.grad


def export(model, folder):
    folder = folder / str(len(list(folder.iterdir())))
    save_float8(model, folder, config={})
    name, state = get_name(model), load_float8(folder, dtype=torch.float32)
    if name in state:
        return state[name]
    return torch.stack([state[name.replace(".", f".{expert}.") + ".weight"] for expert in range(2)])


def read_checkpoint(model, folder):
    torch.save(model.state_dict(), folder / "model.pt")
    state = torch.load(folder / "model.pt", weights_only=False)
    weight = state[get_name(model)]
    if isinstance(weight, FrozenFloat8Weight):
        return weight.to_high_precision()
    return weight.full_tensor() if isinstance(weight, DTensor) else weight


READERS = {"output": compute_output, "grad_input": compute_grad_input, "export": export, "checkpoint": read_checkpoint}


def attempt(function, *arguments):
    """Return the result, or the lines of the error."""
    try:
        return function(*arguments)
    except (RuntimeError, ValueError, IndexError, AssertionError) as error:
        return str(error).splitlines()


def classify(before, after):
    if isinstance(after, list):
        return "refused" if len(after) == 1 else "refused at length"
    return {2.0: "right", 1.0: "lost"}.get((after / before).nanmean().item(), "wrong")


CELLS = [
    (form, write)
    for form, write in itertools.product(FORMS, WRITES)
    if (form, write) not in LOST and not (write in RESHAPES and form in {"plain", "cast_once"})
]
RECIPES_BY_GRANULARITY = ["tensorwise", "rowwise", "blockwise"]
LINEARS = thinned(["linear"], RECIPES_BY_GRANULARITY, CELLS, together=1)
EXPERTS = [  # the dispatch is that of linears
    pytest.param(*case, marks=pytest.mark.nightly if number % 32 else ())
    for number, case in enumerate(itertools.product(["experts", "transposed experts"], RECIPES_BY_GRANULARITY, CELLS))
]


@pytest.mark.parametrize(("kind", "recipe", "cell"), [*LINEARS, *EXPERTS])
def test_each_reader_sees_the_write_or_it_is_refused_in_one_line(request, tmp_path, kind, recipe, cell):
    form, write = cell
    if form == "gathered":
        request.getfixturevalue("one_rank")
    with ExitStack() as scope:
        model = FORMS[form](kind, recipe, scope)
        before = {name: read(model, tmp_path) for name, read in READERS.items()}
        with torch.no_grad():
            written = attempt(WRITES[write], model, get_weight(model))
        if isinstance(written, nn.Module):
            model = written
        is_refused = isinstance(written, list) and isinstance(written[0], str)
        after = {name: written if is_refused else attempt(read, model, tmp_path) for name, read in READERS.items()}
        outcomes = {name: classify(before[name], after[name]) for name in READERS}
        attempt(scope.close)  # cast_weights_once has seen the write
    may_be_refused = write in REFUSED[form]
    assert outcomes["output"] == outcomes["grad_input"] == ("refused" if may_be_refused else "right"), after
    allowed = {"right", "refused"} if may_be_refused else {"right"}
    assert {*outcomes.values()} <= allowed, outcomes


DYNAMIC = [recipe.value for recipe in Float8LinearRecipeName if not recipe.value.startswith("delayed")]


@pytest.mark.parametrize("recipe", DYNAMIC)
@pytest.mark.parametrize("experts", [False, True])
def test_the_backward_reads_the_memory_that_the_forward_read(recipe, experts):
    """diffusers' layerwise casting exchanges `.data` in between; nn.Linear saves a view."""
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

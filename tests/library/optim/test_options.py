"""Tests which options Float8AdamW and Float8Muon refuse."""

import contextlib
import copy
import math

import pytest
import torch
from torch import nn

from quaver.optim import CombinedOptimizer, Float8AdamW, Float8Muon, copy_states
from tests.library.optim.training import give_gradients, make_steps, train
from tests.steps import assert_same

RATE = "expected a finite number, 0 or more, got"
BOTH = {
    f"lr: {RATE} -1": {"lr": -1.0},
    f"weight_decay: {RATE} nan": {"weight_decay": math.nan},
    f"eps: {RATE} inf": {"eps": math.inf},
    f"eps: {RATE} None": {"eps": None},
    f"lr: {RATE} '1e-3'": {"lr": "1e-3"},
    "masters: expected one of bfloat16, float32": {"masters": "float8"},
    "seed: expected a number from 0": {"seed": -1},
    "seed: .*, got True": {"seed": True},
    "expected parameters in float32 or bfloat16, got torch.float16": {"dtype": torch.float16},
    "expected parameters in float32 or bfloat16, got torch.complex64": {"dtype": torch.complex64},
}
ADAMW_ONLY = {
    "betas: expected two numbers from 0 to below 1": {"betas": (0.9, 1.0)},
    "betas: .*, got 0.9": {"betas": 0.9},
    r"betas: .*, got \('a', 0.9\)": {"betas": ("a", 0.9)},
    r"betas: .*, got \(-0.1, 0.9\)": {"betas": (-0.1, 0.9)},
    r"betas: .*, got \(1, 0.9\)": {"betas": (1, 0.9)},
    "exp_avg: expected one of float8, bfloat16, float32, got 'int8'": {"exp_avg": "int8"},
    "exp_avg_sq: expected one of float8, bfloat16, float32, got 8": {"exp_avg_sq": 8},
}
MUON_ONLY = {
    "momentum: expected a number from 0 to below 1, got 1": {"momentum": 1.0},
    "momentum_buffer: expected one of float8, bfloat16, float32, got 'int8'": {"momentum_buffer": "int8"},
    "adjust_lr_fn: expected None, 'original' or": {"adjust_lr_fn": "none"},
    "1 to 99 ns_steps, got .* and 100": {"ns_steps": 100},
    "1 to 99 ns_steps, got .* and 2.5": {"ns_steps": 2.5},
    "expected three ns_coefficients .*, got None": {"ns_coefficients": None},
    r"expected matrices, got a parameter \[4, 8, 16\]; use Float8AdamW": {"shape": (4, 8, 16)},
}


@pytest.mark.parametrize(
    ("optimizer", "message", "options"),
    [
        *((Float8AdamW, *case) for case in (BOTH | ADAMW_ONLY).items()),
        *((Float8Muon, *case) for case in (BOTH | MUON_ONLY).items()),
    ],
)
def test_a_bad_option_is_refused_in_one_line(optimizer, message, options):
    """The constructor refuses it, and so does add_param_group, which adds nothing."""
    options = dict(options)
    shape, dtype = options.pop("shape", (64, 64)), options.pop("dtype", torch.float32)
    parameters = [nn.Parameter(torch.zeros(shape, dtype=dtype))]
    with pytest.raises(ValueError, match=message) as error:
        optimizer(parameters, **options)
    assert "\n" not in str(error.value)
    valid = optimizer([nn.Parameter(torch.zeros(64, 64))])
    with pytest.raises(ValueError, match=message):
        valid.add_param_group({"params": parameters, **options})
    assert len(valid.param_groups) == 1


def cast(dtype):
    return lambda group: nn.ParameterList(group["params"]).to(dtype)


def set_options(**options):
    return lambda group: group.update({name: value for name, value in options.items() if name in group})


def make_gradients_sparse(group):
    for parameter in group["params"]:
        parameter.grad = parameter.grad.to_sparse()


REFUSED_STEPS = {
    "expected parameters in float32 or bfloat16, got torch.float16": cast(torch.float16),
    "expected parameters in float32 or bfloat16, got torch.float64": cast(torch.float64),
    r"expected only \[.*, got \[.*'master'.* parameters and options of the optimizer that saved it": cast(
        torch.float32
    ),
    "torch.float32 .* parameters and options of the optimizer that saved it": set_options(
        exp_avg="float32", exp_avg_sq="float32", momentum_buffer="float32"
    ),
    f"lr: {RATE} -1": set_options(lr=-1.0),
    "seed: expected a number from 0": set_options(seed=None),
    "expected a dense gradient, got torch.sparse_coo": make_gradients_sparse,
}


def combine(groups):
    return CombinedOptimizer(torch.optim.SGD(groups[:1]), Float8AdamW(groups[1:]))


@pytest.mark.parametrize("make", [Float8AdamW, Float8Muon, combine])
@pytest.mark.parametrize("message", REFUSED_STEPS)
def test_a_step_that_one_group_refuses_changes_no_group(make, message):
    parameters = [nn.Parameter(torch.randn(64, 64).bfloat16()) for _ in range(2)]
    optimizer = make([{"params": [parameter], "masters": "float32"} for parameter in parameters])
    make_steps(parameters, optimizer, [0])
    before = copy.deepcopy((parameters[0], optimizer.state_dict()["state"]))
    give_gradients(parameters, 1)
    REFUSED_STEPS[message](optimizer.param_groups[1])
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert_same((parameters[0], optimizer.state_dict()["state"]), before)


FLOAT8_STATES = {
    "exp_avg_fp8": (127, "finite numbers"),
    "exp_avg_scale": (math.inf, "finite numbers, 0 or more"),
    "step": (-1.0, "finite numbers, 0 or more"),
    "momentum_buffer_fp8": (255, "finite numbers"),
    "momentum_buffer_scale": (-1.0, "finite numbers, 0 or more"),
}
TORCH_STATES = {
    "exp_avg": (math.nan, "finite numbers"),
    "exp_avg_sq": (-1.0, "finite numbers, 0 or more"),
    "step": (-1.0, "finite numbers, 0 or more"),
    "momentum_buffer": (math.inf, "finite numbers"),
}
PAIRS = [(Float8AdamW, torch.optim.AdamW), (Float8Muon, torch.optim.Muon)]


@pytest.mark.parametrize(("ours", "source"), [(pair[0], source) for pair in PAIRS for source in pair])
def test_a_load_of_numbers_that_no_run_makes_is_refused_and_changes_nothing(ours, source):
    """Its options would fail in the next step, and blocks with its moments would never train."""
    (parameter,), optimizer = train(ours, shapes=[(64, 64)])
    (_,), other = train(source, shapes=[(64, 64)])
    before, saved = copy.deepcopy((optimizer.state_dict(), other.state_dict()))
    options = {"lr": -5.0, "betas": (2, 3), "seed": -1, "momentum": 1.0, "eps": math.nan}
    for name in options.keys() & saved["param_groups"][0].keys():
        with pytest.raises(ValueError, match=f"^{name}: expected"):
            optimizer.load_state_dict(
                {"state": saved["state"], "param_groups": [{**saved["param_groups"][0], name: options[name]}]}
            )
    for name, (value, expected) in (FLOAT8_STATES if source is ours else TORCH_STATES).items():
        if name in saved["state"][0]:
            bad = copy.deepcopy(saved)
            bad["state"][0][name].view(-1)[-1] = value
            with pytest.raises(ValueError, match=f"expected {expected}, in {name}, got others"):
                optimizer.load_state_dict(bad)
    assert_same(optimizer.state_dict(), before)
    optimizer.load_state_dict(saved)


TORCH_ONLY = "amsgrad", "maximize", "capturable", "differentiable"


@pytest.mark.parametrize("optimizer", [Float8AdamW, Float8Muon])
def test_options_of_torch_that_these_lack_are_refused(optimizer):
    """A param group may have any key, and a step would ignore an unknown one without a word."""
    parameters = [nn.Parameter(torch.zeros(64, 64))]
    for name in TORCH_ONLY:
        with pytest.raises(TypeError, match=name):
            optimizer(parameters, **{name: True})
        with pytest.raises(ValueError, match=f"{name}: expected False, got True"):
            optimizer([{"params": parameters, name: True}])
    accepted = optimizer([{"params": parameters, "name": "mine", **dict.fromkeys(TORCH_ONLY, False)}])
    assert accepted.param_groups[0]["name"] == "mine"


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (torch.optim.AdamW, {"amsgrad": True}, "amsgrad: expected False, got True"),
        (torch.optim.AdamW, {"maximize": True}, "maximize: expected False, got True"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "weight_decay: expected the decoupled one of AdamW, got 0.1 of"),
        (torch.optim.Adam, {}, None),
        (torch.optim.AdamW, {"foreach": False}, None),
    ],
)
def test_states_and_param_groups_of_another_algorithm_are_refused(make, options, message):
    parameter = nn.Parameter(torch.ones(64, 64))
    parameter.grad = torch.ones(64, 64)
    theirs = make([parameter], **options)
    theirs.step()
    target = Float8AdamW([parameter])
    loads = [lambda: target.load_state_dict(theirs.state_dict()), lambda: copy_states(target, theirs)]
    for load in loads[: 1 if make is torch.optim.Adam else 2]:  # copy_states takes none of Adam's
        with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
            load()
        assert bool(target.state) == (message is None)
    with pytest.raises(ValueError, match=message) if message else contextlib.nullcontext():
        Float8AdamW(theirs.param_groups)


@pytest.mark.parametrize("optimizer", [Float8AdamW, Float8Muon])
def test_a_step_in_a_cuda_graph_is_refused(optimizer, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=f"{optimizer.__name__} counts steps on the host"):
        optimizer([nn.Parameter(torch.zeros(64, 64))]).step()

"""CombinedOptimizer against the optimizers alone, state dicts, conversion of states, and refusals."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from quaver import convert_to_float8_training, use_float8_primary_weights
from quaver.optim import CombinedOptimizer, Float8AdamW, Float8Muon, load_states_of
from tests.library.optim.test_adamw import give_gradients, same
from tests.steps import assert_same, by_torch_save

SHAPES = [(16, 300), (300,), (16, 512)]
OURS, THEIRS = (Float8Muon, Float8AdamW), (torch.optim.Muon, torch.optim.AdamW)


def made(kinds=OURS, combine=CombinedOptimizer, **options):
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape) * 0.1) for shape in SHAPES]
    muon, adamw = kinds
    return parameters, combine(muon([parameters[0]], lr=1e-2, **options), adamw(parameters[1:], lr=1e-3))


def stepped(steps=range(3), **options):
    parameters, optimizer = made(**options)
    make_steps(parameters, optimizer, steps)
    return parameters, optimizer


def make_steps(parameters, optimizer, steps):
    for step in steps:
        give_gradients(parameters, step)
        optimizer.step()


def test_it_steps_both_as_they_step_alone():
    ours = stepped()
    parameters, both = made(combine=lambda *optimizers: optimizers)
    for step in range(3):
        give_gradients(parameters, step)
        for each in both:
            each.step()
    assert_same(ours[0], parameters)
    (group,) = both[0].param_groups
    assert ours[1].param_groups[0].keys() == group.keys()
    assert ours[1].state[ours[0][0]].keys() == both[0].state[parameters[0]].keys()


@pytest.mark.parametrize("copied", ["state dict", "deepcopy", "torch.save"])
def test_it_goes_on_to_the_same_bits(copied):
    parameters, optimizer = stepped()
    if copied == "state dict":
        again = [nn.Parameter(each.detach().clone()) for each in parameters]
        other = CombinedOptimizer(Float8Muon([again[0]], lr=1.0), Float8AdamW(again[1:], lr=1.0))
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif copied == "deepcopy":
        again, other = copy.deepcopy((parameters, optimizer))
    else:
        again, other = by_torch_save((parameters, optimizer))
    for each in ((parameters, optimizer), (again, other)):
        for group in each[1].param_groups:  # what a schedule of the learning rate does
            group["lr"] *= 0.5
        make_steps(*each, range(3, 5))
    same((parameters, optimizer), (again, other))
    assert len(other.state) == len(SHAPES)


def test_a_closure_is_called_once():
    parameters, optimizer = made()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        give_gradients(parameters, 0)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert calls == [True]
    assert all(optimizer.state[each] for each in parameters)


def test_states_are_converted_there_and_back():
    """float32 moments become what Float8 optimizers store of torch's state dicts; those are read to the bit."""
    parameters, theirs = stepped(kinds=THEIRS)
    muon, adamw = Float8Muon([parameters[0]]), Float8AdamW(parameters[1:])
    muon.load_muon_state_dict(theirs.optimizers[0].state_dict())
    adamw.load_adamw_state_dict(theirs.optimizers[1].state_dict())
    ours = CombinedOptimizer(Float8Muon([parameters[0]]), Float8AdamW(parameters[1:]))
    load_states_of(ours, theirs)
    same((parameters, ours), (parameters, CombinedOptimizer(muon, adamw)))
    assert ours.param_groups[0]["lr"] == 1e-2

    back = CombinedOptimizer(torch.optim.Muon([parameters[0]]), torch.optim.AdamW(parameters[1:], foreach=True))
    load_states_of(back, ours)
    expected = ours.optimizers[0].muon_state_dict()["state"][0]["momentum_buffer"]
    assert_same(back.state[parameters[0]], {"momentum_buffer": expected})
    for number, state in ours.optimizers[1].adamw_state_dict()["state"].items():
        assert_same({name: back.state[parameters[1 + number]][name] for name in state}, state)
    assert back.param_groups[1]["foreach"]
    assert back.param_groups[1]["lr"] == 1e-3
    again = CombinedOptimizer(Float8Muon([parameters[0]], seed=3), Float8AdamW(parameters[1:], seed=3))
    load_states_of(again, back)
    for each in parameters:  # a value of a code is rounded to itself, whatever the seed; its scale to 1 ulp
        counts = {} if each is parameters[0] else {"step": ours.state[each]["step"]}  # torch's Muon counts none
        expected = {**ours.state[each], "step": torch.tensor(0.0), **counts}
        torch.testing.assert_close(again.state[each], expected, rtol=2e-7, atol=0)
    make_steps(parameters, ours, range(2))
    load_states_of(again, ours)
    assert again.state[parameters[0]]["step"] == 2


def test_param_groups_may_be_others_where_states_are_converted():
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    source = torch.optim.AdamW([{"params": parameters[:1], "weight_decay": 0.3}, {"params": parameters[1:]}])
    make_steps(parameters, source, range(2))
    target = Float8AdamW([{"params": [each]} for each in reversed(parameters)])
    load_states_of(target, source)
    assert [group["weight_decay"] for group in target.param_groups] == [0.01, 0.01, 0.3]
    assert all(target.state[each]["step"] == 2 for each in parameters)


@pytest.mark.parametrize("load", [load_states_of, lambda target, source: target.load_state_dict(source.state_dict())])
def test_states_of_an_optimizer_that_has_not_stepped_replace_those_of_one_that_has(load):
    parameter = nn.Parameter(torch.randn(300, 300))
    target = Float8AdamW([parameter])
    make_steps([parameter], target, range(2))
    load(target, torch.optim.AdamW([parameter]))
    assert not target.state[parameter]


def test_what_does_not_fit_is_refused():
    parameters, optimizer = stepped()
    with pytest.raises(ValueError, match="add the group to that optimizer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    with pytest.raises(ValueError, match="got a parameter in two of them"):
        CombinedOptimizer(Float8AdamW(parameters), Float8AdamW(parameters[:1]))
    with pytest.raises(ValueError, match="with 2 param groups, got 1"):
        optimizer.load_state_dict(Float8AdamW(parameters).state_dict())
    with pytest.raises(ValueError, match="states of Muon cannot become those of AdamW"):
        load_states_of(torch.optim.AdamW(parameters), optimizer)
    with pytest.raises(ValueError, match=r"no state of a parameter \[16, 512\]"):
        load_states_of(Float8AdamW(parameters[1:]), torch.optim.AdamW(parameters[1:2]))


@pytest.mark.parametrize("kinds", [OURS, THEIRS])
def test_a_load_that_the_second_optimizer_refuses_changes_neither(kinds):
    parameters, optimizer = stepped(kinds=kinds)
    before, bad = copy.deepcopy((optimizer.state_dict(), stepped(range(5), kinds=kinds)[1].state_dict()))
    bad["param_groups"][0]["lr"] = 7.0
    bad["param_groups"][1]["params"].pop()
    with pytest.raises(ValueError, match=r"param(eter)? group"):
        optimizer.load_state_dict(bad)
    assert_same(optimizer.state_dict()["state"], before["state"])
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    source = CombinedOptimizer(torch.optim.Muon([parameters[0]], lr=7.0), torch.optim.AdamW(parameters[1:2]))
    with pytest.raises(ValueError, match="no state of a parameter"):
        load_states_of(optimizer, source)
    assert_same(optimizer.state_dict()["state"], before["state"])
    assert optimizer.state_dict()["param_groups"] == before["param_groups"]
    make_steps(parameters, optimizer, range(1))


@pytest.mark.parametrize("combined", [False, True])
def test_a_group_without_parameters_keeps_its_options(combined):
    """torch.distributed.checkpoint.state_dict loses them where the group is not the last."""

    def trained():
        optimizer = Float8AdamW([{"params": [], "weight_decay": 0.5}, {"params": model.parameters()}])
        optimizer = CombinedOptimizer(optimizer) if combined else optimizer
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        return optimizer

    model = nn.Linear(64, 64)
    saved = get_optimizer_state_dict(model, trained())
    set_optimizer_state_dict(model, optimizer := trained(), saved)
    optimizer.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 1e-2]


@pytest.mark.parametrize("kinds", [OURS, THEIRS])
@pytest.mark.parametrize("copied", [False, True])
def test_param_groups_are_those_that_the_optimizers_have_now(kinds, copied):
    parameters, optimizer = stepped(kinds=kinds)
    first, second = optimizer.optimizers
    first.load_state_dict(first.state_dict())  # torch replaces the dicts of the groups
    second.add_param_group({"params": [nn.Parameter(torch.randn(300))]})
    if copied:
        optimizer = by_torch_save(copy.deepcopy(optimizer))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    held = [group for part in optimizer.optimizers for group in part.param_groups]
    give_gradients([parameter for group in held for parameter in group["params"]], 0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    assert [group["lr"] for group in held] == [5e-3, 5e-4, 5e-4]
    assert all(parameter.grad is None for group in held for parameter in group["params"])
    assert len(optimizer.state_dict()["state"]) == 4


def test_schedulers_that_cycle_momentum_and_changes_of_the_state():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    parts = [torch.optim.AdamW(part.parameters()) for part in model]
    optimizer = CombinedOptimizer(*parts)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    scheduler.step()
    assert len({group["betas"][0] for part in parts for group in part.param_groups} | {0.95, 0.9}) == 3
    assert len(optimizer.state) == 4
    assert optimizer.state[model[1].bias] is parts[1].state[model[1].bias]
    CombinedOptimizer(*parts)
    optimizer.state = optimizer.state
    assert len(optimizer.state) == 4
    optimizer.state[model[1].bias] = {"new": 1}
    del optimizer.state[model[0].bias]
    assert parts[1].state[model[1].bias] == {"new": 1}
    assert optimizer.state.get(model[0].bias) is None
    assert optimizer.state.pop(model[0].bias, 3) == 3
    assert model[0].bias not in parts[0].state
    assert optimizer.state.setdefault(model[0].bias, {"new": 2}) is parts[0].state[model[0].bias]
    assert optimizer.state.pop(model[0].bias) == {"new": 2}
    optimizer.state = {}
    assert not any(part.state for part in parts)


def test_a_scheduler_that_cycles_momentum_needs_one_name_for_it():
    model = nn.Linear(64, 64)
    optimizer = CombinedOptimizer(Float8Muon([model.weight]), Float8AdamW([model.bias]))
    with pytest.raises(ValueError, match="must support momentum or beta1"):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10, cycle_momentum=False)


def with_primary_weights(parameters):
    """An optimizer around AdamW, of a linear in float8."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 16, bias=False)))
    optimizer = use_float8_primary_weights(model, torch.optim.AdamW(model.parameters()))
    return list(model.parameters()), optimizer


KINDS = {
    "AdamW": lambda parameters: (parameters, torch.optim.AdamW(parameters)),
    "Float8AdamW": lambda parameters: (parameters, Float8AdamW(parameters)),
    "combined": lambda parameters: (
        parameters,
        CombinedOptimizer(Float8AdamW(parameters[:1]), torch.optim.AdamW(parameters[1:])),
    ),
    "primary": with_primary_weights,
}


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_state_dicts_run_as_those_of_torchs_optimizers(kind):
    parameters, optimizer = KINDS[kind]([nn.Parameter(torch.randn(64, 64)) for _ in range(2)])
    make_steps(parameters, optimizer, range(1))
    calls, lr, step = [], optimizer.param_groups[0]["lr"], "step"

    def renamed(each, state_dict):
        calls.append("load")
        return {"state": state_dict["moments"], "param_groups": state_dict["param_groups"]}

    def loaded(each):
        calls.append(f"loaded {float(next(iter(each.state.values()))[step])}")

    def saved(each, state_dict):
        calls.append("saved")
        return {"moments": state_dict["state"], "param_groups": state_dict["param_groups"]}

    optimizer.register_state_dict_pre_hook(lambda each: calls.append("save"))
    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(renamed)
    optimizer.register_load_state_dict_post_hook(loaded)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][0]["lr"] = lr / 2
    make_steps(parameters, optimizer, range(1))
    optimizer.load_state_dict(state_dict)
    assert calls == ["save", "saved", "load", "loaded 1.0"]
    assert optimizer.param_groups[0]["lr"] == lr / 2
    assert "state" not in state_dict


def test_hooks_of_the_optimizers_in_it_see_their_own_part():
    parameters, optimizer = stepped(kinds=THEIRS)
    seen = []
    for each in optimizer.optimizers:
        each.register_state_dict_post_hook(lambda one, state_dict: seen.append([*state_dict["state"]]))
        each.register_load_state_dict_pre_hook(lambda one, state_dict: seen.append([*state_dict["state"]]))
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [[0], [0, 1]] * 2

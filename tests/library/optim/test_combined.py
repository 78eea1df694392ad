"""Tests CombinedOptimizer against the optimizers alone, state dicts, conversion of states, and refusals."""

import copy
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from quaver import convert_to_float8_training, use_float8_primary_weights
from quaver.optim import CombinedOptimizer, Float8AdamW, Float8Muon, copy_states
from tests.library.optim.training import assert_same_states, give_gradients, make_steps
from tests.steps import assert_same, by_torch_save

SHAPES = [(16, 300), (300,), (16, 512)]
OURS, THEIRS = (Float8Muon, Float8AdamW), (torch.optim.Muon, torch.optim.AdamW)


def build(kinds=OURS, lr=1e-2):
    """Return parameters, and an optimizer that combines one for the first with one for the others."""
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.randn(shape) * 0.1) for shape in SHAPES]
    return parameters, combine(parameters, kinds, lr=lr)


def combine(parameters, kinds=OURS, lr=1e-2):
    return CombinedOptimizer(kinds[0](parameters[:1], lr=lr), kinds[1](parameters[1:], lr=lr / 10))


def train(steps=range(3), **options):
    return make_steps(*build(**options), seeds=steps)


def test_combined_optimizers_step_as_they_do_alone():
    ours, combined = train()
    parameters, _ = build()
    alone = combine(parameters).optimizers
    for seed in range(3):
        give_gradients(parameters, seed)
        for optimizer in alone:
            optimizer.step()
    assert_same(ours, parameters)
    (group,) = alone[0].param_groups
    assert combined.param_groups[0].keys() == group.keys()
    assert combined.state[ours[0]].keys() == alone[0].state[parameters[0]].keys()


@pytest.mark.parametrize("copied", ["state dict", "deepcopy", "torch.save"])
def test_a_combined_optimizer_resumes_bit_identically(copied):
    parameters, optimizer = train()
    if copied == "state dict":
        twins = [nn.Parameter(parameter.detach().clone()) for parameter in parameters]
        other = combine(twins, lr=1.0)
        other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    elif copied == "deepcopy":
        twins, other = copy.deepcopy((parameters, optimizer))
    else:
        twins, other = by_torch_save((parameters, optimizer))
    for group in (*optimizer.param_groups, *other.param_groups):  # what a schedule of the learning rate does
        group["lr"] *= 0.5
    assert_same_states(make_steps(twins, other, range(3, 5)), make_steps(parameters, optimizer, range(3, 5)))
    assert len(other.state) == len(SHAPES)


def test_a_closure_is_called_once():
    parameters, optimizer = build()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        give_gradients(parameters, 0)
        return 3.0

    assert optimizer.step(closure) == 3.0
    assert calls == [True]
    assert all(optimizer.state[parameter] for parameter in parameters)


def test_states_are_converted_there_and_back():
    """float32 moments become what Float8 optimizers store of torch's state dicts; those are read to the bit."""
    parameters, theirs = train(kinds=THEIRS)
    expected, ours = combine(parameters), combine(parameters)
    expected.optimizers[0].load_muon_state_dict(theirs.optimizers[0].state_dict())
    expected.optimizers[1].load_adamw_state_dict(theirs.optimizers[1].state_dict())
    copy_states(ours, theirs)
    assert_same_states((parameters, ours), (parameters, expected))
    assert ours.param_groups[0]["lr"] == 1e-2

    back = CombinedOptimizer(torch.optim.Muon([parameters[0]]), torch.optim.AdamW(parameters[1:], foreach=True))
    copy_states(back, ours)
    expected = ours.optimizers[0].muon_state_dict()["state"][0]["momentum_buffer"]
    assert_same(back.state[parameters[0]], {"momentum_buffer": expected})
    for number, state in ours.optimizers[1].adamw_state_dict()["state"].items():
        assert_same({name: back.state[parameters[1 + number]][name] for name in state}, state)
    assert back.param_groups[1]["foreach"]
    assert back.param_groups[1]["lr"] == 1e-3
    reloaded = CombinedOptimizer(Float8Muon([parameters[0]], seed=3), Float8AdamW(parameters[1:], seed=3))
    copy_states(reloaded, back)
    for parameter in parameters:  # a value of a code is rounded to itself, whatever the seed; its scale to 1 ulp
        expected = dict(ours.state[parameter])
        if parameter is parameters[0]:
            expected["step"] = torch.tensor(0.0)  # torch's Muon counts none
        torch.testing.assert_close(reloaded.state[parameter], expected, rtol=2e-7, atol=0)
    make_steps(parameters, ours, range(2))
    copy_states(reloaded, ours)
    assert reloaded.state[parameters[0]]["step"] == 2


def test_param_groups_may_be_others_where_states_are_converted():
    parameters = [nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    source = torch.optim.AdamW([{"params": parameters[:1], "weight_decay": 0.3}, {"params": parameters[1:]}])
    make_steps(parameters, source, range(2))
    target = Float8AdamW([{"params": [parameter]} for parameter in reversed(parameters)])
    copy_states(target, source)
    assert [group["weight_decay"] for group in target.param_groups] == [0.01, 0.01, 0.3]
    assert all(target.state[parameter]["step"] == 2 for parameter in parameters)
    with pytest.raises(ValueError, match=r"weight_decay: expected one value .* of a group, got 0\.3 and 0\.01"):
        copy_states(Float8AdamW(parameters), source)


@pytest.mark.parametrize("load", [copy_states, lambda target, source: target.load_state_dict(source.state_dict())])
def test_states_of_an_optimizer_that_has_not_stepped_replace_those_of_one_that_has(load):
    parameter = nn.Parameter(torch.randn(300, 300))
    target = Float8AdamW([parameter])
    make_steps([parameter], target, range(2))
    load(target, torch.optim.AdamW([parameter]))
    assert not target.state[parameter]


@pytest.mark.parametrize("is_known", [False, True])
def test_groups_are_added_to_the_optimizers_inside(is_known):
    _, optimizer = build()
    group = optimizer.param_groups[0] if is_known else {"params": [nn.Parameter(torch.ones(3))]}
    with pytest.raises(ValueError, match="add it to that optimizer"):
        optimizer.add_param_group(group)


def test_a_parameter_belongs_to_one_optimizer():
    parameters, _ = build()
    with pytest.raises(ValueError, match="got a parameter in two of them"):
        CombinedOptimizer(Float8AdamW(parameters), Float8AdamW(parameters[:1]))
    with pytest.raises(TypeError, match="^expected optimizers, got list$"):
        CombinedOptimizer(parameters)


def test_the_number_of_param_groups_is_fixed():
    _, optimizer = build()
    for groups in ([], [*optimizer.param_groups, {"params": []}]):
        with pytest.raises(ValueError, match="^param_groups: expected 2 groups, got "):
            optimizer.param_groups = groups


def test_state_dicts_of_others_are_refused():
    parameters, optimizer = build()
    with pytest.raises(ValueError, match="with 2 param groups, got 1"):
        optimizer.load_state_dict(Float8AdamW(parameters).state_dict())
    for state_dict in (7, {}):
        with pytest.raises(ValueError, match="of CombinedOptimizer with 'state' and 'param_groups', got"):
            optimizer.load_state_dict(state_dict)


def test_states_that_do_not_fit_are_not_converted():
    parameters, optimizer = train()
    with pytest.raises(ValueError, match="states of Muon cannot become those of AdamW"):
        copy_states(torch.optim.AdamW(parameters), optimizer)
    with pytest.raises(ValueError, match=r"no state of a parameter \[16, 512\]"):
        copy_states(Float8AdamW(parameters[1:]), torch.optim.AdamW(parameters[1:2]))


@pytest.mark.parametrize("kinds", [OURS, THEIRS])
def test_a_load_that_the_second_optimizer_refuses_changes_neither(kinds, monkeypatch):
    parameters, optimizer = train(kinds=kinds)
    before, bad = copy.deepcopy((optimizer.state_dict(), train(range(5), kinds=kinds)[1].state_dict()))
    bad["param_groups"][0]["lr"] = 7.0
    bad["param_groups"][1]["params"].pop()
    with pytest.raises(ValueError, match=r"param(eter)? group"):
        optimizer.load_state_dict(bad)
    assert_same(optimizer.state_dict(), before)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optimizer.optimizers[1], "load_state_dict", Mock(side_effect=KeyboardInterrupt))
        optimizer.load_state_dict(train(range(5), kinds=kinds)[1].state_dict())
    assert_same(optimizer.state_dict(), before)
    source = CombinedOptimizer(torch.optim.Muon([parameters[0]], lr=7.0), torch.optim.AdamW(parameters[1:2]))
    with pytest.raises(ValueError, match="no state of a parameter"):
        copy_states(optimizer, source)
    assert_same(optimizer.state_dict(), before)
    make_steps(parameters, optimizer, range(1))


@pytest.mark.parametrize("combined", [False, True])
def test_a_group_without_parameters_keeps_its_options(combined):
    """torch.distributed.checkpoint.state_dict loses them where the group is not the last."""

    def train():
        optimizer = Float8AdamW([{"params": [], "weight_decay": 0.5}, {"params": model.parameters()}])
        optimizer = CombinedOptimizer(optimizer) if combined else optimizer
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        return optimizer

    model = nn.Linear(64, 64)
    saved = get_optimizer_state_dict(model, train())
    set_optimizer_state_dict(model, optimizer := train(), saved)
    optimizer.step()
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 1e-2]


@pytest.mark.parametrize("kinds", [OURS, THEIRS])
@pytest.mark.parametrize("copied", [False, True])
def test_param_groups_are_those_that_the_optimizers_have_now(kinds, copied):
    _, optimizer = train(kinds=kinds)
    first, second = optimizer.optimizers
    first.load_state_dict(first.state_dict())  # torch replaces the dicts of the groups
    second.add_param_group({"params": [nn.Parameter(torch.randn(300))]})
    if copied:
        optimizer = by_torch_save(copy.deepcopy(optimizer))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    groups = [group for part in optimizer.optimizers for group in part.param_groups]
    parameters = [parameter for group in groups for parameter in group["params"]]
    make_steps(parameters, optimizer, [0])
    scheduler.step()
    optimizer.zero_grad()
    assert [group["lr"] for group in groups] == [5e-3, 5e-4, 5e-4]
    assert all(parameter.grad is None for parameter in parameters)
    assert len(optimizer.state_dict()["state"]) == 4


def test_schedulers_cycle_momentum_and_the_state_can_be_changed():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    parts = [torch.optim.AdamW(part.parameters()) for part in model]
    optimizer = CombinedOptimizer(*parts)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    scheduler.step()
    (beta,) = {group["betas"][0] for part in parts for group in part.param_groups}
    assert 0.9 < beta < 0.95  # AdamW's own, and that of the schedule's first step
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
    """Return other parameters, of a linear in float8, and an optimizer around AdamW."""
    model = convert_to_float8_training(nn.Sequential(nn.Linear(32, 16, bias=False)))
    optimizer = use_float8_primary_weights(model, torch.optim.AdamW(model.parameters()))
    return list(model.parameters()), optimizer


KINDS = {
    "AdamW": lambda parameters: (parameters, torch.optim.AdamW(parameters)),
    "Float8AdamW": lambda parameters: (parameters, Float8AdamW(parameters)),
    "combined": lambda parameters: (parameters, combine(parameters, (Float8AdamW, torch.optim.AdamW))),
    "primary": with_primary_weights,
}


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_of_state_dicts_run_as_those_of_torchs_optimizers(kind):
    parameters, optimizer = KINDS[kind]([nn.Parameter(torch.randn(64, 64)) for _ in range(2)])
    make_steps(parameters, optimizer, range(1))
    calls, lr = [], optimizer.param_groups[0]["lr"]

    def restore_name(optimizer, state_dict):
        calls.append("load")
        return {"state": state_dict["moments"], "param_groups": state_dict["param_groups"]}

    def record_step(optimizer):
        state = next(iter(optimizer.state.values()))
        calls.append(f"loaded {float(state['step'])}")

    def rename(optimizer, state_dict):
        calls.append("saved")
        return {"moments": state_dict["state"], "param_groups": state_dict["param_groups"]}

    optimizer.register_state_dict_pre_hook(lambda optimizer: calls.append("save"))
    optimizer.register_state_dict_post_hook(rename)
    optimizer.register_load_state_dict_pre_hook(restore_name)
    optimizer.register_load_state_dict_post_hook(record_step)
    state_dict = copy.deepcopy(optimizer.state_dict())
    state_dict["param_groups"][0]["lr"] = lr / 2
    make_steps(parameters, optimizer, range(1))
    optimizer.load_state_dict(state_dict)
    assert calls == ["save", "saved", "load", "loaded 1.0"]
    assert optimizer.param_groups[0]["lr"] == lr / 2
    assert "state" not in state_dict


def test_hooks_of_the_optimizers_in_it_see_their_own_part():
    _, optimizer = train(kinds=THEIRS)
    seen = []

    def record(part, state_dict):
        seen.append([*state_dict["state"]])

    for part in optimizer.optimizers:
        part.register_state_dict_post_hook(record)
        part.register_load_state_dict_pre_hook(record)
    optimizer.load_state_dict(optimizer.state_dict())
    assert seen == [[0], [0, 1]] * 2

"""Tests Float8Muon in one process: numbers against torch's, non-finite gradients, state dicts, refusals."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from quaver.optim import Float8AdamW, Float8Muon, buckets
from tests.library.optim import training
from tests.library.optim.training import assert_same_states, count_state_bytes, give_gradients
from tests.steps import assert_same
from tests.thinned import thinned

SHAPES = training.MUON["shapes"]
build = partial(training.build_parameters, optimizer=Float8Muon, shapes=SHAPES)
train = partial(training.train, optimizer=Float8Muon, shapes=SHAPES)
BOUNDS = {"float32": 1e-3, "bfloat16": 0.02, "float8": 0.08}
OPTIONS = [{}, {"nesterov": False, "weight_decay": 0.0}, {"adjust_lr_fn": "match_rms_adamw", "momentum": 0.8}]


@pytest.mark.parametrize(("storage", "options"), thinned(BOUNDS, OPTIONS, together=1))
def test_float8_muon_follows_torch_muon(storage, options):
    """float32 momentum is torch's up to rounding in bfloat16; others are within the error of their codes."""
    bound = BOUNDS[storage]
    ours, optimizer = train(momentum_buffer=storage, **options)
    theirs, muon = train(optimizer=torch.optim.Muon, **options)
    for mine, other, start in zip(ours, theirs, build(**options)[0], strict=True):
        error = (mine - other).norm() / (other - start).norm()
        assert error < (bound if mine.numel() >= 4096 else 1e-3)
        stored = optimizer.muon_state_dict()["state"][SHAPES.index(tuple(mine.shape))]["momentum_buffer"]
        momentum = muon.state[other]["momentum_buffer"]
        assert (stored - momentum).norm() / momentum.norm() < (bound if mine.numel() >= 4096 else 1e-5)


def test_momentum_of_rare_gradients_decays_and_does_not_freeze():
    """After 100 steps without gradient the mean momentum beside a large one is the true one."""
    (parameter,), optimizer = build(shapes=[(16, 256)], lr=0.0)
    for step in range(100):
        parameter.grad = torch.zeros(16, 256)
        parameter.grad[:, 0] = 10.0
        if step == 0:
            parameter.grad[:, 1:] = 100.0
        optimizer.step()
    stored = optimizer.muon_state_dict()["state"][0]["momentum_buffer"]
    assert stored[:, 1:].mean().item() == pytest.approx(5 * 0.95**99, rel=0.1)


def test_a_momentum_below_the_smallest_code_is_rounded_to_zero():
    """The rounding is stochastic. A second moment's root is never 0, or a step would divide by eps alone."""
    (parameter,), optimizer = build(shapes=[(64, 256)])
    parameter.grad = torch.full((64, 256), 1e-9)
    parameter.grad[:, 0] = 1.0
    optimizer.step()
    stored = optimizer.muon_state_dict()["state"][0]["momentum_buffer"]
    assert (stored[:, 1:] == 0).float().mean() > 0.99
    assert (stored[:, 0] > 0).all()


@pytest.mark.parametrize("masters", ["bfloat16", "float32"])
def test_bfloat16_parameters_move_by_less_than_their_spacing(masters):
    shapes, options = SHAPES[:1] + SHAPES[-1:], {"lr": 1e-4, "weight_decay": 0.0}
    parameters, optimizer = build(dtype=torch.bfloat16, shapes=shapes, masters=masters, **options)
    exact = [parameter.detach().float() for parameter in parameters]
    start, muon = copy.deepcopy(exact), torch.optim.Muon([nn.Parameter(tensor) for tensor in exact], **options)
    for _ in range(20):
        give_gradients(parameters, 0)
        for mine, other in zip(parameters, muon.param_groups[0]["params"], strict=True):
            other.grad = mine.grad.float()
        optimizer.step()
        muon.step()
    for mine, other, before in zip(parameters, exact, start, strict=True):
        ours = optimizer.state[mine].get("master", mine).detach().float()
        moved = ((ours - before) * (other - before)).sum() / (other - before).square().sum()
        assert moved.item() == pytest.approx(1.0, abs=0.2)


def test_matrices_in_parts_have_the_same_bits(monkeypatch):
    whole = train()
    monkeypatch.setattr(buckets, "MAX_BUCKET_ELEMENTS", 5000)
    assert_same_states(train(), whole)


def test_a_matrix_whose_gradient_is_not_finite_stays_and_is_reported():
    parameters, optimizer = train(steps=1)
    before, old_state = copy.deepcopy((parameters, optimizer.state_dict()["state"][0]))
    give_gradients(parameters, 1)
    parameters[0].grad[3, 250] = torch.inf
    with pytest.warns(RuntimeWarning, match="gradients or moments are not finite in 1 matrices"):
        optimizer.step()
    state = optimizer.state_dict()["state"][0]
    assert state.pop("step") == old_state.pop("step") + 1
    assert_same((parameters[0], state), (before[0], old_state))
    assert not (parameters[1] == before[1]).all()
    assert optimizer.skipped_parameters == 1


def test_states_of_muon_are_converted_in_both_directions():
    theirs, muon = train(optimizer=torch.optim.Muon, momentum=0.8)
    optimizer = Float8Muon(copy.deepcopy(theirs))
    optimizer.load_muon_state_dict(muon.state_dict())
    back = optimizer.muon_state_dict()
    assert back["param_groups"] == muon.state_dict()["param_groups"]
    for index, state in muon.state_dict()["state"].items():
        assert back["state"][index].keys() == state.keys()
        stored, exact = back["state"][index]["momentum_buffer"], state["momentum_buffer"]
        assert (stored - exact).norm() / exact.norm() < (0.05 if exact.numel() >= 4096 else 1e-6)
    muon.load_state_dict(back)
    muon.step()


def test_momentum_has_a_byte_per_element_and_a_scale_per_256():
    (parameter,), optimizer = train(shapes=[(64, 512)])
    assert count_state_bytes(optimizer, parameter) == 1 + 4 / 256


def test_states_of_other_optimizers_are_refused():
    _, optimizer = build()
    muon, adamw, float8_adamw = (
        build(optimizer=optimizer)[1].state_dict() for optimizer in (torch.optim.Muon, torch.optim.AdamW, Float8AdamW)
    )
    optimizer.load_state_dict(muon)
    with pytest.raises(ValueError, match="of Float8Muon or of torch.optim.Muon, got one without .*momentum"):
        optimizer.load_state_dict(adamw)
    with pytest.raises(ValueError, match="expected a state dict of Float8Muon, got one without adjust_lr_fn, momentum"):
        optimizer.load_state_dict(float8_adamw)

"""Tests AdamW's groups and implementations, on sharded parameters too, and gradient clipping against torch's."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from quaver.lab.model.llama import Llama
from quaver.lab.settings import Model, Optimizer
from quaver.lab.settings.training import OPTIMIZERS
from quaver.lab.trainer.optimizer import build_optimizer, clip_gradients, compute_squared_norm_share

SHAPE = Model(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=32)
EXPLICIT = ("fused", "foreach", "for-loop")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_parameter_has_its_decay_moments_and_update(name):
    model = Llama(Model(dim=128, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=64))
    optimizer = build_optimizer(model, Optimizer(name=name, weight_decay=0.3))
    take_steps(optimizer, model, 1)
    parameters = dict(model.named_parameters())
    for group in optimizer.param_groups:
        assert {parameter.dim() > 1 for parameter in group["params"]} == {group["weight_decay"] == 0.3}  # not norms
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.3, 0}
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(parameters)
    states = {key: " ".join(optimizer.state[parameter]) for key, parameter in parameters.items()}
    by_muon = {key for key, state in states.items() if "momentum" in state}
    block_matrices = {key for key, parameter in parameters.items() if ".layers." in key and parameter.dim() == 2}
    assert by_muon == (block_matrices if "Muon" in name else set())
    assert all("exp_avg" in states[key] for key in parameters.keys() - by_muon)
    if name == "Float8AdamW":
        in_float8 = {key for key, state in states.items() if "exp_avg_fp8" in state}
        assert in_float8 == {*block_matrices, "lm_head.weight"}


def test_a_tied_embedding_is_updated_once():
    model = Llama(Model(**{**SHAPE.__dict__, "tie_word_embeddings": True}))
    decayed, _ = build_optimizer(model, Optimizer()).param_groups
    assert sum(parameter is model.lm_head.weight for parameter in decayed["params"]) == 1


def test_the_norm_of_bfloat16_gradients_is_not_rounded_to_bfloat16():
    model = Llama(SHAPE).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1.0)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert compute_squared_norm_share(model).item() == pytest.approx(count, rel=1e-6)


def train(model: nn.Module, implementation: str) -> list[torch.Tensor]:
    """Take three steps, and return the parameters in whole."""
    optimizer = build_optimizer(model, Optimizer(lr=0.01, weight_decay=0.2, implementation=implementation))
    take_steps(optimizer, model, 3)
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def take_steps(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> None:
    """Take steps on gradients that depend on the parameter and the number of the step alone."""
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = (parameter.detach() * (step + 1)).sin()
        optimizer.step()


@pytest.mark.parametrize("implementation", EXPLICIT)
def test_implementations_agree_on_whole_and_on_sharded_parameters(one_rank, implementation):
    torch.manual_seed(0)
    model = Llama(SHAPE)
    whole = train(copy.deepcopy(model), implementation)
    torch.testing.assert_close(whole, train(copy.deepcopy(model), "auto"), rtol=1e-5, atol=1e-7)
    sharded = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    torch.testing.assert_close(train(sharded, implementation), whole, rtol=0, atol=0)


def build_with_gradients() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False), nn.Linear(4, 4))
    for parameter in list(model.parameters())[:-1]:  # the last bias has none
        parameter.grad = torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_on_one_rank_gradients_are_clipped_as_by_torch(max_norm):
    model, reference = build_with_gradients(), build_with_gradients()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
    norm = compute_squared_norm_share(model).sqrt()
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    clip_gradients(model, norm, max_norm)
    gradients, expected_gradients = ([p.grad for p in net.parameters()] for net in (model, reference))
    torch.testing.assert_close(gradients[:-1], expected_gradients[:-1], rtol=1e-6, atol=0)
    assert gradients[-1] is expected_gradients[-1] is None
    clipped = compute_squared_norm_share(model).sqrt().item()
    assert clipped == pytest.approx(min(max_norm, expected.item()), rel=1e-5)


def test_gradients_that_several_ranks_hold_count_once():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        parameters = nn.ParameterList()
        for placements in ((Shard(0), Shard(1)), (Replicate(), Shard(0)), (Replicate(), Replicate())):
            parameter = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, placements, run_check=False))
            parameter.grad = DTensor.from_local(torch.full((2, 2), 2.0), mesh, placements, run_check=False)
            parameters.append(parameter)
        share = compute_squared_norm_share(parameters)
        clip_gradients(parameters, torch.tensor(8.0), 4.0)
    finally:
        dist.destroy_process_group()
    assert share.item() == pytest.approx(16 + 16 / 2 + 16 / 4)
    for parameter in parameters:
        torch.testing.assert_close(parameter.grad.to_local(), torch.full((2, 2), 1.0))

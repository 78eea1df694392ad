"""AdamW's groups and implementations, on sharded parameters too, and gradient clipping against torch's."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from quaver.lab.settings import Model, Optimizer
from quaver.lab.settings.training import OPTIMIZERS
from quaver.lab.trainer.model import Llama
from quaver.lab.trainer.optimizer import build_optimizer, clip_gradients, compute_squared_norm_share

SHAPE = Model(dim=32, n_layers=1, n_heads=2, n_kv_heads=1, hidden_dim=32)
EXPLICIT = ("fused", "foreach", "for-loop")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_which_parameters_decay_have_float8_moments_and_are_updated_by_muon(name):
    model = Llama(Model(dim=128, n_layers=2, n_heads=2, n_kv_heads=1, hidden_dim=64))
    optimizer = build_optimizer(model, Optimizer(name=name, weight_decay=0.3))
    steps_with(optimizer, model, 1)
    named = dict(model.named_parameters())
    decays = {id(each): group["weight_decay"] for group in optimizer.param_groups for each in group["params"]}
    assert decays == {id(each): 0.3 * (each.dim() > 1) for each in named.values()}  # not norms
    keys = {name: " ".join(optimizer.state[each]) for name, each in named.items()}
    by_muon = {each for each in named if "momentum" in keys[each]}
    of_blocks = {each for each in named if ".layers." in each and named[each].dim() == 2}
    assert by_muon == (of_blocks if "Muon" in name else set())
    assert all("exp_avg" in keys[each] for each in named.keys() - by_muon)
    if name == "Float8AdamW":
        in_float8 = {each for each in named if "exp_avg_fp8" in keys[each]}
        assert in_float8 == {*of_blocks, "lm_head.weight"}


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


def trained(model: nn.Module, implementation: str, steps: int = 3) -> list[torch.Tensor]:
    """The parameters, in whole, after a few steps on gradients that depend on the parameter and the step alone."""
    model = copy.deepcopy(model)
    return steps_of(model, implementation, steps)


def steps_of(model: nn.Module, implementation: str, steps: int = 3) -> list[torch.Tensor]:
    optimizer = build_optimizer(model, Optimizer(lr=0.01, weight_decay=0.2, implementation=implementation))
    steps_with(optimizer, model, steps)
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def steps_with(optimizer: torch.optim.Optimizer, model: nn.Module, steps: int) -> None:
    for step in range(steps):
        for parameter in model.parameters():
            parameter.grad = (parameter.detach() * (step + 1)).sin()
        optimizer.step()


@pytest.mark.parametrize("implementation", EXPLICIT)
def test_implementations_agree_on_whole_and_on_sharded_parameters(one_rank, implementation):
    torch.manual_seed(0)
    model = Llama(SHAPE)
    whole = trained(model, implementation)
    for ours, expected in zip(whole, trained(model, "auto"), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7)
    sharded = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    for ours, expected in zip(steps_of(sharded, implementation), whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)


def with_gradients() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4, bias=False), nn.Linear(4, 4))
    for parameter in list(model.parameters())[:-1]:  # the last bias has none
        parameter.grad = torch.randn_like(parameter)
    return model


@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_on_one_rank_it_is_torchs(max_norm):
    ours, theirs = with_gradients(), with_gradients()
    expected = torch.nn.utils.clip_grad_norm_(theirs.parameters(), max_norm)
    norm = compute_squared_norm_share(ours).sqrt()
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    clip_gradients(ours, norm, max_norm)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0)
    clipped = compute_squared_norm_share(ours).sqrt().item()
    assert clipped == pytest.approx(min(max_norm, expected.item()), rel=1e-5)


def test_what_several_ranks_hold_counts_once_in_all():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = nn.ParameterDict()
        for name, places in {
            "a": (Shard(0), Shard(1)),
            "b": (Replicate(), Shard(0)),
            "c": (Replicate(), Replicate()),
        }.items():
            parameter = nn.Parameter(DTensor.from_local(torch.zeros(2, 2), mesh, places, run_check=False))
            parameter.grad = DTensor.from_local(torch.full((2, 2), 2.0), mesh, places, run_check=False)
            model[name] = parameter
        share = compute_squared_norm_share(model)
        clip_gradients(model, torch.tensor(8.0), 4.0)
    finally:
        dist.destroy_process_group()
    assert share.item() == pytest.approx(16 + 16 / 2 + 16 / 4)
    for parameter in model.values():
        torch.testing.assert_close(parameter.grad.to_local(), torch.full((2, 2), 1.0))

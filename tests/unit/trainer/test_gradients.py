"""The norm and the clipping of gradients, against torch's on plain tensors and by hand on split ones."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from quaver.trainer.gradients import clip_gradients, squared_norm_share


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
    norm = squared_norm_share(ours).sqrt()
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    clip_gradients(ours, norm, max_norm)
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-6, atol=0)
    clipped = squared_norm_share(ours).sqrt().item()
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
        share = squared_norm_share(model)
        clip_gradients(model, torch.tensor(8.0), 4.0)
    finally:
        dist.destroy_process_group()
    assert share.item() == pytest.approx(16 + 16 / 2 + 16 / 4)
    for parameter in model.values():
        torch.testing.assert_close(parameter.grad.to_local(), torch.full((2, 2), 1.0))

"""Tests FSDP2 and tensor parallelism in a group of one rank: streams, devices and layouts, not exchange.

The group is one of NCCL, or of gloo where the GPU is virtual.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn.parallel import DistributedDataParallel

from quaver import convert_to_float8_training, reduce_gradients_in_float8
from quaver.distributed import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    precompute_float8_dynamic_scale_for_fsdp,
)
from quaver.fsdp.gradients import BLOCK_ELEMENTS, dequantize_gradients, quantize_gradients, sum_over_ranks
from quaver.recipes.sqnr import compute_sqnr_db
from tests.gpu.device import BACKEND, DEVICE, VIRTUAL, host, smaller
from tests.recipes import NON_BLOCK_RECIPES, make_recipe_config

pytestmark = pytest.mark.gpu
RTOL = 0 if VIRTUAL else 2 * 2**-8
"""Of losses. One rank adds nothing, so a virtual GPU gives equal bits. On a GPU the order of a matmul's sum depends on
its operands' addresses, and Inductor leaves out roundings: outputs differ by a rounding to bfloat16, squares by two.
"""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo" if VIRTUAL else "nccl", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh(DEVICE, (1,), mesh_dim_names=("all",))
    dist.destroy_process_group()


class FeedForward(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = torch.nn.Linear(64, 128, bias=False)
        self.up = torch.nn.Linear(64, 128, bias=False)
        self.down = torch.nn.Linear(128, 64, bias=False)

    def forward(self, hidden):
        return self.down(torch.nn.functional.silu(self.gate(hidden)) * self.up(hidden))


def make(recipe, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(FeedForward(), FeedForward()).to(DEVICE, torch.bfloat16)
    return convert_to_float8_training(model, config=make_recipe_config(recipe, **options))


def train(model, *, precompute=False):
    """Return the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator(DEVICE).manual_seed(1)
    losses = []
    for _ in range(smaller(3, 2)):
        input = torch.randn(2, 16, 64, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        loss = model(input).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if precompute:
            precompute_float8_dynamic_scale_for_fsdp(model)
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)
@pytest.mark.parametrize("way", ["plain", "precompute", "offload", "compile"])
def test_fsdp_with_float8_all_gather(recipe, way, mesh):
    reference = make(recipe)
    if way == "compile":
        reference = torch.nn.Sequential(*[torch.compile(block, backend=BACKEND) for block in reference])
    expected = train(reference)
    model = make(recipe, enable_fsdp_float8_all_gather=True)
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=not VIRTUAL)} if way == "offload" else {}
    for block in model:
        if way == "compile":
            block.compile(fullgraph=True, backend=BACKEND)
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    assert train(model, precompute=way == "precompute") == pytest.approx(expected, rel=RTOL)


@pytest.mark.parametrize("recipe", NON_BLOCK_RECIPES)
@pytest.mark.parametrize("compiled", [False, True])
def test_tensor_and_sequence_parallel_steps_equal_one_device(recipe, compiled, mesh):
    reference = make(recipe)
    expected = train(torch.compile(reference, fullgraph=True, backend=BACKEND) if compiled else reference)
    model = make(recipe)
    for block in model:
        plan = {"gate": Float8ColwiseParallel(), "up": Float8ColwiseParallel()}
        plan["down"] = Float8RowwiseParallel(output_layouts=Shard(1))
        parallelize_module(block, mesh, plan)
        prepare = PrepareFloat8ModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        )
        parallelize_module(block, mesh, prepare)
    if compiled:
        model = torch.compile(model, fullgraph=True, backend=BACKEND)
    assert train(model) == pytest.approx(expected, rel=RTOL)


def test_gradients_in_float8_have_the_bits_of_a_cpu_and_wait_for_their_stream(mesh):
    rows = torch.randn(1, 40 * BLOCK_ELEMENTS + 77, generator=torch.Generator().manual_seed(0))
    rows[0, 300] = torch.nan
    with host():
        expected = dequantize_gradients(quantize_gradients(rows), rows.shape[1])[0]
    actual = sum_over_ranks(rows.to(DEVICE), mesh.get_group()).cpu()
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    grads = []
    for in_float8 in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(FeedForward().to(DEVICE))
        if in_float8:
            reduce_gradients_in_float8(model)
        model(torch.ones(16, 64, device=DEVICE)).square().mean().backward()
        grads.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    assert 28 < compute_sqnr_db(*grads) < 40

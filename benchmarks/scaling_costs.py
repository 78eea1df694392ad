"""The all-reduces of dynamic, delayed and static scaling, counted on ranks for benchmarks/scaling.py."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from benchmarks.distributed import BATCH, DIM, SEQUENCE, Attention, Block, Collectives, FeedForward
from quaver import (
    CastConfig,
    Float8ColwiseParallel,
    Float8LinearConfig,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    ScalingType,
    calibrate_float8_static_scales,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
    sync_float8_amax_and_scale_history,
)

RECIPES = ("tensorwise", "delayed", "delayed_with_dynamic_weight", "static")


def config_of(recipe: str) -> Float8LinearConfig:
    """The config of a recipe; "static" is not a recipe's name: every scale is calibrated."""
    if recipe != "static":
        return Float8LinearConfig.from_recipe_name(recipe)
    static = CastConfig(scaling_type=ScalingType.STATIC)
    return Float8LinearConfig(cast_config_input=static, cast_config_weight=static, cast_config_grad_output=static)


def count_all_reduces(mesh: DeviceMesh, parallel: str, recipe: str) -> dict[str, Any]:
    """The all-reduces of amaxes and scales in a step after the first ones, by phase, and their bytes."""
    torch.manual_seed(0)
    model, x = _fsdp(mesh, recipe) if parallel == "fsdp" else _tensor_parallel(mesh, parallel, recipe)
    if recipe == "static":
        with calibrate_float8_static_scales(model):
            model(x).square().mean().backward()
    phases: dict[str, Collectives] = {}
    for _ in range(3):  # the first steps check that ranks agree, and initialize the scales
        phases = {name: Collectives() for name in ("forward", "backward", "sync", "precompute")}
        with phases["forward"]:
            loss = model(x).square().mean()
        with phases["backward"]:
            loss.backward()
        if recipe != "static":
            with phases["sync"]:
                sync_float8_amax_and_scale_history(model)
        if parallel == "fsdp":
            with phases["precompute"]:
                precompute_float8_dynamic_scale_for_fsdp(model)
    counts = {name: counted.total("all_reduce", torch.int32, torch.float32) for name, counted in phases.items()}
    return {
        "parallel": parallel,
        "recipe": recipe,
        "all_reduces": {name: calls for name, (calls, _) in counts.items()},
        "bytes": sum(size for _, size in counts.values()),
    }


def _fsdp(mesh: DeviceMesh, recipe: str) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(Block(), Block())
    config = replace(config_of(recipe), enable_fsdp_float8_all_gather=True, shared_inputs=SIBLINGS)
    convert_to_float8_training(model, config=config)
    for block in (*model, model):
        fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    return model, torch.randn(BATCH, SEQUENCE, DIM)


def _tensor_parallel(mesh: DeviceMesh, module: str, recipe: str) -> tuple[nn.Module, Tensor]:
    model = (FeedForward() if module == "feed-forward" else Attention()).to(torch.bfloat16)
    convert_to_float8_training(model, config=replace(config_of(recipe), shared_inputs=SIBLINGS))
    last = "down" if module == "feed-forward" else "o"
    styles: dict[str, Any] = {name: Float8ColwiseParallel() for name, _ in model.named_children() if name != last}
    styles[last] = Float8RowwiseParallel(output_layouts=Shard(1))
    styles[""] = PrepareFloat8ModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
    )
    parallelize_module(model, mesh, styles)
    return model, torch.randn(BATCH, SEQUENCE // mesh.size(), DIM, dtype=torch.bfloat16, requires_grad=True)


PARALLEL = ("fsdp", "feed-forward", "attention")
SIBLINGS = (("q", "k", "v"), ("gate", "up"))


def count_on_rank(mesh: DeviceMesh) -> list[dict[str, Any]]:
    """The all-reduces of every layout and recipe."""
    return [count_all_reduces(mesh, parallel, recipe) for parallel in PARALLEL for recipe in RECIPES]

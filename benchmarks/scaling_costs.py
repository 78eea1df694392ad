"""What dynamic, delayed and static scaling read, send and take; `python -m benchmarks.scaling` runs it.

Reads are counted inside the C extension, element by element. Calls and bytes of collectives are counted on 2 gloo
processes. Times are those of one thread of a CPU.
"""

import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
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
from quaver.bench.harness import time_alternating
from quaver.kernels import cpu
from quaver.kernels.cast import cast_tensorwise, cast_with_persistent_scale, cast_with_scale
from quaver.scaling import PersistentScale

RECIPES = ("tensorwise", "delayed", "delayed_with_dynamic_weight", "static")
CPU = torch.device("cpu")


def config_of(recipe: str) -> Float8LinearConfig:
    """The config of a recipe; "static" has every scale measured, and is no recipe by name."""
    if recipe != "static":
        return Float8LinearConfig.from_recipe_name(recipe)
    static = CastConfig(scaling_type=ScalingType.STATIC)
    return Float8LinearConfig(cast_config_input=static, cast_config_weight=static, cast_config_grad_output=static)


# ---- reads -----------------------------------------------------------------------------------------------------------

READS_SHAPE = {"tokens": 96, "in": 64, "out": 160}
_CASTS = ("dynamic_cast", "cast_with_scale", "cast_and_observe")


@contextmanager
def counted_casts() -> Iterator[Counter[tuple[tuple[int, ...], str]]]:
    """By the shape of a matrix: its casts, and how often the casts read each of its elements."""
    counts: Counter[tuple[tuple[int, ...], str]] = Counter()

    def counting(cast: Callable[..., Any]) -> Callable[..., Any]:
        def counted(hp: Tensor, *args: Any, **kwargs: Any) -> Any:
            before = cpu.elements_read()
            result = cast(hp, *args, **kwargs)
            reads, rest = divmod(cpu.elements_read() - before, hp.numel())
            assert rest == 0, (hp.shape, rest)
            counts[tuple(hp.shape), "casts"] += 1
            counts[tuple(hp.shape), "reads"] += reads
            return result

        return counted

    with ExitStack() as patches:
        for name in _CASTS:
            patches.enter_context(mock.patch.object(cpu, name, counting(getattr(cpu, name))))
        yield counts


def count_reads(recipe: str, dtype: torch.dtype) -> list[dict[str, Any]]:
    """The reads and casts of each operand in the first step of a linear (none for static), and in a later one."""
    torch.manual_seed(0)
    tokens, k, n = READS_SHAPE.values()
    model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=dtype))
    convert_to_float8_training(model, config=config_of(recipe))

    def step() -> None:
        model(torch.randn(tokens, k, dtype=dtype).requires_grad_()).square().mean().backward()

    if recipe == "static":
        with calibrate_float8_static_scales(model):
            step()
    shapes = {"input": (tokens, k), "weight": (n, k), "grad_output": (tokens, n)}
    rows = []
    for when in ("first", "later"):
        before = cpu.elements_read()
        with counted_casts() as counts:
            step()
        operands = {name: {what: counts[shape, what] for what in ("reads", "casts")} for name, shape in shapes.items()}
        elements = {name: shape[0] * shape[1] for name, shape in shapes.items()}
        known = sum(operands[name]["reads"] * elements[name] for name in shapes)
        assert known == cpu.elements_read() - before, (recipe, operands)
        rows.append({"recipe": recipe, "dtype": str(dtype), "step": when, **operands})
        sync_float8_amax_and_scale_history(model)
    return rows


# ---- time ------------------------------------------------------------------------------------------------------------

CAST_SHAPES = ((1024, 1024), (4096, 4096))
LINEAR_SHAPES = ((1024, 1024, 1024), (2048, 2048, 2048))  # M, K, N
CAST_ROUNDS, LINEAR_ROUNDS = 30, 15


def time_casts(dtype: torch.dtype, shape: tuple[int, int], float8_dtype: torch.dtype) -> dict[str, Any]:
    """One cast: with the scale of its own amax, with a kept scale while recording, and with a scale alone."""
    hp = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = torch.tensor(64.0)
    kept = PersistentScale(scale, torch.zeros(2), torch.tensor(True))
    cold = PersistentScale(torch.tensor(0.0), torch.zeros(2), torch.tensor(False))
    contestants = {
        "dynamic": lambda: cast_tensorwise(hp, float8_dtype, True, False, False),
        "kept": lambda: cast_with_persistent_scale(hp, kept, float8_dtype, True, False, False),
        "cold": lambda: cast_with_persistent_scale(hp, cold, float8_dtype, True, False, False),
        "scale_only": lambda: cast_with_scale(hp, float8_dtype, scale, None),
    }
    timings = time_alternating(contestants, CPU, rounds=CAST_ROUNDS)
    return {
        "dtype": str(dtype),
        "float8_dtype": str(float8_dtype),
        "shape": list(shape),
        **{name: timing.__dict__ for name, timing in timings.items()},
    }


def time_linears(shape: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    """Forward and backward of one linear by recipe, scales known, without the sync."""
    m, k, n = shape
    torch.manual_seed(0)
    input, grad_output = torch.randn(m, k).to(dtype), torch.randn(m, n).to(dtype)
    modules = {"high precision": nn.Sequential(nn.Linear(k, n, bias=False, dtype=dtype))}
    for recipe in RECIPES[:3]:
        model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=dtype))
        modules[recipe] = convert_to_float8_training(model, config=config_of(recipe))

    def stepper(module: nn.Module) -> Callable[[], None]:
        parameters = list(module.parameters())

        def step() -> None:
            for parameter in parameters:
                parameter.grad = None
            module(input.detach().requires_grad_()).backward(grad_output)

        return step

    contestants = {name: stepper(module) for name, module in modules.items()}
    for name, step in contestants.items():
        step()
        sync_float8_amax_and_scale_history(modules[name])
    timings = time_alternating(contestants, CPU, rounds=LINEAR_ROUNDS, warmup=1)
    return {
        "shape": list(shape),
        "dtype": str(dtype),
        "rows": {name: timing.__dict__ for name, timing in timings.items()},
    }


# ---- across ranks ----------------------------------------------------------------------------------------------------

SYNC_LINEARS, SYNC_DIM, SYNC_ROUNDS, RANKS = (1, 10, 100, 1000), 16, 30, 2


def cost_of_sync(linears: int) -> dict[str, Any]:
    """One sync of a model of so many linears: what it dispatches, sends, and takes."""
    layers = [nn.Linear(SYNC_DIM, SYNC_DIM, bias=False) for _ in range(linears)]
    model = convert_to_float8_training(nn.Sequential(*layers), config=config_of("delayed"))
    layers = list(model)

    def run() -> None:
        model(torch.randn(2, SYNC_DIM)).mean().backward()

    run()
    sync_float8_amax_and_scale_history(model)  # also checks once that ranks agree
    run()
    counted = Collectives()
    with counted:
        sync_float8_amax_and_scale_history(model)
    calls, size = counted.total("all_reduce")
    assert calls == sum(counted.calls.values())
    times_us: dict[str, list[float]] = {"model": [], "fp8_layers": []}
    for _ in range(SYNC_ROUNDS):
        for name, given in (("model", None), ("fp8_layers", layers)):
            if dist.is_initialized():
                dist.barrier()
            start = time.perf_counter()
            sync_float8_amax_and_scale_history(model, given)
            times_us[name].append(1e6 * (time.perf_counter() - start))
    return {
        "ranks": dist.get_world_size() if dist.is_initialized() else 1,
        "linears": linears,
        "scales": 3 * linears,
        "operations": counted.operations,
        "all_reduces": calls,
        "bytes": size,
        "us": {
            name: {"median": statistics.median(times), "min": min(times), "max": max(times)}
            for name, times in times_us.items()
        },
        "rounds": SYNC_ROUNDS,
    }


def count_all_reduces(mesh: DeviceMesh, parallel: str, recipe: str) -> dict[str, Any]:
    """The all-reduces of numbers for scales in a later step, by phase, and their bytes."""
    torch.manual_seed(0)
    model, x = _fsdp(mesh, recipe) if parallel == "fsdp" else _tensor_parallel(mesh, parallel, recipe)
    if recipe == "static":
        with calibrate_float8_static_scales(model):
            model(x).square().mean().backward()
    phases: dict[str, Collectives] = {}
    for _ in range(3):  # the first steps check that ranks agree, and learn the scales
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


def _on_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    results = {
        "sync": [cost_of_sync(linears) for linears in SYNC_LINEARS],
        "all_reduces": [count_all_reduces(mesh, parallel, recipe) for parallel in PARALLEL for recipe in RECIPES],
    }
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def measure_costs() -> dict[str, Any]:
    """The figures of all tables of costs."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_rank, (RANKS, folder), nprocs=RANKS)
        across_ranks = json.loads((Path(folder) / "results.json").read_text())
    across_ranks["sync"] = [cost_of_sync(linears) for linears in SYNC_LINEARS] + across_ranks["sync"]
    dtypes = (torch.bfloat16, torch.float32)
    return {
        "reads": [row for recipe in RECIPES for row in count_reads(recipe, torch.bfloat16)],
        "casts": [time_casts(dtype, shape, torch.float8_e4m3fn) for dtype in dtypes for shape in CAST_SHAPES],
        "linears": [time_linears(shape, torch.bfloat16) for shape in LINEAR_SHAPES],
        **across_ranks,
    }

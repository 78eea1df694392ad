"""What float8 sends between ranks, beside bfloat16: collectives and their bytes, counted on a CPU.

    python -m benchmarks.distributed [--ranks 2] [--output benchmarks/results/distributed.json] [--update-docs]

Starts gloo processes itself; any laptop will do. Counts do not depend on the machine or the backend. The only times are
those of `precompute_float8_dynamic_scale_for_fsdp`, and they are a CPU's.

All figures are those of rank 0. The bytes of a collective are those of its whole tensor: what an all-gather leaves on a
rank, what a reduce-scatter or all-reduce takes from it. Of n such bytes, a ring over R ranks has each rank send
n * (R - 1) / R in an all-gather or reduce-scatter, and twice that in an all-reduce.

The model is a stack of blocks with Llama 3 8B's proportions, 1/16 of its widths, without norm weights, embedding and
output projection, which do not travel in float8: what is counted is the linears alone.
"""

import argparse
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.record import ROOT, fill, has_changed, markdown
from quaver import Float8LinearConfig, Float8LinearRecipeName, convert_to_float8_training
from quaver.bench.harness import environment
from quaver.distributed import (
    Float8ColwiseParallel,
    Float8RowwiseParallel,
    PrepareFloat8ModuleInput,
    precompute_float8_dynamic_scale_for_fsdp,
)
from quaver.tensor import Float8Tensor

RESULTS = ROOT / "benchmarks" / "results" / "distributed.json"
DOCS = ROOT / "docs" / "distributed.md"

RECIPES = tuple(
    recipe.value
    for recipe in Float8LinearRecipeName
    if not Float8LinearConfig.from_recipe_name(recipe).has_persistent_scales
)
LAYERS, DIM, KV, HIDDEN, HEAD = 4, 256, 64, 896, 16
LLAMA_3_8B = {"layers": 32, "dim": 4096, "kv": 1024, "hidden": 14336}
BATCH, SEQUENCE = 2, 64
PRECOMPUTE_LINEARS, PRECOMPUTE_DIM, PRECOMPUTE_ROUNDS = (1, 10, 100, 1000), 16, 15

# ---- counting --------------------------------------------------------------------------------------------------------

_KINDS = {"all_gather": "all_gather", "allgather": "all_gather", "reduce_scatter": "reduce_scatter"}
_KINDS |= {"all_reduce": "all_reduce", "allreduce": "all_reduce"}


class Collectives(TorchDispatchMode):
    """Calls and bytes of every collective by (kind, dtype), and the number of other operations that are no views."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, torch.dtype]] = Counter()
        self.bytes: Counter[tuple[str, torch.dtype]] = Counter()
        self.operations = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor first turns it into collectives and operations on its local tensor
        out = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        if "c10d" not in namespace:
            self.operations += not func.is_view
            return out
        kind = next((kind for part, kind in _KINDS.items() if part in name), None)
        if kind is not None:
            tensor = _whole(name, args, out)
            self.calls[kind, tensor.dtype] += 1
            self.bytes[kind, tensor.dtype] += tensor.numel() * tensor.itemsize
        return out

    def total(self, kind: str, *dtypes: torch.dtype) -> tuple[int, int]:
        """Calls and bytes of `kind`, of all dtypes or of those named."""
        keys = [key for key in self.calls if key[0] == kind and (not dtypes or key[1] in dtypes)]
        return sum(self.calls[key] for key in keys), sum(self.bytes[key] for key in keys)


def _whole(name: str, args: Any, out: Any) -> Tensor:
    if name.startswith("_reduce_scatter_base"):
        value = args[1]
    elif "gather" in name:
        value = args[0] if name.startswith("_allgather_base") else out
    else:
        value = args[0]
    while not isinstance(value, Tensor):
        value = value[0]
    return value


# ---- the model -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(DIM, DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.k, self.v = nn.Linear(DIM, KV, bias=False), nn.Linear(DIM, KV, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for linear in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(attended.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(DIM, elementwise_affine=False)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(self.norm(x))


def linear_shapes(layers: int, dim: int, kv: int, hidden: int) -> list[tuple[int, int]]:
    """(N, K) of every linear of a stack of Llama blocks."""
    block = [(dim, dim), (kv, dim), (kv, dim), (dim, dim), (hidden, dim), (hidden, dim), (dim, hidden)]
    return block * layers


def scale_bytes(recipe: str, shapes: list[tuple[int, int]]) -> int:
    """The bytes of amaxes that the ranks exchange for the weights of `shapes`; the count must agree with it."""
    numbers = {
        "tensorwise": lambda n, k: 1,
        "rowwise": lambda n, k: n + k,
        "rowwise_with_gw_hp": lambda n, k: n + 1,
        "rowwise_with_tensorwise_weight": lambda n, k: 1,
    }
    return 4 * sum(numbers[recipe](n, k) for n, k in shapes)


def config_of(recipe: str, **options: bool) -> Float8LinearConfig:
    return replace(Float8LinearConfig.from_recipe_name(recipe), **options)


# ---- FSDP2 -----------------------------------------------------------------------------------------------------------


def count_fsdp(mesh: DeviceMesh, param_dtype: torch.dtype | None, recipe: str | None) -> dict[str, Any]:
    """One training step: parameters in float32, gathered in `param_dtype`, or in float8 where a recipe is given."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(LAYERS)])
    if recipe is not None:
        convert_to_float8_training(model, config=config_of(recipe, enable_fsdp_float8_all_gather=True))
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    elements = sum(n * k for n, k in linear_shapes(LAYERS, DIM, KV, HIDDEN))
    shares = {}
    for precompute in (False, True):
        for counted in (False, True):  # the first step also checks that ranks agree
            scales, forward, backward = Collectives(), Collectives(), Collectives()
            with scales:
                if precompute:
                    precompute_float8_dynamic_scale_for_fsdp(model)
            with forward:
                loss = model(torch.randn(BATCH, SEQUENCE, DIM, requires_grad=True)).square().mean()
            with backward:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if counted:
                shares[precompute] = (scales, forward, backward)
    result: dict[str, Any] = {"recipe": recipe, "param_dtype": str(param_dtype or torch.float32)}
    for precompute, name in ((False, "without_precompute"), (True, "with_precompute")):
        of_phase = [[c.total(kind) for c in shares[precompute]] for kind in ("all_gather", "reduce_scatter")]
        reductions = [c.total("all_reduce") for c in shares[precompute]]
        result[name] = {
            "all_gathers": sum(calls for calls, _ in of_phase[0]),
            "reduce_scatters": sum(calls for calls, _ in of_phase[1]),
            "all_reduces_before_forward": reductions[0][0],
            "all_reduces_in_forward_and_backward": reductions[1][0] + reductions[2][0],
            "scale_bytes": sum(size for _, size in reductions),
            "gathered_bytes_per_element_forward": of_phase[0][1][1] / elements,
            "gathered_bytes_per_element_backward": of_phase[0][2][1] / elements,
            "reduce_scattered_bytes_per_element": sum(size for _, size in of_phase[1]) / elements,
        }
        if recipe is not None:
            expected = scale_bytes(recipe, linear_shapes(LAYERS, DIM, KV, HIDDEN))
            assert result[name]["scale_bytes"] == expected, (recipe, result[name], expected)
    result["unsharded_bytes_per_element"] = _unsharded_bytes(model) / (elements / LAYERS)
    return result


def _unsharded_bytes(model: nn.Sequential) -> int:
    """What the first block's weights take while it runs forward."""
    found = []

    def look(module: nn.Module, inputs: Any, output: Tensor) -> None:
        found.append(_storage_bytes([each.weight for each in model[0].modules() if isinstance(each, nn.Linear)]))

    hook = model[0].feed_forward.register_forward_hook(look)
    model(torch.randn(BATCH, SEQUENCE, DIM))
    hook.remove()
    return found[0]


def _storage_bytes(weights: list[Tensor]) -> int:
    sizes = {}
    for weight in weights:
        held = (weight.data_fp8, weight.first_data_fp8) if isinstance(weight, Float8Tensor) else (weight,)
        sizes.update({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held})
    return sum(sizes.values())


# ---- tensor and sequence parallelism ---------------------------------------------------------------------------------


def count_tp(mesh: DeviceMesh, module_type: type[nn.Module], recipe: str | None, local: bool) -> dict[str, Any]:
    """One forward and backward in bfloat16 of a module whose input and output are sharded along the sequence."""
    torch.manual_seed(0)
    module = module_type().to(torch.bfloat16)
    colwise, rowwise, prepare = ColwiseParallel, RowwiseParallel, PrepareModuleInput
    if recipe is not None:
        convert_to_float8_training(module, config=config_of(recipe))
        colwise, rowwise, prepare = Float8ColwiseParallel, Float8RowwiseParallel, PrepareFloat8ModuleInput
    last = "o" if module_type is Attention else "down"
    styles = {name: colwise() for name, _ in module.named_children() if name != last}
    styles[last] = rowwise(output_layouts=Shard(1))
    styles[""] = prepare(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=local)
    parallelize_module(module, mesh, styles)
    x = torch.randn(BATCH, SEQUENCE // mesh.size(), DIM, dtype=torch.bfloat16, requires_grad=True)
    result: dict[str, Any] = {"module": module_type.__name__, "recipe": recipe, "use_local_output": local}
    forward, backward = Collectives(), Collectives()
    with forward:
        out = module(x)
    with backward:
        out.sum().backward()
    elements = BATCH * SEQUENCE * DIM
    for name, counted in (("forward", forward), ("backward", backward)):
        gathers = counted.total("all_gather", torch.uint8, torch.bfloat16)
        scales, amaxes = counted.total("all_gather", torch.float32), counted.total("all_reduce", torch.int32)
        summed = counted.total("all_reduce", torch.bfloat16)
        scattered = counted.total("reduce_scatter")
        known = gathers[0] + scales[0] + amaxes[0] + summed[0] + scattered[0]
        assert known == sum(counted.calls.values()), counted.calls
        result[name] = {
            "gathers": gathers[0],
            "gathered_bytes_per_element": gathers[1] / elements,
            "scale_gathers": scales[0],
            "scale_gathered_bytes": scales[1],
            "reduce_scatters": scattered[0],
            "reduce_scattered_bytes_per_element": scattered[1] / elements,
            "all_reduces": summed[0],
            "all_reduced_bytes_per_element": summed[1] / elements,
            "amax_all_reduces": amaxes[0],
            "amax_bytes": amaxes[1],
        }
    return result


# ---- the cost of precompute ------------------------------------------------------------------------------------------


def cost_of_precompute(mesh: DeviceMesh, linears: int, recipe: str, dtype: torch.dtype) -> dict[str, Any]:
    layers = [nn.Linear(PRECOMPUTE_DIM, PRECOMPUTE_DIM, bias=False, dtype=dtype) for _ in range(linears)]
    model = nn.Sequential(*layers)
    convert_to_float8_training(model, config=config_of(recipe, enable_fsdp_float8_all_gather=True))
    fully_shard(model, mesh=mesh)
    precompute_float8_dynamic_scale_for_fsdp(model)  # checks once that ranks agree
    counted = Collectives()
    with counted:
        precompute_float8_dynamic_scale_for_fsdp(model)
    calls, size = counted.total("all_reduce")
    assert calls == sum(counted.calls.values())
    times_ms = []
    for _ in range(PRECOMPUTE_ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        precompute_float8_dynamic_scale_for_fsdp(model)
        times_ms.append(1e3 * (time.perf_counter() - start))
    return {
        "linears": linears,
        "recipe": recipe,
        "dtype": str(dtype),
        "operations": counted.operations,
        "all_reduces": calls,
        "bytes": size,
        "median_ms": statistics.median(times_ms),
        "min_ms": min(times_ms),
        "max_ms": max(times_ms),
        "rounds": PRECOMPUTE_ROUNDS,
    }


# ---- running ---------------------------------------------------------------------------------------------------------

FSDP_CASES = [(None, None), (torch.bfloat16, None)] + [(torch.bfloat16, recipe) for recipe in RECIPES]
TP_CASES = [(None, False)] + [(recipe, True) for recipe in RECIPES]
TP_CASES.insert(TP_CASES.index(("rowwise_with_gw_hp", True)), ("rowwise_with_gw_hp", False))
PRECOMPUTE_CASES = [("tensorwise", torch.float32), ("tensorwise", torch.bfloat16), ("rowwise", torch.float32)]


def _on_rank(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,))
    results = {
        "fsdp": [count_fsdp(mesh, *case) for case in FSDP_CASES],
        "tp": [count_tp(mesh, module, *case) for module in (FeedForward, Attention) for case in TP_CASES],
        "precompute": [
            cost_of_precompute(mesh, linears, *case) for case in PRECOMPUTE_CASES for linears in PRECOMPUTE_LINEARS
        ],
    }
    if rank == 0:
        (Path(folder) / "results.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int) -> dict[str, Any]:
    """All tables' figures, from `ranks` processes started for it."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_on_rank, (ranks, folder), nprocs=ranks)
        counted = json.loads((Path(folder) / "results.json").read_text())
    return {
        "environment": environment(torch.device("cpu"))
        | {
            "threads": 1,
            "backend": "gloo",
            "ranks": ranks,
            "command": shlex.join(["python", "-m", "benchmarks.distributed", *sys.argv[1:]]),
        }
        | {"uncommitted_changes_in_quaver": has_changed("quaver")},
        "model": {"layers": LAYERS, "dim": DIM, "kv": KV, "hidden": HIDDEN, "batch": BATCH, "sequence": SEQUENCE},
        "precompute_linear": [PRECOMPUTE_DIM, PRECOMPUTE_DIM],
        **counted,
    }


# ---- tables ----------------------------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Each table of the documentation by its name, in Markdown."""
    return {"fsdp": _fsdp_table(results)}


def _fsdp_table(results: dict[str, Any]) -> str:
    head = ["gathered as", "all-gathers", "reduce-scatters", "all-reduces", "gathered, forward", "gathered, backward"]
    head += ["reduce-scattered", "unsharded", "scales"]
    rows = []
    for row in results["fsdp"]:
        counts = row["without_precompute"]
        moved = row["with_precompute"]
        reductions = counts["all_reduces_before_forward"] + counts["all_reduces_in_forward_and_backward"]
        same = [key for key in counts if not key.startswith("all_reduces") and counts[key] != moved[key]]
        assert not same, same
        assert moved["all_reduces_before_forward"] == reductions
        assert moved["all_reduces_in_forward_and_backward"] == 0
        cells = [_gathered_as(row), counts["all_gathers"], counts["reduce_scatters"], reductions]
        cells += [f"{counts[f'gathered_bytes_per_element_{phase}']:g}" for phase in ("forward", "backward")]
        cells += [f"{counts['reduce_scattered_bytes_per_element']:g}", f"{row['unsharded_bytes_per_element']:g}"]
        rows.append([*cells, f"{counts['scale_bytes']:,}"])
    return markdown(head, rows)


def _llama_table(results: dict[str, Any]) -> str:
    shapes = linear_shapes(**LLAMA_3_8B)
    elements = sum(n * k for n, k in shapes)
    rows = []
    for row in results["fsdp"]:
        counts = row["without_precompute"]
        gathered = sum(counts[f"gathered_bytes_per_element_{phase}"] for phase in ("forward", "backward"))
        unsharded = row["unsharded_bytes_per_element"] * elements / LLAMA_3_8B["layers"]
        scales = scale_bytes(row["recipe"], shapes) if row["recipe"] else 0
        rows.append([_gathered_as(row), f"{gathered * elements / 1e9:.2f}", f"{unsharded / 1e6:.1f}", f"{scales:,}"])
    return markdown(["gathered as", "gathered per step, GB", "unsharded block, MB", "scales per step, bytes"], rows)


def _gathered_as(row: dict[str, Any]) -> str:
    return f"float8, `{row['recipe']}`" if row["recipe"] else row["param_dtype"].removeprefix("torch.")


def _tp_table(results: dict[str, Any]) -> str:
    head = ["module", "precision", "gathered", "reduce-scattered", "all-reduced", "collectives of activations"]
    head += ["amax all-reduces", "amaxes, bytes", "scales gathered, bytes"]
    rows = []
    for row in results["tp"]:
        phases = row["forward"], row["backward"]
        collectives = [phase["gathers"] + phase["reduce_scatters"] + phase["all_reduces"] for phase in phases]
        name = f"`{row['recipe']}`" if row["recipe"] else "bfloat16"
        if row["recipe"] == "rowwise_with_gw_hp":
            name += f", `use_local_output={row['use_local_output']}`"
        module = {"FeedForward": "feed-forward", "Attention": "attention"}[row["module"]]
        cells = [module, name]
        for key in ("gathered", "reduce_scattered", "all_reduced"):
            cells.append(" + ".join(f"{phase[f'{key}_bytes_per_element']:g}" for phase in phases))
        cells.append(" + ".join(map(str, collectives)))
        for key in ("amax_all_reduces", "amax_bytes", "scale_gathered_bytes"):
            cells.append(" + ".join(f"{phase[key]:,}" for phase in phases))
        rows.append(cells)
    return markdown(head, rows)


def _precompute_table(results: dict[str, Any]) -> str:
    head = ["recipe, parameters", "linears", "operations", "all-reduces", "bytes", "median, ms", "min to max, ms"]
    rows = [
        [f"`{row['recipe']}`, {row['dtype'].removeprefix('torch.')}", row["linears"], row["operations"]]
        + [row["all_reduces"], f"{row['bytes']:,}", f"{row['median_ms']:.2f}"]
        + [f"{row['min_ms']:.2f} to {row['max_ms']:.2f}"]
        for row in results["precompute"]
    ]
    return markdown(head, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--output", type=Path, help="write the figures to this JSON file")
    parser.add_argument("--update-docs", action="store_true", help=f"rewrite the tables of {DOCS.relative_to(ROOT)}")
    options = parser.parse_args()
    if options.update_docs and options.ranks != 2:
        parser.error("the page describes 2 ranks; --update-docs needs --ranks 2")
    results = measure(options.ranks)
    for name, table in tables(results).items():
        print(f"{name}\n{table}\n")
    if options.output is not None:
        options.output.write_text(json.dumps(results, indent=2) + "\n")
    if options.update_docs:
        DOCS.write_text(fill(DOCS.read_text(), tables(results)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

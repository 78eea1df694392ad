"""What FSDP2 sends between ranks in float8 and in bfloat16: collectives and their bytes, counted on a CPU.

    python -m benchmarks.distributed --update-docs

Starts gloo processes; counts do not depend on the machine or the backend. All figures are rank 0's. The bytes of a
collective are those of its whole tensor: the output of an all-gather, the input of a reduce-scatter or an all-reduce.
For n such bytes a ring over R ranks sends n * (R - 1) / R per rank in an all-gather or reduce-scatter, twice that in
an all-reduce.

The model is a stack of blocks with Llama 3 8B's proportions at 1/16 of its width. Norm weights, embedding and output
projection are left out, because they never travel in float8.
"""

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.record import ROOT, make_page, markdown, on_ranks, page_parser, provenance
from quaver import Float8LinearConfig, Float8LinearRecipeName, convert_to_float8_training
from quaver.distributed import precompute_float8_dynamic_scale_for_fsdp
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
BATCH, SEQUENCE, RANKS = 2, 64, 2

_KINDS = {"all_gather": "all_gather", "allgather": "all_gather", "reduce_scatter": "reduce_scatter"}
_KINDS |= {"all_reduce": "all_reduce", "allreduce": "all_reduce"}


class Collectives(TorchDispatchMode):
    """Calls and bytes of every collective by (kind, dtype)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[tuple[str, torch.dtype]] = Counter()
        self.bytes: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor first turns it into collectives and operations on its local tensor
        out = func(*args, **(kwargs or {}))
        namespace, name = func._schema.name.split("::")
        kind = next((kind for part, kind in _KINDS.items() if part in name), None)
        if "c10d" in namespace and kind is not None:
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


FSDP_CASES = [(None, None), (torch.bfloat16, None)] + [(torch.bfloat16, recipe) for recipe in RECIPES]


def count(mesh: DeviceMesh) -> list[dict[str, Any]]:
    """All counts of one rank."""
    return [count_fsdp(mesh, *case) for case in FSDP_CASES]


def measure() -> dict[str, Any]:
    """The table's figures, from RANKS processes started for it."""
    return {
        "environment": provenance("distributed", threads=1, backend="gloo", ranks=RANKS),
        "model": {"layers": LAYERS, "dim": DIM, "kv": KV, "hidden": HIDDEN, "batch": BATCH, "sequence": SEQUENCE},
        "fsdp": on_ranks(RANKS, count)[0],
    }


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Each table of the documentation by its name, in Markdown."""
    return {"fsdp": _fsdp_table(results)}


def _fsdp_table(results: dict[str, Any]) -> str:
    """The page says in words what all rows have in common: all-gathers, reduce-scatters and their bytes."""
    common = ("all_gathers", "reduce_scatters", "reduce_scattered_bytes_per_element")
    assert len({tuple(row["without_precompute"][key] for key in common) for row in results["fsdp"]}) == 1
    rows = []
    for row in results["fsdp"]:
        counts = row["without_precompute"]
        moved = row["with_precompute"]
        reductions = counts["all_reduces_before_forward"] + counts["all_reduces_in_forward_and_backward"]
        same = [key for key in counts if not key.startswith("all_reduces") and counts[key] != moved[key]]
        assert not same, same
        assert moved["all_reduces_before_forward"] == reductions
        assert moved["all_reduces_in_forward_and_backward"] == 0
        cells = [f"{counts[f'gathered_bytes_per_element_{phase}']:g}" for phase in ("forward", "backward")]
        cells += [f"{row['unsharded_bytes_per_element']:g}", reductions, f"{counts['scale_bytes']:,}"]
        rows.append([_gathered_as(row), *cells])
    return markdown(["gathered as", "forward", "backward", "unsharded", "all-reduces", "their bytes"], rows)


def _gathered_as(row: dict[str, Any]) -> str:
    return f"float8, `{row['recipe']}`" if row["recipe"] else row["param_dtype"].removeprefix("torch.")


def main() -> None:
    make_page(page_parser(__doc__).parse_args(), measure, RESULTS, tables, DOCS)


if __name__ == "__main__":
    main()

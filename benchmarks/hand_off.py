"""Measures handing weights to an engine from float32 masters, in bfloat16 and in float8, on one and two ranks.

    python -m benchmarks.hand_off                       # a Llama with 2048 features and 4 layers, on a CPU

Prints MB yielded to the engine, MB of the whole tensors that each rank gathers, and seconds. docs/export.md quotes
the bytes.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.record import run_on_ranks
from quaver.export import iter_float8_weights

RECIPES = (None, "rowwise", "tensorwise", "blockwise", "mxfp8")


def build_llama(width: int, layers: int) -> nn.Module:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 128,
        vocab_size=4096,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def measure(mesh: DeviceMesh | None, width: int, layers: int, rounds: int) -> None:
    """Print a line per recipe on the first rank."""
    model = build_llama(width, layers)
    if mesh is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    masters = next(iter_float8_weights(model, recipe="rowwise", format="high-precision"))[1].dtype
    seconds: dict[str | None, list[float]] = {recipe: [] for recipe in RECIPES}
    counts = {}
    for _ in range(rounds):  # alternating
        for recipe in RECIPES:
            options = {"recipe": recipe} if recipe else {"recipe": "rowwise", "format": "high-precision"}
            if mesh is not None:
                dist.barrier()
            start = time.perf_counter()
            weights = iter_float8_weights(model, forward_dtype="bfloat16", dtype=torch.bfloat16, **options)
            for _ in weights:
                pass
            seconds[recipe].append(time.perf_counter() - start)
            counts[recipe] = weights.bytes_yielded, weights.bytes_moved
    if mesh is None or mesh.get_rank() == 0:
        count = sum(parameter.numel() for parameter in model.parameters())
        print(f"{1 if mesh is None else mesh.size()} rank(s), {count / 1e6:.0f}M parameters in {masters}")
        for recipe, (yielded, moved) in counts.items():
            print(
                f"| {recipe or 'bfloat16'} | {yielded / 1e6:.0f} MB | {moved / 1e6:.0f} MB "
                f"| {statistics.median(seconds[recipe]):.2f} s |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=2048, help="features of the model")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model")
    parser.add_argument("--rounds", type=int, default=5, help="samples of the seconds")
    options = parser.parse_args()
    for ranks in (1, 2):
        run_on_ranks(ranks, measure, options.width, options.layers, options.rounds)


if __name__ == "__main__":
    main()

"""python -m benchmarks.gpu_parts PART --output FILE [--seconds S] [--dry]."""

import argparse
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.gpu import EXIT_WRONG_GRADIENTS
from benchmarks.gpu_parts.attention import time_attention
from benchmarks.gpu_parts.blocks import time_compiled_blocks, time_eager_blocks
from benchmarks.gpu_parts.gradients import compare_gradients
from benchmarks.gpu_parts.kernels import time_kernels
from benchmarks.gpu_parts.matmuls import time_matmuls
from benchmarks.gpu_parts.other_measurements import (
    time_experts,
    time_fsdp,
    time_graphs,
    time_optimizers,
    time_stored_activations,
)
from benchmarks.gpu_parts.part_context import PartContext, Row, record
from benchmarks.gpu_parts.rates import measure_rates

PARTS: dict[str, Callable[[PartContext], Iterator[Row]]] = {
    "rates": measure_rates,
    "gradients": compare_gradients,
    "kernels": time_kernels,
    "blocks": time_compiled_blocks,
    "eager": time_eager_blocks,
    "matmuls": time_matmuls,
    "attention": time_attention,
    "experts": time_experts,
    "optimizers": time_optimizers,
    "stored": time_stored_activations,
    "graphs": time_graphs,
    "fsdp": time_fsdp,
}
EXIT_INTERRUPTED = 130


def main(argv: list[str]) -> int:
    """Run a part. Returns 0, 1 if a row failed, 2 without a GPU, `EXIT_WRONG_GRADIENTS`, or `EXIT_INTERRUPTED`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_parts", description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=600.0, help="time limit of the part")
    parser.add_argument("--dry", action="store_true", help="small sizes on a CPU; times mean nothing")
    options = parser.parse_args(argv)
    if not options.dry and not torch.cuda.is_available():
        print("benchmarks.gpu_parts needs a GPU, or --dry", file=sys.stderr)
        return 2
    try:
        context = PartContext(options.dry, options.seconds)
        rows = record(PARTS[options.part](context), context, options.output, options.part)
    except KeyboardInterrupt:
        print(f"interrupted; {options.output} has the rows so far", file=sys.stderr)
        return EXIT_INTERRUPTED
    if any(row.get("is_wrong") for row in rows):
        return EXIT_WRONG_GRADIENTS
    return int(any("error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

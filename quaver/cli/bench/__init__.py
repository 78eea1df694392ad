"""`quaver bench VERB`: one thin file per benchmark, which parses, checks, calls its engine and prints a table."""

import os

from quaver.cli.dispatch import dispatch

VERBS = {
    "linear": "one linear, forward and backward",
    "roofline": "what float8 linears would gain on other GPUs, predicted",
    "cast": "casts to float8: bytes per second and per element, against a copy",
    "gemm": "the three matmuls of a linear: FLOP/s, float8 against bfloat16",
    "block": "a transformer block in training: time and memory of a step",
    "train": "steps of quaver train: time, tokens per second and memory per recipe",
    "host": "what a tiny linear costs the host: time, operations, kernels",
}


def run(argv: list[str]) -> int:
    """Run the benchmark that `argv` begins with; 0 when done, 2 for bad input."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13's profiler prints lines of its own
    usage = "quaver bench VERB [options]      quaver bench VERB --help"
    return dispatch(__name__, VERBS, argv, kind="benchmark", usage=usage)

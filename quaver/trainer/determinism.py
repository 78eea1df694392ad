"""Makes torch choose algorithms that repeat to the bit, for as long as a run lasts."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

CUBLAS_WORKSPACE = ("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
"""What cuBLAS needs to repeat itself (its documentation, "Results Reproducibility"); it is read when CUDA starts."""


@contextmanager
def determinism(enabled: bool) -> Iterator[None]:
    """Use deterministic algorithms inside the block where `enabled`; torch then refuses operations that have none.

    On a CPU, quaver and the trainer's model repeat to the bit anyway. On CUDA it costs speed, in attention above all.
    """
    if not enabled:
        yield
        return
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.backends.cudnn.benchmark,
    )
    os.environ.setdefault(*CUBLAS_WORKSPACE)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.backends.cudnn.benchmark = before[2]

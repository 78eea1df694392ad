"""A GPU without a GPU: CPU tensors take a GPU's code, and the vendor's matmuls are models with the device's contracts.

    with virtual_gpu("h100"):
        float8_linear(input, weight, config="rowwise")    # Triton's kernels, layouts and native matmuls of an H100

With TRITON_INTERPRET=1 before triton is imported casts are Triton's kernels, else PyTorch's in a GPU's layouts. A
matmul that the device refuses raises; one that it takes is exact, with one rounding. Both are replaced in the
dispatcher, so eager and compiled code, operations and backwards reach them. `Card.calls` counts them.

`runtime.py` models what the package calls of torch.cuda; it calls no streams and no events. Not modelled: the device's
memory, the order of its sums, and what torch's own operators do there.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from quaver.kernels import triton_blocks
from quaver.linear import gemm
from quaver.linear.gemm import ScaleKind, assuming_native
from quaver.runtime.devices import simulate_gpu
from quaver.runtime.slow_paths import slow_paths
from tests.virtual_gpu import grouped_matmuls, matmuls, runtime

CAPABILITIES = {"a100": (8, 0), "l40s": (8, 9), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0), "rtx5090": (12, 0)}
"""Compute capabilities (developer.nvidia.com/cuda-gpus)."""
KINDS = {
    "l40s": {ScaleKind.TENSORWISE, ScaleKind.ROWWISE},
    **dict.fromkeys(
        ("h100", "h200"), {ScaleKind.TENSORWISE, ScaleKind.ROWWISE, ScaleKind.GROUPS, ScaleKind.BLOCKS_OF_128}
    ),
    "b200": {ScaleKind.TENSORWISE, ScaleKind.ROWWISE, ScaleKind.GROUPS, ScaleKind.BLOCKS_OF_32},
    "rtx5090": {ScaleKind.TENSORWISE},
}
"""The kinds of scales that a card multiplies natively."""


@dataclass
class Card:
    """The GPU that CPU tensors stand for."""

    name: str
    capability: tuple[int, int]
    calls: Counter[str] = field(default_factory=Counter)
    """How often each of the vendor's matmuls was called, by the operator and the kind of its scales."""


@contextlib.contextmanager
def virtual_gpu(name: str = "h100") -> Iterator[Card]:
    """Inside the block CPU tensors stand for those of a GPU, one of CAPABILITIES.

    Raises AssertionError at the exit where results may be right, and slow: a probe found otherwise than KINDS, or casts
    of a card that runs kernels ran in PyTorch.
    """
    if name not in CAPABILITIES:
        raise ValueError(f"expected one of {', '.join(CAPABILITIES)}, got {name!r}")
    card, before = Card(name, CAPABILITIES[name]), set(slow_paths())
    with contextlib.ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for operator, model in {**matmuls.MODELS, **grouped_matmuls.MODELS}.items():
            library.impl(operator, functools.partial(model, card), "CPU", allow_override=True)
        stack.enter_context(assuming_native({}))
        stack.enter_context(runtime.cuda_functions(card))
        stack.enter_context(simulate_gpu(card.capability))
        yield card
        for (_, kind), failure in gemm._native_failures.items():
            assert (failure is None) == (kind in KINDS.get(name, ())), f"{name}, {kind.value}: {failure}"
        slow = [each for each in slow_paths() if each not in before and each.startswith("float8 casts on")]
        assert card.capability < triton_blocks.FIRST_CAPABILITY or not slow, slow

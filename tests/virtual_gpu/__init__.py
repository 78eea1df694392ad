"""Simulates a GPU: CPU tensors take the code paths of a GPU, and models of the vendor's matmuls check its contracts.

    with virtual_gpu("h100"):
        float8_linear(input, weight, config="rowwise")    # Triton's kernels, layouts and native matmuls of an H100

Casts run Triton's kernels if TRITON_INTERPRET=1 was set before the import of triton, else PyTorch's code in a GPU's
layouts. A matmul that the device refuses raises; any other is exact, with one rounding. The models replace the CPU
kernels in the dispatcher, so eager code, compiled code and backwards call them. `Card.calls` counts these calls.

`runtime.py` models the functions of torch.cuda that the package calls, which use no streams and no events. Not modeled:
the device's memory, the order of its sums, and torch's other operators.
"""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from quaver.kernels import triton_blocks
from quaver.kernels.native_mm import ScaleKind
from quaver.linear.backends import replace_trial_results
from quaver.runtime.devices import simulate_gpu
from quaver.runtime.slow_paths import list_slow_paths
from tests.virtual_gpu import grouped_matmuls, matmuls, runtime

CAPABILITIES = {"a100": (8, 0), "l40s": (8, 9), "h100": (9, 0), "h200": (9, 0), "b200": (10, 0), "rtx5090": (12, 0)}
"""Compute capabilities by card (developer.nvidia.com/cuda-gpus)."""
NATIVE_SCALE_KINDS = {
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
    """The number of calls of the vendor's matmuls, by the operator and the kind of its scales."""


@contextlib.contextmanager
def virtual_gpu(name: str = "h100") -> Iterator[Card]:
    """Let CPU tensors stand for those of the GPU `name`, a key of CAPABILITIES, inside the block.

    Raises AssertionError at the exit if the package took a slow path that gives right results: a trial differs from
    NATIVE_SCALE_KINDS, or casts ran in PyTorch on a card that runs kernels.
    """
    if name not in CAPABILITIES:
        raise ValueError(f"expected one of {', '.join(CAPABILITIES)}, got {name!r}")
    card, before = Card(name, CAPABILITIES[name]), set(list_slow_paths())
    with contextlib.ExitStack() as stack:
        library = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for operator, model in {**matmuls.OPERATOR_MODELS, **grouped_matmuls.OPERATOR_MODELS}.items():
            library.impl(operator, functools.partial(model, card), "CPU", allow_override=True)
        failures = stack.enter_context(replace_trial_results({}))
        stack.enter_context(runtime.patch_cuda_functions(card))
        stack.enter_context(simulate_gpu(card.capability))
        yield card
        for (_, kind), failure in failures.items():
            assert (failure is None) == (kind in NATIVE_SCALE_KINDS.get(name, ())), f"{name}, {kind.value}: {failure}"
        slow = [path for path in list_slow_paths() if path not in before and path.startswith("float8 casts on")]
        assert card.capability < triton_blocks.MIN_CAPABILITY or not slow, slow

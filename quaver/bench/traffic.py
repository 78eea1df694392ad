"""Bytes that a cast moves, counted and not timed: by a CPU's C extension, the compiler's schedule, or operators."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quaver.kernels import cpu


@dataclass(frozen=True)
class Traffic:
    """Bytes `moved` by one call, read and written, and who counted them. None: nothing can count them here."""

    moved: int | None
    source: str


UNKNOWN = Traffic(None, "unknown")


def distinct_bytes(tensors: Iterable[Tensor]) -> int:
    """The bytes of the distinct storages behind `tensors`: what had to be written to make them."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def count_extension(function: Callable[[], Iterable[Tensor]], hp_itemsize: int) -> Traffic:
    """Call `function`, whose casts all run in the C extension: elements it read, and the results it wrote."""
    if not cpu.AVAILABLE:
        return UNKNOWN
    before = cpu.elements_read()
    results = list(function())
    read = cpu.elements_read() - before
    return Traffic(read * hp_itemsize + distinct_bytes(results), "C extension") if read else UNKNOWN


def count_compiled(function: Callable[[], Any], least_bytes: int) -> Traffic:
    """Call a compiled `function` for the first time, so that it compiles: the buffers of each node of its schedule.

    The compiler adds them up for a log of its own (torch 2.11 to 2.13); a compilation that comes out of a cache has no
    schedule, so caches are off meanwhile. Unknown where it fails to, and the next call compiles again; and where the
    sum is under `least_bytes`: then an operator's own kernel reads its arguments more than once.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor import compile_fx, metrics
    from torch._inductor import config as inductor_config
    from torch._inductor.exc import InductorError

    log = compile_fx.inductor_metrics_log
    level = log.level
    metrics.reset()
    log.setLevel(logging.INFO)  # it has no handler, unless TORCH_LOGS asks for one
    try:
        with (
            inductor_config.patch(fx_graph_cache=False),
            functorch_config.patch(enable_autograd_cache=False),
            torch.no_grad(),
        ):
            function()
        moved = metrics.num_bytes_accessed
    except InductorError as error:
        return Traffic(None, f"unknown: {str(error).strip().splitlines()[0]}")
    finally:
        log.setLevel(level)
        metrics.reset()
    return Traffic(moved, "compiler's schedule") if moved >= max(1, least_bytes) else UNKNOWN


class _OperatorBytes(TorchDispatchMode):
    """Adds up the tensors that operators read and write; views and empty allocations move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and "empty" not in func._schema.name:
            tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
            self.moved += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return out


def count_operators(function: Callable[[], Any], least_bytes: int) -> Traffic:
    """Call an eager `function`: what PyTorch's operators read and write.

    Unknown where that is under `least_bytes`: then work is done by kernels that the dispatcher does not see.
    """
    with _OperatorBytes() as counted, torch.no_grad():
        function()
    return Traffic(counted.moved, "operators") if counted.moved >= least_bytes else UNKNOWN

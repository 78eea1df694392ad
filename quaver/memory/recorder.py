"""Records what happens to every storage in one step of training, and what each is for.

What a storage is for can become clear late: a gradient is one once the optimizer reads it. So the recorder logs sizes
only, and says at the end, or at the optimizer's step, what each storage was for all of its life. One thing changes
during a life and is logged: whether autograd keeps the storage for the backward.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.memory.modules import OUTSIDE, ModuleTracker
from quaver.memory.storages import StorageWatch, plain_parts
from quaver.phases import OpenPhase

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "kept_scales",
    "inputs",
    "gathered_weights",
    "float8_weights",
    "saved_activations",
    "temporaries",
)
"""What storages are for, from what stays longest to what goes first; docs/profiling.md says what belongs to each."""

BEFORE = "before"
"""The phase in which a storage was made that is older than the recording."""

_FLOAT8_BYTES = 1


@dataclass(eq=False, slots=True)
class Allocation:
    """One storage, from its allocation to its release."""

    operator: str | None
    """What made it; None for one that is older than the recording."""
    module: str
    phase: str
    """before, forward, backward, recompute, optimizer or other."""
    shape: tuple[int, ...]
    """Of the tensor with which the storage was first seen."""
    dtype: str
    category: str | None = None
    """What it was for all of its life; None: a saved activation while autograd keeps it, else a temporary."""
    kept_from_birth: bool = False
    """Whether something other than autograd kept it from the forward for the backward."""
    saved_in: str = OUTSIDE
    """The module whose forward had autograd keep it, first."""


class Entry(NamedTuple):
    """What became of an allocation at one moment."""

    t_us: float
    """Microseconds since the recording began."""
    allocation: Allocation
    size_bytes: int
    saved: int
    """How many times autograd keeps it."""


class Recorder(StorageWatch):
    """The log of one step. `name` and `end` say what storages are for.

    Attributes:
        initial: what was there when the recording began, with its bytes.
        log: all that happened since, in order.
        spans: phases and the number of entries of the log when each began.
    """

    def __init__(self, modules: ModuleTracker, open_phases: list[OpenPhase]) -> None:
        super().__init__()
        self.initial: dict[Allocation, int] = {}
        self.log: list[Entry] = []
        self.spans: list[tuple[str, int]] = [("other", 0)]
        self.in_optimizer = False
        self._modules, self._open_phases = modules, open_phases
        self._live: dict[int, Allocation] = {}
        self._saved: dict[int, int] = {}
        self._start = time.perf_counter_ns()

    # ---- what is it for ------------------------------------------------------------------------------------------

    def name(self, category: str, tensors: Iterable[Tensor], module: str = OUTSIDE) -> None:
        """Say what the storages of `tensors` are for, now and in all of their life, unless that is known already."""
        for tensor in tensors:
            self.meet(tensor)
            for part in plain_parts(tensor):
                allocation = self._live[part.untyped_storage()._cdata]
                if allocation.category in (None, "inputs"):
                    allocation.category = category
                    allocation.module = module or allocation.module

    def keep(self, part: Tensor) -> int:
        """Autograd keeps the plain tensor `part` for the backward; returns the key with which to `release` it."""
        self.meet(part)
        key = part.untyped_storage()._cdata
        allocation = self._live[key]
        allocation.saved_in = allocation.saved_in or self._modules.current
        self._change_saved(key, 1)
        return key

    def release(self, key: int) -> None:
        """Autograd keeps a tensor of this storage no longer."""
        if key in self._live:
            self._change_saved(key, -1)

    def _change_saved(self, key: int, more: int) -> None:
        self._saved[key] = self._saved.get(key, 0) + more
        self._note(key, self._sizes[key])

    # ---- what happens --------------------------------------------------------------------------------------------

    def storage_appeared(self, key: int, size_bytes: int, tensor: Tensor | None, operator: str | None) -> None:
        shape = () if tensor is None else tuple(tensor.shape)
        dtype = "" if tensor is None else str(tensor.dtype).removeprefix("torch.")
        if operator is None:
            allocation = Allocation(None, OUTSIDE, BEFORE, shape, dtype, category="inputs")
            self.initial[allocation] = size_bytes
            self._live[key] = allocation
            return
        allocation = Allocation(
            operator.removesuffix(".default"), self._modules.current, self.spans[-1][0], shape, dtype
        )
        self._live[key] = allocation
        if self._open_phases:
            self._made_in_phase(allocation, tensor)
        self._note(key, size_bytes)

    def storage_resized(self, key: int, size_bytes: int, before_bytes: int) -> None:
        allocation = self._live[key]
        if allocation.category in (None, "inputs"):
            allocation.category = "gathered_weights"
            allocation.module = allocation.module or self._modules.current
        self._note(key, size_bytes)

    def storage_gone(self, key: int, size_bytes: int) -> None:
        self._saved.pop(key, None)
        self._note(key, 0)
        del self._live[key]

    def operator_called(self, tensors: list[Tensor]) -> None:
        phase = self._phase()
        before = self.spans[-1][0]
        if phase == before:
            return
        if before == "forward" and phase == "backward":
            self._keep_what_is_left_of_forward()
        self.spans.append((phase, len(self.log)))

    def end(self) -> None:
        """Forget the storages; nothing is recorded any more."""
        self.forget_all()
        self._live.clear()

    def _note(self, key: int, size_bytes: int) -> None:
        t_us = (time.perf_counter_ns() - self._start) / 1e3
        self.log.append(Entry(t_us, self._live[key], size_bytes, self._saved.get(key, 0)))

    def _phase(self) -> str:
        if self.in_optimizer:
            return "optimizer"
        if torch._C._current_autograd_node() is not None:
            return "recompute" if self._modules.stack else "backward"
        # the loss comes after the model's forward
        return "forward" if self._modules.stack or self.spans[-1][0] == "forward" else "other"

    def _made_in_phase(self, allocation: Allocation, tensor: Tensor | None) -> None:
        """Name the phase as the operator, and a parameter's cast to float8 as such."""
        name, arguments = self._open_phases[-1]
        allocation.operator = f"{name} ({allocation.operator})"
        matrix = arguments[0] if arguments else None
        if name != "quaver::cast" or tensor is None or tensor.itemsize != _FLOAT8_BYTES:
            return
        for part in plain_parts(matrix) if isinstance(matrix, Tensor) else ():
            of = self._live.get(part.untyped_storage()._cdata)
            if of is not None and of.category in ("parameters", "gathered_weights"):
                allocation.category = "float8_weights"
                allocation.module = allocation.module or of.module

    def _keep_what_is_left_of_forward(self) -> None:
        for key, allocation in self._live.items():
            made_in_forward = allocation.phase == "forward" and allocation.module != OUTSIDE
            if made_in_forward and allocation.category is None and not self._saved.get(key):
                allocation.kept_from_birth = True

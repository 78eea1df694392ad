"""Records the life of every storage in one training step, and the category of each.

The category can become known late: a gradient is recognized when the optimizer reads it. So the log has sizes, and the
category belongs to the allocation as a whole. Only one property changes during a life and is logged: how many times
autograd has saved the storage for backward.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.lab.recorder.callers import caller
from quaver.lab.recorder.modules import OUTSIDE, ModuleTracker
from quaver.lab.recorder.storages import StorageWatch, plain_parts
from quaver.runtime.phases import OpenPhase
from quaver.torch_private.autograd import current_node
from quaver.torch_private.memory import storage_key

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer_state",
    "persistent_scales",
    "inputs",
    "gathered_weights",
    "float8_weights",
    "saved_activations",
    "communication",
    "temporaries",
)
"""Categories of storages, from the longest-lived to the shortest; docs/profiling.md defines each."""

BEFORE = "before"
"""The phase of a storage that is older than the recording."""

_AFTER_FORWARD = ("backward", "recompute", "optimizer")
_FLOAT8_BYTES = 1
CAST_PREFIX = "quaver.cast_"
"""All operators that cast to float8 have names that start so (quaver/kernels/cast.py)."""
_OF_COLLECTIVES = ("c10d.", "_c10d_functional.", "_dtensor.")


class Use(NamedTuple):
    """An operator that read an allocation."""

    operator: str
    module: str
    phase: str
    line: str
    """The line of its call, as in `Allocation.line`."""


@dataclass(eq=False, slots=True)
class Allocation:
    """One storage, from its allocation to its release."""

    key: int
    """Key of the storage; after its release another may have it."""
    operator: str | None
    """The operator that allocated it; None if it is older than the recording."""
    module: str
    phase: str
    """before, forward, backward, recompute, optimizer or other."""
    shape: tuple[int, ...]
    """Shape of the first tensor seen with the storage."""
    dtype: str
    line: str = ""
    """The line that called the operator, as "quaver/linear/module.py:123"; for an autograd node in C++ the forward's
    line that created the node, as "backward of model.py:57"; empty where neither is known."""
    of: Allocation | None = None
    """The largest operand of the operator, or of the float8 phase around it."""
    parameter: str = ""
    """The name of the parameter with this storage, sharded or gathered."""
    category: str | None = None
    """One of CATEGORIES; None for a saved activation while autograd holds it, else a temporary."""
    communicates: bool = False
    """Whether it is a buffer of a collective."""
    under_policy: bool = False
    """Whether a selective checkpoint's policy was asked about the operator."""
    held_from_forward: bool = False
    """Whether something other than autograd's saved tensors holds it from forward to backward."""
    saved_in: str = OUTSIDE
    """The module in whose forward autograd saved it first."""
    first_use: Use | None = None
    """Its first reader after the forward, if the forward allocated it."""


class AllocationState(NamedTuple):
    """The state of an allocation after one event."""

    t_us: float
    """Microseconds since the recording began."""
    allocation: Allocation
    size_bytes: int
    saved: int
    """How many times autograd has saved it."""


class Recorder(StorageWatch):
    """The log of one step.

    Attributes:
        initial: the allocations that are older than the recording, with their bytes.
        log: the events since, in order.
        spans: each phase, with the length of the log at its begin.
    """

    def __init__(self, modules: ModuleTracker, open_phases: list[OpenPhase]) -> None:
        super().__init__()
        self.initial: dict[Allocation, int] = {}
        self.log: list[AllocationState] = []
        self.spans: list[tuple[str, int]] = [("other", 0)]
        self.in_optimizer = False
        self._modules, self._open_phases = modules, open_phases
        self._live: dict[int, Allocation] = {}
        self._saved: dict[int, int] = {}
        self._given: Allocation | None = None  # the largest operand of the last operator
        self._start = time.perf_counter_ns()

    # ---- categories and saved tensors ----------------------------------------------------------------------------

    def name(
        self, category: str, tensors: Iterable[Tensor], module: str = OUTSIDE, *, parameter: str | None = None
    ) -> None:
        """Set the category of the storages of `tensors`, unless it is set.

        Args:
            parameter: the parameter that the tensors belong to, if they belong to one.
        """
        for tensor in tensors:
            self.meet(tensor)
            for part in plain_parts(tensor):
                allocation = self._live[storage_key(part.untyped_storage())]
                if allocation.category in (None, "inputs"):
                    allocation.category = category
                    allocation.module = module or allocation.module
                    allocation.parameter = parameter or allocation.parameter

    def save(self, part: Tensor) -> Allocation:
        """Autograd saved the plain tensor `part` for backward; returns what to `release`."""
        key = storage_key(part.untyped_storage())
        # A result of a DTensor's operators, which no mode sees; a collective's own buffer is never saved.
        unseen = self._left_alone.pop(key, None) is not None
        self.meet(part, "torch.distributed" if unseen else None)
        allocation = self._live[key]
        allocation.saved_in = allocation.saved_in or self._modules.current
        self._change_saved(key, 1)
        return allocation

    def release(self, allocation: Allocation) -> None:
        """Autograd dropped a saved tensor of this storage."""
        if self._live.get(allocation.key) is allocation:
            self._change_saved(allocation.key, -1)

    def _change_saved(self, key: int, more: int) -> None:
        self._saved[key] = self._saved.get(key, 0) + more
        self._note(key, self._sizes[key])

    # ---- events --------------------------------------------------------------------------------------------------

    def storage_appeared(self, key: int, size_bytes: int, tensor: Tensor | None, operator: str | None) -> None:
        shape, dtype = ((), "") if tensor is None else _looks(tensor)
        if operator is None:
            allocation = Allocation(key, None, OUTSIDE, BEFORE, shape, dtype, category="inputs")
            self.initial[allocation] = size_bytes
            self._live[key] = allocation
            return
        called = caller()
        allocation = Allocation(
            key,
            operator.removesuffix(".default"),
            self._modules.current,
            self.spans[-1][0],
            shape,
            dtype,
            line=called.line or self._line_of_node(),
            of=self._given,
            communicates=called.communicates or operator.startswith(_OF_COLLECTIVES),
            under_policy=called.under_policy,
        )
        self._live[key] = allocation
        if self._open_phases:
            self._made_in_phase(allocation, tensor)
        elif operator.startswith(CAST_PREFIX):
            _name_weight_cast(allocation, tensor)
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

    def operator_called(self, operator: Any, tensors: list[Tensor]) -> None:
        self._given = self._largest(tensors)
        self._follow_phase()
        phase = self.spans[-1][0]
        reads = not operator.is_view and operator.namespace != "prim"
        for allocation, tensor in ((self.allocation_of(tensor), tensor) for tensor in tensors):
            if allocation is None:
                continue
            if allocation.category == "gathered_weights" and not allocation.parameter:
                self._name_gathered(allocation, tensor)
            from_forward = allocation.first_use is None and allocation.phase in ("forward", BEFORE)
            if reads and from_forward and phase in _AFTER_FORWARD:
                line = caller().line or self._line_of_node()
                name = self._in_phase(str(operator).removesuffix(".default"))
                allocation.first_use = Use(name, self._modules.current, phase, line)
        if phase == "forward" and torch.is_grad_enabled():
            self._modules.called_from(caller().line)

    def _follow_phase(self) -> None:
        phase = self._phase()
        before = self.spans[-1][0]
        if phase == before:
            return
        if before == "forward" and phase == "backward":
            self._save_what_is_left_of_forward()
        self.spans.append((phase, len(self.log)))

    def end(self) -> None:
        """Stop recording."""
        self.forget_all()
        self._live.clear()
        self._given = None

    def _note(self, key: int, size_bytes: int) -> None:
        t_us = (time.perf_counter_ns() - self._start) / 1e3
        self.log.append(AllocationState(t_us, self._live[key], size_bytes, self._saved.get(key, 0)))

    def _phase(self) -> str:
        if self.in_optimizer:
            return "optimizer"
        if current_node() is not None:
            return "recompute" if self._modules.stack else "backward"
        # the loss runs after the model's forward
        return "forward" if self._modules.stack or self.spans[-1][0] == "forward" else "other"

    def _line_of_node(self) -> str:
        line = self._modules.line_of_node()
        return f"backward of {line}" if line else ""

    def allocation_of(self, tensor: Tensor) -> Allocation | None:
        """The allocation of the first storage inside `tensor`."""
        part = next(plain_parts(tensor), None)
        return None if part is None else self._live.get(storage_key(part.untyped_storage()))

    def _largest(self, tensors: list[Tensor]) -> Allocation | None:
        keys = [storage_key(part.untyped_storage()) for tensor in tensors for part in plain_parts(tensor)]
        keys = [key for key in keys if key in self._live]
        return self._live[max(keys, key=self._sizes.__getitem__)] if keys else None

    def _name_gathered(self, allocation: Allocation, tensor: Tensor) -> None:
        """FSDP2 resizes a gathered weight's storage, which has no shape or name: take those of its first reader."""
        part = next(plain_parts(tensor))
        allocation.parameter = self._modules.parameter_of(storage_key(part.untyped_storage()))
        if allocation.parameter:
            allocation.module = self._modules.current
            allocation.shape, allocation.dtype = _looks(part)

    def _in_phase(self, operator: str) -> str:
        """The operator, inside the name of the open float8 phase if there is one."""
        return f"{self._open_phases[-1].name} ({operator})" if self._open_phases else operator

    def _made_in_phase(self, allocation: Allocation, tensor: Tensor | None) -> None:
        """Name the float8 phase around the operator, and recognize a weight's cast."""
        name, arguments = self._open_phases[-1]
        allocation.operator = self._in_phase(allocation.operator or "")
        matrix = arguments[0] if arguments else None
        allocation.of = (self._largest([matrix]) if isinstance(matrix, Tensor) else None) or allocation.of
        if name == "quaver::cast":
            _name_weight_cast(allocation, tensor)

    def _save_what_is_left_of_forward(self) -> None:
        for key, allocation in self._live.items():
            made_in_forward = allocation.phase == "forward" and allocation.module != OUTSIDE
            if made_in_forward and allocation.category is None and not self._saved.get(key):
                allocation.held_from_forward = True


def _name_weight_cast(allocation: Allocation, tensor: Tensor | None) -> None:
    """Categorize the float8 codes of a parameter."""
    of = allocation.of
    if of is None or of.category not in ("parameters", "gathered_weights"):
        return
    if tensor is not None and tensor.itemsize == _FLOAT8_BYTES:
        allocation.category = "float8_weights"
        allocation.module = allocation.module or of.module


def _looks(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

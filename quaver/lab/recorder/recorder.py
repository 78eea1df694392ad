"""Records the allocation, resizes and release of every storage in one training step, and its category.

The category may become known late: a gradient is recognized when the optimizer reads it. So the category is an
attribute of the allocation, and the log has sizes only. One other property changes over time and is logged: how many
times autograd has saved the storage for backward.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quaver.lab.recorder.callers import find_caller
from quaver.lab.recorder.modules import OUTSIDE_MODULES, ModuleTracker
from quaver.lab.recorder.storages import StorageTracker, iter_plain_parts
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

BEFORE_RECORDING = "before"
"""The phase of a storage that is older than the recording."""

_AFTER_FORWARD = ("backward", "recompute", "optimizer")
_FLOAT8_BYTES = 1
CAST_PREFIX = "quaver.cast_"
"""The prefix of all operators that cast to float8 (quaver/kernels/cast.py)."""
_COLLECTIVE_PREFIXES = ("c10d.", "_c10d_functional.", "_dtensor.")


class Use(NamedTuple):
    """An operator that read an allocation."""

    operator: str
    module: str
    phase: str
    source: str
    """The line of its call, as in `Allocation.source`."""


@dataclass(eq=False, slots=True)
class Allocation:
    """One storage, from its allocation to its release."""

    key: int
    """The key of the storage. Another storage may get it after the release."""
    operator: str | None
    """The operator that allocated it; None if it is older than the recording."""
    module: str
    phase: str
    """before, forward, backward, recompute, optimizer or other."""
    shape: tuple[int, ...]
    """The shape of the first tensor with the storage."""
    dtype: str
    source: str = ""
    """The line that called the operator, as "quaver/linear/module.py:123". For an autograd node in C++ it is the
    forward's line that created the node, as "backward of model.py:57". Empty if neither is known."""
    operand: Allocation | None = None
    """The largest operand of the operator, or of the float8 phase around it."""
    parameter: str = ""
    """The name of the parameter with this storage, sharded or gathered."""
    category: str | None = None
    """One of CATEGORIES. None means a saved activation while autograd holds it, and otherwise a temporary."""
    is_collective_buffer: bool = False
    """Whether it is a buffer of a collective."""
    under_policy: bool = False
    """Whether a selective checkpoint called its policy for the operator."""
    held_from_forward: bool = False
    """Whether it survives the forward without being saved by autograd."""
    saved_in: str = OUTSIDE_MODULES
    """The module in whose forward autograd first saved it."""
    first_use: Use | None = None
    """Its first reader after the forward, if the forward allocated it."""


class AllocationState(NamedTuple):
    """The state of an allocation after one event."""

    t_us: float
    """Microseconds since the recording began."""
    allocation: Allocation
    size_bytes: int
    save_count: int
    """How many times autograd has saved it."""


class Recorder(StorageTracker):
    """The log of one step."""

    def __init__(self, modules: ModuleTracker, open_float8_phases: list[OpenPhase]) -> None:
        super().__init__()
        self.initial: dict[Allocation, int] = {}
        """The allocations that are older than the recording, with their bytes."""
        self.log: list[AllocationState] = []
        """The events of the recording, in order."""
        self.spans: list[tuple[str, int]] = [("other", 0)]
        """Each phase, with the length of the log at its beginning."""
        self.in_optimizer = False
        self.modules, self._open_float8_phases = modules, open_float8_phases
        self._live: dict[int, Allocation] = {}
        self._save_counts: dict[int, int] = {}
        self._operand: Allocation | None = None  # the largest operand of the last operator
        self._start = time.perf_counter_ns()

    def ignore_compile_internals(self) -> bool:  # type: ignore[override]
        return self.modules.follows_compiled_code

    def categorize(
        self, category: str, tensors: Iterable[Tensor], module: str = OUTSIDE_MODULES, *, parameter: str | None = None
    ) -> None:
        """Set the category of the storages of `tensors`, unless it is known already.

        Args:
            parameter: the name of the parameter that the tensors belong to, if any.
        """
        for tensor in tensors:
            for part in iter_plain_parts(tensor):
                allocation = self._follow_part(part)
                if allocation.category in (None, "inputs"):
                    allocation.category = category
                    allocation.module = module or allocation.module
                    allocation.parameter = parameter or allocation.parameter

    def record_saved(self, part: Tensor) -> Allocation:
        """Record that autograd saved the plain tensor `part`, and return its allocation for `record_dropped`."""
        allocation = self._follow_part(part)
        allocation.saved_in = allocation.saved_in or self.modules.current
        self._change_save_count(allocation.key, 1)
        return allocation

    def record_dropped(self, allocation: Allocation) -> None:
        """Record that autograd dropped a saved tensor of this storage."""
        if self._live.get(allocation.key) is allocation:
            self._change_save_count(allocation.key, -1)

    def _follow_part(self, part: Tensor) -> Allocation:
        """Follow a plain tensor that autograd, a parameter or the optimizer holds, and return its allocation.

        None of them holds a collective's own buffer. So an ignored one is a result of DTensor's ops, which no mode
        sees.
        """
        key = storage_key(part.untyped_storage())
        is_unseen = self._ignored.pop(key, None) is not None
        self.follow(part, "torch.distributed" if is_unseen else None)
        return self._live[key]

    def _change_save_count(self, key: int, change: int) -> None:
        with self._lock:
            self._save_counts[key] = self._save_counts.get(key, 0) + change
            self._log_state(key, self._sizes[key])

    def on_storage_appeared(self, key: int, size_bytes: int, tensor: Tensor | None, operator: str | None) -> None:
        shape, dtype = ((), "") if tensor is None else _get_shape_and_dtype(tensor)
        if operator is None:
            allocation = Allocation(key, None, OUTSIDE_MODULES, BEFORE_RECORDING, shape, dtype, category="inputs")
            self.initial[allocation] = size_bytes
            self._live[key] = allocation
            return
        caller = find_caller()
        allocation = Allocation(
            key,
            operator.removesuffix(".default"),
            self.modules.current,
            self.spans[-1][0],
            shape,
            dtype,
            source=caller.line or self._find_line_of_node(),
            operand=self._operand,
            is_collective_buffer=caller.is_collective_buffer or operator.startswith(_COLLECTIVE_PREFIXES),
            under_policy=caller.under_policy,
        )
        self._live[key] = allocation
        if self._open_float8_phases:
            self._attribute_to_float8_phase(allocation, tensor)
        elif operator.startswith(CAST_PREFIX):
            _categorize_weight_cast(allocation, tensor)
        self._log_state(key, size_bytes)

    def on_storage_resized(self, key: int, size_bytes: int, before_bytes: int) -> None:
        allocation = self._live[key]
        if allocation.category in (None, "inputs"):
            allocation.category = "gathered_weights"
            allocation.module = allocation.module or self.modules.current
        self._log_state(key, size_bytes)

    def on_storage_released(self, key: int, size_bytes: int) -> None:
        self._save_counts.pop(key, None)
        self._log_state(key, 0)
        del self._live[key]

    def on_operator_called(self, operator: Any, tensors: list[Tensor]) -> None:
        self._operand = self._find_largest(tensors)
        self._follow_phase()
        phase = self.spans[-1][0]
        reads = not operator.is_view and operator.namespace != "prim"
        for allocation, tensor in ((self.find_allocation(tensor), tensor) for tensor in tensors):
            if allocation is None:
                continue
            if allocation.category == "gathered_weights" and not allocation.parameter:
                self._name_gathered(allocation, tensor)
            from_forward = allocation.first_use is None and allocation.phase in ("forward", BEFORE_RECORDING)
            if reads and from_forward and phase in _AFTER_FORWARD:
                source = find_caller().line or self._find_line_of_node()
                name = self._name_with_float8_phase(str(operator).removesuffix(".default"))
                allocation.first_use = Use(name, self.modules.current, phase, source)
        if phase == "forward" and torch.is_grad_enabled():
            self.modules.record_line(find_caller().line)

    def _follow_phase(self) -> None:
        phase = self._get_phase()
        before = self.spans[-1][0]
        if phase == before:
            return
        if before == "forward" and phase == "backward":
            self._mark_held_from_forward()
        self.spans.append((phase, len(self.log)))

    def end(self) -> None:
        """Stop recording."""
        with self._lock:
            self.forget_all()
            self._live.clear()
            self._operand = None

    def _log_state(self, key: int, size_bytes: int) -> None:
        t_us = (time.perf_counter_ns() - self._start) / 1e3
        self.log.append(AllocationState(t_us, self._live[key], size_bytes, self._save_counts.get(key, 0)))

    def _get_phase(self) -> str:
        if self.in_optimizer:
            return "optimizer"
        if current_node() is not None:
            return "recompute" if self.modules.stack else "backward"
        # the loss runs after the model's forward
        return "forward" if self.modules.stack or self.spans[-1][0] == "forward" else "other"

    def _find_line_of_node(self) -> str:
        line = self.modules.find_line_of_node()
        return f"backward of {line}" if line else ""

    def find_allocation(self, tensor: Tensor) -> Allocation | None:
        """Return the allocation of the first storage inside `tensor`."""
        part = next(iter_plain_parts(tensor), None)
        return None if part is None else self._live.get(storage_key(part.untyped_storage()))

    def _find_largest(self, tensors: list[Tensor]) -> Allocation | None:
        keys = [storage_key(part.untyped_storage()) for tensor in tensors for part in iter_plain_parts(tensor)]
        keys = [key for key in keys if key in self._live]
        return self._live[max(keys, key=self._sizes.__getitem__)] if keys else None

    def _name_gathered(self, allocation: Allocation, tensor: Tensor) -> None:
        """Name an unsharded weight after the parameter with its storage. FSDP2 only resized the storage."""
        part = next(iter_plain_parts(tensor))
        allocation.parameter = self.modules.find_parameter(storage_key(part.untyped_storage()))
        if allocation.parameter:
            allocation.module = self.modules.current
            allocation.shape, allocation.dtype = _get_shape_and_dtype(part)

    def _name_with_float8_phase(self, operator: str) -> str:
        return f"{self._open_float8_phases[-1].name} ({operator})" if self._open_float8_phases else operator

    def _attribute_to_float8_phase(self, allocation: Allocation, tensor: Tensor | None) -> None:
        name, arguments = self._open_float8_phases[-1]
        allocation.operator = self._name_with_float8_phase(allocation.operator or "")
        matrix = arguments[0] if arguments else None
        operand = self._find_largest([matrix]) if isinstance(matrix, Tensor) else None
        allocation.operand = operand or allocation.operand
        if name == "quaver::cast":
            _categorize_weight_cast(allocation, tensor)

    def _mark_held_from_forward(self) -> None:
        """Mark, at the beginning of backward, what the forward allocated and something still holds."""
        with self._lock:
            for key, allocation in self._live.items():
                made_in_forward = allocation.phase == "forward" and allocation.module != OUTSIDE_MODULES
                if made_in_forward and allocation.category is None and not self._save_counts.get(key):
                    allocation.held_from_forward = True


def _categorize_weight_cast(allocation: Allocation, tensor: Tensor | None) -> None:
    operand = allocation.operand
    if operand is None or operand.category not in ("parameters", "gathered_weights"):
        return
    if tensor is not None and tensor.itemsize == _FLOAT8_BYTES:
        allocation.category = "float8_weights"
        allocation.module = allocation.module or operand.module


def _get_shape_and_dtype(tensor: Tensor) -> tuple[tuple[int, ...], str]:
    return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

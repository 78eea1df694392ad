"""Which casts of a weight FSDP2 gathers in a pass: those that the pass reads, where that can be known.

Row-wise recipes cast a weight twice: the forward's matmul reads one cast, the backward's the other. To gather both in
both passes is as many bytes as bfloat16, twice. So the forward gathers the first, and the backward the second, and the
first again only if it is read there:

    who reads it in the backward             how it is known, when the backward gathers
    a recomputation in compiled code         the compiled forward has saved the first cast
    a recomputation in eager code            the forward has saved neither cast, or autograd would hold the second
    nobody                                   autograd holds the second cast and not the first
    nobody: recomputations look outputs up   each eager forward has left word that its output is kept (forward_reads.py)

[Note: saved without its memory]
A cast that the forward saves for the backward need not have memory then: FSDP frees gathered memory after the forward
and fills it again for the backward, in the same storage. Here it is filled for the first time. So the tensors that
stand for the casts are made once, and all graphs hold the same ones.

[Note: let go before the end]
When every recomputation that reads the first cast is over (forward_reads.py), its memory goes, as FSDP would free it
at the end of the group's backward: by emptying the storage, which the next gather fills again. FSDP finds it empty and
leaves it alone. A cast that a compiled graph has saved stays.

[Note: who holds a tensor]
Reference counts tell: a saved tensor is held by the graph that saved it. What is not understood counts as held, and
everything is gathered: the first time, without a group of FSDP2 to ask, where FSDP keeps gathered weights from one pass
to the next, where hooks for saved tensors would read what has no memory yet, and outside both passes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.tensor import DTensor

from quaver.casts import Operand
from quaver.forward_reads import ForwardReads
from quaver.saved_hooks import values_are_read
from quaver.tensor import Float8Tensor

FORWARD, BACKWARD = 0, 1
"""The places of the casts: what the forward reads comes first."""


@dataclass
class Gathered:
    """A weight with two casts, gathered at least once.

    Attributes:
        param: FSDP2's own record of the weight.
        group: FSDP2's group of weights that are gathered together.
        buffers: uint8, what FSDP gathers into, one for each cast.
        codes: the views of them that stand for the casts, float8 [N, K]; made once, see
            [Note: saved without its memory].
        forward_reads: who may read the forward's cast again; see [Note: let go before the end].
    """

    param: Any
    group: Any
    buffers: list[Tensor]
    codes: list[Tensor]
    forward_reads: ForwardReads = field(init=False)
    _is_for_backward: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.forward_reads = ForwardReads(self._let_go)

    def begin(self) -> list[int]:
        """The places of the casts to gather now; FSDP is told to gather no others."""
        places = self._needed()
        self._is_for_backward = self.group._training_state.name == "PRE_BACKWARD"
        self.forward_reads.gather(in_backward=torch._C._current_graph_task_id() != -1)
        self.param.all_gather_outputs = [self.buffers[place] for place in places]
        return places

    def end(self) -> None:
        """Let FSDP free both, when it frees what it has gathered."""
        self.param.all_gather_outputs = self.buffers

    def _let_go(self) -> None:
        """[Note: let go before the end], where it was gathered for this backward and goes with it."""
        buffer = self.buffers[FORWARD]
        goes = self._is_for_backward and self.group.reshard_after_backward and not _is_held(self.codes, FORWARD)
        if goes and buffer.untyped_storage().size() > 0:
            buffer.untyped_storage().resize_(0)

    def _needed(self) -> list[int]:
        both = [FORWARD, BACKWARD]
        state, is_backward = self.group._training_state.name, torch._C._current_graph_task_id() != -1
        if state == "FORWARD" and not is_backward:
            is_kept = not self.group._reshard_after_forward
            return both if is_kept or self._is_saved_by_value() else [FORWARD]
        if state == "PRE_BACKWARD" and self.group.reshard_after_backward:
            is_for_graph = _is_held(self.codes, BACKWARD) and not _is_held(self.codes, FORWARD)
            return [BACKWARD] if is_for_graph or self.forward_reads.are_kept else both
        return both

    def _is_saved_by_value(self) -> bool:
        weight = self.param.unsharded_param
        gathered: Any = weight._local_tensor if isinstance(weight, DTensor) else weight
        return values_are_read() or bool(gathered.is_saved_by_value)


def follow(linear: nn.Module, codes: Sequence[Tensor]) -> Gathered | None:
    """What to gather of the weight of `linear` from now on, just after both casts have been gathered.

    Args:
        codes: the views of FSDP's memory that stand for the casts, the forward's first.
    Returns:
        None where no group of FSDP2 is found that holds the weight.
    """
    found = _found(linear)
    if found is None:
        _find_all()
        found = _found(linear)
    if found is None or len(found[0].all_gather_outputs) != len(codes):
        return None
    param, group = found
    return Gathered(param, group, list(param.all_gather_outputs), list(codes))


_weights: WeakKeyDictionary[nn.Module, tuple[ref[Any], ref[Any]]] = WeakKeyDictionary()
"""FSDP2's records of the weights of linears, and their groups. They hold their modules, so they are held weakly."""


def _found(linear: nn.Module) -> tuple[Any, Any] | None:
    known = _weights.get(linear)
    if known is None:
        return None
    param, group = known[0](), known[1]()
    return None if param is None or group is None else (param, group)


def _find_all() -> None:
    """Look through all groups of FSDP2 once for all linears, which ask one after another."""
    for module in list(_module_state_mapping):
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            for param in getattr(group, "fsdp_params", ()):
                info = param._module_info
                if isinstance(info.module, nn.Linear) and info.param_name == "weight":
                    _weights[info.module] = ref(param), ref(group)


def _is_held(codes: list[Tensor], place: int) -> bool:
    """Whether a graph holds gathered codes, or another view of their memory; see [Note: who holds a tensor]."""
    counts = _references(codes, place)
    return any(count > unheld for count, unheld in zip(counts, _unheld(), strict=True))


def _references(codes: list[Tensor], place: int) -> tuple[int, int, int]:
    """The references to the memory of a tensor, to the tensor, and to the Python object, which hooks may hold."""
    storage = torch._C._storage_Use_Count(codes[place].untyped_storage()._cdata)
    return storage, codes[place]._use_count(), sys.getrefcount(codes[place])  # type: ignore[attr-defined]


@functools.cache
def _unheld() -> tuple[int, int, int]:
    """`_references` of what nothing refers to but its buffer, a list and a gathered weight."""
    buffer = torch.empty(4, dtype=torch.uint8)
    codes = [buffer.view(2, 2).view(torch.float8_e4m3fn)]
    weight = Float8Tensor.from_operands(Operand(codes[0], torch.ones(())), None, torch.bfloat16)
    counts = _references(codes, 0)
    del buffer, weight
    return counts

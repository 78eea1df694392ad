"""What a linear asks of those around it: kept scales, ranks that share its matrices, and what a checkpoint keeps.

A linear knows the first two by their interfaces only: scale_state.py and distributed/linear_sharding.py implement them.

[Note: an input that is kept anyway] A checkpoint keeps the inputs of its module until the backward is through with it.
A linear that reads such an input need not keep float8 codes of it beside it: it saves the input, which takes no memory,
and its tensorwise scale, and casts it in the backward, to the same bits. So for the forward and for each recomputation
the checkpoint says which tensors it keeps (activation_checkpointing.py). Compiled code decides by itself what is kept.
What a checkpoint inside computes again, it computes on its own, where nobody says so; to it, nothing is kept anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from quaver.casts import MatrixCasts, Operand
from quaver.config import Float8LinearConfig
from quaver.saved_hooks import top_saved_tensors_hooks
from quaver.scaling import PersistentScale, PersistentScales


class LinearScaling(Protocol):
    """What a linear knows of the kept scales of its operands; scale_state.py implements it."""

    def scales(self, *, recording: bool, device: torch.device) -> PersistentScales:
        """The kept scales for a forward that begins now on `device`, and its backward."""

    def belongs_to(self, linear: nn.Module) -> None:
        """Called for a linear that was made by copying or unpickling another."""

    def follow(self, device: torch.device) -> None:
        """Called after the linear's parameters went to `device`."""

    def host_decides(self) -> None:
        """Called once where ranks must decide together, on the host, whether a scale is known."""


class LinearSharding(Protocol):
    """How a linear's matrices are spread over ranks: its casts, and what it exchanges with the other ranks.

    distributed/linear_sharding.py implements it; a linear on one rank has none.
    """

    mesh: Any
    """The DeviceMesh of tensor parallelism, one axis."""
    group: Any
    """Its process group."""
    weight_dim: int
    """The dim of the weight that is sharded."""
    weight_length: int
    """The length of this rank's part along it."""

    def weight_casts(
        self, config: Float8LinearConfig, hp_dtype: torch.dtype, kept: PersistentScale | None
    ) -> MatrixCasts:
        """The casts of this rank's part of the weight."""

    def input_casts(
        self, input: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype, kept: PersistentScale | None
    ) -> MatrixCasts:
        """The casts of this rank's part of the input."""

    def local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """This rank's part of weight and bias, differentiably, and the bias that is added to the reduced output."""

    def grad_output_operands(
        self,
        grad_output: Tensor,
        config: Float8LinearConfig,
        hp_dtype: torch.dtype,
        kept: PersistentScale | None,
        needs: tuple[bool, bool],
    ) -> tuple[Operand | None, Operand | None]:
        """What `grad_input` and `grad_weight` read of grad_output, each where it is needed."""

    def reduce_output(self, output: Tensor) -> Tensor:
        """The result from every rank's `output` [..., tokens, N]."""


class _Kept(threading.local):
    storages: frozenset[int] = frozenset()
    hooks: Any = None
    """What takes what is saved in the checkpoint that keeps them."""


_kept = _Kept()


@contextmanager
def kept_by_checkpoint(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Say, while a checkpointed module runs, that its checkpoint keeps `tensors`; the caller holds them meanwhile."""
    before = _kept.storages, _kept.hooks
    keeps = torch.is_grad_enabled()
    storages = {_storage(tensor) for tensor in tensors if keeps and not is_traceable_wrapper_subclass(tensor)}
    _kept.storages, _kept.hooks = before[0].union(storages), top_saved_tensors_hooks(True)
    try:
        yield
    finally:
        _kept.storages, _kept.hooks = before


def is_kept_by_checkpoint(tensor: Tensor) -> bool:
    """Whether a checkpoint around what runs now keeps `tensor`, a plain one, or what it is a view of."""
    if not _kept.storages or _storage(tensor) not in _kept.storages:
        return False
    hooks = top_saved_tensors_hooks(True)
    return (hooks and hooks[0]) is (_kept.hooks and _kept.hooks[0])


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata

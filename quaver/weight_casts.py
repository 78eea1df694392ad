"""The casts of a linear's weight for its two matmuls: made now, made before for a scope, or taken from a gather."""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor

from quaver.casts import MatrixCasts, Operand
from quaver.config import Float8LinearConfig
from quaver.forward_reads import ForwardRead
from quaver.linear_surroundings import LinearSharding
from quaver.saved_hooks import values_are_read
from quaver.scaling import PersistentScale
from quaver.tensor import Float8Tensor, NeverRead


class WeightCasts(NamedTuple):
    """One weight, cast before the linear runs: as `output` and as `grad_input` read it."""

    for_output: Operand
    for_grad_input: Operand
    read: ForwardRead | None = None
    """What the linear's graph holds, and tells when its backward begins (forward_reads.py)."""


def cast_weight(
    weight: Tensor,
    config: Float8LinearConfig,
    hp_dtype: torch.dtype,
    kept: PersistentScale | None = None,
    sharding: LinearSharding | None = None,
) -> WeightCasts:
    """Cast `weight` [N, K], or the part of it that `sharding` tells of, for both of its matmuls."""
    casts = weight_casts_of(config, hp_dtype, kept, sharding)
    made = casts.both(weight, config.casts.weight, config.casts.weight_for_grad_input)
    return WeightCasts(cast(Operand, made.last), cast(Operand, made.first))


def weight_casts_of(
    config: Float8LinearConfig, hp_dtype: torch.dtype, kept: PersistentScale | None, sharding: LinearSharding | None
) -> MatrixCasts:
    """What makes the casts of a weight, or of the part of it that `sharding` tells of."""
    if sharding is None:
        return MatrixCasts(config, hp_dtype, kept)
    return sharding.weight_casts(config, hp_dtype, kept)


def casts_of_gathered(weight: Float8Tensor) -> WeightCasts:
    """The casts of a weight that was cast where it was gathered.

    That for grad_input may be gathered later, for the backward (distributed/gather_passes.py); that for the output need
    not be gathered for a recomputation that finds the output kept.

    Raises:
        RuntimeError: the cast for the output was not gathered, or that for grad_input was not and would be read now.
    """
    casts = WeightCasts(weight.operand(1), weight.operand(0))
    if torch.compiler.is_compiling():
        return casts
    reads = weight.forward_reads
    if reads is not None and not _has_memory(casts.for_output) and reads.are_looked_up:
        never_read = NeverRead.in_place_of(casts.for_output.data)
        casts = casts._replace(for_output=casts.for_output._replace(data=never_read))
    _check_gathered(weight, casts)
    return casts if reads is None else casts._replace(read=reads.begin())


def _check_gathered(weight: Float8Tensor, casts: WeightCasts) -> None:
    if not _has_memory(casts.for_output):
        raise RuntimeError(
            "this weight was gathered for a backward without recomputation, or has been through its recomputations, "
            "and is read by a forward: where some forwards of a module run in a checkpoint and some do not, or a "
            "backward runs forwards of its own, give fully_shard reshard_after_forward=False"
        )
    weight.is_saved_by_value = values_are_read()
    if weight.is_saved_by_value and torch.is_grad_enabled() and not _has_memory(casts.for_grad_input):
        raise RuntimeError(
            "hooks for saved tensors would read a weight that is gathered later, for the backward: enter them from the "
            "first step on, or outside of the module that was given to fully_shard"
        )


def _has_memory(operand: Operand) -> bool:
    codes = operand.data
    return not codes.numel() or isinstance(codes, NeverRead) or codes.untyped_storage().size() > 0


class ScopedWeight:
    """A weight's casts while a `cast_weights_once` is open, and what must not change meanwhile."""

    def __init__(self, weight: Tensor, config: Float8LinearConfig, kept: PersistentScale | None) -> None:
        self.casts = cast_weight(weight, config, weight.dtype, kept)
        self._weight = weight
        self._version = weight._version

    def check(self, weight: Tensor) -> None:
        """Raise RuntimeError if `weight` is not the tensor that was cast, or has been written to since."""
        if weight is not self._weight or weight._version != self._version:
            what = "replaced" if weight is not self._weight else "changed"
            raise RuntimeError(
                f"a weight of shape {list(weight.shape)} was {what} inside cast_weights_once; "
                "leave the scope before you change weights"
            )

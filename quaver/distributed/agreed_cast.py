"""Casts of a rank's part of a tensor with a kept scale: the same scale on every rank, whether it is known or not.

A known scale is equal on every rank since the last sync, so nothing is exchanged. Until then the ranks take the scale
of the whole tensor, as dynamic scaling does, which is an exchange. All must join it: they decide by `is_initialized`,
which is equal too, and is read when the cast runs, not when it is traced. So to a compiler this is one operation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from quaver import scaling
from quaver.distributed.collectives import max_over_ranks
from quaver.kernels.cast import (
    cast_with_persistent_scale,
    cast_with_scale,
    fake_cast_with_persistent_scale,
    record,
    record_amax,
)
from quaver.scaling import PLAIN_TYPES, PersistentScale


def cast_with_agreed_scale(
    hp: Tensor, kept: PersistentScale, float8_dtype: torch.dtype, power_of_2: bool, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Cast this rank's part [rows, columns] of a matrix: float8, quant_scale (), dequant_scale (). A collective.

    What this rank's part shows is recorded; the sync takes the maximum over ranks.
    """
    # Functions that Dynamo does not look into (InputGather) are traced with tensors that have no value to decide by.
    if torch.compiler.is_dynamo_compiling() or type(kept.is_initialized) not in PLAIN_TYPES:
        codes, quant, dequant, seen = torch.ops.quaver.cast_with_agreed_scale(
            hp, kept.quant_scale, kept.is_initialized, float8_dtype, power_of_2, group.group_name
        )
        record(kept, seen)
        return codes, quant, dequant
    if kept.is_initialized:
        return cast_with_persistent_scale(hp, kept, float8_dtype, power_of_2)
    own = scaling.amax(hp).float()
    quant = scaling.amax_to_quant_scale(max_over_ranks(own, group), float8_dtype, power_of_2=power_of_2)
    record_amax(kept, own)
    return cast_with_scale(hp, quant, float8_dtype), quant, scaling.to_dequant_scale(quant)


def _agree_and_see(
    hp: Tensor, quant_scale: Tensor, known: Tensor, float8_dtype: torch.dtype, power_of_2: bool, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seen = hp.new_zeros(2, dtype=torch.float32)
    kept = PersistentScale(quant_scale, seen, known)
    # Functional collectives take the name of a group, too.
    group: ProcessGroup = group_name  # type: ignore[assignment]
    return *cast_with_agreed_scale(hp.contiguous(), kept, float8_dtype, power_of_2, group), seen


_library = torch.library.Library("quaver", "FRAGMENT")
_library.define(
    "cast_with_agreed_scale(Tensor hp, Tensor quant_scale, Tensor known, ScalarType float8_dtype, bool power_of_2, "
    "str group_name) -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.impl("cast_with_agreed_scale", _agree_and_see, "CompositeExplicitAutograd")


@torch.library.register_fake("quaver::cast_with_agreed_scale")
def _fake_cast_with_agreed_scale(
    hp: Tensor, quant_scale: Tensor, known: Tensor, float8_dtype: torch.dtype, power_of_2: bool, group_name: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return fake_cast_with_persistent_scale(hp, quant_scale, float8_dtype, power_of_2)

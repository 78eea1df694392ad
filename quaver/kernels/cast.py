"""One cast, wherever it runs: in C on a CPU, in PyTorch elsewhere; scaling.py says what it computes.

To a compiler a CPU's cast is one operation too. Compiled C++ casts along columns slowly (docs/log.md); and an operation
of its own reads the tensor that eager code would read, so the codes in a compiled model are eager's even where the
compiler would have kept the producer's result in float32. On a GPU the compiler sees plain PyTorch, and fuses it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quaver import scaling
from quaver.kernels import cpu


def dynamic_cast(
    hp: Tensor, float8_dtype: torch.dtype, dim: int | None, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`quaver.scaling.dynamic_cast` of a matrix [rows, columns]: float8, quant_scale, dequant_scale."""
    if torch.compiler.is_dynamo_compiling():
        if hp.is_cpu:
            return torch.ops.quaver.dynamic_cast(hp, float8_dtype, dim, power_of_2)
    elif cpu.takes(hp, float8_dtype):
        return cpu.dynamic_cast(hp, float8_dtype, dim, power_of_2=power_of_2)
    return scaling.dynamic_cast(hp, float8_dtype, dim, power_of_2=power_of_2)


def cast_with_scale(hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype) -> Tensor:
    """`quaver.scaling.cast_to_float8` of a matrix [rows, columns]; scale (), [rows, 1] or [1, columns]."""
    if torch.compiler.is_dynamo_compiling():
        if hp.is_cpu:
            return torch.ops.quaver.cast_with_scale(hp, quant_scale, float8_dtype)
    elif cpu.takes(hp, float8_dtype):
        return cpu.cast_with_scale(hp, quant_scale, float8_dtype)
    return scaling.cast_to_float8(hp, quant_scale, float8_dtype)


_library = torch.library.Library("quaver", "FRAGMENT")
_library.define(
    "dynamic_cast(Tensor hp, ScalarType float8_dtype, int? dim, bool power_of_2) -> (Tensor, Tensor, Tensor)"
)
_library.define("cast_with_scale(Tensor hp, Tensor quant_scale, ScalarType float8_dtype) -> Tensor")
# An operation's results have the strides that its fake promises: those of a contiguous tensor.
_library.impl(
    "dynamic_cast",
    lambda hp, float8_dtype, dim, power_of_2: dynamic_cast(hp.contiguous(), float8_dtype, dim, power_of_2),
    "CPU",
)
_library.impl(
    "cast_with_scale",
    lambda hp, quant_scale, float8_dtype: cast_with_scale(hp.contiguous(), quant_scale.contiguous(), float8_dtype),
    "CPU",
)


@torch.library.register_fake("quaver::dynamic_cast")
def _fake_dynamic_cast(
    hp: Tensor, float8_dtype: torch.dtype, dim: int | None, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    shape = () if dim is None else [1 if i == dim else n for i, n in enumerate(hp.shape)]
    quant_scale = hp.new_empty(shape, dtype=torch.float32)
    return hp.new_empty(hp.shape, dtype=float8_dtype), quant_scale, torch.empty_like(quant_scale)


@torch.library.register_fake("quaver::cast_with_scale")
def _fake_cast_with_scale(hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype) -> Tensor:
    return hp.new_empty(hp.shape, dtype=float8_dtype)

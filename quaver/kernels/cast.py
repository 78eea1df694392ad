"""One cast, wherever it runs: in C on a CPU, in PyTorch elsewhere; scaling.py says what it computes.

With a kept scale it runs in Triton on a GPU (triton_cast.py), whatever the mode: only a kernel can find out on the
device that it has to read a tensor twice.

To a compiler a CPU's cast is one operation too. Compiled C++ casts along columns slowly (docs/log.md); and an operation
of its own reads the tensor that eager code would read, so the codes in a compiled model are eager's even where the
compiler would have kept the producer's result in float32. On a GPU the compiler sees plain PyTorch, and fuses it.

Where a fake tensor stands for a real one (quaver/memory/faking/fakes.py) its cast is that operation, too: the C code
allocates its results and nothing else.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from quaver import scaling
from quaver.kernels import cpu
from quaver.kernels.layout_ops import runs_on_triton, under_dispatch_mode
from quaver.phases import phase
from quaver.scaling import PersistentScale

_amax = phase("quaver::amax")(scaling.amax)


@phase("quaver::amax")
def shared_amax(hp: Tensor, dim: int | None) -> Tensor:
    """`quaver.scaling.amax` of a matrix in float32, in one read and without a temporary where Triton runs.

    For amaxes that ranks reduce before they cast. A policy that keeps amaxes is shown PyTorch's.
    """
    if under_dispatch_mode() or not runs_on_triton(torch.float8_e4m3fn, hp):
        return scaling.amax(hp, dim).float()
    if dim is None:
        from quaver.kernels import triton_cast

        return triton_cast.amax_unless_known(hp, None)[0]
    from quaver.kernels import triton_reduce

    amaxes = triton_reduce.axis_amaxes(hp, rows=dim == 1, columns=dim == 0)
    return cast(Tensor, amaxes[1 - dim])


@phase("quaver::cast")
def dynamic_cast(
    hp: Tensor, float8_dtype: torch.dtype, dim: int | None, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`quaver.scaling.dynamic_cast` of a matrix [rows, columns]: float8, quant_scale, dequant_scale."""
    if torch.compiler.is_dynamo_compiling():
        if hp.is_cpu:
            return torch.ops.quaver.dynamic_cast(hp, float8_dtype, dim, power_of_2)
    elif cpu.takes(hp, float8_dtype):
        return cpu.dynamic_cast(hp, float8_dtype, dim, power_of_2=power_of_2)
    elif cpu.would_take(hp, float8_dtype):
        return torch.ops.quaver.dynamic_cast(hp, float8_dtype, dim, power_of_2)
    return _cast_in_pytorch(hp, float8_dtype, dim, power_of_2)


def _cast_in_pytorch(
    hp: Tensor, float8_dtype: torch.dtype, dim: int | None, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    quant_scale = scaling.amax_to_quant_scale(_amax(hp, dim), float8_dtype, power_of_2=power_of_2)
    return scaling.cast_to_float8(hp, quant_scale, float8_dtype), quant_scale, scaling.to_dequant_scale(quant_scale)


Axes = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""Codes [R, C], quant_scale and dequant_scale [R, 1]; the same with scales [1, C]."""


@phase("quaver::cast")
def dynamic_cast_axes(hp: Tensor, float8_dtype: torch.dtype, power_of_2: bool) -> Axes:
    """`dynamic_cast` of a matrix [R, C] with dim 1 and with dim 0, on a CPU from two reads instead of three."""
    if torch.compiler.is_dynamo_compiling():
        if hp.is_cpu:
            return torch.ops.quaver.dynamic_cast_axes(hp, float8_dtype, power_of_2)
    elif cpu.takes(hp, float8_dtype):
        return cpu.dynamic_cast_axes(hp, float8_dtype, power_of_2=power_of_2)
    elif cpu.would_take(hp, float8_dtype):
        return torch.ops.quaver.dynamic_cast_axes(hp, float8_dtype, power_of_2)
    by_rows, by_columns = (_cast_in_pytorch(hp, float8_dtype, dim, power_of_2) for dim in (1, 0))
    return (*by_rows, *by_columns)


@phase("quaver::cast")
def cast_with_scale(hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype) -> Tensor:
    """`quaver.scaling.cast_to_float8` of a matrix [rows, columns]; scale (), [rows, 1] or [1, columns]."""
    if torch.compiler.is_dynamo_compiling():
        if hp.is_cpu:
            return torch.ops.quaver.cast_with_scale(hp, quant_scale, float8_dtype)
    elif cpu.takes(hp, float8_dtype):
        return cpu.cast_with_scale(hp, quant_scale, float8_dtype)
    elif cpu.would_take(hp, float8_dtype):
        return torch.ops.quaver.cast_with_scale(hp, quant_scale, float8_dtype)
    return scaling.cast_to_float8(hp, quant_scale, float8_dtype)


_library = torch.library.Library("quaver", "FRAGMENT")
_library.define(
    "dynamic_cast(Tensor hp, ScalarType float8_dtype, int? dim, bool power_of_2) -> (Tensor, Tensor, Tensor)"
)
_library.define(
    "dynamic_cast_axes(Tensor hp, ScalarType float8_dtype, bool power_of_2)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_library.define("cast_with_scale(Tensor hp, Tensor quant_scale, ScalarType float8_dtype) -> Tensor")
# An operation's results have the strides that its fake promises: those of a contiguous tensor.
_library.impl(
    "dynamic_cast",
    lambda hp, float8_dtype, dim, power_of_2: dynamic_cast(hp.contiguous(), float8_dtype, dim, power_of_2),
    "CPU",
)
_library.impl(
    "dynamic_cast_axes",
    lambda hp, float8_dtype, power_of_2: dynamic_cast_axes(hp.contiguous(), float8_dtype, power_of_2),
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


@torch.library.register_fake("quaver::dynamic_cast_axes")
def _fake_dynamic_cast_axes(hp: Tensor, float8_dtype: torch.dtype, power_of_2: bool) -> Axes:
    by_rows, by_columns = (_fake_dynamic_cast(hp, float8_dtype, dim, power_of_2) for dim in (1, 0))
    return (*by_rows, *by_columns)


@torch.library.register_fake("quaver::cast_with_scale")
def _fake_cast_with_scale(hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype) -> Tensor:
    return hp.new_empty(hp.shape, dtype=float8_dtype)


@phase("quaver::cast")
def cast_with_persistent_scale(
    hp: Tensor, kept: PersistentScale, float8_dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """`quaver.scaling.cast_with_persistent_scale` of a matrix [rows, columns]: float8, quant_scale, dequant_scale.

    Records in `kept` what the cast saw, by a maximum, so that the same cast again changes nothing.
    """
    if (
        torch.compiler.is_dynamo_compiling()
        or cpu.would_take(hp, float8_dtype)
        or (hp.is_cuda and under_dispatch_mode())
    ):
        codes, quant, dequant, seen = torch.ops.quaver.cast_with_persistent_scale(
            hp, kept.quant_scale, float8_dtype, power_of_2
        )
    elif kept.amax_buffer is not None and cpu.takes(hp, float8_dtype):
        return cpu.cast_and_observe(hp, kept.quant_scale, float8_dtype, power_of_2, kept.amax_buffer)
    else:
        codes, quant, dequant, seen = _cast_and_see(hp, kept.quant_scale, float8_dtype, power_of_2)
    record(kept, seen)
    return codes, quant, dequant


def record(kept: PersistentScale, seen: Tensor) -> None:
    """Record what a cast saw (float32 [2]), by a maximum."""
    if kept.amax_buffer is None:
        return
    if torch.compiler.is_compiling():
        kept.amax_buffer.copy_(torch.maximum(kept.amax_buffer, seen))
    else:
        torch.maximum(kept.amax_buffer, seen, out=kept.amax_buffer)


def record_amax(kept: PersistentScale, amax: Tensor) -> None:
    """Record the amax (float32 ()) of a tensor that was cast with a dynamic scale, so that nothing saturated."""
    record(kept, torch.stack([amax, torch.zeros_like(amax)]).to(kept.quant_scale.device))


def _cast_and_see(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if cpu.takes(hp, float8_dtype):
        seen = hp.new_zeros(2, dtype=torch.float32)
        return (*cpu.cast_and_observe(hp, quant_scale, float8_dtype, power_of_2, seen), seen)
    if hp.is_cuda:
        from quaver.kernels import triton_cast  # imports triton, which a CPU does not need

        if triton_cast.takes(hp, float8_dtype):
            return triton_cast.cast_with_persistent_scale(hp, quant_scale, float8_dtype, power_of_2=power_of_2)
    return scaling.cast_with_persistent_scale(hp, quant_scale, float8_dtype, power_of_2=power_of_2)


# To a compiler this is one operation on every device: it reads the tensor a second time only where its scale is not
# known, which no traced code can decide without asking the device.
_library.define(
    "cast_with_persistent_scale(Tensor hp, Tensor quant_scale, ScalarType float8_dtype, bool power_of_2)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
_library.impl(
    "cast_with_persistent_scale",
    lambda hp, quant_scale, float8_dtype, power_of_2: _cast_and_see(
        hp.contiguous(), quant_scale, float8_dtype, power_of_2
    ),
    "CompositeExplicitAutograd",
)


@torch.library.register_fake("quaver::cast_with_persistent_scale")
def fake_cast_with_persistent_scale(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, power_of_2: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes in the shape of `hp`, two float32 scales (), what was observed, float32 [2]: shapes and dtypes alone."""
    scale = hp.new_empty((), dtype=torch.float32)
    seen = hp.new_empty(2, dtype=torch.float32)
    return hp.new_empty(hp.shape, dtype=float8_dtype), scale, torch.empty_like(scale), seen

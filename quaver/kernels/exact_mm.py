"""A float8 matmul that is exact up to float32 accumulation, on any device.

    exact_float8_mm(a, b, a_dequant_scale, b_dequant_scale, bias, out_dtype)
        = RN((a * a_dequant_scale) @ (b * b_dequant_scale)) + bias       a [M, K], b [K, N] -> [M, N] in out_dtype

Every float8 value is a bfloat16 value, and the product of two bfloat16 numbers is exact in float32. So the operands are
widened and multiplied on the machine's bfloat16 units, which lose nothing, and sums are kept in float32. Where quaver
has a matmul of its own for this CPU (cpu_mm.py), that does it all; what follows is for every other device, where a
library multiplies.

It is one operation to a compiler, as the hardware's float8 matmul is. The compiler then keeps the float8 operand for
backward, as on a GPU; were the widening visible, it would keep the widened one, which is twice the size. Two steps
could not be written for a tracer in any case: the scale that reaches the CPU library as a number, and the process-wide
setting under which float32 operands take the bfloat16 units.

[Note: panels] Native float8 matmuls widen nothing, so what is widened here is memory that only this stand-in takes. On
a CPU, therefore, only the smaller operand is widened as a whole; the larger one is in panels, about a thousand rows (or
columns of b) at a time, each multiplied at once into its part of the result. All panels take the same room, which is
allocated with the smaller one's: memory that is new to a process costs more than widening. No sum is split, so every
element of the result is the same sum as in one matmul; and where sums are float32, no more of them than a panel's are
alive at a time.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from quaver.kernels import cpu, cpu_mm
from quaver.kernels.widen import widen

UNITS_PAY_FROM = 8192
"""Elements of the larger operand from which a CPU's bfloat16 units beat float32: they take microseconds to start."""


PANEL_LENGTH = 1024
"""Rows or columns of the larger operand that are widened at a time on a CPU, at least half as many."""

PANEL_ELEMENTS = 1 << 19
"""And elements, likewise: with fewer, starting a matmul weighs more than its memory."""


@functools.cache
def has_bfloat16_units(device_type: str) -> bool:
    """Whether this kind of device multiplies bfloat16 numbers and accumulates in float32 in hardware."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device_type != "cpu":
        return False
    if platform.machine() in ("x86_64", "AMD64"):
        # mkldnn says yes to AVX-512 alone, where it does so in three times the time of float32
        return torch.cpu._is_avx512_bf16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def exact_float8_mm(
    a: Tensor,
    b: Tensor,
    a_dequant_scale: Tensor,
    b_dequant_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    scales_are_powers_of_2: bool,
) -> Tensor:
    """See the top of the file, and `quaver.gemm.float8_mm` for the arguments. Runs on plain tensors, never traced."""
    if bias is None and a.is_cpu and cpu_mm.takes_small_mm(a, b, out_dtype):
        return cpu_mm.small_mm(a, b, a_dequant_scale, b_dequant_scale, out_dtype)
    if cpu_mm.takes_mm(a, b):
        return cpu_mm.mm(a, b, a_dequant_scale, b_dequant_scale, bias, out_dtype)
    # bfloat16 operands leave room for one scale of the whole result, or for scales that change no mantissa.
    tensorwise = a_dequant_scale.dim() == 0 and b_dequant_scale.dim() == 0
    bfloat16 = (tensorwise or scales_are_powers_of_2) and _bfloat16_pays(a, b, out_dtype)
    wide = torch.bfloat16 if bfloat16 else torch.float32
    multiply = _bfloat16_mm if bfloat16 else _float32_mm
    left, right = _Codes(a, a_dequant_scale, 0), _Codes(b, b_dequant_scale, 1)
    by_rows = a.numel() >= b.numel()
    larger, smaller = (left, right) if by_rows else (right, left)
    panels = _panels(larger)
    out = a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)
    whole_room, panel_room = _rooms(smaller, larger, panels[-1][1], wide)
    whole = smaller.widen(wide, scales_are_powers_of_2, whole_room)
    for start, length in panels:
        part, into, part_of_bias = larger, out, bias
        if len(panels) > 1:
            part, into = larger.part(start, length), out.narrow(larger.dim, start, length)
            part_of_bias = bias if by_rows or bias is None else bias.narrow(0, start, length)
        wide_part = part.widen(wide, scales_are_powers_of_2, panel_room)
        multiply(*((wide_part, whole) if by_rows else (whole, wide_part)), part_of_bias, into)
    return out


def _bfloat16_pays(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether bfloat16 operands give this result, and sooner than float32 ones."""
    if not has_bfloat16_units(a.device.type):
        return False
    return a.is_cuda or (out_dtype is torch.bfloat16 and max(a.numel(), b.numel()) >= UNITS_PAY_FROM)


class _Wide(NamedTuple):
    """An operand in bfloat16 or float32, and the scale that is left for the result."""

    data: Tensor
    scale_left: Tensor | None


class _Codes(NamedTuple):
    """A float8 operand, its scale, and the dim that is not contracted: 0 of a, 1 of b."""

    data: Tensor
    dequant_scale: Tensor
    dim: int

    @property
    def rows(self) -> Tensor:
        """The codes, or their transpose where that is what has contiguous rows."""
        return self.data.t() if self.data.stride(1) != 1 and self.data.stride(0) == 1 else self.data

    def part(self, start: int, length: int) -> _Codes:
        """`length` rows or columns."""
        scale = self.dequant_scale
        if scale.dim():
            scale = scale.narrow(self.dim, start, length)
        return _Codes(self.data.narrow(self.dim, start, length), scale, self.dim)

    def widen(self, dtype: torch.dtype, scales_are_powers_of_2: bool, room: Tensor | None = None) -> _Wide:
        """Times the row scales where that is exact."""
        if scales_are_powers_of_2 and self.dequant_scale.dim():
            return _Wide(widen(self.data, dtype, self.dequant_scale, room), None)
        return _Wide(widen(self.data, dtype, None, room), self.dequant_scale)


def _panels(codes: _Codes) -> list[tuple[int, int]]:
    """Start and length of the parts to widen at a time ([Note: panels]): nearly equal ones, the last of the longest."""
    length = codes.data.shape[codes.dim]
    longest = max(PANEL_LENGTH, PANEL_ELEMENTS * length // codes.data.numel())
    if length <= longest or not codes.data.is_cpu:
        return [(0, length)]
    count = -(-length // longest)
    ends = [length * i // count for i in range(count + 1)]
    return [(start, stop - start) for start, stop in zip(ends, ends[1:], strict=False)]


def _rooms(whole: _Codes, larger: _Codes, panel: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """Memory for `whole` and for `panel` rows or columns of `larger`; None where their widening allocates its own."""
    if not (cpu.takes_codes(whole.rows, dtype) and cpu.takes_codes(larger.rows, dtype)):
        return None, None
    of_whole, of_panel = whole.data.numel(), panel * larger.data.shape[1 - larger.dim]
    both = whole.data.new_empty(of_whole + of_panel, dtype=dtype)
    return both[:of_whole], both[of_whole:]


def _product(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    if first is None or second is None:
        return second if first is None else first
    return first * second


# The matmuls below write into a tensor, because autocast would give a plain torch.mm other operands.


def _bfloat16_mm(a: _Wide, b: _Wide, bias: Tensor | None, out: Tensor) -> Tensor:
    """out = RN(alpha * (a @ b)) + bias, with one rounding of the float32 sum; alpha is what is left of the scales."""
    alpha = _product(a.scale_left, b.scale_left)
    if out.is_cpu:  # here out is bfloat16, and the library scales its float32 sums by a number
        torch.addmm(out, a.data, b.data, beta=0, alpha=1 if alpha is None else alpha.item(), out=out)
    else:
        # Asking for float32 also keeps cuBLAS from adding partial sums in bfloat16.
        sums = torch.empty_like(out, dtype=torch.float32)
        torch.mm(a.data, b.data, out_dtype=torch.float32, out=sums)
        out.copy_(sums if alpha is None else sums.mul_(alpha))
    return out if bias is None else out.add_(bias)


def _float32_mm(a: _Wide, b: _Wide, bias: Tensor | None, out: Tensor) -> Tensor:
    """out = RN(scales * (a @ b) + bias), in float32 up to the end."""
    sums = out if out.dtype is torch.float32 and out.is_contiguous() else torch.empty_like(out, dtype=torch.float32)
    _mm_of_bfloat16_numbers(a.data, b.data, sums)
    for scale in (a.scale_left, b.scale_left):
        if scale is not None:
            sums.mul_(scale)
    if bias is not None:
        sums.add_(bias)
    return out if sums is out else out.copy_(sums)


def _mm_of_bfloat16_numbers(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out = a @ b in float32, on bfloat16 units where a CPU has them."""
    if a.is_cpu and max(a.numel(), b.numel()) >= UNITS_PAY_FROM and has_bfloat16_units("cpu"):
        with _float32_matmuls_on_bfloat16_units():
            torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out=out)


@contextmanager
def _float32_matmuls_on_bfloat16_units() -> Iterator[None]:
    setting = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = setting.fp32_precision
    setting.fp32_precision = "bf16"
    try:
        yield
    finally:
        setting.fp32_precision = before


_library = torch.library.Library("quaver", "FRAGMENT")
_library.define(
    "exact_float8_mm(Tensor a, Tensor b, Tensor a_dequant_scale, Tensor b_dequant_scale, Tensor? bias, "
    "ScalarType out_dtype, bool scales_are_powers_of_2) -> Tensor"
)
_library.impl("exact_float8_mm", exact_float8_mm, "CompositeExplicitAutograd")


@torch.library.register_fake("quaver::exact_float8_mm")
def _fake_exact_float8_mm(
    a: Tensor,
    b: Tensor,
    a_dequant_scale: Tensor,
    b_dequant_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    scales_are_powers_of_2: bool,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)

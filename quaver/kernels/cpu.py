"""Calls the C extension for casts and a matmul of eager code on a CPU. It is missing if the install had no compiler.

Eager PyTorch takes about sixteen calls and ten passes over memory for a cast that needs two passes, so a C extension
does it (quaver/csrc/cpu.c). Its casts are bit-identical to scaling.py. The extension also has a float8 matmul for CPUs
with bfloat16 dot products in AVX-512 (quaver/csrc/matmul.h). QUAVER_PURE_PYTORCH=1 in the environment disables both.

Casts. Every matrix is [rows, columns] and contiguous. hp is float32, bfloat16 or float16; float8 is e4m3fn or e5m2.
`dim` is the dim that an amax reduces: None for one scale (), 1 for one per row [rows, 1], 0 for one per column
[1, columns]. A `ScaleLayout` describes blocks. Scales are float32 and contiguous. Results have no autograd history.
Large matrices are split between torch.get_num_threads() threads, in PyTorch's OpenMP pool on Linux.

[Note: addresses] C gets addresses, so a function here returns None for a matrix that it does not support: other dtypes
and strides, and tensors that may have no memory (`is_plain`). It also returns None while a mode may replace PyTorch's
functions (`runs_directly`). Then call the registered operation, whose implementation runs without modes. Scales of
other shapes and dtypes raise ValueError.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, empty_like

from quaver.recipes.scale_layout import TENSORWISE, ScaleLayout
from quaver.recipes.scaling import PLAIN_TYPES
from quaver.runtime.slow_paths import report_slow_path
from quaver.torch_private.dispatch import (
    DispatchKey,
    DispatchKeySet,
    count_dispatch_modes,
    count_function_modes,
    dispatch_keys,
    innermost_transform,
    without_dispatch_modes,
)
from quaver.torch_private.tracing import is_jit_tracing

PURE_PYTORCH = os.environ.get("QUAVER_PURE_PYTORCH", "") not in ("", "0")


def _load_extension() -> tuple[Any, str | None]:
    if PURE_PYTORCH:
        return None, "QUAVER_PURE_PYTORCH is set"
    try:
        return importlib.import_module("quaver._cpu"), None
    except ImportError as error:
        return None, f"quaver._cpu was not built at install, or does not load: {error}"


extension, UNAVAILABLE_REASON = _load_extension()
"""UNAVAILABLE_REASON: the reason why the C extension is unavailable, or None."""
HAS_EXTENSION = UNAVAILABLE_REASON is None
HAS_MM = HAS_EXTENSION and bool(extension.has_mm())
"""Whether this CPU has bfloat16 dot products in AVX-512 and no AMX; with AMX, oneDNN is faster than `mm`."""

# The numbers that cpu.c uses.
HP_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FLOAT8_KIND = {torch.float8_e4m3fn: 0, torch.float8_e5m2: 1}
_TENSORWISE, _BLOCKS = -1, 2

_WIDE_DTYPES = (torch.bfloat16, torch.float32)
_CONVERSIONS = {(hp, float8) for hp in HP_KIND for float8 in FLOAT8_KIND} | {
    (float8, wide) for float8 in FLOAT8_KIND for wide in _WIDE_DTYPES
}
# Below, starting threads takes longer than they save.
MIN_THREADED_ELEMENTS = 1 << 17  # elements of a cast
MIN_THREADED_MM_PRODUCTS = 1 << 21  # multiplications
_MAX_THREADS = 64  # the limit in cpu.c

with without_dispatch_modes():
    _SCALAR = torch.empty((), dtype=torch.float32, device="cpu")  # new_empty takes half the time of torch.empty
# The dispatch keys of an inference tensor, and of any other ordinary tensor.
_INFERENCE_KEYS = DispatchKeySet(DispatchKey.CPU) | DispatchKeySet(DispatchKey.AutocastCPU)
_AUTOGRAD_KEYS = DispatchKeySet(DispatchKey.ADInplaceOrView) | DispatchKeySet(DispatchKey.AutogradCPU)
_PLAIN_KEYS = {_INFERENCE_KEYS.raw_repr(), (_INFERENCE_KEYS | _AUTOGRAD_KEYS).raw_repr()}


def runs_directly() -> bool:
    """Return whether no dispatch or function mode, functorch transform or tracer is active."""
    return (
        count_dispatch_modes() == 0
        and count_function_modes() == 0
        and innermost_transform() is None
        and not is_jit_tracing()
    )


def has_plain_keys(tensor: Tensor) -> bool:
    """Return whether `tensor` has the dispatch keys of an ordinary CPU tensor."""
    return dispatch_keys(tensor).raw_repr() in _PLAIN_KEYS


def has_memory(tensor: Tensor) -> bool:
    """Return whether the storage of a strided tensor holds all of its elements.

    FSDP2 frees gathered weights by resizing their storages to zero; then `data_ptr()` is not an address.
    """
    elements = tensor.numel()
    if elements and not tensor.is_contiguous():
        elements = 1
        for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
            elements += (n - 1) * stride
    end = (tensor.storage_offset() + elements) * tensor.itemsize
    return elements == 0 or tensor.untyped_storage().nbytes() >= end


def is_plain(tensor: Tensor) -> bool:
    """Return whether `tensor` is an ordinary strided CPU tensor with all of its memory. Call `runs_directly` first.

    The dispatch keys exclude fake, sparse, quantized, nested, meta and zero tensors, negated and conjugated views, and
    functorch wrappers.
    """
    return type(tensor) in PLAIN_TYPES and has_plain_keys(tensor) and has_memory(tensor)


def check_memory(*tensors: Tensor | None) -> None:
    """Raise RuntimeError if the storage of an ordinary CPU tensor is too small: PyTorch would read out of bounds."""
    if torch.compiler.is_dynamo_compiling():
        return
    for tensor in tensors:
        if tensor is None or type(tensor) not in PLAIN_TYPES or not has_plain_keys(tensor) or has_memory(tensor):
            continue
        raise RuntimeError(
            f"the memory of a tensor of shape {list(tensor.shape)} was freed before it was used: its storage has "
            f"{tensor.untyped_storage().nbytes()} bytes"
        )


def report_missing_extension() -> None:
    """Report once that casts on this CPU run in PyTorch, unless QUAVER_PURE_PYTORCH is set."""
    if not PURE_PYTORCH:
        report_slow_path(
            "casts without the C extension",
            f"float8 casts on the CPU run in PyTorch, up to 10 times slower: {UNAVAILABLE_REASON}",
        )


def supports(matrix: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the extension converts `matrix`, hp or float8, to `dtype`. Do not call it while compiling.

    hp must be contiguous; codes need contiguous rows only. A missing extension is reported once.
    """
    if not (runs_directly() and is_plain(matrix) and (matrix.dtype, dtype) in _CONVERSIONS):
        return False
    if not HAS_EXTENSION:
        report_missing_extension()
        return False
    if matrix.dim() != 2 or matrix.is_contiguous():
        return matrix.dim() == 2
    return dtype in _WIDE_DTYPES and matrix.stride(1) == 1 and matrix.stride(0) >= matrix.shape[1]


def _make_error(tensor: Tensor, expected: str) -> ValueError:
    return ValueError(
        f"{expected}; got {type(tensor).__name__} {tensor.dtype} of {list(tensor.shape)}, {tensor.layout}"
    )


def _call_extension(
    function: Any,
    hp_dtype: torch.dtype,
    codes: Tensor,
    *addresses: int,
    dim: int = _TENSORWISE,
    power_of_2: bool = False,
    block_size: Sequence[int] = (0, 0),
) -> None:
    rows, columns = codes.shape
    function(
        *(addresses + (0,) * (7 - len(addresses))),
        rows,
        columns,
        codes.stride(0) if columns and rows > 1 else columns,
        HP_KIND[hp_dtype],
        FLOAT8_KIND.get(codes.dtype, 0),
        dim,
        power_of_2,
        1 if rows * columns < MIN_THREADED_ELEMENTS else torch.get_num_threads(),
        *block_size,
    )


def _empty_codes(hp: Tensor, float8_dtype: torch.dtype) -> Tensor | None:
    """Allocate the codes of `hp`; None if the extension does not support it."""
    return empty_like(hp, dtype=float8_dtype) if hp.dtype in HP_KIND and supports(hp, float8_dtype) else None


def _empty_scales(*shape: int) -> tuple[Tensor, Tensor]:
    quant_scale = _SCALAR.new_empty(shape) if shape else empty_like(_SCALAR)
    return quant_scale, empty_like(quant_scale)


def _describe_granularity(scale: Tensor, layout: ScaleLayout, rows: int, columns: int) -> dict[str, Any]:
    """Return the arguments `dim` and `block_size` of `_call_extension` for a scale."""
    if is_plain(scale) and scale.dtype is torch.float32 and scale.is_contiguous():
        if scale.numel() == 1:
            return {"dim": _TENSORWISE}
        if scale.shape == (rows, 1):
            return {"dim": 1}
        if scale.shape == (1, columns):
            return {"dim": 0}
        if scale.shape == layout.get_scale_shape(rows, columns):
            return {"dim": _BLOCKS, "block_size": layout.get_block_shape((rows, columns))}
    shape = list(layout.get_scale_shape(rows, columns))
    raise _make_error(scale, f"expected a contiguous float32 scale of shape {shape} ({layout})")


def dynamic_cast(
    hp: Tensor,
    float8_dtype: torch.dtype,
    dim: int | None = None,
    *,
    power_of_2: bool = False,
    codes: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Run `recipes.scaling.dynamic_cast` on `hp` [rows, columns]: float8 [rows, columns], quant_scale, dequant_scale.

    `codes`: rows of a float8 matrix to write to, for an `hp` that `supports` accepts; None to allocate them.
    """
    if dim not in (None, 0, 1):
        raise ValueError(f"expected dim None, 0 or 1, got {dim}")
    codes = _empty_codes(hp, float8_dtype) if codes is None else codes
    if codes is None:
        return None
    quant, dequant = _empty_scales(*(() if dim is None else (hp.shape[0], 1) if dim else (1, hp.shape[1])))
    addresses = hp.data_ptr(), codes.data_ptr(), quant.data_ptr(), dequant.data_ptr()
    dim = _TENSORWISE if dim is None else dim
    _call_extension(extension.dynamic_cast, hp.dtype, codes, *addresses, dim=dim, power_of_2=power_of_2)
    return codes, quant, dequant


def dynamic_cast_both_dims(
    hp: Tensor, float8_dtype: torch.dtype, *, power_of_2: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] | None:
    """Run `dynamic_cast` with dim 1 and with dim 0, in two reads of `hp` [rows, columns] instead of three.

    Returns float8 [rows, columns], quant_scale and dequant_scale [rows, 1]; then the same with scales [1, columns].
    """
    row_codes = _empty_codes(hp, float8_dtype)
    if row_codes is None:
        return None
    column_codes = empty_like(row_codes)
    row_results = row_codes, *_empty_scales(hp.shape[0], 1)
    column_results = column_codes, *_empty_scales(1, hp.shape[1])
    addresses = [tensor.data_ptr() for tensor in (hp, *row_results, *column_results)]
    _call_extension(extension.dynamic_cast_both_dims, hp.dtype, row_codes, *addresses, power_of_2=power_of_2)
    return *row_results, *column_results


def cast_with_scale(
    hp: Tensor, factor: Tensor, float8_dtype: torch.dtype, layout: ScaleLayout = TENSORWISE, *, divides: bool = False
) -> Tensor | None:
    """Run `recipes.scaling.cast_to_float8` on `hp` [rows, columns] with the scales `factor`.

    `factor`: one number, one per row, one per column, or the shape that `layout` gives. `divides`: whether to divide by
    `factor`, a dequant_scale, instead of multiplying.
    """
    codes = _empty_codes(hp, float8_dtype)
    if codes is None:
        return None
    granularity = _describe_granularity(factor, layout, *hp.shape)
    addresses = hp.data_ptr(), codes.data_ptr(), factor.data_ptr()
    function = extension.cast_by_divisor if divides else extension.cast_with_scale
    _call_extension(function, hp.dtype, codes, *addresses, **granularity)
    return codes


def compute_block_amax(hp: Tensor, layout: ScaleLayout) -> Tensor | None:
    """Run `quaver.recipes.scaling.compute_block_amax` on `hp` [rows, columns]."""
    if hp.dtype not in HP_KIND or not supports(hp, torch.float8_e4m3fn):
        return None
    amax = hp.new_empty(layout.get_scale_shape(hp.shape[0], hp.shape[1]))
    addresses = hp.data_ptr(), 0, amax.data_ptr()
    _call_extension(extension.block_amax, hp.dtype, hp, *addresses, dim=_BLOCKS, block_size=layout.block_size)
    return amax


def cast_and_record_amax(
    hp: Tensor, quant_scale: Tensor, float8_dtype: torch.dtype, power_of_2: bool, recorded_amax: Tensor
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Run `scaling.cast_with_persistent_scale` on `hp` [rows, columns], in one pass if the scale is known.

    Args:
        quant_scale: float32 (). A scale <= 0 or NaN means unknown: hp is then scaled by its own amax.
        recorded_amax: float32 [2], contiguous; updated to the maximum of itself and hp's amax and saturated count.
    Returns:
        float8 [rows, columns], and the quant_scale and dequant_scale () that were used.
    """
    codes = _empty_codes(hp, float8_dtype)
    if codes is None:
        return None
    for tensor, elements in ((quant_scale, 1), (recorded_amax, 2)):
        if not (is_plain(tensor) and tensor.dtype is torch.float32 and tensor.is_contiguous()):
            raise _make_error(tensor, "expected contiguous float32 on the CPU")
        if tensor.numel() != elements:
            raise _make_error(tensor, f"expected {elements} elements")
    scales = _empty_scales()
    addresses = [tensor.data_ptr() for tensor in (hp, codes, *scales, quant_scale, recorded_amax)]
    _call_extension(extension.cast_and_record_amax, hp.dtype, codes, *addresses, power_of_2=power_of_2)
    return codes, *scales


def use_avx512(*, enabled: bool) -> bool:
    """Set whether `widen` may use AVX-512, which changes no result; returns the previous setting. For tests."""
    return bool(extension.use_avx512(enabled))


def count_elements_read() -> int:
    """Return the number of high-precision elements that casts have read so far, for tests and profiles."""
    return int(extension.elements_read())


def widen(
    codes: Tensor, dtype: torch.dtype, scale: Tensor | None = None, layout: ScaleLayout = TENSORWISE
) -> Tensor | None:
    """Convert float8 [rows, columns] to bfloat16 or float32, exactly, NaN and inf included, and multiply by a scale.

    `scale`: one number, one per row, one per column, or the shape that `layout` gives. For bfloat16 its values must be
    powers of two of at least 2^-110 (or 0, inf, NaN), so that products are exact. For float32 any values are allowed,
    and products are rounded once.
    """
    if dtype not in _WIDE_DTYPES or not supports(codes, dtype):
        return None
    granularity = {} if scale is None else _describe_granularity(scale, layout, *codes.shape)
    out = codes.new_empty(codes.shape, dtype=dtype)
    scale_address = 0 if scale is None else scale.data_ptr()
    _call_extension(extension.widen, dtype, codes, out.data_ptr(), codes.data_ptr(), scale_address, **granularity)
    return out


def mm(
    a: Tensor, b: Tensor, a_dequant_scale: Tensor, b_dequant_scale: Tensor, bias: Tensor | None, out_dtype: torch.dtype
) -> Tensor | None:
    """Multiply two float8 matrices and apply their scales.

        mm = RN(RN(RN(sum) * RN(a_dequant_scale * b_dequant_scale)) + bias)      a [M, K], b [K, N] -> [M, N]

    Each sum runs over ascending k in float32, rounded at each step, in slabs of 2048 whose sums are added in order. So
    an element depends on its row of a and its column of b only, not on layouts, other rows and columns, or threads. Its
    error grows with the number of slabs, not with K. Products of float8 numbers are exact. The result is rounded once
    to the output dtype, ties to even. NaN and inf follow IEEE 754.

    Args:
        a, b: float8 [M, K] and [K, N], any strides; a matrix with neither contiguous rows nor columns is copied first.
        a_dequant_scale, b_dequant_scale: float32; () or [M, 1], () or [1, N].
        bias: [N] in a high-precision dtype; or None.
        out_dtype: float32, bfloat16 or float16.
    Returns:
        [M, N]; None for other tensors and on other CPUs. See [Note: addresses].
    Raises:
        ValueError: a scale or the bias has the wrong shape or dtype.
    """
    if not (HAS_MM and runs_directly() and is_plain(a) and is_plain(b) and (bias is None or is_plain(bias))):
        return None
    if not (is_plain(a_dequant_scale) and is_plain(b_dequant_scale)):
        return None
    (m, k), n = a.shape, b.shape[1]
    if a.dtype not in FLOAT8_KIND or b.dtype not in FLOAT8_KIND or out_dtype not in HP_KIND or b.shape[0] != k:
        return None
    for scale, shape in ((a_dequant_scale, (m, 1)), (b_dequant_scale, (1, n))):
        if scale.dtype is not torch.float32 or (scale.dim() != 0 and scale.shape != shape):
            raise ValueError(f"expected a float32 scale of () or {shape}, got {scale.dtype} of {list(scale.shape)}")
    if bias is not None:
        if bias.shape != (n,):
            raise ValueError(f"expected a bias of [{n}], got {list(bias.shape)}")
        bias = bias.to(torch.float32).contiguous()
    a, b = (codes if 1 in codes.stride() else codes.clone(memory_format=torch.contiguous_format) for codes in (a, b))
    a_dequant_scale, b_dequant_scale = a_dequant_scale.contiguous(), b_dequant_scale.contiguous()
    out = a.new_empty(m, n, dtype=torch.bfloat16 if out_dtype is torch.bfloat16 else torch.float32)
    extension.mm(
        out.data_ptr(),
        *(a.data_ptr(), FLOAT8_KIND[a.dtype], *a.stride(), a_dequant_scale.data_ptr(), a_dequant_scale.dim() > 0),
        *(b.data_ptr(), FLOAT8_KIND[b.dtype], *b.stride()[::-1], b_dequant_scale.data_ptr(), b_dequant_scale.dim() > 0),
        *(m, k, n, HP_KIND[out.dtype], 0 if bias is None else bias.data_ptr()),
        1 if m * k * n < MIN_THREADED_MM_PRODUCTS else torch.get_num_threads(),
    )
    return out if out.dtype is out_dtype else out.to(out_dtype)


def observe(
    hp: Tensor, codes: Tensor | None, quant_scale: Tensor, dequant_scale: Tensor, layout: ScaleLayout
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Measure `hp` [rows, columns] and its cast, in one read; numerics/statistics.py is the oracle.

    Args:
        codes: float8 [rows, columns], or None.
        quant_scale, dequant_scale: float64, contiguous, one number for each block of `layout`.
    Returns:
        signal and noise, float64, one number for each block; float64 [7]: zeros, non-finite elements, underflow,
        saturated elements; amax, smallest nonzero magnitude and sum of fourth powers of the finite elements. None for
        tensors that the extension does not support.
    """
    if hp.dtype not in HP_KIND or not supports(hp, torch.float8_e4m3fn) or not hp.is_contiguous():
        return None
    rows, columns = hp.shape
    if codes is not None and not (is_plain(codes) and codes.dtype in FLOAT8_KIND and codes.shape == hp.shape):
        return None
    codes = codes if codes is None or codes.stride(1) == 1 else codes.contiguous()
    threads = 1 if hp.numel() < MIN_THREADED_ELEMENTS else min(torch.get_num_threads(), _MAX_THREADS)
    block_size, blocks = layout.get_block_shape(hp.shape), layout.get_scale_shape(rows, columns) or (1, 1)
    for scale in (quant_scale, dequant_scale):
        is_dense = is_plain(scale) and scale.is_contiguous()
        if not (is_dense and scale.dtype is torch.float64 and scale.numel() == blocks[0] * blocks[1]):
            raise _make_error(scale, f"expected {blocks[0] * blocks[1]} scales in contiguous float64")
    shared = threads if block_size[0] >= rows else 1
    with without_dispatch_modes():
        signal, noise = torch.zeros(2, shared, *blocks, dtype=torch.float64, device="cpu")
        counts = torch.empty(7, dtype=torch.float64, device="cpu")
    extension.observe(
        *(hp.data_ptr(), 0 if codes is None else codes.data_ptr(), quant_scale.data_ptr(), dequant_scale.data_ptr()),
        *(signal.data_ptr(), noise.data_ptr(), counts.data_ptr(), rows, columns),
        columns if codes is None or rows < 2 else codes.stride(0),
        *(HP_KIND[hp.dtype], 0 if codes is None else FLOAT8_KIND[codes.dtype], *block_size, threads),
    )
    return signal.sum(0), noise.sum(0), counts

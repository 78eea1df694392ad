"""Multiplies float8 matrices: chooses a backend, and calls it.

    float8_mm(a, b, a_dequant_scale, b_dequant_scale) = (a * a_dequant_scale) @ (b * b_dequant_scale)
    a [M, K] and b [K, N], each with a scale of any granularity; result [M, N]

The granularity of the scales decides which of two backends computes it:

    scales                                                   on hardware that multiplies float8    elsewhere
    one per tensor; one per row of a and column of b         NATIVE                                EXACT
    of blocks: 1 x 128 or 1 x 32 of a (native_blocks.py)     NATIVE                                EXACT
    others, which vary along the contracted dim              EXACT                                 EXACT

NATIVE is the hardware's float8 matmul. It is used if a probe, a tiny matmul, gives the right result. The compute
capability is not enough: row-wise scales are missing on sm_120 and were broken on sm_89. EXACT runs on every device
(kernels/exact_mm.py). docs/numerics.md says where each rounds. Row-wise scales vary along the contracted dim if
grad_input reads a row-wise weight that is stored once.

`native_operands` prepares operands for Hopper's native matmul, which requires:

    both operands contiguous along the contracted dim
    K and N that are multiples of 16 (`_pad` appends zeros)
    with row-wise scales, a bfloat16 result and a scale for every row of a and every column of b
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.kernels.cast import to_column_major_after, to_row_major
from quaver.kernels.cpu import check_memory
from quaver.kernels.exact_mm import exact_float8_mm
from quaver.kernels.native_blocks import ALIGNMENT, native_block_mm, pad_codes
from quaver.kernels.operands import Operand, expect
from quaver.kernels.widen import widen
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.formats import E5M2, FLOAT8_FORMATS
from quaver.recipes.linear_casts import MATMULS, MatmulOptions
from quaver.recipes.scale_layout import COLUMNWISE, ROWWISE, TENSORWISE, ScaleLayout, infer_layout
from quaver.recipes.scaling import dequantize, multiply_scale_
from quaver.runtime.compile_hints import is_compiling
from quaver.runtime.devices import cuda_device, has_cuda, is_capturing, is_cpu, is_cuda_device
from quaver.runtime.phases import phase
from quaver.runtime.slow_paths import warn_once
from quaver.torch_private.dispatch import without_dispatch_modes
from quaver.torch_private.hardware import scaled_mm
from quaver.torch_private.tracing import assume_constant_result


class GemmBackend(enum.Enum):
    """The implementation that runs a float8 matmul: the hardware's, or exact_mm.py."""

    NATIVE = "native"
    EXACT = "exact"


class ScaleKind(enum.Enum):
    """The layouts of scales that hardware distinguishes."""

    TENSORWISE = "tensor-wise"
    ROWWISE = "row-wise"
    BLOCKS_OF_128 = "1 x 128"
    BLOCKS_OF_32 = "1 x 32"
    GROUPS = "row-wise grouped"

    @property
    def block_length(self) -> int:
        """The length of a block along the contracted dim; 0 if the scales have no blocks."""
        return next((length for length, kind in _BLOCKS.items() if kind is self), 0)


_BLOCKS = {128: ScaleKind.BLOCKS_OF_128, 32: ScaleKind.BLOCKS_OF_32}


def float8_mm(
    a: Tensor,
    b: Tensor,
    a_dequant_scale: Tensor,
    b_dequant_scale: Tensor,
    *,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
    scales_are_powers_of_2: bool = False,
    emulate: bool = False,
    pad: bool = False,
    a_layout: ScaleLayout | None = None,
    b_layout: ScaleLayout | None = None,
) -> Tensor:
    """Multiply two scaled float8 matrices.

    Args:
        a: float8 [M, K], any strides.
        b: float8 [K, N], any strides.
        a_dequant_scale: float32, the scales of a, for instance (), [M, 1] or one per block.
        b_dequant_scale: float32, the scales of b, for instance (), [1, N] or one per block.
        out_dtype: float32, bfloat16 or float16.
        bias: [N] in a high-precision dtype, added before the last rounding if the backend supports it.
        use_fast_accum, scales_are_powers_of_2, emulate, pad: see `MatmulOptions` in recipes/linear_casts.py.
        a_layout, b_layout: which elements share a scale; None to infer it from the shape of the scale (`infer_layout`).
    Returns:
        [M, N] in out_dtype.
    Raises:
        ValueError: shapes, dtypes or shapes of scales do not fit.
    """
    _check_codes(a, b)
    a_operand = _check_operand("a", a, a_dequant_scale, a_layout)
    b_operand = _check_operand("b", b, b_dequant_scale, b_layout)
    check_memory(a, b, a_dequant_scale, b_dequant_scale, bias)
    options = MatmulOptions(use_fast_accum, scales_are_powers_of_2, emulate, pad)
    return mm(a_operand, b_operand, options, out_dtype, bias)


@phase("quaver::gemm")
def mm(a: Operand, b: Operand, options: MatmulOptions, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Multiply checked operands: a [M, K] @ b [K, N] + bias [N] -> [M, N] in out_dtype.

    If `a` has no scale, the matmul runs in high precision, and codes of `b` are dequantized.
    """
    if a.dequant_scale is None:
        b_hp = dequantize_operand(b, out_dtype, options.scales_are_powers_of_2)
        return torch.mm(a.data, b_hp) if bias is None else torch.addmm(bias.to(out_dtype), a.data, b_hp)
    if a.data.numel() == 0 or b.data.numel() == 0:
        zeros = torch.zeros((a.size[0], b.size[1]), dtype=out_dtype, device=a.data.device)
        return zeros if bias is None else zeros + bias.to(out_dtype)
    if not is_cpu(a.data) and _choose_backend_for(a, b, options) is GemmBackend.NATIVE:
        return _native_mm(a, b, bias, out_dtype, options.use_fast_accum)
    columns = b.size[1]
    if options.pad:
        a, b = _pad(a, b)
        bias = bias if bias is None else F.pad(bias, (0, b.size[1] - columns))
    tensors = a.data, b.data, a.dequant_scale, b.dequant_scale
    rest = bias, out_dtype, options.scales_are_powers_of_2, [*a.layout], [*b.layout], a.outer_scale, b.outer_scale
    out: Tensor = exact_float8_mm(*tensors, *rest)
    return out if out.shape[1] == columns else out[:, :columns].contiguous()  # autograd.Functions return no views


def dequantize_operand(operand: Operand, dtype: torch.dtype, scales_are_powers_of_2: bool) -> Tensor:
    """Return the values of an operand, which may be in high precision already, in `dtype`."""
    data, scale, layout, _, outer_scale = operand
    if scale is None:
        return data if data.dtype is dtype else data.to(dtype)
    if is_compiling() or outer_scale is not None:
        return dequantize(data, scale, dtype, layout, outer_scale)
    exact = dtype is torch.bfloat16 and scales_are_powers_of_2
    return widen(data, dtype if exact else torch.float32, scale, layout).to(dtype)


def _check_codes(a: Tensor, b: Tensor) -> None:
    if a.dtype not in FLOAT8_FORMATS or b.dtype not in FLOAT8_FORMATS:
        raise ValueError(f"expected two float8 matrices, got {a.dtype} and {b.dtype}")
    if a.dtype is E5M2.dtype and b.dtype is E5M2.dtype:
        raise ValueError("no hardware multiplies e5m2 by e5m2; cast one operand to e4m3")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"expected [M, K] and [K, N], got {list(a.shape)} and {list(b.shape)}")


def _check_operand(name: str, codes: Tensor, dequant_scale: Tensor, layout: ScaleLayout | None) -> Operand:
    try:
        if dequant_scale.dtype is not torch.float32:
            raise ValueError(f"expected float32, got {dequant_scale.dtype}")
        layout = layout or infer_layout(dequant_scale, codes.shape)
        shape = layout.get_scale_shape(codes.shape[0], codes.shape[1])
        if dequant_scale.shape != shape:
            raise ValueError(f"expected a {layout} scale of shape {list(shape)}, got {list(dequant_scale.shape)}")
    except ValueError as error:
        raise ValueError(f"{name}_dequant_scale: {error}") from None
    return Operand(codes, dequant_scale, layout)


# ---- choosing a backend ------------------------------------------------------------------------------------------


def choose_backend(
    device: torch.device,
    kind: ScaleKind | None,
    *,
    emulate: bool = False,
    works: Callable[[int, ScaleKind], bool] | None = None,
) -> GemmBackend:
    """Return the backend of `device` for a kind of scales.

    Args:
        kind: None if no hardware supports the scales.
        works: returns whether the CUDA device with this index multiplies `kind` natively; None probes `mm`.
    """
    works = works or _native_works
    if kind is None or emulate or not is_cuda_device(device) or not works(device.index or 0, kind):
        return GemmBackend.EXACT
    return GemmBackend.NATIVE


def _choose_backend_for(a: Operand, b: Operand, options: MatmulOptions) -> GemmBackend:
    kind = find_kind(a, b)
    if kind is ScaleKind.BLOCKS_OF_32 and not options.scales_are_powers_of_2:
        kind = None  # the hardware's scales have no mantissa
    return choose_backend(a.data.device, kind, emulate=options.emulate)


def find_kind(a: Operand, b: Operand) -> ScaleKind | None:
    """Return the kind of the scales of a [M, K] and b [K, N], or None if no hardware supports them."""
    if a.varies_along(1) or b.varies_along(0):
        kind = _find_block_kind(a.layout, b.layout)
        return None if E5M2.dtype in (a.data.dtype, b.data.dtype) else kind
    return ScaleKind.TENSORWISE if a.layout.is_tensorwise and b.layout.is_tensorwise else ScaleKind.ROWWISE


def _find_block_kind(a: ScaleLayout, b: ScaleLayout) -> ScaleKind | None:
    """Return the kind of a [M, K] in blocks of 1 x n and b [K, N] in blocks of n x 1 or n x n, else None."""
    length = a.columns
    return _BLOCKS.get(length) if a.rows == 1 and b.rows == length and b.columns in (1, length) else None


@assume_constant_result
def _native_works(device_index: int, kind: ScaleKind) -> bool:
    return multiplies_natively(device_index, kind)


def multiplies_natively(device_index: int, kind: ScaleKind, probe: NativeTest | None = None) -> bool:
    """Return whether the device multiplies natively, and report a failure once."""
    failure = find_native_failure(device_index, kind, probe)
    if failure is not None:
        warn_once(
            f"exact matmuls on cuda:{device_index}, {kind.value}",
            f"cuda:{device_index} runs float8 matmuls with {kind.value} scales on the exact backend, which is slower: "
            f"{failure}",
        )
    return failure is None


NativeTest = Callable[[torch.device, "ScaleKind"], str | None]
"""A function that multiplies on a device and compares the result, such as `probe_native_mm`."""

_native_failures: dict[tuple[int, ScaleKind], str | None] = {}
"""The result of each probe, by device and kind of scales: why the hardware failed, or None."""


def find_native_failure(device_index: int, kind: ScaleKind, probe: NativeTest | None = None) -> str | None:
    """Probe whether this CUDA (or ROCm) device multiplies float8 natively. Returns why not, or None if it does.

    `probe` is for kinds that `mm` does not multiply; None for `probe_native_mm`. Results are cached.

    Raises:
        RuntimeError: the probe failed for another reason, such as too little memory, or would have to run while a CUDA
            graph is captured. Nothing is cached, and the next call tries again.
    """
    key = device_index, kind
    if key not in _native_failures:
        if not has_cuda():
            return "no CUDA device"
        if is_capturing():
            raise RuntimeError(
                "the first float8 matmul on a device runs a probe, which a CUDA graph cannot capture; "
                "run a step before the capture"
            )
        # The first call may be inside a forward. A dispatch mode, such as a selective checkpoint, must not see these
        # operations, because the recomputation will not repeat them.
        with without_dispatch_modes():
            _native_failures[key] = (probe or probe_native_mm)(cuda_device(device_index), kind)
    return _native_failures[key]


@contextlib.contextmanager
def assume_native(failures: Mapping[ScaleKind, str | None]) -> Iterator[Mapping[tuple[int, ScaleKind], str | None]]:
    """Inside the block, `failures` replaces the probes of the first device; other kinds are probed.

    For tests and predictions. Yields the results of all probes: by device and kind, why the hardware failed, or None.
    """
    before = dict(_native_failures)
    _native_failures.clear()
    _native_failures.update({(0, kind): failure for kind, failure in failures.items()})
    try:
        yield _native_failures
    finally:
        _native_failures.clear()
        _native_failures.update(before)


_NOT_THE_HARDWARE = (
    "out of memory",
    "alloc_failed",
    "captur",
    "illegal memory access",
    "launch failure",
    "interrupted",
)
"""Words in CUDA errors that are not about what the hardware can multiply."""


def find_cast_kind(left: CastConfig, right: CastConfig) -> ScaleKind | None:
    """Return the kind of the scales of a matmul from its operands' casts, or None if no hardware supports them."""
    a, b = left.layout, None if right.layout is None else right.layout.t()
    if a is None or b is None:
        return None
    if not (left.is_blockwise or right.is_blockwise):
        return ScaleKind.TENSORWISE if a.is_tensorwise and b.is_tensorwise else ScaleKind.ROWWISE
    has_mantissas = not (left.e8m0_mode and right.e8m0_mode)
    kind = _find_block_kind(a, b)
    if (kind is ScaleKind.BLOCKS_OF_32 and has_mantissas) or E5M2.dtype in (left.target_dtype, right.target_dtype):
        return None
    return kind


def predict_backend(left: CastConfig, right: CastConfig, device: torch.device, *, emulate: bool) -> GemmBackend:
    """Return the backend on `device` of a matmul from its operands' casts."""
    return choose_backend(device, find_cast_kind(left, right), emulate=emulate)


def list_matmul_casts(config: Float8LinearConfig) -> list[tuple[CastConfig, CastConfig]]:
    """Return the casts of both operands of each float8 matmul."""
    pairs = [(config.casts.get(*left), config.casts.get(*right)) for left, right in MATMULS.values()]
    return [pair for pair in pairs if not pair[0].is_disabled]


def describe_backends(
    config: Float8LinearConfig, device: torch.device, backend_of: Callable[..., GemmBackend] = predict_backend
) -> str:
    """Return the backends of a linear's float8 matmuls on `device`: "native", "exact" or "native and exact".

    "high precision" if the config disables all casts. `backend_of` chooses the backend of one matmul.
    """
    backends = {backend_of(*pair, device, emulate=config.emulate) for pair in list_matmul_casts(config)}
    return " and ".join(backend.value for backend in GemmBackend if backend in backends) or "high precision"


def probe_native_mm(device: torch.device, kind: ScaleKind) -> str | None:
    """Multiply on `device` and compare. Returns None if the product is right, else the error's first line.

    Errors that are not about the hardware are raised.
    """
    for operands in _make_probes(kind):
        a, b = (multiply_scale_(side.data.double(), expect(side.dequant_scale), side.layout) for side in operands)
        expected = torch.mm(a, b)
        try:
            out = _native_mm(operands[0].to(device), operands[1].to(device), None, torch.bfloat16, False)
            wrong = (out.float().cpu() - expected).abs().max() > expected.abs().max() * 2**-7
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return describe_hardware_failure(error)
        if wrong:
            return f"a {expected.shape[0]} x {expected.shape[1]} matmul with {kind.value} scales gave a wrong result"
    return None


def describe_hardware_failure(error: Exception) -> str:
    """Return the first line of an error, or its class if it has no text. Raises it if it is not about the hardware."""
    if any(words in str(error).lower() for words in _NOT_THE_HARDWARE):
        raise error
    return (str(error) or type(error).__name__).splitlines()[0]


def _make_probes(kind: ScaleKind) -> Iterator[tuple[Operand, Operand]]:
    """Yield operands for the forward and the backward matmuls of a linear, with different scales.

    Dtypes and devices are explicit, because the result must not depend on torch's defaults at the first call.
    """
    length = kind.block_length
    size = 2 * length or 32
    numbers = torch.arange(size * size, device="cpu")
    a, b = ((numbers % modulus - modulus // 2).float().view(size, size) for modulus in (13, 7))
    a_codes = a.to(torch.float8_e4m3fn)
    if length:
        powers = torch.exp2((numbers % 7).float() - 3)
        for columns in (length, 1):
            blocks = size // columns
            yield (
                Operand(a_codes, powers[: 2 * size].view(size, 2), ScaleLayout(1, length)),
                Operand(b.to(torch.float8_e4m3fn), powers[: 2 * blocks].view(2, blocks), ScaleLayout(length, columns)),
            )
        return
    row_scales = torch.arange(1, size + 1, dtype=torch.float32, device="cpu")
    is_rowwise = kind is ScaleKind.ROWWISE
    # Cloned so that it is aligned: `_align_scale` copies no scale while code is compiled.
    a_scale = row_scales.view(size, 1) if is_rowwise else row_scales[1].clone()
    b_scale = row_scales.view(1, size) if is_rowwise else 1 / row_scales[1]
    layouts = (ROWWISE, COLUMNWISE) if is_rowwise else (TENSORWISE, TENSORWISE)
    for b_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield Operand(a_codes, a_scale, layouts[0]), Operand(b.to(b_dtype), b_scale, layouts[1])


# ---- native ------------------------------------------------------------------------------------------------------


def reads_along_contracted(device: torch.device, emulate: bool = False) -> bool:
    """Return whether `device` multiplies natively: the hardware reads both operands along the contracted dim."""
    return choose_backend(device, ScaleKind.TENSORWISE, emulate=emulate) is GemmBackend.NATIVE


def lay_out_rows(codes: Tensor, *, emulate: bool = False) -> Tensor:
    """Return row codes in the layout that the device multiplies: the native backend needs contiguous rows."""
    return codes if is_cpu(codes) or not reads_along_contracted(codes.device, emulate) else to_row_major(codes)


def lay_out_columns(codes: Tensor, *, emulate: bool = False) -> Tensor:
    """Return column codes in the layout that the device multiplies: the native backend needs contiguous columns."""
    if is_cpu(codes) or not reads_along_contracted(codes.device, emulate):
        return codes
    return to_row_major(codes.t()).t()


def lay_out_saved_columns(codes: Tensor, gradient: Tensor, *, emulate: bool = False) -> Tensor:
    """Run `lay_out_columns` on the saved codes [N, K] of a weight in compiled code, after `gradient`.

    The codes were quantized before the graph, so no cast can be fused with the copy. Without the order Inductor would
    copy in the forward and save the copy. Eager code copies when it multiplies.
    """
    if not torch.compiler.is_compiling() or is_cpu(codes) or codes.t().is_contiguous():
        return codes
    if not reads_along_contracted(codes.device, emulate):
        return codes
    laid_out: Tensor = to_column_major_after(codes, gradient)
    return laid_out


def native_operands(a: Operand, b: Operand) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the codes of a and b, then their scales, for the hardware.

    K and N are padded to multiples of 16, codes are contiguous along K, and both scales have one kind.
    """
    a, b = _pad(a, b)
    a_codes, b_codes = to_row_major(a.data), to_row_major(b.data.t()).t()
    a_scale, b_scale = expect(a.dequant_scale), expect(b.dequant_scale)
    if not (a.layout.is_tensorwise and b.layout.is_tensorwise):
        a_scale = a_scale.expand(a_codes.shape[0], 1).contiguous()
        b_scale = b_scale.expand(1, b_codes.shape[1]).contiguous()
    return a_codes, b_codes, _align_scale(a_scale), _align_scale(b_scale)


def _align_scale(scale: Tensor) -> Tensor:
    """Copy `scale` unless it starts at a multiple of 16 bytes, as cuBLAS requires.

    Scales of experts and of FSDP2 are slices of one tensor. Dynamo does not trace storage_offset; compiled code
    multiplies experts in an operation, which calls this in eager mode.
    """
    return scale if torch.compiler.is_compiling() or scale.storage_offset() % 4 == 0 else scale.clone()


def _native_mm(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
    rows, columns = a.data.shape[0], b.data.shape[1]
    kind = find_kind(a, b)
    if kind is not None and kind.block_length:
        tensors, is_square = (a.data, b.data, a.dequant_scale, b.dequant_scale), b.layout.rows == b.layout.columns
        product = native_block_mm(*tensors, kind.block_length, is_square)
        return _finish(product, rows, columns, bias, out_dtype)
    a_codes, b_codes, a_scale, b_scale = native_operands(a, b)
    native_dtype = torch.bfloat16 if a_scale.dim() else out_dtype
    bias_inside = bias is not None and bias.dtype is native_dtype is torch.bfloat16 and b_codes.shape[1] == columns
    out = scaled_mm(
        a_codes,
        b_codes,
        scale_a=a_scale,
        scale_b=b_scale,
        bias=bias if bias_inside else None,
        out_dtype=native_dtype,
        use_fast_accum=use_fast_accum,
    )
    return _finish(out, rows, columns, None if bias_inside else bias, out_dtype)


def _finish(out: Tensor, rows: int, columns: int, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Remove the padding, add the bias and convert to `out_dtype`."""
    if out.shape != (rows, columns):
        out = out[:rows, :columns].clone(memory_format=torch.contiguous_format)  # autograd.Functions return no views
    out = out if bias is None else out + bias
    # `to` must not return its argument: Dynamo in torch 2.11 would make the gradients of the autograd.Function zeros.
    return out if out.dtype is out_dtype else out.to(out_dtype)


def _pad(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """Pad K and N of a [M, K] and b [K, N] with zeros to multiples of 16."""
    k, n = -a.size[1] % ALIGNMENT, -b.size[1] % ALIGNMENT
    return _append_zeros(a, 0, k), _append_zeros(b, k, n)


def _append_zeros(operand: Operand, rows: int, columns: int) -> Operand:
    """Append this many rows and columns of zeros. New blocks have a scale of 1."""
    codes, scale, layout, _, outer_scale = operand
    padded = pad_codes(codes, rows // layout.rows_of_byte, columns // layout.columns_of_byte)
    if scale is not None and not layout.is_tensorwise:
        down, across = layout.get_scale_shape(*layout.get_matrix_size(padded))
        more = (0, across - scale.shape[1], 0, down - scale.shape[0])
        scale = F.pad(scale, more, value=1.0) if any(more) else scale
    return Operand(padded, scale, layout, None, outer_scale)

"""The one place that multiplies float8 matrices.

    float8_mm(a, b, a_dequant_scale, b_dequant_scale) = (a * a_dequant_scale) @ (b * b_dequant_scale)
    a [M, K] and b [K, N], each with a scale of any granularity; result [M, N]

Two backends compute it, by how the scales of the operands lie:

    scales                                                   on hardware that multiplies float8    elsewhere
    one per tensor; one per row of a and column of b         NATIVE                                EXACT
    of blocks: 1 x 128 or 1 x 32 of a (native_blocks.py)     NATIVE                                EXACT
    others, that vary along the contracted dim               EXACT                                 EXACT

NATIVE is the hardware's float8 matmul, used where a tiny one has just given the right answer: a capability number is
not enough, since row-wise scales are missing on sm_120 and were broken on sm_89. EXACT runs on every device
(kernels/exact_mm.py). docs/numerics.md says where each rounds. Scales of no blocks vary along the contracted dim where
a row-wise weight that is stored once is read by grad_input.

Hopper's native matmul requires both operands contiguous along the contracted dim; K and N multiples of 16 (zeros are
appended, and add nothing); with row-wise scales a bfloat16 result and a scale for every row of both operands.
`native_operands` establishes this.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from quaver.kernels.cast import column_major_after, row_major
from quaver.kernels.cpu import check_memory
from quaver.kernels.exact_mm import exact_float8_mm
from quaver.kernels.native_blocks import ALIGNMENT, native_block_mm, pad_codes
from quaver.kernels.operands import Operand, expect
from quaver.kernels.widen import widen
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.formats import E5M2, FORMATS
from quaver.recipes.linear_casts import MATMULS, MatmulOptions
from quaver.recipes.scale_layout import COLUMNWISE, ROWWISE, TENSORWISE, ScaleLayout, layout_of
from quaver.recipes.scaling import dequantize, multiply_scale_
from quaver.runtime.compile_hints import is_compiling
from quaver.runtime.devices import cuda_device, has_cuda, is_capturing, is_cpu, is_cuda_device
from quaver.runtime.phases import phase
from quaver.runtime.slow_paths import say_once
from quaver.torch_private.dispatch import without_dispatch_modes
from quaver.torch_private.hardware import scaled_mm
from quaver.torch_private.tracing import assume_constant_result


class GemmBackend(enum.Enum):
    """The implementation that runs a float8 matmul: the hardware's, or exact_mm.py."""

    NATIVE = "native"
    EXACT = "exact"


class ScaleKind(enum.Enum):
    """How the scales of a matmul lie, as hardware tells them apart."""

    TENSORWISE = "tensor-wise"
    ROWWISE = "row-wise"
    BLOCKS_OF_128 = "1 x 128"
    BLOCKS_OF_32 = "1 x 32"
    GROUPS = "row-wise grouped"

    @property
    def block_length(self) -> int:
        """The length of a block of scales along the contracted dim; 0 for scales of no blocks."""
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
        a_dequant_scale: float32, the scales of a: (), [M, 1] or one a block, say.
        b_dequant_scale: float32, the scales of b: (), [1, N] or one a block, say.
        out_dtype: float32, bfloat16 or float16.
        bias: [N] in a high-precision dtype, added before the last rounding where the backend can.
        use_fast_accum, scales_are_powers_of_2, emulate, pad: see `MatmulOptions` in config.py.
        a_layout, b_layout: which elements share a scale; None to find it by the shape of the scale (`layout_of`).
    Returns:
        [M, N] in out_dtype.
    Raises:
        ValueError: shapes, dtypes or scale shapes that do not fit.
    """
    _check_codes(a, b)
    a_operand = _checked_operand("a", a, a_dequant_scale, a_layout)
    b_operand = _checked_operand("b", b, b_dequant_scale, b_layout)
    check_memory(a, b, a_dequant_scale, b_dequant_scale, bias)
    options = MatmulOptions(use_fast_accum, scales_are_powers_of_2, emulate, pad)
    return mm(a_operand, b_operand, options, out_dtype, bias)


@phase("quaver::gemm")
def mm(a: Operand, b: Operand, options: MatmulOptions, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [K, N] + bias [N] -> [M, N] in out_dtype, for operands that fit and have memory.

    If `a` has no scale, the matmul runs in high precision, and codes of `b` are dequantized.
    """
    if a.dequant_scale is None:
        b_hp = in_high_precision(b, out_dtype, options.scales_are_powers_of_2)
        return torch.mm(a.data, b_hp) if bias is None else torch.addmm(bias.to(out_dtype), a.data, b_hp)
    if a.data.numel() == 0 or b.data.numel() == 0:
        out = torch.zeros((a.size[0], b.size[1]), dtype=out_dtype, device=a.data.device)
        return out if bias is None else out + bias.to(out_dtype)
    if not is_cpu(a.data) and _backend_of(a, b, options) is GemmBackend.NATIVE:
        return _native_mm(a, b, bias, out_dtype, options.use_fast_accum)
    if not options.pad:
        return _exact_mm(a, b, bias, out_dtype, options.scales_are_powers_of_2)
    columns = b.size[1]
    a, b = _padded(a, b)
    bias = bias if bias is None else F.pad(bias, (0, b.size[1] - columns))
    out = _exact_mm(a, b, bias, out_dtype, options.scales_are_powers_of_2)
    return out if out.shape[1] == columns else out[:, :columns].contiguous()  # autograd.Functions return no views


def in_high_precision(operand: Operand, dtype: torch.dtype, scales_are_powers_of_2: bool) -> Tensor:
    """The values of an operand: those it has, which may be of the weight's dtype, or its codes times their scales."""
    data, scale, layout, _, outer_scale = operand
    if scale is None:
        return data if data.dtype is dtype else data.to(dtype)
    if is_compiling() or outer_scale is not None:
        return dequantize(data, scale, dtype, layout, outer_scale)
    exact = dtype is torch.bfloat16 and scales_are_powers_of_2
    return widen(data, dtype if exact else torch.float32, scale, layout).to(dtype)


def _exact_mm(
    a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, scales_are_powers_of_2: bool
) -> Tensor:
    tensors = a.data, b.data, a.dequant_scale, b.dequant_scale
    rest = bias, out_dtype, scales_are_powers_of_2, [*a.layout], [*b.layout], a.outer_scale, b.outer_scale
    out: Tensor = exact_float8_mm(*tensors, *rest)
    return out


def _check_codes(a: Tensor, b: Tensor) -> None:
    if a.dtype not in FORMATS or b.dtype not in FORMATS:
        raise ValueError(f"expected two float8 matrices, got {a.dtype} and {b.dtype}")
    if a.dtype is E5M2.dtype and b.dtype is E5M2.dtype:
        raise ValueError("no hardware multiplies e5m2 by e5m2; cast one operand to e4m3")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"expected [M, K] and [K, N], got {list(a.shape)} and {list(b.shape)}")


def _checked_operand(name: str, codes: Tensor, dequant_scale: Tensor, layout: ScaleLayout | None) -> Operand:
    try:
        if dequant_scale.dtype is not torch.float32:
            raise ValueError(f"expected float32, got {dequant_scale.dtype}")
        layout = layout or layout_of(dequant_scale, codes.shape)
        shape = layout.scale_shape(codes.shape[0], codes.shape[1])
        if dequant_scale.shape != shape:
            raise ValueError(f"expected a {layout} scale of shape {list(shape)}, got {list(dequant_scale.shape)}")
    except ValueError as error:
        raise ValueError(f"{name}_dequant_scale: {error}") from None
    return Operand(codes, dequant_scale, layout)


# ---- choosing a backend ------------------------------------------------------------------------------------------


def backend_for(
    device: torch.device,
    kind: ScaleKind | None,
    *,
    emulate: bool = False,
    works: Callable[[int, ScaleKind], bool] | None = None,
) -> GemmBackend:
    """The backend of `device` for scales of a kind; None for those that no hardware multiplies.

    `works` asks a CUDA device, by its index, whether it multiplies them; None for the matmuls of `mm`.
    """
    works = works or _native_works
    if kind is None or emulate or not is_cuda_device(device) or not works(device.index or 0, kind):
        return GemmBackend.EXACT
    return GemmBackend.NATIVE


def _backend_of(a: Operand, b: Operand, options: MatmulOptions) -> GemmBackend:
    kind = kind_of(a, b)
    if kind is ScaleKind.BLOCKS_OF_32 and not options.scales_are_powers_of_2:
        kind = None  # they have no mantissa in hardware
    return backend_for(a.data.device, kind, emulate=options.emulate)


def kind_of(a: Operand, b: Operand) -> ScaleKind | None:
    """The kind of the scales of a [M, K] and b [K, N]; None for those that no hardware multiplies."""
    if a.varies_along(1) or b.varies_along(0):
        kind = _kind_of_blocks(a.layout, b.layout)
        return None if E5M2.dtype in (a.data.dtype, b.data.dtype) else kind
    return ScaleKind.TENSORWISE if a.layout.is_tensorwise and b.layout.is_tensorwise else ScaleKind.ROWWISE


def _kind_of_blocks(a: ScaleLayout, b: ScaleLayout) -> ScaleKind | None:
    """The kind of a [M, K] in blocks of 1 x n, and b [K, N] in such of n x 1 or of n x n."""
    length = a.columns
    return _BLOCKS.get(length) if a.rows == 1 and b.rows == length and b.columns in (1, length) else None


@assume_constant_result
def _native_works(device_index: int, kind: ScaleKind) -> bool:
    return says_whether_native(device_index, kind)


def says_whether_native(device_index: int, kind: ScaleKind, probe: Probe | None = None) -> bool:
    """Whether `native_failure` finds none; said once where it does."""
    failure = native_failure(device_index, kind, probe)
    if failure is not None:
        say_once(
            f"exact matmuls on cuda:{device_index}, {kind.value}",
            f"cuda:{device_index} multiplies float8 with {kind.value} scales exactly, which is slower: {failure}",
        )
    return failure is None


Probe = Callable[[torch.device, "ScaleKind"], str | None]
"""Multiplies on a device and compares, as `probe_native_mm`."""

_native_failures: dict[tuple[int, ScaleKind], str | None] = {}
"""Why the hardware does not multiply, as probes found it, by device and kind of scales; None where it does."""


def native_failure(device_index: int, kind: ScaleKind, probe: Probe | None = None) -> str | None:
    """Why this CUDA (or ROCm) device cannot multiply float8 natively, found by trying; None if it can.

    `probe` tries a kind that `mm` does not multiply; None for `probe_native_mm`.

    Only verdicts about the hardware are remembered.

    Raises:
        RuntimeError: the probe failed for another reason, such as too little memory, or would have to run while a CUDA
            graph is captured. The next call tries again.
    """
    key = device_index, kind
    if key not in _native_failures:
        if not has_cuda():
            return "no CUDA device"
        if is_capturing():
            raise RuntimeError(
                "the first float8 matmul on a device tries out its float8 units, which a CUDA graph cannot capture; "
                "run a step before the capture"
            )
        # The first call may come inside a forward. A dispatch mode (a selective checkpoint, say) must not see these
        # operations, because the recomputation will not repeat them.
        with without_dispatch_modes():
            _native_failures[key] = (probe or probe_native_mm)(cuda_device(device_index), kind)
    return _native_failures[key]


@contextlib.contextmanager
def assuming_native(failures: Mapping[ScaleKind, str | None]) -> Iterator[None]:
    """Inside the block these answers take the place of probes of the first device; kinds without one are probed.

    For tests and predictions.
    """
    before = dict(_native_failures)
    _native_failures.clear()
    _native_failures.update({(0, kind): failure for kind, failure in failures.items()})
    try:
        yield
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
"""Words of CUDA's errors that say nothing about what the hardware can multiply."""


def kind_of_casts(left: CastConfig, right: CastConfig) -> ScaleKind | None:
    """The kind of the scales of a matmul whose operands are cast so; None for those that no hardware multiplies."""
    a, b = left.layout, None if right.layout is None else right.layout.t()
    if a is None or b is None:
        return None
    if not (left.is_blockwise or right.is_blockwise):
        return ScaleKind.TENSORWISE if a.is_tensorwise and b.is_tensorwise else ScaleKind.ROWWISE
    has_mantissas = not (left.e8m0_mode and right.e8m0_mode)
    kind = _kind_of_blocks(a, b)
    if (kind is ScaleKind.BLOCKS_OF_32 and has_mantissas) or E5M2.dtype in (left.target_dtype, right.target_dtype):
        return None
    return kind


def backend_of_casts(left: CastConfig, right: CastConfig, device: torch.device, *, emulate: bool) -> GemmBackend:
    """The backend on `device` of a matmul whose operands are cast so."""
    return backend_for(device, kind_of_casts(left, right), emulate=emulate)


def casts_of_matmuls(config: Float8LinearConfig) -> list[tuple[CastConfig, CastConfig]]:
    """The casts of both operands of each matmul in float8."""
    pairs = [(config.casts.get(*left), config.casts.get(*right)) for left, right in MATMULS.values()]
    return [pair for pair in pairs if not pair[0].is_disabled]


def backends_of(config: Float8LinearConfig, device: torch.device) -> str:
    """The backends of a linear's float8 matmuls on `device`: "native", "exact" or "native and exact".

    "high precision" where the config disables them all.
    """
    found = {backend_of_casts(*pair, device, emulate=config.emulate) for pair in casts_of_matmuls(config)}
    names = [backend.value for backend in GemmBackend if backend in found]
    return " and ".join(names) or "high precision"


def probe_native_mm(device: torch.device, kind: ScaleKind) -> str | None:
    """Multiply on `device` and compare; the error's first line, None if the product is right.

    An error that is not about the hardware is raised.

    Dtypes and devices are explicit: the verdict must not depend on torch's defaults at the first call.
    """
    for operands in _probes(kind):
        a, b = (multiply_scale_(each.data.double(), expect(each.dequant_scale), each.layout) for each in operands)
        expected = torch.mm(a, b)
        try:
            out = _native_mm(operands[0].to(device), operands[1].to(device), None, torch.bfloat16, False)
            wrong = (out.float().cpu() - expected).abs().max() > expected.abs().max() * 2**-7
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return failure_of_hardware(error)
        if wrong:
            return f"a {expected.shape[0]} x {expected.shape[1]} matmul with {kind.value} scales gave a wrong result"
    return None


def failure_of_hardware(error: Exception) -> str:
    """The first line of an error; raises it where it says nothing about the hardware."""
    if any(words in str(error).lower() for words in _NOT_THE_HARDWARE):
        raise error
    return str(error).splitlines()[0]


def _probes(kind: ScaleKind) -> Iterator[tuple[Operand, Operand]]:
    """Operands of both kinds of matmuls of a linear; scales differ from each other."""
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
    # In memory of its own: `_aligned` copies no scale while compiled code probes.
    a_scale = row_scales.view(size, 1) if is_rowwise else row_scales[1].clone()
    b_scale = row_scales.view(1, size) if is_rowwise else 1 / row_scales[1]
    layouts = (ROWWISE, COLUMNWISE) if is_rowwise else (TENSORWISE, TENSORWISE)
    for b_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield Operand(a_codes, a_scale, layouts[0]), Operand(b.to(b_dtype), b_scale, layouts[1])


# ---- native ------------------------------------------------------------------------------------------------------


def reads_along_contracted(device: torch.device, emulate: bool = False) -> bool:
    """Whether the float8 matmul of `device` is the hardware's, which reads both operands along the contracted dim."""
    return backend_for(device, ScaleKind.TENSORWISE, emulate=emulate) is GemmBackend.NATIVE


def laid_out_for_rows(codes: Tensor, *, emulate: bool = False) -> Tensor:
    """Row codes in the layout that this device multiplies: the native backend reads rows that are contiguous."""
    return codes if is_cpu(codes) or not reads_along_contracted(codes.device, emulate) else row_major(codes)


def laid_out_for_columns(codes: Tensor, *, emulate: bool = False) -> Tensor:
    """Column codes in the layout that this device multiplies: the native backend reads columns that are contiguous."""
    if is_cpu(codes) or not reads_along_contracted(codes.device, emulate):
        return codes
    return row_major(codes.t()).t()


def laid_out_for_columns_after(codes: Tensor, gradient: Tensor, *, emulate: bool = False) -> Tensor:
    """`laid_out_for_columns` of the codes [N, K] of a weight that was quantized before, ordered after `gradient`.

    For compiled code. The codes were quantized before the graph, so no cast can be fused with the copy, and Inductor
    would otherwise make the copy in the forward and save it. Eager code copies when it multiplies.
    """
    if not torch.compiler.is_compiling() or is_cpu(codes) or codes.t().is_contiguous():
        return codes
    if not reads_along_contracted(codes.device, emulate):
        return codes
    laid_out: Tensor = column_major_after(codes, gradient)
    return laid_out


def native_operands(a: Operand, b: Operand) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operands as the hardware reads them: K and N padded to 16, contiguous along K, both scales of one kind."""
    a, b = _padded(a, b)
    a_codes, b_codes = row_major(a.data), row_major(b.data.t()).t()
    a_scale, b_scale = expect(a.dequant_scale), expect(b.dequant_scale)
    if not (a.layout.is_tensorwise and b.layout.is_tensorwise):
        a_scale = a_scale.expand(a_codes.shape[0], 1).contiguous()
        b_scale = b_scale.expand(1, b_codes.shape[1]).contiguous()
    return a_codes, b_codes, _aligned(a_scale), _aligned(b_scale)


def _aligned(scale: Tensor) -> Tensor:
    """`scale` at a multiple of 16 bytes, where cuBLAS reads one; scales of experts and of FSDP2 lie in one tensor.

    Dynamo traces no storage_offset. Compiled code multiplies experts by an operation, which comes here in eager code.
    """
    return scale if torch.compiler.is_compiling() or scale.storage_offset() % 4 == 0 else scale.clone()


def _native_mm(a: Operand, b: Operand, bias: Tensor | None, out_dtype: torch.dtype, use_fast_accum: bool) -> Tensor:
    rows, columns = a.data.shape[0], b.data.shape[1]
    kind = kind_of(a, b)
    if kind is not None and kind.block_length:
        tensors, is_square = (a.data, b.data, a.dequant_scale, b.dequant_scale), b.layout.rows == b.layout.columns
        blocks = native_block_mm(*tensors, kind.block_length, is_square)
        return _finished(blocks, rows, columns, bias, out_dtype)
    a_codes, b_codes, a_scale, b_scale = native_operands(a, b)
    native_dtype = torch.bfloat16 if a_scale.dim() else out_dtype
    bias_inside = bias is not None and bias.dtype is native_dtype is torch.bfloat16 and b_codes.shape[1] == columns
    # torch.nn.functional.scaled_mm would be the public name. The operation below is the one that the compiler's
    # templates, its FLOP counter and its recomputation policies know (torch 2.11 and 2.13).
    out = scaled_mm(
        a_codes,
        b_codes,
        scale_a=a_scale,
        scale_b=b_scale,
        bias=bias if bias_inside else None,
        out_dtype=native_dtype,
        use_fast_accum=use_fast_accum,
    )
    return _finished(out, rows, columns, None if bias_inside else bias, out_dtype)


def _finished(out: Tensor, rows: int, columns: int, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Without the padding, with a bias."""
    if out.shape != (rows, columns):
        out = out[:rows, :columns].clone(memory_format=torch.contiguous_format)  # autograd.Functions return no views
    out = out if bias is None else out + bias
    # No `to` that returns its argument: with it torch 2.11's Dynamo makes the gradients of an autograd.Function zeros.
    return out if out.dtype is out_dtype else out.to(out_dtype)


def _padded(a: Operand, b: Operand) -> tuple[Operand, Operand]:
    """a [M, K] and b [K, N], with K and N completed to multiples of 16."""
    k, n = -a.size[1] % ALIGNMENT, -b.size[1] % ALIGNMENT
    return _completed(a, 0, k), _completed(b, k, n)


def _completed(operand: Operand, rows: int, columns: int) -> Operand:
    """With so many rows and columns of zeros more, and scales of 1 for blocks that begin there."""
    codes, scale, layout, _, outer_scale = operand
    padded = pad_codes(codes, rows // layout.rows_of_byte, columns // layout.columns_of_byte)
    if scale is not None and not layout.is_tensorwise:
        down, across = layout.scale_shape(*layout.size_of(padded))
        more = (0, across - scale.shape[1], 0, down - scale.shape[0])
        scale = F.pad(scale, more, value=1.0) if any(more) else scale
    return Operand(padded, scale, layout, None, outer_scale)

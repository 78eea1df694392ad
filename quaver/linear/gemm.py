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
from quaver.kernels.exact_mm import exact_float8_mm, varies_along_contracted
from quaver.kernels.native_blocks import ALIGNMENT, block_length, native_block_mm, pad_codes
from quaver.kernels.operands import Operand
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.formats import E5M2, FORMATS
from quaver.recipes.linear_casts import MATMULS, MatmulOptions
from quaver.recipes.scaling import BLOCK_SIZE, multiply_scale_, scale_blocks
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
) -> Tensor:
    """Multiply two scaled float8 matrices.

    Args:
        a: float8 [M, K], any strides.
        b: float8 [K, N], any strides.
        a_dequant_scale: float32, (), [M, 1], or any that `scaling.multiply_scale_` takes for a.
        b_dequant_scale: float32, (), [1, N], or any that it takes for b: [K, 1] or one a block of 128 x 128, say.
        out_dtype: float32, bfloat16 or float16.
        bias: [N] in a high-precision dtype, added before the last rounding where the backend can.
        use_fast_accum, scales_are_powers_of_2, emulate, pad: see `MatmulOptions` in config.py.
    Returns:
        [M, N] in out_dtype.
    Raises:
        ValueError: shapes, dtypes or scale shapes that do not fit.
    """
    _check_operands(a, b, a_dequant_scale, b_dequant_scale)
    check_memory(a, b, a_dequant_scale, b_dequant_scale, bias)
    options = MatmulOptions(use_fast_accum, scales_are_powers_of_2, emulate, pad)
    return mm(Operand(a, a_dequant_scale), Operand(b, b_dequant_scale), options, out_dtype, bias)


@phase("quaver::gemm")
def mm(a: Operand, b: Operand, options: MatmulOptions, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """a [M, K] @ b [K, N] + bias [N] -> [M, N] in out_dtype, for operands that fit and have memory.

    If one of them has no scale, both are in high precision.
    """
    if a.dequant_scale is None or b.dequant_scale is None:
        b_hp = b.data if b.data.dtype is out_dtype else b.data.to(out_dtype)  # quantized in the weight's dtype
        return torch.mm(a.data, b_hp) if bias is None else torch.addmm(bias.to(out_dtype), a.data, b_hp)
    if a.data.numel() == 0 or b.data.numel() == 0:
        out = torch.zeros((a.data.shape[0], b.data.shape[1]), dtype=out_dtype, device=a.data.device)
        return out if bias is None else out + bias.to(out_dtype)
    tensors = a.data, b.data, a.dequant_scale, b.dequant_scale
    if not is_cpu(a.data) and _backend_of(*tensors, options) is GemmBackend.NATIVE:
        return _native_mm(*tensors, bias, out_dtype, options.use_fast_accum)
    if not options.pad:
        return exact_float8_mm(*tensors, bias, out_dtype, options.scales_are_powers_of_2)
    columns = b.data.shape[1]
    padded = _padded(*tensors)
    bias = bias if bias is None else F.pad(bias, (0, padded[1].shape[1] - columns))
    out = exact_float8_mm(*padded, bias, out_dtype, options.scales_are_powers_of_2)
    return out if out.shape[1] == columns else out[:, :columns].contiguous()  # autograd.Functions return no views


def _check_operands(a: Tensor, b: Tensor, a_dequant_scale: Tensor, b_dequant_scale: Tensor) -> None:
    if a.dtype not in FORMATS or b.dtype not in FORMATS:
        raise ValueError(f"expected two float8 matrices, got {a.dtype} and {b.dtype}")
    if a.dtype is E5M2.dtype and b.dtype is E5M2.dtype:
        raise ValueError("no hardware multiplies e5m2 by e5m2; cast one operand to e4m3")
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"expected [M, K] and [K, N], got {list(a.shape)} and {list(b.shape)}")
    for name, codes, scale in (("a_dequant_scale", a, a_dequant_scale), ("b_dequant_scale", b, b_dequant_scale)):
        if scale.dtype is not torch.float32 or scale_blocks(scale, codes.shape) is None:
            raise ValueError(
                f"{name}: expected float32 of shape (), with 1 or all of the {list(codes.shape)} rows and columns, or "
                f"one a block of {BLOCK_SIZE}; got {scale.dtype} of {list(scale.shape)}"
            )


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


def _backend_of(
    a: Tensor, b: Tensor, a_dequant_scale: Tensor, b_dequant_scale: Tensor, options: MatmulOptions
) -> GemmBackend:
    kind = kind_of(a, b, a_dequant_scale, b_dequant_scale)
    if kind is ScaleKind.BLOCKS_OF_32 and not options.scales_are_powers_of_2:
        kind = None  # they have no mantissa in hardware
    return backend_for(a.device, kind, emulate=options.emulate)


def kind_of(a: Tensor, b: Tensor, a_dequant_scale: Tensor, b_dequant_scale: Tensor) -> ScaleKind | None:
    """The kind of the scales of a [M, K] and b [K, N]; None for those that no hardware multiplies."""
    if varies_along_contracted(a, a_dequant_scale, 1) or varies_along_contracted(b, b_dequant_scale, 0):
        length = block_length(a, b, a_dequant_scale, b_dequant_scale)
        return None if length is None or a.dtype is E5M2.dtype or b.dtype is E5M2.dtype else _BLOCKS[length]
    return ScaleKind.ROWWISE if a_dequant_scale.dim() > 0 or b_dequant_scale.dim() > 0 else ScaleKind.TENSORWISE


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
    if left.sharing is None or right.sharing is None:
        return None
    if not (left.is_blockwise or right.is_blockwise):
        return ScaleKind.ROWWISE if left.is_rowwise or right.is_rowwise else ScaleKind.TENSORWISE
    if left.block_size is None or right.block_size is None or not left.has_two_casts:
        return None
    has_mantissas = not (left.e8m0_mode and right.e8m0_mode)
    length, dtypes = left.block_size[1], (left.target_dtype, right.target_dtype)
    if length != right.block_size[1] or (length == 32 and has_mantissas) or E5M2.dtype in dtypes:
        return None
    return _BLOCKS[length]


def backend_of_casts(left: CastConfig, right: CastConfig, device: torch.device, *, emulate: bool) -> GemmBackend:
    """The backend on `device` of a matmul whose operands are cast so."""
    return backend_for(device, kind_of_casts(left, right), emulate=emulate)


def casts_of_matmuls(config: Float8LinearConfig) -> list[tuple[CastConfig, CastConfig]]:
    """The casts of both operands of each matmul in float8."""
    pairs = [(config.casts.of(*left), config.casts.of(*right)) for left, right in MATMULS.values()]
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
    for a, b, a_scale, b_scale in _probes(kind):
        values = multiply_scale_(a.double(), a_scale.double()), multiply_scale_(b.double(), b_scale.double())
        expected = torch.mm(*values)
        try:
            scales = a_scale.to(device), b_scale.to(device)
            out = _native_mm(a.to(device), b.to(device), *scales, None, torch.bfloat16, False)
            wrong = (out.float().cpu() - expected).abs().max() > expected.abs().max() * 2**-7
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return failure_of_hardware(error)
        if wrong:
            return f"a {a.shape[0]} x {b.shape[1]} matmul with {kind.value} scales gave a wrong result"
    return None


def failure_of_hardware(error: Exception) -> str:
    """The first line of an error; raises it where it says nothing about the hardware."""
    if any(words in str(error).lower() for words in _NOT_THE_HARDWARE):
        raise error
    return str(error).splitlines()[0]


def _probes(kind: ScaleKind) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Codes and scales of both kinds of matmuls of a linear; scales differ from each other."""
    size = 2 * kind.block_length or 32
    numbers = torch.arange(size * size, device="cpu")
    a, b = ((numbers % modulus - modulus // 2).float().view(size, size) for modulus in (13, 7))
    a_codes = a.to(torch.float8_e4m3fn)
    if kind.block_length:
        powers = torch.exp2((numbers % 7).float() - 3)
        for blocks in (2, size):
            yield (
                a_codes,
                b.to(torch.float8_e4m3fn),
                powers[: 2 * size].view(size, 2),
                powers[: 2 * blocks].view(2, blocks),
            )
        return
    row_scales = torch.arange(1, size + 1, dtype=torch.float32, device="cpu")
    # In memory of its own: `_aligned` copies no scale while compiled code probes.
    a_scale = row_scales.view(size, 1) if kind is ScaleKind.ROWWISE else row_scales[1].clone()
    b_scale = row_scales.view(1, size) if kind is ScaleKind.ROWWISE else 1 / row_scales[1]
    for b_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        yield a_codes, b.to(b_dtype), a_scale, b_scale


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


def native_operands(
    a: Tensor, b: Tensor, a_dequant_scale: Tensor, b_dequant_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The operands as the hardware reads them: K and N padded to 16, contiguous along K, both scales of one kind."""
    a, b, a_dequant_scale, b_dequant_scale = _padded(a, b, a_dequant_scale, b_dequant_scale)
    a, b = row_major(a), row_major(b.t()).t()
    if a_dequant_scale.dim() or b_dequant_scale.dim():
        a_dequant_scale = a_dequant_scale.expand(a.shape[0], 1).contiguous()
        b_dequant_scale = b_dequant_scale.expand(1, b.shape[1]).contiguous()
    return a, b, _aligned(a_dequant_scale), _aligned(b_dequant_scale)


def _aligned(scale: Tensor) -> Tensor:
    """`scale` at a multiple of 16 bytes, where cuBLAS reads one; scales of experts and of FSDP2 lie in one tensor.

    Dynamo traces no storage_offset. Compiled code multiplies experts by an operation, which comes here in eager code.
    """
    return scale if torch.compiler.is_compiling() or scale.storage_offset() % 4 == 0 else scale.clone()


def _native_mm(
    a: Tensor,
    b: Tensor,
    a_dequant_scale: Tensor,
    b_dequant_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    rows, columns = a.shape[0], b.shape[1]
    kind = kind_of(a, b, a_dequant_scale, b_dequant_scale)
    if kind is not None and kind.block_length:
        blocks = native_block_mm(a, b, a_dequant_scale, b_dequant_scale, kind.block_length)
        return _finished(blocks, rows, columns, bias, out_dtype)
    a, b, a_dequant_scale, b_dequant_scale = native_operands(a, b, a_dequant_scale, b_dequant_scale)
    native_dtype = torch.bfloat16 if a_dequant_scale.dim() else out_dtype
    bias_inside = bias is not None and bias.dtype is native_dtype is torch.bfloat16 and b.shape[1] == columns
    # torch.nn.functional.scaled_mm would be the public name. The operation below is the one that the compiler's
    # templates, its FLOP counter and its recomputation policies know (torch 2.11 and 2.13).
    out = scaled_mm(
        a,
        b,
        scale_a=a_dequant_scale,
        scale_b=b_dequant_scale,
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


def _padded(
    a: Tensor, b: Tensor, a_dequant_scale: Tensor, b_dequant_scale: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """a [M, K] and b [K, N] with their scales, K and N completed to multiples of 16."""
    k, n = -a.shape[1] % ALIGNMENT, -b.shape[1] % ALIGNMENT
    scales = _padded_scale(a, a_dequant_scale, 0, k), _padded_scale(b, b_dequant_scale, k, n)
    return pad_codes(a, 0, k), pad_codes(b, k, n), *scales


def _padded_scale(codes: Tensor, scale: Tensor, rows: int, columns: int) -> Tensor:
    """A scale for each new row or column where each has its own; the padding of blocks lies inside blocks."""
    if scale.dim() == 0:
        return scale
    more = [new if scale.shape[dim] == codes.shape[dim] != 1 else 0 for dim, new in enumerate((rows, columns))]
    return F.pad(scale, (0, more[1], 0, more[0]), value=1.0) if any(more) else scale

"""Chooses the backend of a float8 matmul: native or exact.

The granularity of the scales decides which of two backends computes it:

    scales                                                   on hardware that multiplies float8    elsewhere
    one per tensor; one per row of a and column of b         NATIVE                                EXACT
    of blocks: 1 x 128 or 1 x 32 of a                        NATIVE                                EXACT
    others, which vary along the contracted dim              EXACT                                 EXACT

NATIVE is the hardware's float8 matmul (kernels/native_mm.py). It is used if a trial, a tiny matmul, gives the right
result. The compute capability is not enough: rowwise scales are missing on sm_120 and were broken on sm_89. EXACT runs
on every device (kernels/exact_mm.py). docs/numerics.md says where each rounds. Rowwise scales vary along the contracted
dim if grad_input reads a rowwise weight that is stored once.
"""

from __future__ import annotations

import contextlib
import enum
import re
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from quaver.kernels.native_mm import ScaleKind, find_block_kind, native_mm
from quaver.kernels.operands import Operand, require
from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.formats import E5M2
from quaver.recipes.linear_casts import MATMULS
from quaver.recipes.scale_layout import COLUMNWISE, ROWWISE, TENSORWISE, ScaleLayout
from quaver.recipes.scaling import multiply_scale_
from quaver.runtime.devices import get_cuda_device, get_device_index, has_cuda, is_capturing, is_cuda_device
from quaver.runtime.errors import describe_error
from quaver.runtime.slow_paths import report_slow_path
from quaver.torch_private.dispatch import without_dispatch_modes
from quaver.torch_private.tracing import assume_constant_result


class GemmBackend(enum.Enum):
    """The implementation that runs a float8 matmul: the hardware's, or exact_mm.py."""

    NATIVE = "native"
    EXACT = "exact"


def choose_backend(
    device: torch.device,
    kind: ScaleKind | None,
    *,
    emulate: bool = False,
    is_native: Callable[[int, ScaleKind], bool] | None = None,
) -> GemmBackend:
    """Return the backend of `device` for a kind of scales.

    Args:
        kind: None if no hardware supports the scales.
        is_native: returns whether the CUDA device with this index multiplies `kind` natively; None tries `native_mm`.
    """
    is_native = is_native or _run_trial_as_constant
    if kind is None or emulate or not is_cuda_device(device) or not is_native(get_device_index(device), kind):
        return GemmBackend.EXACT
    return GemmBackend.NATIVE


def predict_scale_kind(left: CastConfig, right: CastConfig) -> ScaleKind | None:
    """Return the kind of the scales of a matmul from its operands' casts, or None if no hardware supports them."""
    a, b = left.layout, None if right.layout is None else right.layout.t()
    if a is None or b is None:
        return None
    if not (left.is_blockwise or right.is_blockwise):
        return ScaleKind.TENSORWISE if a.is_tensorwise and b.is_tensorwise else ScaleKind.ROWWISE
    has_mantissas = None in (left.scale_calculation_mode, right.scale_calculation_mode)
    kind = find_block_kind(a, b)
    if (kind is ScaleKind.BLOCKS_OF_32 and has_mantissas) or E5M2.dtype in (left.target_dtype, right.target_dtype):
        return None
    return kind


def predict_backend(left: CastConfig, right: CastConfig, device: torch.device, *, emulate: bool) -> GemmBackend:
    """Return the backend on `device` of a matmul from its operands' casts."""
    return choose_backend(device, predict_scale_kind(left, right), emulate=emulate)


def list_matmul_casts(config: Float8LinearConfig) -> dict[str, tuple[CastConfig, CastConfig]]:
    """Return the casts of both operands of each float8 matmul, by its name."""
    pairs = {name: (config.casts.get(*left), config.casts.get(*right)) for name, (left, right) in MATMULS.items()}
    return {name: pair for name, pair in pairs.items() if not pair[0].is_disabled}


def describe_backends(
    config: Float8LinearConfig,
    device: torch.device,
    backend_of: Callable[..., GemmBackend] = predict_backend,
    *,
    has_row_codes_only: bool = False,
) -> str:
    """Return the backends of a linear's float8 matmuls on `device`: "native", "exact" or "native and exact".

    "high precision" if the config disables all casts. `backend_of` chooses the backend of one matmul.
    `has_row_codes_only`: whether the weight is rowwise and stored once, so that grad_input reads row codes, too.
    """
    backends = {
        GemmBackend.EXACT
        if has_row_codes_only and matmul == "grad_input"
        else backend_of(*casts, device, emulate=config.emulate)
        for matmul, casts in list_matmul_casts(config).items()
    }
    return " and ".join(backend.value for backend in GemmBackend if backend in backends) or "high precision"


@assume_constant_result
def _run_trial_as_constant(device_index: int, kind: ScaleKind) -> bool:
    return run_trial(device_index, kind)


def run_trial(device_index: int, kind: ScaleKind, trial: NativeTrial | None = None) -> bool:
    """Try whether the device multiplies natively, report a failure as a slow path, and return the result.

    The trial runs once for each device and kind; see `find_native_failure`.
    """
    failure = find_native_failure(device_index, kind, trial)
    if failure is not None:
        report_slow_path(
            f"exact matmuls on cuda:{device_index}, {kind.value}",
            f"cuda:{device_index} runs float8 matmuls with {kind.value} scales on the exact backend, which is slower: "
            f"{failure}",
        )
    return failure is None


NativeTrial = Callable[[torch.device, "ScaleKind"], str | None]
"""A function that multiplies on a device and compares the result, such as `try_native_mm`."""


_native_failures: dict[tuple[int, ScaleKind], str | None] = {}
"""The result of each trial, by device and kind of scales: why the hardware failed, or None."""


def find_native_failure(device_index: int, kind: ScaleKind, trial: NativeTrial | None = None) -> str | None:
    """Try whether this CUDA (or ROCm) device multiplies float8 natively. Returns why not, or None if it does.

    `trial` is for kinds that `native_mm` does not multiply; None for `try_native_mm`. Results are cached.

    Raises:
        RuntimeError: the trial failed for another reason than what the device can run, such as too little memory, or
            would have to run while a CUDA graph is captured. Nothing is cached, and the next call tries again.
    """
    key = device_index, kind
    if key not in _native_failures:
        if not has_cuda():
            return "no CUDA device"
        if is_capturing():
            raise RuntimeError(
                "the first float8 matmul on a device runs a trial, which a CUDA graph cannot capture; "
                "run a step before the capture"
            )
        # The first call may be inside a forward. A dispatch mode, such as a selective checkpoint, must not see these
        # operations, because the recomputation will not repeat them.
        with without_dispatch_modes():
            _native_failures[key] = (trial or try_native_mm)(get_cuda_device(device_index), kind)
    return _native_failures[key]


@contextlib.contextmanager
def replace_trial_results(
    failures: Mapping[ScaleKind, str | None],
) -> Iterator[Mapping[tuple[int, ScaleKind], str | None]]:
    """Inside the block, `failures` replaces the trial results of the first device; other kinds are tried.

    For tests and predictions. Yields the results of all trials: by device and kind, why the hardware failed, or None.
    """
    before = dict(_native_failures)
    _native_failures.clear()
    _native_failures.update({(0, kind): failure for kind, failure in failures.items()})
    try:
        yield _native_failures
    finally:
        _native_failures.clear()
        _native_failures.update(before)


_CAPABILITY_CODES = (98, 209, 801)
"""The codes of CUDA (and HIP) errors about what a device can run: cudaErrorInvalidDeviceFunction,
cudaErrorNoKernelImageForDevice, cudaErrorNotSupported."""

_CAPABILITY_STATUSES = ("ARCH_MISMATCH", "INVALID_VALUE", "NOT_SUPPORTED")
"""The statuses of cuBLAS (and hipBLAS) about what a device can run. PyTorch raises all statuses as RuntimeError; the
others may pass, such as ALLOC_FAILED and EXECUTION_FAILED."""


def try_native_mm(device: torch.device, kind: ScaleKind) -> str | None:
    """Multiply on `device` and compare. Returns None if the product is right, else the error's first line.

    Errors that are not about the hardware are raised.
    """
    for operands in _make_trial_operands(kind):
        a, b = (
            multiply_scale_(operand.data.double(), require(operand.dequant_scale, "the dequant_scale"), operand.layout)
            for operand in operands
        )
        expected = torch.mm(a, b)
        try:
            out = native_mm(operands[0].to(device), operands[1].to(device), None, torch.bfloat16, use_fast_accum=False)
            is_right = is_expected_product(out, expected)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return describe_hardware_failure(error)
        if not is_right:
            return f"a {expected.shape[0]} x {expected.shape[1]} matmul with {kind.value} scales gave a wrong result"
    return None


def is_expected_product(out: Tensor, expected: Tensor) -> bool:
    """Return whether `out`, on any device, is `expected` up to rounding to bfloat16. NaN is never right."""
    return bool((out.float().cpu() - expected).abs().max() <= expected.abs().max() * 2**-7)


def describe_hardware_failure(error: Exception) -> str:
    """Return the first line of an error, or its class if it has no text. Raises it if it is not about the hardware."""
    status = re.search(r"BLAS_STATUS_(\w+)", str(error))
    is_transient = status is not None and status[1] not in _CAPABILITY_STATUSES
    if isinstance(error, torch.AcceleratorError):  # such as an illegal access, or a call that a capture forbids
        is_transient = getattr(error, "error_code", None) not in _CAPABILITY_CODES
    if is_transient or isinstance(error, torch.OutOfMemoryError):
        raise error
    return describe_error(error).splitlines()[0]


def _make_trial_operands(kind: ScaleKind) -> Iterator[tuple[Operand, Operand]]:
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

"""Models the milliseconds of a ledger on a device, by quaver/roofline/cost.py's model of a launch.

    seconds = max(FLOPs / rate, bytes / bandwidth, instructions / issue rate) + launches * KERNEL_LAUNCH_S

Rates and bandwidth are the data sheet's, times the shares that quaver/roofline/matmul.py takes from measurements.
quaver's and Inductor's kernels copy codes at this bandwidth; aten's strided copy of bytes is slower. Instructions are
counted if machine code was compiled (`--machine-code`). The issue rate is the best case: one instruction per cycle of
each of a multiprocessor's four schedulers, at the clock of the data sheet's FLOP/s. Not modeled: slower pipes (special
functions, integers, conversions), the rate of caches, the host, the overlap of kernels, partial last waves of tiles.
"""

from __future__ import annotations

from quaver.kernels.native_mm import ScaleKind
from quaver.lab.bench.ledger.entries import (
    KERNEL_CATEGORIES,
    LedgerEntry,
    find_matrices,
    find_query_and_key,
    find_scale_kind,
)
from quaver.lab.bench.ledger.gpu_code import GPU_PROPERTIES
from quaver.lab.bench.ledger.ledger import Ledger
from quaver.roofline.attention import CUDNN, FLASH, choose_attention_kernel, get_attention_rates
from quaver.roofline.cost import KERNEL_LAUNCH_S
from quaver.roofline.device_specs import DeviceSpec
from quaver.roofline.matmul import (
    MATMUL_SHARES,
    MEMORY_SHARE,
    get_best_tflops,
    predict_matmul_seconds,
    predict_move_seconds,
)
from quaver.roofline.scaled_matmul import get_scales_share

STRIDED_COPY_S_PER_ELEMENT = 7.4e-12
"""Time per element of aten's strided copy of bytes: 1.98 ms for 32768 x 8192 on an H100, where a compiled copy takes
0.224 ms (github.com/pytorch/pytorch/issues/113560). It is assumed for every GPU; one measurement on a loaded H200 was
closer to a compiled copy (docs/experiments/log.md)."""

_SCHEDULERS_PER_MULTIPROCESSOR = 4
"""Warp schedulers of a multiprocessor, since Volta."""


def predict_entry_seconds(
    entry: LedgerEntry, spec: DeviceSpec, *, by_shape: bool = False, sustained_share: float = 1.0
) -> float:
    """Return the modeled time of one entry, including its launches.

    Args:
        by_shape: take the rate of a matmul's shape instead of the best rate of the device.
        sustained_share: the share of their rates that matmuls and attention sustain in a long run.
    """
    multiplied_s = _predict_flop_seconds(entry, spec, by_shape=by_shape) / sustained_share if entry.flops else 0.0
    strided_s = entry.strided_elements * STRIDED_COPY_S_PER_ELEMENT
    seconds = max(
        predict_move_seconds(entry.moved_bytes, spec), multiplied_s, predict_issue_seconds(entry, spec), strided_s
    )
    return seconds + entry.num_launches * KERNEL_LAUNCH_S


def predict_issue_seconds(entry: LedgerEntry, spec: DeviceSpec) -> float:
    """Return the least time to issue the instructions of an entry, or 0 if no machine code was compiled."""
    if not entry.issued_instructions:
        return 0.0
    gpu = GPU_PROPERTIES[spec.name]
    return entry.issued_instructions / (_SCHEDULERS_PER_MULTIPROCESSOR * gpu.multi_processor_count * gpu.clock_hz)


def sum_milliseconds(ledger: Ledger, spec: DeviceSpec) -> dict[str, float]:
    """Return the modeled time of each category."""
    milliseconds = dict.fromkeys(KERNEL_CATEGORIES, 0.0)
    for entry in ledger.entries:
        milliseconds[entry.category] += 1e3 * predict_entry_seconds(entry, spec)
    return milliseconds


def _predict_flop_seconds(entry: LedgerEntry, spec: DeviceSpec, *, by_shape: bool) -> float:
    """Return the time of an entry's FLOPs: attention at the rate of its kernel and length, or a matmul."""
    if entry.category == "attention":
        query, _ = find_query_and_key(entry)
        rate = get_attention_rates(spec, CUDNN if CUDNN in entry.name else FLASH)[entry.is_backward]
        return entry.flops / (rate.compute_tflops(query.size[2]) * 1e12)
    in_float8 = entry.category == "float8 matmul"
    share = get_scales_share(find_scale_kind(entry), spec) if in_float8 else 1.0
    if not by_shape:
        return entry.flops / (get_best_tflops(spec, in_float8=in_float8) * share * 1e12)
    columns, contracted = entry.launch.writes[0].size[-1], find_matrices(entry)[0].size[-1]
    rows = entry.flops // (2 * columns * contracted)
    return predict_matmul_seconds(rows, contracted, columns, spec, in_float8=in_float8, scales_share=share)


def list_constants(spec: DeviceSpec) -> dict[str, str]:
    """Return the constants of the model with their sources, as text that is printed and saved with a result."""
    shares = MATMUL_SHARES[spec.name]
    measured = "Bekman, Machine Learning Engineering, Maximum Achievable Matmul FLOPS"
    kernel = choose_attention_kernel(spec.compute_capability)
    kinds = (ScaleKind.ROWWISE, ScaleKind.BLOCKS_OF_128 if spec.block_length == 128 else ScaleKind.BLOCKS_OF_32)
    scaled = ", ".join(f"{kind.value} {get_scales_share(kind, spec):.2f}" for kind in kinds)
    gpu = GPU_PROPERTIES[spec.name]
    times = f"{gpu.multi_processor_count} at {gpu.clock_hz / 1e9:g} GHz"
    rates = [f"{rate.best_tflops:g} x T / (T + {rate.half_rate_seq_len:g})" for rate in get_attention_rates(spec)]
    return {
        "bandwidth": f"{spec.memory_gb_per_s:g} GB/s (data sheet) x {MEMORY_SHARE:g} (quaver/roofline/matmul.py)",
        "bfloat16 matmuls": f"{spec.bfloat16_tflops:g} TFLOP/s (data sheet) x {shares.bfloat16:.2f} ({measured})",
        "float8 matmuls": f"{spec.float8_tflops:g} TFLOP/s (data sheet) x {shares.float8:.2f} ({measured})",
        "scales of rows and blocks": f"{scaled} of that (quaver/roofline/scaled_matmul.py)",
        "attention": f"{kernel}, at its length: {', '.join(rates)} TFLOP/s (quaver/roofline/attention.py)",
        "instructions": f"with --machine-code, {_SCHEDULERS_PER_MULTIPROCESSOR} a cycle of a multiprocessor ({times})",
        "launch": f"{1e6 * KERNEL_LAUNCH_S:g} us (quaver/roofline/cost.py)",
        "aten's strided copy": f"{1e12 * STRIDED_COPY_S_PER_ELEMENT:g} ps an element (pytorch/pytorch#113560)",
    }

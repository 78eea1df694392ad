"""Modelled milliseconds of a ledger on a device: quaver/roofline/cost.py's model of a launch, for each entry.

    seconds = max(FLOPs / rate, bytes / bandwidth, instructions / issue rate) + launches * KERNEL_LAUNCH_S

with the data sheet's rates and bandwidth, and the shares of them that quaver/roofline/cost.py takes from measurements.
A copy of codes is such a launch, of quaver's kernel or of Inductor's; aten's strided copy of bytes is slower.
Instructions are those of machine code, where it was compiled (`--machine-code`), and the issue rate is one of a warp in
each cycle of each of a multiprocessor's four schedulers, at the clock of the data sheet's FLOP/s: the least time.
Not modelled: slower pipes (special functions, integers, conversions), the rate of caches, the host, the overlap of
kernels, tiles that do not fill the last wave.
"""

from __future__ import annotations

from quaver.lab.bench.ledger.entries import CATEGORIES, LedgerEntry, matrices, query_and_key, scale_kind
from quaver.lab.bench.ledger.ledger import Ledger
from quaver.lab.memory.compiling.gpu_code import GPUS
from quaver.linear.gemm import ScaleKind
from quaver.roofline.attention import CUDNN, FLASH, kernel_of, rates_of
from quaver.roofline.cost import KERNEL_LAUNCH_S
from quaver.roofline.device_specs import DeviceSpec
from quaver.roofline.matmul import MATMUL_SHARES, MEMORY_SHARE, best_tflops, matmul_seconds, moved_s
from quaver.roofline.scaled_matmul import share_of_scales

STRIDED_COPY_S = 7.4e-12
"""Time of one element in aten's strided copy of bytes: 1.98 ms for 32768 x 8192 on an H100, where a compiled copy takes
0.224 ms (github.com/pytorch/pytorch/issues/113560). Assumed for every GPU; one round on a loaded H200 was nearer to a
compiled copy (docs/log.md)."""

_SCHEDULERS = 4


def seconds_of(entry: LedgerEntry, spec: DeviceSpec, *, by_shape: bool = False, sustained: float = 1.0) -> float:
    """Return the modelled time of one entry, its launches included.

    Args:
        by_shape: matmuls have the rate of their shape; else all have the best rate of the device.
        sustained: the share of its rates that matmuls and attention keep in a long run.
    """
    multiplied_s = _multiplied_s(entry, spec, by_shape=by_shape) / sustained if entry.flops else 0.0
    strided_s = entry.strided_elements * STRIDED_COPY_S
    seconds = max(moved_s(entry.moved_bytes, spec), multiplied_s, issue_s(entry, spec), strided_s)
    return seconds + entry.launches * KERNEL_LAUNCH_S


def issue_s(entry: LedgerEntry, spec: DeviceSpec) -> float:
    """Return the least time in which the instructions of an entry are issued; 0 where no machine code was compiled."""
    if not entry.issued:
        return 0.0
    gpu = GPUS[spec.name]
    return entry.issued / (_SCHEDULERS * gpu.multi_processor_count * gpu.clock_hz)


def milliseconds_by_category(ledger: Ledger, spec: DeviceSpec) -> dict[str, float]:
    """Return the modelled time of each category; they add up to the whole."""
    found = dict.fromkeys(CATEGORIES, 0.0)
    for entry in ledger.entries:
        found[entry.category] += 1e3 * seconds_of(entry, spec)
    return found


def _multiplied_s(entry: LedgerEntry, spec: DeviceSpec, *, by_shape: bool) -> float:
    """Return the time of the FLOPs of attention, at the rate of its kernel and its length, or of a matmul."""
    if entry.category == "attention":
        query, _ = query_and_key(entry)
        rate = rates_of(spec, CUDNN if CUDNN in entry.name else FLASH)[entry.is_backward]
        return entry.flops / (rate.tflops(query.size[2]) * 1e12)
    in_float8 = entry.category == "float8 matmul"
    share = share_of_scales(scale_kind(entry), spec) if in_float8 else 1.0
    if not by_shape:
        return entry.flops / (best_tflops(in_float8, spec) * share * 1e12)
    columns, contracted = entry.launch.writes[0].size[-1], matrices(entry)[0].size[-1]
    rows = entry.flops // (2 * columns * contracted)
    return matmul_seconds(rows, contracted, columns, in_float8, spec, share_of_scales=share)


def constants(spec: DeviceSpec) -> dict[str, str]:
    """Return each constant of the model with its source, for the reader of a result."""
    shares = MATMUL_SHARES[spec.name]
    measured = "Bekman, Machine Learning Engineering, Maximum Achievable Matmul FLOPS"
    kernel = kernel_of(spec.compute_capability)
    kinds = (ScaleKind.ROWWISE, ScaleKind.BLOCKS_OF_128 if spec.block_length == 128 else ScaleKind.BLOCKS_OF_32)
    scaled = ", ".join(f"{kind.value} {share_of_scales(kind, spec):.2f}" for kind in kinds)
    gpu = GPUS[spec.name]
    times = f"{gpu.multi_processor_count} at {gpu.clock_hz / 1e9:g} GHz"
    rates = [f"{rate.best:g} x T / (T + {rate.half:g})" for rate in rates_of(spec)]
    return {
        "bandwidth": f"{spec.memory_gb_per_s:g} GB/s (data sheet) x {MEMORY_SHARE:g} (quaver/roofline/cost.py)",
        "bfloat16 matmuls": f"{spec.bfloat16_tflops:g} TFLOP/s (data sheet) x {shares.bfloat16:.2f} ({measured})",
        "float8 matmuls": f"{spec.float8_tflops:g} TFLOP/s (data sheet) x {shares.float8:.2f} ({measured})",
        "scales of rows and blocks": f"{scaled} of that (quaver/roofline/scaled_matmul.py)",
        "attention": f"{kernel}, at its length: {', '.join(rates)} TFLOP/s (quaver/roofline/attention.py)",
        "instructions": f"with --machine-code, {_SCHEDULERS} a cycle of a multiprocessor ({times})",
        "launch": f"{1e6 * KERNEL_LAUNCH_S:g} us (quaver/roofline/cost.py)",
        "aten's strided copy": f"{1e12 * STRIDED_COPY_S:g} ps an element (pytorch/pytorch#113560)",
    }

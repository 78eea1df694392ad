"""The launches of compiled code as entries: category, bytes, FLOPs.

The category depends on what the launch writes:

    casts       float8 codes, with or without an amax or a norm in the same kernel
    amax        only amaxes for quantization
    copies      codes in another layout
    hp          other tensors in high precision: norms, SwiGLU, RoPE, the residual, and their gradients
    float8 matmul, bfloat16 matmul, attention
    small       vectors and scales

Bytes are counted as the launch moves them in memory. Inductor's counts are a best case, with two corrections here. A
kernel whose tiles are larger than the L2 cache reads a buffer once for each loop that loads it; loads that the cache
serves are counted separately. quaver's operations move more than their arguments, as ENTRY_CORRECTIONS describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

import torch

from quaver.kernels.native_mm import ScaleKind, _native_block_mm
from quaver.kernels.operands import FlatOperands
from quaver.kernels.triton_cast_blocks import casts_both_directions_at_once
from quaver.lab.bench.ledger.kernels import count_float64_operations, count_loads_in_loops, is_along_rows
from quaver.lab.bench.ledger.launches import BufferAccess, CompiledGraph, Launch
from quaver.lab.bench.ledger.operator_calls import OperatorCall, record_calls
from quaver.roofline.attention import CUDNN, FLASH
from quaver.roofline.block import ATTENTION_MATMULS

KERNEL_CATEGORIES = ("amax", "casts", "copies", "hp", "float8 matmul", "bfloat16 matmul", "attention", "small")
OVERHEAD_CATEGORIES = ("amax", "casts", "copies", "hp")
"""Categories of launches that move tensors and are neither matmuls nor attention."""

_SMALL_DIVISOR = 100
"""A launch is small if its tensors have less than a hundredth of the elements of the largest tensor."""

_AMAX_OPERATORS = frozenset({"amax", "max", "abs"})


@dataclass(frozen=True)
class LedgerEntry:
    """The work of one launch, or of an operator with the kernels that it launches."""

    category: str
    is_backward: bool
    name: str
    location: str
    fuses: tuple[str, ...]
    num_launches: int
    read_bytes: int
    written_bytes: int
    reread_bytes: int
    """Bytes of repeated reads, which `read_bytes` includes."""
    cached_bytes: int
    """Bytes that a cache serves again, which `read_bytes` does not include."""
    flops: int
    strided_elements: int
    """Elements of codes that aten's strided copy of bytes moves."""
    float64_operations: int
    """The number of values that are computed in float64."""
    launch: Launch
    issued_instructions: int = 0
    """Instructions of all warps of its Triton kernels; 0 before `add_machine_code` (machine_code.py)."""

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written."""
        return self.read_bytes + self.written_bytes


def list_entries(graphs: Sequence[CompiledGraph], l2_bytes: int) -> tuple[LedgerEntry, ...]:
    """Return the launches of all graphs in order, for a GPU whose L2 cache has `l2_bytes`."""
    largest = max(access.elements for graph in graphs for access in _list_accesses(graph.launches))
    entries = []
    for graph in graphs:
        for launch in graph.launches:
            entries += _make_entries(launch, graph.is_backward, largest / _SMALL_DIVISOR, l2_bytes)
    return tuple(entries)


def _list_accesses(launches: Sequence[Launch]) -> list[BufferAccess]:
    return [access for launch in launches for access in (*launch.reads, *launch.writes)]


def _make_entries(launch: Launch, is_backward: bool, small: float, l2_bytes: int) -> list[LedgerEntry]:
    reread, cached = _count_repeated_loads(launch, l2_bytes)
    category = _classify(launch, small)
    entry = LedgerEntry(
        category=category,
        is_backward=is_backward,
        name=launch.operator or " + ".join(kernel.name for kernel in launch.kernels),
        location=launch.location,
        fuses=launch.fuses,
        num_launches=max(1, len(launch.kernels)),
        read_bytes=sum(access.moved_bytes for access in launch.reads) + reread,
        written_bytes=sum(access.moved_bytes for access in launch.writes),
        reread_bytes=reread,
        cached_bytes=cached,
        flops=0,
        strided_elements=launch.writes[0].elements if category == "copies" and _is_copied_by_aten(launch) else 0,
        float64_operations=sum(count_float64_operations(kernel.source) for kernel in launch.kernels),
        launch=launch,
    )
    correct = next((correct for name, correct in ENTRY_CORRECTIONS.items() if launch.operator.startswith(name)), None)
    return [entry] if correct is None else correct(entry)


def _classify(launch: Launch, small: float) -> str:
    large = [access for access in (*launch.reads, *launch.writes) if access.elements > small]
    if not large:
        return "small"
    written = [access for access in launch.writes if access.elements > small]
    if any(access.is_float8 for access in written):
        read = [access for access in launch.reads if access.elements > small]
        return "copies" if read and all(access.is_float8 for access in (*read, *written)) else "casts"
    is_amax = launch.is_reduction and not written and _AMAX_OPERATORS.intersection(launch.fuses)
    return "amax" if is_amax else "hp"


def _is_copied_by_aten(launch: Launch) -> bool:
    """Return whether aten, not a kernel of Inductor, copies codes into another layout."""
    codes = next(access for access in launch.reads if access.is_float8)
    return launch.operator.startswith("aten.") and codes.stride != launch.writes[0].stride


def _count_repeated_loads(launch: Launch, l2_bytes: int) -> tuple[int, int]:
    """Return the bytes that loops load again from memory, and from a cache.

    The first loop that loads a buffer does not count, unless the kernel has stored the buffer.
    """
    reread = cached = 0
    for kernel in launch.kernels:
        loops = count_loads_in_loops(kernel.source)
        first = {kernel.pointers.get(access.name) for access in launch.reads}
        for access in (*launch.reads, *launch.writes):  # an in-place result shares its operand's pointer
            pointer = kernel.pointers.get(access.name, "")
            moved = max(0, loops.pop(pointer, 0) - (pointer in first)) * access.moved_bytes
            if is_along_rows(kernel.source) or access.moved_bytes <= l2_bytes:
                cached += moved
            else:
                reread += moved
    return reread, cached


def find_matrices(entry: LedgerEntry) -> tuple[BufferAccess, BufferAccess]:
    """Return the two operands of a matmul, skipping scalar scales."""
    operands = [access for access in entry.launch.reads if len(access.size) >= 2 and access.elements > 1]
    return operands[0], operands[1]


def find_scale_kind(entry: LedgerEntry) -> ScaleKind:
    """Return the kind of a float8 matmul's scales, from the scale of its first operand."""
    a, b = find_matrices(entry)
    scale = entry.launch.reads[entry.launch.reads.index(b) + 1]
    if scale.elements == 1:
        return ScaleKind.TENSORWISE
    blocks = scale.size[1] if len(scale.size) == 2 else 1
    if blocks == 1 and not entry.launch.operator.startswith("quaver.native_block_mm"):
        return ScaleKind.ROWWISE
    return ScaleKind.BLOCKS_OF_128 if blocks <= ceil(a.size[-1] / 128) else ScaleKind.BLOCKS_OF_32


def _correct_matmul(entry: LedgerEntry) -> list[LedgerEntry]:
    """Add the FLOPs of [.., m, k] @ [.., k, n]."""
    a, b = find_matrices(entry)
    category = "float8 matmul" if a.is_float8 else "bfloat16 matmul"
    return [replace(entry, category=category, flops=2 * prod(a.size) * b.size[-1])]


def _correct_grouped_matmul(entry: LedgerEntry) -> list[LedgerEntry]:
    """Count tokens [T, K] times the weights of their experts, [E, K, N] or [E * N, K], or a matmul that contracts T."""
    a, b = find_matrices(entry)
    result = entry.launch.writes[0]
    rows = a.size[0] if len(result.size) == 2 else 1
    contracted = a.size[-1] if len(result.size) == 2 else max(a.size)
    flops = 2 * contracted * (rows * result.size[-1] if len(result.size) == 2 else prod(result.size[-2:]))
    return [replace(entry, category="float8 matmul" if a.is_float8 else "bfloat16 matmul", flops=flops)]


def _correct_expert_matmul(entry: LedgerEntry) -> list[LedgerEntry]:
    """Count quaver's grouped matmul, preceded by copies of e4m3 codes that are not contiguous along the contracted dim.

    quaver's kernel makes the copies (experts/gpu_gemm.py). Contracted tokens are first padded with zeros. A square
    weight is contracted along its columns in the forward and along its rows in the backward. Codes with blockwise
    scales are widened instead.
    """
    a, b, *scales, ends = entry.launch.reads
    result = entry.launch.writes[0]
    along_blocks = any(
        len(scale.size) == 2 and scale.size[1] > 1 and scale.size[0] != ends.elements for scale in scales
    )
    if along_blocks or not a.dtype is b.dtype is torch.float8_e4m3fn:
        return _correct_grouped_matmul(entry)
    contracts_tokens = len(result.size) == 3
    is_along = b.size[-1] == a.size[-1] and not (entry.is_backward and b.size[-1] == result.size[-1])
    copied = (a, b) if contracts_tokens else () if is_along else (b,)
    copies = [
        replace(
            entry,
            category="copies",
            name=f"{entry.name}: copy",
            num_launches=3 if contracts_tokens else 1,
            read_bytes=operand.elements * (2 if contracts_tokens else 1),
            written_bytes=operand.elements * (3 if contracts_tokens else 1),
        )
        for operand in copied
    ]
    return [*copies, *_correct_grouped_matmul(entry)]


def _correct_block_matmul(entry: LedgerEntry) -> list[LedgerEntry]:
    """Count a matmul with blockwise scales, preceded by copies and pads of codes and scales."""
    b, b_scale = entry.launch.reads[1], entry.launch.reads[3]
    is_square = b_scale.size[-1] != b.size[-1]
    calls = record_calls(_native_block_mm, entry.launch.reads, find_scale_kind(entry).block_length, is_square)
    return [operation for call in calls for operation in _make_called_entries(entry, call)]


def _make_called_entries(entry: LedgerEntry, call: OperatorCall) -> list[LedgerEntry]:
    if "scaled_mm" in call.name:
        return _correct_matmul(entry)
    moves_codes = call.reads[0].element_size() == 1
    is_copied_by_quaver = call.name.startswith("quaver.") and any(
        operand.is_contiguous() for operand in (call.reads[0], call.reads[0].mT)
    )
    keeps_layout = call.reads[0].stride() == call.writes[0].stride() or "pad" in call.name
    part = replace(
        entry,
        category="copies" if moves_codes else "small",
        name=f"{entry.name}: {call.name}",
        num_launches=call.kernels,
        read_bytes=call.read_bytes,
        written_bytes=call.written_bytes,
        strided_elements=call.reads[0].numel() if moves_codes and not (is_copied_by_quaver or keeps_layout) else 0,
    )
    return [part]


def _correct_copy_of_codes(entry: LedgerEntry) -> list[LedgerEntry]:
    """Count a copy of the first argument, codes, into the other layout.

    quaver's kernel (quaver/kernels/triton_copy.py) copies codes that are contiguous or whose transpose is; aten copies
    others. A gradient after the first argument only orders the copy, and is not read.
    """
    codes = entry.launch.reads[0]
    is_copied_by_quaver = is_contiguous(codes) or is_contiguous(codes, transposed=True)
    moved = codes.elements * codes.dtype.itemsize
    strided = 0 if is_copied_by_quaver else codes.elements
    return [replace(entry, category="copies", read_bytes=moved, written_bytes=moved, strided_elements=strided)]


def is_contiguous(access: BufferAccess, *, transposed: bool = False) -> bool:
    """Return whether a matrix, or its transpose, is contiguous."""
    size, stride = ((lengths[::-1] if transposed else lengths) for lengths in (access.size, access.stride))
    contiguous_stride = (prod(size[dim + 1 :]) for dim in range(len(size)))
    return all(
        extent == 1 or step == expected for extent, step, expected in zip(size, stride, contiguous_stride, strict=True)
    )


def _correct_group_amaxes(entry: LedgerEntry) -> list[LedgerEntry]:
    """Count a second launch, which fills the amaxes with zeros."""
    return [replace(entry, category="small" if entry.category == "small" else "amax", num_launches=2)]


def _correct_cast_of_two_reads(entry: LedgerEntry) -> list[LedgerEntry]:
    """Count two reads of the operand, for its amaxes and for its codes."""
    operand = entry.launch.reads[0].moved_bytes
    return [replace(entry, read_bytes=entry.read_bytes + operand, num_launches=3)]


def _correct_cast_of_blocks(entry: LedgerEntry) -> list[LedgerEntry]:
    """Count one kernel; for 1 x n blocks in both directions of unaligned sizes two, which both read the operand."""
    operand, written = entry.launch.reads[0], sum(access.elements > 0 for access in entry.launch.writes)
    if written == len(FlatOperands._fields) - 2 and not casts_both_directions_at_once(*operand.size):
        return [replace(entry, read_bytes=entry.read_bytes + operand.moved_bytes, num_launches=2)]
    return [entry]


def find_query_and_key(entry: LedgerEntry) -> tuple[BufferAccess, BufferAccess]:
    """Return query and key of attention. Its backward reads a gradient before them."""
    reads = entry.launch.reads[entry.is_backward :]
    return reads[0], reads[1]


def _correct_attention(entry: LedgerEntry) -> list[LedgerEntry]:
    """Count causal attention, which computes half of the scores."""
    query, key = find_query_and_key(entry)
    sequences, heads, queries, size = query.size
    flops = ATTENTION_MATMULS[entry.is_backward] * 2 * sequences * heads * queries * key.size[2] * size // 2
    return [replace(entry, category="attention", flops=flops)]


EntryCorrection = Callable[[LedgerEntry], list[LedgerEntry]]

ENTRY_CORRECTIONS: dict[str, EntryCorrection] = {
    "quaver.native_block_mm": _correct_block_matmul,
    "quaver.exact_float8_mm": _correct_matmul,
    "quaver.to_column_major": _correct_copy_of_codes,
    "quaver.cast_rowwise": _correct_cast_of_two_reads,
    "quaver.cast_blockwise": _correct_cast_of_blocks,
    "quaver.group_amax": _correct_group_amaxes,
    "quaver.grouped_mm": _correct_expert_matmul,
    "aten._scaled_mm": _correct_matmul,
    "aten._scaled_grouped_mm": _correct_grouped_matmul,
    "aten._grouped_mm": _correct_grouped_matmul,
    "aten.mm": _correct_matmul,
    "aten.bmm": _correct_matmul,
    "aten.addmm": _correct_matmul,
    "mm": _correct_matmul,
    "bmm": _correct_matmul,
    "addmm": _correct_matmul,
    **{f"aten._scaled_dot_product_{kernel}_attention": _correct_attention for kernel in (FLASH, CUDNN)},
}
"""Corrects the entry of an operator, by the beginning of its name, for work that its arguments do not show."""

"""Reads the source of Inductor's Triton kernels: loops that load a buffer again, and float64 operations."""

from __future__ import annotations

import re
from collections import Counter
from math import prod

_REDUCTION_LOOP = "for r0_offset"
_LOAD_PATTERN = re.compile(r"tl\.load\((\w+)")
_SIZE_PATTERN = re.compile(r"^\s*(xnumel|ynumel|znumel|r0_numel|r1_numel) = (\d+)", re.M)
_ASSIGNMENT_PATTERN = re.compile(r"^\s*(_?tmp\w*|[xyz]\w*|r[01]_\w+) = (.*)$", re.M)
_OPERAND_PATTERN = re.compile(r"\b(?:_?tmp\w*|[xyz]\d+|[xyz]index|r[01]_\w+)\b")


def count_loads_in_loops(source: str) -> Counter[str]:
    """Count the loops of a kernel that load from each pointer.

    Triton keeps no tensor in registers from one loop to the next, so the machine code loads even what it has stored.
    """
    return Counter(
        pointer for loop in source.split(_REDUCTION_LOOP)[1:] for pointer in set(_LOAD_PATTERN.findall(loop))
    )


def is_along_rows(source: str) -> bool:
    """Return whether a tile is one or two rows, so that the next loop reads it from the cache.

    Other tiles have 8 to 256 rows or columns, which exceed the L2 cache for all multiprocessors together.
    """
    return "ReductionHint.INNER" in source


def count_float64_operations(source: str) -> int:
    """Count the values that a kernel computes in float64 in one launch.

    A value that depends only on the row of a tile is computed once a row, because Triton broadcasts it. A value that is
    loaded by a flat index is computed once an element.
    """
    sizes = {name[0]: int(size) for name, size in _SIZE_PATTERN.findall(source)}
    axes: dict[str, frozenset[str]] = {}
    doubles: set[str] = set()
    count = 0
    for name, value in _ASSIGNMENT_PATTERN.findall(source):
        operands = _OPERAND_PATTERN.findall(value)
        if name[0] in "xyzr" and not name.startswith("tmp"):
            axes[name] = frozenset(name[0])
            continue
        operand_axes = (axes.get(operand, frozenset(operand[0]) & set("xyzr")) for operand in operands)
        axes[name] = frozenset[str]().union(*operand_axes)
        if "[:, None]" in value or "promote_to_tensor" in value:  # the result of a reduction
            axes[name] -= {"r"}
        is_double = "tl.float64" in value or (not doubles.isdisjoint(operands) and ".to(tl." not in value)
        if is_double:
            doubles.add(name)
            count += prod(sizes.get(axis, 1) for axis in axes[name])
    return count

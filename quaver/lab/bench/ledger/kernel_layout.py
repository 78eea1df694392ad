"""The tiles that the programs of one of Inductor's Triton kernels load and store, read from its source."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

_SIZE_PATTERN = re.compile(r"^\s*(xnumel|ynumel|r0_numel) = (\d+)", re.M)
_ACCESS_PATTERN = re.compile(r"^( *).*tl\.(load|store)\((\w+) \+ (\(.*)$", re.M)
_UNIT_STRIDE_AXIS_PATTERN = re.compile(r"(?:^\(|\+ )(x|y|r0_)(?:\d+|index)?(?= \+|\)|,)")
_BYTES_OF_TYPE = {"bf16": 2, "fp16": 2, "fp32": 4, "fp64": 8, "i32": 4, "i64": 8}
_SECTOR_BYTES = 32
"""Bytes that an NVIDIA GPU moves at least ("Device Memory Accesses", CUDA C++ Programming Guide)."""


class TileAccess(NamedTuple):
    """A load or store of a tile."""

    is_load: bool
    element_bytes: int
    axes: frozenset[str]
    """The axes in the index."""
    unit_stride_axis: str
    """The axis along which elements are adjacent in memory; empty if unknown."""


@dataclass(frozen=True)
class KernelLayout:
    """The axes of a kernel and its accesses of tiles."""

    sizes: dict[str, int]
    """The size of each axis by its first letter: x, y or r."""
    accesses: tuple[TileAccess, ...]

    @classmethod
    def parse(cls, source: str, signature: dict[str, str]) -> KernelLayout:
        """Read a kernel's source.

        Args:
            signature: Triton's type of each argument, such as "*bf16".
        """
        sizes = {name[0]: int(size) for name, size in _SIZE_PATTERN.findall(source)}
        accesses = []
        for _, kind, pointer, index in _ACCESS_PATTERN.findall(source):
            index = index.split(", ")[0]
            axes = frozenset(axis for axis in sizes if re.search(rf"\b{axis}(?:0_)?\d", index))
            unit = _UNIT_STRIDE_AXIS_PATTERN.search(index)
            width = _BYTES_OF_TYPE.get(signature.get(pointer, "").lstrip("*"), 1)
            accesses.append(TileAccess(kind == "load", width, axes, unit[1][0] if unit else ""))
        return cls(sizes, tuple(accesses))

    def get_block(self, axis: str, config: dict[str, int]) -> int:
        """Return the extent of a program's tile along an axis; by default the whole axis."""
        return config.get({"x": "XBLOCK", "y": "YBLOCK", "r": "R0_BLOCK"}[axis], self.sizes.get(axis, 1))

    def count_programs(self, config: dict[str, int]) -> int:
        """Return the number of programs in a launch."""
        rows = config.get("RSPLIT_SIZE") or self.get_block("x", config)
        programs = ceil(self.sizes["x"] / rows)
        return programs * ceil(self.sizes["y"] / self.get_block("y", config)) if "y" in self.sizes else programs

    def count_sector_bytes(self, config: dict[str, int]) -> float:
        """Return the bytes that move for each element of the tile, in whole sectors of 32 bytes."""
        moved = 0.0
        for access in self.accesses:
            if len(access.axes) == len(self.sizes):
                adjacent = self.get_block(access.unit_stride_axis, config) if access.unit_stride_axis else 1
                moved += max(access.element_bytes, _SECTOR_BYTES / adjacent)
        return moved

    def count_loaded_bytes(self, config: dict[str, int]) -> float:
        """Return the bytes that one program loads, loops included."""
        extents = {axis: self.get_block(axis, config) for axis in self.sizes}
        if "r" in extents:  # loops cover the whole axis
            extents["r"] = ceil(self.sizes["r"] / extents["r"]) * extents["r"]
        extents["x"] = config.get("RSPLIT_SIZE") or extents["x"]
        elements = 1
        for extent in extents.values():
            elements *= extent
        widths = (access.element_bytes for access in self.accesses if access.is_load and self._is_in_loop(access))
        return float(elements * sum(widths))

    def _is_in_loop(self, access: TileAccess) -> bool:
        return "r" in access.axes or "r" not in self.sizes

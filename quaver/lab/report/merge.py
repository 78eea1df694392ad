"""Makes the heat maps of a run small enough for a page: merged samples and tensors show their worst value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quaver.lab.report.statistics import CellBytes

MAX_MAP_CELLS = 3_000_000
"""Bytes of all heat maps of a page; in base64 they take 4 MB."""
MAX_MAP_COLUMNS = 2000
"""About the pixels of a screen's width."""
MIN_MAP_COLUMNS = 200
"""Samples are merged down to this number of columns before tensors are merged."""


@dataclass(frozen=True)
class Grid:
    """Which samples share a column, and which tensors share a row."""

    column_edges: list[int]
    """The first sample of each column, and the number of samples."""
    rows: list[list[int]]
    """The tensors of each row."""

    def merge(self, cells: CellBytes) -> CellBytes:
        """Return the worst byte of each cell, [rows, columns], of `cells`, [samples, tensors]."""
        by_column = np.maximum.reduceat(cells, self.column_edges[:-1], axis=0)
        if len(self.rows) == cells.shape[1]:
            return by_column.T
        return np.stack([by_column[:, row].max(1) for row in self.rows])


def choose_grid(sample_count: int, kinds: Sequence[object], map_count: int, max_cells: int) -> Grid:
    """Choose the grid whose `map_count` maps together have about `max_cells` cells or fewer.

    Neighboring samples are merged first, down to `MIN_MAP_COLUMNS` columns, then neighboring tensors of one kind.

    Args:
        sample_count: at least 1.
        kinds: the kind of each tensor, such as its operand and cast. Tensors of different kinds never share a row.
    """
    per_sample = max(1, len(kinds) * map_count)
    columns = min(sample_count, MAX_MAP_COLUMNS, max(MIN_MAP_COLUMNS, max_cells // per_sample))
    tensors_per_row = max(1, -(-per_sample * columns // max_cells))
    edges = np.linspace(0, sample_count, columns + 1).astype(int).tolist()
    if tensors_per_row == 1:
        return Grid(edges, [[tensor] for tensor in range(len(kinds))])
    by_kind: dict[object, list[int]] = {}
    for tensor, kind in enumerate(kinds):
        by_kind.setdefault(kind, []).append(tensor)
    rows = [
        tensors[first : first + tensors_per_row]
        for tensors in by_kind.values()
        for first in range(0, len(tensors), tensors_per_row)
    ]
    return Grid(edges, rows)

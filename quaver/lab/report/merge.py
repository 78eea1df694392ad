"""Makes the heat maps of a run small enough for a page: samples and tensors are merged, and the worst value stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from quaver.lab.report.statistics import Codes

MOST_CELLS = 3_000_000
"""Bytes of all heat maps of a page, which base64 makes 4 MB."""
MOST_COLUMNS = 2000
FEWEST_COLUMNS = 200
"""Samples are merged to so many columns before tensors are merged."""


@dataclass(frozen=True)
class Grid:
    """Which samples share a column, and which tensors share a row.

    Attributes:
        columns: the first sample of each column, and the number of samples.
        rows: the tensors of each row.
    """

    columns: list[int]
    rows: list[list[int]]

    def merged(self, codes: Codes) -> Codes:
        """The worst byte of each cell, [rows, columns].

        Args:
            codes: [samples, tensors].
        """
        by_column = np.maximum.reduceat(codes, self.columns[:-1], axis=0)
        if len(self.rows) == codes.shape[1]:
            return by_column.T
        return np.stack([by_column[:, row].max(1) for row in self.rows])


def grid_of(samples: int, kinds: Sequence[object], statistics: int, cells: int = MOST_CELLS) -> Grid:
    """The grid whose maps together have about `cells` cells or fewer.

    Neighbouring samples are merged first, down to `FEWEST_COLUMNS` columns; then neighbouring tensors of one kind.

    Args:
        samples: at least 1.
        kinds: of each tensor, such as its operand and cast; tensors of two kinds never share a row.
        statistics: the number of maps.
    """
    per_sample = max(1, len(kinds) * statistics)
    columns = min(samples, MOST_COLUMNS, max(FEWEST_COLUMNS, cells // per_sample))
    together = max(1, -(-per_sample * columns // cells))
    edges = np.linspace(0, samples, columns + 1).astype(int).tolist()
    if together == 1:
        return Grid(edges, [[at] for at in range(len(kinds))])
    return Grid(edges, [row for kind in _of_one_kind(kinds) for row in _chunks(kind, together)])


def _of_one_kind(kinds: Sequence[object]) -> list[list[int]]:
    """The positions of each kind, in the order of the first of them."""
    order = {kind: at for at, kind in enumerate(dict.fromkeys(kinds))}
    positions = sorted(range(len(kinds)), key=lambda at: order[kinds[at]])
    return [list(same) for _, same in groupby(positions, key=lambda at: order[kinds[at]])]


def _chunks(positions: list[int], size: int) -> list[list[int]]:
    return [positions[at : at + size] for at in range(0, len(positions), size)]

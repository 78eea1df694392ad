"""float8.high_precision_schedule: which matmuls run in high precision, in which steps and blocks.

"forward: last 18% of steps", "grad_weight: last 15% of blocks", "all: first 100 steps in last 2 blocks"
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from quaver.recipes.linear_casts import BACKWARD_MATMULS, MATMULS
from quaver.runtime.errors import InputError

MATMULS_BY_PART = {"forward": ("output",), "backward": BACKWARD_MATMULS, "all": tuple(MATMULS)} | {
    name: (name,) for name in BACKWARD_MATMULS
}
_RANGE_PATTERN = re.compile(r"(first|last) ([1-9][0-9]*)(%?)(?: of)? (step|block)s?")


@dataclass(frozen=True)
class Range:
    """The first or last steps of a run, or blocks of a model."""

    is_last: bool
    number: int
    is_percentage: bool
    """`number` is a percentage, which is rounded up to whole steps or blocks."""

    def count(self, total: int) -> int:
        """Return how many of `total` steps or blocks are in the range."""
        return ceil(self.number * total / 100) if self.is_percentage else self.number

    def contains(self, index: int, total: int) -> bool:
        """Return whether step or block `index`, from 0, of `total` is in the range."""
        return index >= total - self.count(total) if self.is_last else index < self.count(total)


@dataclass(frozen=True)
class ScheduleEntry:
    """One entry of the schedule."""

    text: str
    matmuls: tuple[str, ...]
    steps: Range | None
    blocks: Range | None

    @classmethod
    def parse(cls, text: str) -> "ScheduleEntry":
        """Parse an entry. Raises InputError for any other form."""
        part, colon, where = text.partition(":")
        matches = [_RANGE_PATTERN.fullmatch(part_range.strip()) for part_range in where.split(" in ")]
        ranges = {match[4]: Range(match[1] == "last", int(match[2]), bool(match[3])) for match in matches if match}
        fits = colon and part.strip() in MATMULS_BY_PART and len(ranges) == len(matches)
        if not fits or any(part_range.is_percentage and part_range.number > 100 for part_range in ranges.values()):
            raise InputError(
                'entries such as "forward: last 18% of steps" or "all: last 9 steps in first 2 blocks", each of one '
                f"of {', '.join(MATMULS_BY_PART)}, got {text!r}"
            )
        return cls(text, MATMULS_BY_PART[part.strip()], ranges.get("step"), ranges.get("block"))


def list_high_precision_matmuls(
    entries: Sequence[ScheduleEntry], step: int, steps: int, block: int | None, blocks: int
) -> tuple[str, ...]:
    """Return the matmuls that run in high precision in `step` (from 1) of `steps`.

    Args:
        block: the index of the block, or None for a linear outside of all blocks, which entries for blocks skip.
    """
    in_high_precision = {
        matmul
        for entry in entries
        if entry.steps is None or entry.steps.contains(step - 1, steps)
        if entry.blocks is None or (block is not None and entry.blocks.contains(block, blocks))
        for matmul in entry.matmuls
    }
    return tuple(matmul for matmul in MATMULS if matmul in in_high_precision)

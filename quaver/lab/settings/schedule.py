"""float8.high_precision_schedule: which matmuls run in high precision, in which steps and blocks.

"forward: last 18% of steps", "grad_weight: last 15% of blocks", "all: first 100 steps in last 2 blocks"
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from quaver.recipes.linear_casts import BACKWARD_MATMULS, MATMULS

PARTS = {"forward": ("output",), "backward": BACKWARD_MATMULS, "all": tuple(MATMULS)} | {
    name: (name,) for name in BACKWARD_MATMULS
}
_RANGE = re.compile(r"(first|last) ([1-9][0-9]*)(%?)(?: of)? (step|block)s?")


@dataclass(frozen=True)
class Range:
    """The first or last of some steps, or of some blocks."""

    is_last: bool
    number: int
    is_share: bool
    """The number is percent; a part of a step or block counts as a whole one."""

    def count(self, of: int) -> int:
        """How many of so many."""
        return ceil(self.number * of / 100) if self.is_share else self.number

    def has(self, index: int, of: int) -> bool:
        """Whether number `index`, from 0, is among them."""
        return index >= of - self.count(of) if self.is_last else index < self.count(of)


@dataclass(frozen=True)
class ScheduleEntry:
    """One entry of the schedule."""

    text: str
    matmuls: tuple[str, ...]
    steps: Range | None
    blocks: Range | None

    @classmethod
    def parse(cls, text: str) -> "ScheduleEntry":
        """Raises ValueError for another form."""
        part, colon, where = text.partition(":")
        found = [_RANGE.fullmatch(each.strip()) for each in where.split(" in ")]
        ranges = {each[4]: Range(each[1] == "last", int(each[2]), bool(each[3])) for each in found if each}
        fits = colon and part.strip() in PARTS and len(ranges) == len(found)
        if not fits or any(each.is_share and each.number > 100 for each in ranges.values()):
            raise ValueError(
                'entries such as "forward: last 18% of steps" or "all: last 9 steps in first 2 blocks", each of one '
                f"of {', '.join(PARTS)}, got {text!r}"
            )
        return cls(text, PARTS[part.strip()], ranges.get("step"), ranges.get("block"))


def matmuls_at(
    entries: Sequence[ScheduleEntry], step: int, steps: int, block: int | None, blocks: int
) -> tuple[str, ...]:
    """The matmuls that run in high precision in `step` (from 1) of `steps`.

    `block`: the number of the block, from 0; None for what lies outside of all, where entries for blocks do not count.
    """
    found = {
        matmul
        for entry in entries
        if entry.steps is None or entry.steps.has(step - 1, steps)
        if entry.blocks is None or (block is not None and entry.blocks.has(block, blocks))
        for matmul in entry.matmuls
    }
    return tuple(matmul for matmul in MATMULS if matmul in found)

"""How the bytes of a training step's moments grow with the number of blocks that are alike.

A moment is what is alive after one event of a step. The step of a deeper model has the same moments in the same order,
and, for each stretch of them that a block brings, copies of it:

    3 blocks    begin  x y z  x y z  x y z  end
    4 blocks    begin  x y z  x y z  x y z  x y z  end

so a deep model's timeline is the shallow one's with stretches repeated: in the forward, in the backward, and where
gradients or parameters are gone through. And each moment's bytes grow by the same with each step in depth: what is kept
and stored of one block more. For a moment k of the first model, `moved` by what is repeated before it, in n steps:

    first[k] + n * (second[k + moved] - first[k])                            outside of the stretches
    first[k] + i * (second[k + moved + length] - first[k])                   in the copy of a stretch that has i others
             + (n - i) * (second[k + moved] - first[k])                      before it, and n - i behind it

Where the stretches are is found from three depths. The third is the check: each of its moments must be what the other
two say, so a moment that grows in another way, or comes elsewhere, is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Stretch(NamedTuple):
    """Moments of the first timeline that come once more with each step in depth."""

    start: int
    length: int


@dataclass(frozen=True)
class Growth:
    """A timeline by depth."""

    first: Sequence[int]
    """Bytes, by moment."""
    second: Sequence[int]
    """Of one step in depth more."""
    stretches: tuple[Stretch, ...]
    """In order, without overlap."""

    def timeline(self, steps: int) -> list[int]:
        """The bytes of all moments, this many steps in depth beyond the first timeline."""
        found: list[int] = []
        place = moved = 0
        for start, length in self.stretches:
            found += (self._bytes(k, moved, 0, 0, steps) for k in range(place, start))
            for before in range(steps + 1):
                found += (self._bytes(k, moved, length, before, steps) for k in range(start, start + length))
            place, moved = start + length, moved + length
        found += (self._bytes(k, moved, 0, 0, steps) for k in range(place, len(self.first)))
        return found

    def _bytes(self, moment: int, moved: int, length: int, before: int, steps: int) -> int:
        now = self.first[moment]
        if not length:
            return now + steps * (self.second[moment + moved] - now)
        early, late = self.second[moment + moved] - now, self.second[moment + moved + length] - now
        return now + before * late + (steps - before) * early


def without_releases(timeline: Sequence[int]) -> list[int]:
    """The moments of a timeline but for those between releases, of which none is the highest.

    What is released together goes in an order of its own: weights that autocast has cast go by their addresses.
    """
    neighbours = zip(timeline[:-2], timeline[1:-1], timeline[2:], strict=True)
    inside = [now for before, now, after in neighbours if not before >= now >= after]
    return [*timeline[:1], *inside, *timeline[1:][-1:]]


def growth_of(first: Sequence[int], second: Sequence[int], third: Sequence[int], steps: int) -> Growth | None:
    """How timelines grow with depth.

    Args:
        first, second, third: bytes by moment, of three depths. The second is one step deeper than the first.
        steps: from the first to the third, 2 or more.
    Returns:
        None unless the first two give each moment of the third.
    Raises:
        ValueError: too few steps for a check.
    """
    if steps < 2:
        raise ValueError(f"expected a third depth 2 steps or more beyond the first, got {steps}")
    stretches = _Search(first, second, third, steps).stretches()
    if stretches is None:
        return None
    growth = Growth(first, second, stretches)
    return growth if growth.timeline(steps) == list(third) else None


@dataclass(frozen=True)
class _Search:
    """Looks for the stretches from the first moment on; whether they are right shows in the third timeline."""

    first: Sequence[int]
    second: Sequence[int]
    third: Sequence[int]
    steps: int

    def stretches(self) -> tuple[Stretch, ...] | None:
        """None where there are none that explain all moments."""
        moments, more = len(self.first), len(self.second) - len(self.first)
        if more < 0 or len(self.third) != moments + self.steps * more:
            return None
        found: list[Stretch] = []
        place = moved = 0
        while moved < more:
            end = self._end(place, moved)
            stretch = self._stretch(place, end, moved, more - moved)
            if stretch is None:
                return None
            found.append(stretch)
            place, moved = stretch.start + stretch.length, moved + stretch.length
        return tuple(found) if self._end(place, moved) == moments else None

    def _end(self, place: int, moved: int) -> int:
        """The first moment from `place` on that does not grow by the same with each step if it is `moved` so far."""
        while place < len(self.first) and self._grows(place, moved):
            place += 1
        return place

    def _grows(self, moment: int, moved: int) -> bool:
        now = self.first[moment]
        return self.third[moment + self.steps * moved] - now == self.steps * (self.second[moment + moved] - now)

    def _stretch(self, place: int, end: int, moved: int, longest: int) -> Stretch | None:
        """The stretch before `end` that explains most moments behind it; of equals the shortest.

        It grows as what is before it does, and as what is behind it does, in its first copy and its last one.
        """
        best, reached = None, -1
        for length in range(1, min(longest, end - place) + 1):
            start = end - length
            reaches = self._end(start, moved + length)
            if reaches >= end and reaches > reached:
                best, reached = Stretch(start, length), reaches
        return best

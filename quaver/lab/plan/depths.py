"""The peak memory of a deep model from those of two shallow ones that differ by one period of equal blocks.

[Note: linear in depth] A step passes the same places at every depth: the embedding, each block, the output projection,
the optimizer; forward and backward. At a place, live bytes are linear in the number of blocks: each block that is
inserted adds its states everywhere, what it saved after its forward, its gradients after its backward. So the bytes at
each place follow from two depths, and the peak of the deep model is the largest over all places. It may lie elsewhere
than in the shallow ones: all places are followed, not only their peaks.

Two depths that differ by one block, or one period of unlike blocks, are checked against each other. In each phase of
each micro-batch the first blocks and one in the middle must grow by the same bytes when a block comes after them; one
in the middle and the last blocks, when it comes before them. Other places must grow as some block does. What grows
otherwise must stay below the peak: after the backward even if it grew by as much more as it differs from a block, and
in the optimizer, whose buckets may be fuller at another depth, even with its temporaries twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quaver.lab.memory.predict import Prediction
from quaver.lab.recorder.recorder import CATEGORIES

BLOCK = re.compile(r"\blayers\.(\d+)\b")
"""A block in the name of a module."""
_WITH_BLOCKS = ("forward", "backward", "recompute")
_TRANSIENT = [CATEGORIES.index(name) for name in ("gathered_weights", "communication", "temporaries")]


class NotLinearError(Exception):
    """Shallow models do not determine the memory of the whole one; says why."""


@dataclass(frozen=True)
class Depths:
    """Two depths of a model, and how the deeper whole follows from them."""

    shallow: int
    period: int
    """The number of blocks after which they repeat; the other depth has so many more."""
    repeats: int
    """How many periods the whole model has more than the shallow one."""
    before: int
    """The number of blocks in front of the repeating ones."""

    @property
    def deep(self) -> int:
        """The other depth."""
        return self.shallow + self.period

    @property
    def whole(self) -> int:
        """The depth of the whole model."""
        return self.shallow + self.period * self.repeats


class Place(NamedTuple):
    """A place in a step; `block` is -1 outside of blocks."""

    micro_batch: int
    phase: str
    module: str
    block: int


class Highest(NamedTuple):
    """The most bytes that are live at a place, by category, and the module that reaches them."""

    bytes: int
    categories: tuple[int, ...]
    module: str

    @property
    def transient(self) -> int:
        """Bytes that no state, gradient or saved tensor has."""
        return sum(self.categories[index] for index in _TRANSIENT)

    def moved(self, other: Highest, periods: int) -> Highest:
        """This with `periods` times the difference to the same place of a model with one period more."""
        pairs = zip(self.categories, other.categories, strict=True)
        categories = tuple(here + periods * (there - here) for here, there in pairs)
        return Highest(self.bytes + periods * (other.bytes - self.bytes), categories, self.module)


class AtPlace(NamedTuple):
    """`highest` at a place."""

    place: Place
    highest: Highest


class Alike(NamedTuple):
    """Places of the shallow model that must grow alike, where they are in the deep one, and where in the whole."""

    shallow: list[Place]
    deep: list[Place]
    whole: list[Place]


def depths_of(signatures: Sequence[object], period: int) -> list[Depths]:
    """Neighbouring depths that may determine a model whose blocks have these signatures; empty if it is no deeper.

    They have 3, 4 and 5 periods of equal blocks: at the ends a block may be unlike the next one, as where FSDP2 gathers
    ahead.

    Args:
        period: blocks repeat after a multiple of it.
    """
    whole = len(signatures)
    repeats_next = [signatures[i] == signatures[i + period] for i in range(whole - period)]
    begin, length = _longest_run(repeats_next)
    periods = (length + period) // period if length else 0
    counts = [periods - kept for kept in (3, 4, 5) if periods > kept]
    return [Depths(whole - left_out * period, period, left_out, begin) for left_out in counts] if counts[1:] else []


def highest_of_whole(shallow: Prediction, deep: Prediction, depths: Depths) -> AtPlace:
    """The highest place of the whole model.

    Raises:
        NotLinearError: see [Note: linear in depth].
    """
    here, there = highest_by_place(shallow), highest_by_place(deep)
    in_blocks = sorted(_in_blocks(here, there, depths), key=lambda alike: alike.whole[0].phase not in _WITH_BLOCKS)
    outside = sorted({place for place in here.keys() | there.keys() if place.block < 0})
    known: set[int] = set()
    certain: list[AtPlace] = []
    doubtful: list[tuple[int, str]] = []
    for alike in [*in_blocks, *(Alike([place], [place], [place]) for place in outside)]:
        pairs = [(_at(here, a), _at(there, b)) for a, b in zip(alike.shallow, alike.deep, strict=True)]
        slopes = {after.bytes - before.bytes for before, after in pairs}
        place = alike.whole[0]
        of_block = place.block >= 0 and place.phase in _WITH_BLOCKS
        if len(slopes) == 1 and (of_block or slopes <= known):
            known |= slopes if of_block else set()
            moved = [before.moved(after, depths.repeats) for before, after in pairs]
            certain += map(AtPlace, alike.whole, moved)
            continue
        unsure = max(after.transient for _, after in pairs)
        if place.phase != "optimizer":  # whose buckets may be fuller at another depth
            distance = min((abs(max(slopes) - slope) for slope in known), default=0)
            unsure = depths.repeats * (distance + max(slopes) - min(slopes))
        most = max(before.bytes for before, _ in pairs) + depths.repeats * max(slopes) + unsure
        doubtful.append((most, f"bytes in {_words(place)} grow by {sorted(slopes)} with one period of blocks more"))
    most, why = max(doubtful, default=(0, ""))
    top = max(certain, key=lambda at: at.highest.bytes, default=None)
    if top is None or most >= top.highest.bytes:
        raise NotLinearError(why)
    return top


def check_micro_batches(prediction: Prediction) -> None:
    """The last two of three micro-batches must have the same bytes at each place.

    Raises:
        NotLinearError: they have not.
    """
    highest = highest_by_place(prediction)
    for place, at in highest.items():
        if place.micro_batch == 2 and place.phase in ("forward", "backward", "recompute"):
            before = highest.get(place._replace(micro_batch=1))
            if before is None or before.bytes != at.bytes:
                raise NotLinearError(f"{_words(place)} has other bytes than in the micro-batch before")


def highest_by_place(prediction: Prediction) -> dict[Place, Highest]:
    """The most bytes at each place of a recorded step."""
    highest: dict[Place, Highest] = {}
    rows = prediction.report["timeline"]
    totals = [sum(row[2:]) for row in rows]
    for place, module, row, total in zip(*_places(prediction, totals), rows[1:], totals[1:], strict=True):
        if place not in highest or total > highest[place].bytes:
            highest[place] = Highest(total, tuple(row[2:]), module)
    return highest


def _places(prediction: Prediction, totals: list[int]) -> tuple[list[Place], list[str]]:
    """The place of each event, and its module; an event outside of modules is at the place of the one before.

    So is one that allocates nothing: a tensor is freed anywhere. Autocast frees its casts of weights at its end, those
    of checkpointed blocks too, in any order.
    """
    places, names, micro_batch, last_group = [], [], -1, ""
    for phase, begin, end in prediction.report["spans"]:
        group = "backward" if phase == "recompute" else phase
        if group != last_group:
            module, block, last_group = "", -1, group
            micro_batch += group == "forward"
        for event, name in enumerate(prediction.modules[begin:end], begin):
            if name and totals[event + 1] > totals[event]:
                found = BLOCK.search(name)
                module, block = ("", int(found[1])) if found else (name, -1)
            places.append(Place(micro_batch, phase, module, block))
            names.append(name)
    return places, names


def _in_blocks(here: dict[Place, Highest], there: dict[Place, Highest], depths: Depths) -> Iterator[Alike]:
    """Yield the places in blocks between which those of all other blocks lie: of the first ones, and of the last."""
    period, added = depths.period, depths.repeats * depths.period
    sides = ((range(depths.before + 2 * period), 0), (range(depths.before + period, depths.shallow), 1))
    for visit in sorted({place._replace(block=0) for place in here.keys() | there.keys() if place.block >= 0}):
        for blocks, is_end in sides:
            alike = Alike(*([visit._replace(block=i + is_end * n) for i in blocks] for n in (0, period, added)))
            passed = [i for i, _ in enumerate(blocks) if alike.shallow[i] in here or alike.deep[i] in there]
            if passed:
                yield Alike(*([places[i] for i in passed] for places in alike))


def _at(highest: dict[Place, Highest], place: Place) -> Highest:
    if place not in highest:
        raise NotLinearError(f"{_words(place)} is passed at one depth only")
    return highest[place]


def _longest_run(flags: Sequence[bool]) -> tuple[int, int]:
    """Where the longest run of true values begins, and its length."""
    best, begin = (0, 0), 0
    for index, flag in enumerate([*flags, False]):
        if not flag:
            best, begin = max(best, (begin, index - begin), key=lambda run: run[1]), index + 1
    return best


def _words(place: Place) -> str:
    where = f"block {place.block}" if place.block >= 0 else place.module or "no module"
    return f"{where} in {place.phase}"

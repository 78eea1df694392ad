"""Timelines of deep models from shallow ones: exact where a third depth agrees at every moment, refused where not."""

import random
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quaver.memory.runs.moments import growth_of, without_releases

GREATEST = st.integers(-(2**40), 2**40)
PARTS_OF_8B_IN_BFLOAT16 = {
    # Highest bytes of: the forward, the backward but for its last 1/blocks, the rest of it, what comes before the
    # optimizer. With 2 blocks the moment that is the highest of deeper backwards was in the third part, not the second.
    2: (9786570840, 10289903712, 10330372192, 7786436704),
    3: (10634881148, 11178682500, 8689387652, 8222660740),
    4: (11483191456, 12026992808, 9125611688, 8658884776),
    32: (35235880080, 35779681432, 21339884696, 20873157784),
}


def _step(blocks, changes, ends):
    """Bytes by event of a step whose every block allocates and frees alike, forward and backward, then its gradients.

    `changes` of the forward stay until the block's backward; what a block stores grows with the blocks.
    """
    forward, backward, begin, end = changes[0], changes[1], ends[0], ends[1]
    events = [1000 * blocks, *begin]
    events += [each for _ in range(blocks) for each in forward]
    events += begin
    events += [each for _ in range(blocks) for each in backward]
    events += [*end, 16 * blocks, -16 * blocks]
    events += [4] * (3 * blocks) + [-4] * (3 * blocks) + end
    total, totals = 0, []
    for each in events:
        total += each
        totals.append(total)
    return totals


changes = st.lists(GREATEST, min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(st.tuples(changes, changes), st.tuples(changes, changes), st.integers(7, 20))
def test_a_deep_step_moment_by_moment(blocks, ends, depth):
    growth = growth_of(*(_step(each, blocks, ends) for each in (3, 4, 6)), 3)
    assert growth is not None
    assert growth.timeline(0) == _step(3, blocks, ends)
    assert growth.timeline(depth - 3) == _step(depth, blocks, ends)


STEP = (([700, 40, -300], [-500, 90, -20, 10]), ([60, -5], [-30, 8]))


@pytest.mark.parametrize("place", range(0, len(_step(6, *STEP)), 3))
def test_one_moment_that_disagrees_is_seen(place):
    """Anywhere in the third step, the peak or not."""
    first, second, third = (_step(each, *STEP) for each in (3, 4, 6))
    assert growth_of(first, second, third, 3) is not None
    third[place] += 1
    assert growth_of(first, second, third, 3) is None


def test_moments_that_come_elsewhere_are_seen():
    first, second, third = (_step(each, *STEP) for each in (3, 4, 6))
    assert growth_of(first, second, [*third, third[-1]], 3) is None
    assert growth_of(first, second, third[:-1], 3) is None
    assert growth_of(second, first, third, 3) is None
    assert growth_of(first, second, _step(5, *STEP), 3) is None


def test_bytes_that_do_not_grow_by_the_same_are_seen():
    steps = [[total + blocks**2 for total in _step(blocks, *STEP)] for blocks in (3, 4, 6)]
    assert growth_of(*steps, 3) is None


def test_parts_that_end_elsewhere_at_each_depth_are_seen():
    """Llama 3 8B in bfloat16 on 8 ranks: from 2 and 3 blocks its peak is 3% too high, and a third depth says so."""
    two, three, four, deep = PARTS_OF_8B_IN_BFLOAT16.values()
    extrapolated = [a + 30 * (b - a) for a, b in zip(two, three, strict=True)]
    assert max(extrapolated) > 1.03 * max(deep)
    assert growth_of(two, three, four, 2) is None
    aligned = (0, 3)  # the parts that end at the same moment at each depth
    growth = growth_of(*([depth[part] for part in aligned] for depth in (two, three, four)), 2)
    assert growth.timeline(30) == [deep[part] for part in aligned]


def test_the_order_of_releases_does_not_count():
    """What one model releases in another order than the next, or a block at a time, is all released afterwards."""

    def step(blocks):
        made = [each for _ in range(blocks) for each in (50, 7, 900)]
        released = random.Random(blocks).sample(made, len(made))
        return list(accumulate([10, *made, *(-each for each in released), 5 * blocks]))

    assert growth_of(*map(step, (3, 4, 6)), 3) is None
    growth = growth_of(*(without_releases(step(blocks)) for blocks in (3, 4, 6)), 3)
    assert growth.timeline(17) == without_releases(step(20))


@given(st.lists(st.integers(0, 5)))
def test_releases_hold_no_highest_moment(timeline):
    kept = without_releases(timeline)
    assert kept[:1] == timeline[:1]
    assert kept[-1:] == timeline[-1:]
    assert max(kept, default=0) == max(timeline, default=0)
    assert without_releases(kept) == kept


def test_moments_between_releases_are_left_out():
    assert without_releases([1, 2, 5, 4, 4, 3, 6, 6, 2, 7]) == [1, 2, 5, 3, 6, 2, 7]
    assert without_releases([5, 4, 3]) == [5, 3]
    assert without_releases([3, 4, 5]) == [3, 4, 5]


def test_two_depths_check_nothing():
    with pytest.raises(ValueError, match="expected a third depth 2 steps or more beyond the first, got 1"):
        growth_of([1], [2], [2], 1)

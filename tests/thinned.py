"""Thins a product of test parameters to all pairs. The other parameter sets run in `make nightly`."""

import itertools
from collections.abc import Container, Iterable
from typing import Any

import pytest


def thinned(*axes: Iterable[Any], together: int = 2) -> list[Any]:
    """Return a parameter set for each combination of the axes' values.

    A small subset covers each pair of values of two axes, or with `together=1` each value. The rest is marked
    `nightly`.
    """
    axes = tuple(map(tuple, axes))
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = {part for combination in combinations for part in _parts(combination, together)}
    kept = set()
    while missing:
        best = max(combinations, key=lambda combination: len(missing & _parts(combination, together)))
        kept.add(best)
        missing -= _parts(best, together)
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, combination, strict=True)),
            marks=() if combination in kept else pytest.mark.nightly,
        )
        for combination in combinations
    ]


def first(count: int, cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return parameter sets, marked `nightly` after the first `count`."""
    cases = list(cases)
    return [*cases[:count], *at_night(cases[count:])]


def at_night(cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Return parameter sets that are marked `nightly`."""
    return [pytest.param(*case, marks=pytest.mark.nightly) for case in cases]


def by_day(names: Container[Any], values: Iterable[Any]) -> list[Any]:
    """Return the values of one parameter, marked `nightly` unless `names` has them."""
    return [pytest.param(value, marks=() if value in names else pytest.mark.nightly) for value in values]


def _parts(combination: tuple[int, ...], together: int) -> set[tuple[tuple[int, int], ...]]:
    return set(itertools.combinations(enumerate(combination), together))

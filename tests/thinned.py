"""Thins a product of test parameters to pairs; `make nightly` runs the rest of the product."""

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def thinned(*axes: Iterable[Any]) -> list[Any]:
    """Parameter sets for every combination of the axes' values.

    A small part of them has each pair of values of each two axes; the rest is marked `nightly`.
    """
    axes = tuple(map(tuple, axes))
    combinations = list(itertools.product(*(range(len(axis)) for axis in axes)))
    missing = set().union(*map(_pairs, combinations))
    kept = set()
    while missing:
        best = max(combinations, key=lambda combination: len(missing & _pairs(combination)))
        kept.add(best)
        missing -= _pairs(best)
    return [
        pytest.param(
            *(axis[index] for axis, index in zip(axes, combination, strict=True)),
            marks=() if combination in kept else pytest.mark.nightly,
        )
        for combination in combinations
    ]


def _pairs(combination: tuple[int, ...]) -> set[tuple[tuple[int, int], tuple[int, int]]]:
    return set(itertools.combinations(enumerate(combination), 2))

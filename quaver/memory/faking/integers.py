"""Finds out whether the sizes of a step's tensors depend on integers that it reads from tensors.

A prediction answers such reads by 1 (Note: numbers that are read, in fakes.py). A loop count or a check may be all that
they are for, but as a length they would make tensors too small. So the step is done once more with 2 in their place.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quaver.memory.faking.fakes import Fakes
from quaver.memory.faking.refusals import depends_on
from quaver.recorder.storages import StorageWatch


class _Sizes(StorageWatch):
    """The bytes of all storages that operators allocate, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes_bytes: list[int] = []

    def storage_appeared(self, key: int, size_bytes: int, tensor: Tensor | None, operator: str | None) -> None:
        if operator is not None:
            self.sizes_bytes.append(size_bytes)


def check_integers(step: Callable[[], None], fakes: Fakes) -> list[str]:
    """Do two more steps, if integers were read, and compare what they allocate.

    Returns:
        What an estimate must say of it; nothing where sizes do not depend on what was read.
    Raises:
        NotImplementedError: sizes depend on an integer that was read, and no estimate was asked for.
    """
    if not fakes.integer_reads:
        return []
    sizes = []
    for fakes.integer in (2, 1):
        with _Sizes() as watch:
            step()
        sizes.append(watch.sizes_bytes)
    if sizes[0] == sizes[1]:
        return []
    if fakes.assumptions is None:
        raise depends_on(fakes.integer_reads)
    return [
        f"estimate: sizes depend on an integer that was taken for 1, read in {each}" for each in fakes.integer_reads
    ]

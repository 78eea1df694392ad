"""Checks whether the sizes of a step's tensors depend on integers that it reads from tensors.

A prediction answers such reads with 1 ([Note: values that are read] in fakes.py). As a loop count or in a check that
does no harm, but as a length it makes tensors too small. So the step is repeated with 2, and the sizes compared.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quaver.memory.faking.fakes import Fakes
from quaver.memory.faking.refusals import depends_on
from quaver.recorder.storages import StorageWatch


class _Sizes(StorageWatch):
    """The bytes of the storages that operators allocate, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes_bytes: list[int] = []

    def storage_appeared(self, key: int, size_bytes: int, tensor: Tensor | None, operator: str | None) -> None:
        if operator is not None:
            self.sizes_bytes.append(size_bytes)


def check_integers(step: Callable[[], None], fakes: Fakes) -> list[str]:
    """If integers were read, run two more steps and compare their allocations.

    Returns:
        Notes for an estimate; none if sizes do not depend on the integers.
    Raises:
        NotImplementedError: sizes depend on an integer, and no estimate was asked for.
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
        f"estimate: sizes depend on an integer that was assumed to be 1, read in {each}" for each in fakes.integer_reads
    ]

"""Errors for operators that cannot be predicted without values: one line with the operator, the module and its code."""

from __future__ import annotations

from collections.abc import Iterable

from torch._subclasses.fake_tensor import UnsupportedOperatorException

from quaver.memory.faking.places import place_of


def refusal(error: Exception) -> NotImplementedError:
    """The error for an operator that fake tensors do not support."""
    place = place_of(error)
    operator = f"{error.args[0]} in {place}" if place else str(error.args[0])
    if isinstance(error, UnsupportedOperatorException):
        return NotImplementedError(
            f"expected operators with a fake implementation, got {operator}, which has none; give it one with "
            "torch.library.register_fake, or ask for an estimate"
        )
    return NotImplementedError(
        f"expected operators whose results have shapes that do not depend on values, got {operator}; memory can only "
        "be predicted without it, or as an estimate, with the largest possible result"
    )


def depends_on(places: Iterable[str], error: Exception | None = None) -> NotImplementedError:
    """The error for a step that allocates other sizes, or fails, with another integer in place of those read."""
    became = "other sizes for another integer" if error is None else f"an error ({' '.join(str(error).split())})"
    return NotImplementedError(
        f"expected sizes that do not depend on integers read from tensors, got {became} read in "
        f"{' and in '.join(sorted(places))}; memory can only be predicted without that"
    )

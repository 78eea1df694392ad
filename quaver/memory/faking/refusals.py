"""The errors of a prediction that would need numbers: one line each, with the operator, the module and its code."""

from __future__ import annotations

from collections.abc import Iterable

from torch._subclasses.fake_tensor import UnsupportedOperatorException

from quaver.memory.faking.places import place_of


def refusal(error: Exception) -> NotImplementedError:
    """What to say of an operator that fake tensors do not know."""
    place = place_of(error)
    operator = f"{error.args[0]} in {place}" if place else str(error.args[0])
    if isinstance(error, UnsupportedOperatorException):
        return NotImplementedError(
            f"expected operators that tell what they return, got {operator}, which has no fake implementation; give it "
            "one with torch.library.register_fake, or ask for an estimate"
        )
    return NotImplementedError(
        f"expected operators whose results have shapes that do not depend on numbers, got {operator}; memory can only "
        "be predicted without it, or as an estimate, with as large a result as there can be"
    )


def depends_on(places: Iterable[str], error: Exception | None = None) -> NotImplementedError:
    """What to say where the step is another one, or fails, with other integers than those read in these places."""
    became = "other ones with another integer" if error is None else f"an error ({' '.join(str(error).split())})"
    return NotImplementedError(
        f"expected sizes that do not depend on integers read from tensors, got {became} read in "
        f"{' and in '.join(sorted(places))}; memory can only be predicted without that"
    )

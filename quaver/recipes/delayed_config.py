"""`DelayedScalingConfig`: how a scale follows from the amaxes of earlier steps."""

from __future__ import annotations

from dataclasses import dataclass

from quaver.recipes.field_checks import check_field, convert_field


@dataclass(frozen=True)
class DelayedScalingConfig:
    """How delayed scaling computes a scale from earlier amaxes, in `sync_float8_amax_and_scale_history`.

        amax        = max or most recent of the history, this step's amax included
        quant_scale = (format.max / (amax * headroom)) / 2**margin        unchanged where amax is 0 or not finite

    With the defaults of `margin` and `headroom`, and `nonfinite_amax="keep_scale"`, this is TransformerEngine's rule.

    Args:
        history_len: the number of steps in the history. With "max", the scale stays small for this many steps after a
            spike, and fits again one step after any growth.
        scale_fn_name: "max" or "most_recent".
        margin: how many powers of two to stay below the largest number of the format.
        headroom: the factor by which a tensor may grow from one step to the next before it saturates.
        nonfinite_amax: what to do with an inf or a NaN amax. "skip": leave it out of the history. "keep_scale": add it
            to the history; the scale does not change while the amax above is not finite.
    Raises:
        ValueError: a field of the wrong type or out of range.
    """

    history_len: int = 16
    scale_fn_name: str = "max"
    margin: int = 0
    headroom: float = 1.0
    nonfinite_amax: str = "skip"

    def __post_init__(self) -> None:
        for name in ("history_len", "margin"):
            convert_field(self, name, int)
        check_field(1 <= self.history_len <= 65536, "history_len", "1 to 65536 steps", self.history_len)
        for name, choices in (("scale_fn_name", _SCALE_FN_NAMES), ("nonfinite_amax", _NONFINITE_POLICIES)):
            value = getattr(self, name)
            check_field(value in choices, name, f"one of {', '.join(choices)}", value)
        check_field(0 <= self.margin <= 16, "margin", "0 to 16 powers of two", self.margin)
        is_number = isinstance(self.headroom, int | float) and not isinstance(self.headroom, bool)
        check_field(is_number and 1 <= self.headroom <= 65536, "headroom", "a factor of 1 to 65536", self.headroom)


_SCALE_FN_NAMES = ("max", "most_recent")
_NONFINITE_POLICIES = ("skip", "keep_scale")

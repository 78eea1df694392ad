"""How a setting that cannot be is refused: by its name, with what was expected, what came and what to do."""

import math
from typing import Any


def require(holds: bool, name: str, expected: str, got: object, fix: str = "") -> None:
    """Raise ValueError saying what field `name` must be, what it is, and what to do, unless `holds`."""
    if not holds:
        raise ValueError(f"{name} must be {expected}, got {got!r}" + (f"; {fix}" if fix else ""))


def require_positive(section: str, owner: object, *names: str) -> None:
    """Refuse a value below 1 of these fields."""
    for name in names:
        value = getattr(owner, name)
        require(value >= 1, f"{section}.{name}", "at least 1", value)


def require_default(section: str, owner: Any, name: str, unless: str, fix: str = "") -> None:
    """Refuse a value of field `name` that nothing would read."""
    value, default = getattr(owner, name), type(owner).__dataclass_fields__[name].default
    require(value == default, f"{section}.{name}", f"its default, {default!r}, unless {unless}", value, fix)


def require_finite(section: str, owner: object, *names: str) -> None:
    """Refuse inf, NaN and negative values of these fields."""
    for name in names:
        value = getattr(owner, name)
        require(math.isfinite(value) and value >= 0, f"{section}.{name}", "finite and not negative", value)


def is_folder_name(name: str) -> bool:
    """Whether `name` is empty or names one folder, on any system, and not a path."""
    return name not in (".", "..") and not any(sep in name for sep in "/\\")

"""`replace_attribute`: replaces an attribute of PyTorch inside a block, where PyTorch has no hook, and restores it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replace_attribute(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace an attribute of a class or module inside the block, in all threads. Blocks nest.

    Raises:
        AttributeError: `owner` has no such attribute, in which case nothing would use the replacement.
        RuntimeError: at the exit, if the attribute was replaced again inside the block and is not restored.
    """
    if not hasattr(owner, name):
        raise AttributeError(f"expected {owner.__name__}.{name} to replace, got none; this version has no such name")
    is_inherited = name not in vars(owner)
    original = None if is_inherited else vars(owner)[name]
    setattr(owner, name, replacement)
    try:
        yield
        if vars(owner).get(name) is not replacement:
            raise RuntimeError(
                f"{owner.__name__}.{name} was replaced inside a block that replaces it, and not restored"
            )
    finally:
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

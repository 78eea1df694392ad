"""Keeps transformers from taking fake tensors for tracing.

transformers (5.23) treats fake tensors as tracing, and then builds attention masks that a training step does not have.
Inside a prediction its `is_fake_tensor` is replaced. It has no hook for that. This can go when `is_tracing` in
transformers.utils.import_utils no longer asks.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ASKS = "transformers.utils.import_utils", "is_fake_tensor"


@contextmanager
def as_if_not_fake() -> Iterator[None]:
    """If transformers is imported, have it take fake tensors for real ones inside the block."""
    module, name = sys.modules.get(_ASKS[0]), _ASKS[1]
    asked = getattr(module, name, None)
    if module is None or asked is None:
        yield
        return
    setattr(module, name, lambda tensor: False)
    try:
        yield
    finally:
        setattr(module, name, asked)

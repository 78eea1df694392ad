"""Keeps libraries from doing other work because tensors are fake.

transformers (seen in 5.23) asks whether a tensor is fake, takes that for tracing, and then makes attention masks that
a step of training leaves out. A prediction is about that step: it is told that no tensor is fake, and its own checks,
such as whether a mask is all true, are then answered as all numbers are that are read. Can go when
transformers.utils.import_utils.is_fake_tensor is no longer asked by `is_tracing`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

_ASKS = "transformers.utils.import_utils", "is_fake_tensor"


@contextmanager
def as_if_not_fake() -> Iterator[None]:
    """Have the libraries that were imported already take fake tensors for real ones inside the block."""
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

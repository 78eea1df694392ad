"""torch.distributed.checkpoint in one process: no warning that it is alone, and the errors themselves that it wraps."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException


@contextmanager
def single_process() -> Iterator[None]:
    """Around a save or a load with no_dist: raise the first cause of a CheckpointException instead of it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        try:
            yield
        except CheckpointException as error:
            raise next(failure[0] for failure in error.failures.values()) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)

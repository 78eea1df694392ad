"""The progress of making tokens, for the caller of `load_data` to show."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Advance = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


class CacheProgress:
    """Receives what the cache does while a run waits for its tokens, and shows nothing; subclasses show it."""

    def print_line(self, text: str) -> None:
        """Report in one line what the cache does or waits for."""

    def show_reading(self, label: str, total_bytes: int) -> AbstractContextManager[Advance]:
        """Return a context manager for the reading of `total_bytes`, which yields the function that counts them."""
        return nullcontext(lambda count: None)

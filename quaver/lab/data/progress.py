"""How the making of tokens is shown: by whoever loads the data, and by nobody unless they do."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Advance = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


class CacheProgress:
    """Hears what the cache does while a run waits for its tokens; shows nothing."""

    def say(self, text: str) -> None:
        """One line: what is done, or waited for."""

    def reading(self, label: str, total_bytes: int) -> AbstractContextManager[Advance]:
        """Around the reading of `total_bytes`."""
        return nullcontext(lambda count: None)

"""Shows how far a long read is: a bar on a terminal, now and then a line elsewhere, nothing where it is quiet."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 30.0
"""Seconds between two lines where there is no terminal."""

Advance = Callable[[int], None]
"""Tells of so many bytes more that were read."""


def say(text: str, *, quiet: bool) -> None:
    """Print one plain line, unless `quiet`."""
    Console(quiet=quiet).print(text, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def byte_progress(label: str, total: int, *, quiet: bool) -> Iterator[Advance]:
    """Show progress over `total` bytes under `label` while the block runs."""
    console = Console(quiet=quiet)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        DownloadColumn(),
        TimeRemainingColumn(compact=True),
        console=console,
        disable=quiet or not console.is_terminal,
        refresh_per_second=2,
        transient=True,
    )
    done, last_line = 0, time.monotonic()
    if not console.is_terminal:
        say(f"{label}: {total:,} bytes", quiet=quiet)
    with bar:
        task = bar.add_task(label, total=total)

        def advance(count: int) -> None:
            nonlocal done, last_line
            done += count
            bar.advance(task, count)
            if not console.is_terminal and time.monotonic() - last_line > LINE_EVERY_S:
                last_line = time.monotonic()
                say(f"{label}: {done / max(total, 1):.0%}", quiet=quiet)

        yield advance

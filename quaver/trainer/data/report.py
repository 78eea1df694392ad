"""Shows the progress of a long read: a bar on a terminal, one line elsewhere, nothing if quiet."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from quaver.trainer.display import stdout_console

Advance = Callable[[int], None]
"""Called with the number of bytes read since the last call."""


def say(text: str, *, quiet: bool) -> None:
    """Print one plain line, unless `quiet`."""
    stdout_console(quiet=quiet).print(text, soft_wrap=True, highlight=False, markup=False)


@contextmanager
def byte_progress(label: str, total: int, *, quiet: bool) -> Iterator[Advance]:
    """Show progress over `total` bytes under `label` while the block runs."""
    console = stdout_console(quiet=quiet)
    if not console.is_terminal:
        say(f"{label}: {total:,} bytes", quiet=quiet)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=None), DownloadColumn(), TimeRemainingColumn()
    disable = quiet or not console.is_terminal
    with Progress(*columns, console=console, disable=disable, refresh_per_second=2, transient=True) as bar:
        task = bar.add_task(label, total=total)
        yield lambda count: bar.advance(task, count)

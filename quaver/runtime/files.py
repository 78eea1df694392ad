"""Files that are replaced as a whole: a process that is killed leaves the old file or the new one."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path where the block writes a new file, which replaces `path` when the block ends.

    An error leaves `path` as it was. The name of the new file keeps the suffix of `path` and begins with a dot.
    """
    partial = path.with_name(f".partial.{path.name.removeprefix('.')}")
    try:
        yield partial
        partial.replace(path)
    finally:
        with suppress(OSError):
            partial.unlink()

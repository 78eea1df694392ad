"""Files that are replaced as a whole: a process that is killed leaves the old file or the new one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

MAX_NAME_BYTES = 255
"""The longest name of a file on the usual file systems."""


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Yield the path where the block writes a new file, which replaces `path` when the block ends.

    An error leaves `path` as it was. The name of the new file begins with a dot and ends as the name of `path` does. If
    `path` is a symlink, the file that it points to is replaced, in that file's folder.
    """
    target = Path(os.path.realpath(path))
    name = os.fsencode(path.name.removeprefix("."))[-(MAX_NAME_BYTES - len(".partial.")) :]
    partial = target.with_name(f".partial.{name.decode(errors='ignore')}")
    try:
        yield partial
        partial.replace(target)
    finally:
        with suppress(OSError):
            partial.unlink()

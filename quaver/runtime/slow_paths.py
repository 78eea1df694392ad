"""Reports slow paths once: correct code that runs slower than this machine allows.

A slow path is logged once per process at WARNING, and is listed by `list_slow_paths()`, which `conversion_report`
prints. With `error_on_slow_path()` or QUAVER_ERROR_ON_SLOW_PATH=1 it raises RuntimeError instead.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, ExitStack

_logger = logging.getLogger("quaver")
_reported: dict[str, str] = {}
_raises_errors = os.environ.get("QUAVER_ERROR_ON_SLOW_PATH", "") not in ("", "0")


def report_slow_path(key: str, message: str) -> None:
    """Log `message` at WARNING, unless a message with this key was logged before.

    Args:
        key: names the slow path, with the device if messages differ by device.
    Raises:
        RuntimeError: with `message`, on every call, while `error_on_slow_path` is on.
    """
    if _raises_errors:
        raise RuntimeError(message)
    if key not in _reported:
        _reported[key] = message
        _logger.warning(message)


def list_slow_paths() -> list[str]:
    """Return the messages that `report_slow_path` has logged in this process."""
    return list(_reported.values())


def clear_slow_paths() -> None:
    """Forget which slow paths were reported, so that they are reported again."""
    _reported.clear()


def error_on_slow_path(error: bool = True) -> AbstractContextManager[object]:
    """Make slow paths raise RuntimeError in every thread; with `error=False`, log them again.

    As a context manager (`with error_on_slow_path(): ...`) it restores the previous setting on exit.

    Raises:
        TypeError: `error` is not a bool.
    """
    if not isinstance(error, bool):
        raise TypeError(f"error: expected True or False, got {error!r}")
    restore = ExitStack()
    restore.callback(_set_raises, _raises_errors)
    _set_raises(error)
    return restore


def _set_raises(raises: bool) -> None:
    global _raises_errors
    _raises_errors = raises

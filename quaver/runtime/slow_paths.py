"""Slow paths, said once: code that gives the right result more slowly than this machine could.

Each is logged once per process at WARNING, and stays in `slow_paths()`, which `conversion_report` and `quaver doctor`
print. `error_on_slow_path()`, or QUAVER_ERROR_ON_SLOW_PATH=1 in the environment, makes each a RuntimeError.
"""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, ExitStack

_logger = logging.getLogger("quaver")
_said: dict[str, str] = {}
_raises = os.environ.get("QUAVER_ERROR_ON_SLOW_PATH", "") not in ("", "0")


def say_once(key: str, message: str) -> None:
    """Log `message` at WARNING, unless one with this key was logged before.

    Args:
        key: what is slow; with the device where another device may say something else.
    Raises:
        RuntimeError: with `message`, on every call, while `error_on_slow_path` is on.
    """
    if _raises:
        raise RuntimeError(message)
    if key not in _said:
        _said[key] = message
        _logger.warning(message)


def slow_paths() -> list[str]:
    """The messages that `say_once` has logged in this process."""
    return list(_said.values())


def clear_slow_paths() -> None:
    """Forget what was said: it will be said again."""
    _said.clear()


def error_on_slow_path(error: bool = True) -> AbstractContextManager[object]:
    """From now on, in every thread, a slow path raises RuntimeError, or with `error=False` is logged.

    As a context manager (`with error_on_slow_path(): ...`) it restores the previous setting at the exit.
    """
    restore = ExitStack()
    restore.callback(_set_raises, _raises)
    _set_raises(error)
    return restore


def _set_raises(raises: bool) -> None:
    global _raises
    _raises = raises

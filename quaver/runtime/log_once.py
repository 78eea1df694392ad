"""`log_once`: logs a message once for each object that it is about, such as a model or an optimizer."""

from __future__ import annotations

import logging
from weakref import WeakKeyDictionary

_logged_messages: WeakKeyDictionary[object, set[str]] = WeakKeyDictionary()


def log_once(logger: logging.Logger, owner: object, key: str, message: str, *arguments: object) -> None:
    """Log `message` % `arguments` at WARNING, unless a message with this key was logged about `owner`.

    Args:
        owner: the object that the message is about; it is not kept alive.
    """
    keys = _logged_messages.setdefault(owner, set())
    if key not in keys:
        keys.add(key)
        logger.warning(message, *arguments)

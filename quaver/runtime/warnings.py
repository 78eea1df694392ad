"""`warn_user`: a warning at the line of the user's code that led to it, not at a line of quaver or PyTorch."""

from __future__ import annotations

import os
import sys
import threading
import warnings
from types import FrameType

import torch

_SKIPPED_PATHS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    threading.__file__,
)
"""The packages torch and quaver, and the module that starts threads. Python 3.12 takes such a tuple as
`skip_file_prefixes`."""


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn with the `stacklevel` of the innermost frame outside of quaver and PyTorch.

    Threads of autograd and DataParallel may have no such frame; the warning then names the caller of this function.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_SKIPPED_PATHS):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=2 if frame is None else level)

"""Whether this process is one of several ranks."""

from __future__ import annotations

import torch.distributed as dist


def has_process_group() -> bool:
    """Return whether the default process group exists; False where torch was built without distributed."""
    return dist.is_available() and dist.is_initialized()

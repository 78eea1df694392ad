"""The autocast around a run's forward and loss."""

from __future__ import annotations

import torch

from quaver.trainer.config import Training


def autocast_of(training: Training, device: torch.device) -> torch.autocast:
    """To `mixed_precision_param` on `device`; off where parameters have that dtype."""
    dtype = getattr(torch, training.mixed_precision_param)
    return torch.autocast(device.type, dtype=dtype, enabled=training.mixed_precision_param != training.dtype)

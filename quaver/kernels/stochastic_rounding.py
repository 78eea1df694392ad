"""Stochastic rounding of float32 to bfloat16."""

from __future__ import annotations

import torch
from torch import Tensor


def round_to_bfloat16(values: Tensor, noise: Tensor) -> Tensor:
    """Round float32 up or down to bfloat16, with probabilities that preserve the expected value.

    The upper 16 bits of a float32 are a bfloat16. Adding 16 uniform random bits carries into them with a probability
    equal to the fraction that the lower bits represent. Non-finite values are rounded to nearest.

    Args:
        noise: random bits, int32 of the shape of `values`, 0 to 65535.
    """
    rounded = (values.view(torch.int32) + noise).bitwise_and(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)

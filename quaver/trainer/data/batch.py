"""What one forward of the model gets."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """B sequences of T tokens: `tokens` and, one place ahead, `targets`, both int64 [B, T].

    `documents`, int64 [B, T], numbers the documents of each row from 0 on; None where attention may cross them.
    """

    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on `device`."""
        documents = None if self.documents is None else self.documents.to(device)
        return Batch(self.tokens.to(device), self.targets.to(device), documents)

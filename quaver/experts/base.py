"""`Float8Grouped`: the base class of modules whose grouped matmuls run in float8."""

from __future__ import annotations

import torch

from quaver.experts.gemm import describe_grouped_backends
from quaver.linear.float8_module import Float8Module
from quaver.linear.last_run import note_run


class Float8Grouped(Float8Module):
    """A converted module with 3-D weights. Its subclasses multiply."""

    _describe_backends = staticmethod(describe_grouped_backends)

    def note_run(self, device: torch.device, *, has_row_codes_only: bool = False) -> None:
        """Record that a forward ran on `device`; see `last_run.note_run`."""
        config = self.float8_config
        note_run(self, device, config, describe_grouped_backends, has_row_codes_only=has_row_codes_only)

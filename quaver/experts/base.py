"""`Float8Grouped`: the base class of modules whose grouped matmuls run in float8."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quaver.experts.gemm import describe_grouped_backends
from quaver.linear.last_run import LastRun, note_run
from quaver.recipes.config import Float8LinearConfig


class Float8Grouped(nn.Module):
    """A converted module with 3-D weights. Its subclasses multiply."""

    float8_config: Float8LinearConfig
    _last_run: LastRun

    def note_run(self, device: torch.device, *, has_row_codes_only: bool = False) -> None:
        """Record that a forward ran on `device`; see `last_run.note_run`."""
        config = self.float8_config
        note_run(self, device, config, describe_grouped_backends, has_row_codes_only=has_row_codes_only)

    @property
    def backend(self) -> str:
        """The backends of the last eager forward; see `Float8Linear.backend`."""
        return self._last_run.backend

    def extra_repr(self) -> str:
        recipe = self.float8_config.recipe_name
        name = f"recipe={recipe.value}, " if recipe else ""
        before = super().extra_repr()
        return f"{before}{', ' if before else ''}{name}cast_configs={self.float8_config.short_str()}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last_run": LastRun()}  # a copy starts as "not run yet"

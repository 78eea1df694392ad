"""`Float8Grouped`: what modules share whose grouped matmuls run in float8."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quaver.experts.gemm import grouped_backends_of
from quaver.linear.last_run import LastRun, note_run
from quaver.recipes.config import Float8LinearConfig


class Float8Grouped(nn.Module):
    """A module with 3-D weights that was converted; its class says how it multiplies."""

    float8_config: Float8LinearConfig
    _converted_from: type[nn.Module]

    _last_run: LastRun

    def note_run(self, device: torch.device) -> None:
        """Note that a forward multiplied on `device`."""
        note_run(self, device, self.float8_config, grouped_backends_of)

    @property
    def backend(self) -> str:
        """The backends that the last eager forward ran on, in the words of `Float8Linear.backend`."""
        return self._last_run.backend

    def extra_repr(self) -> str:
        recipe = self.float8_config.recipe_name
        name = f"recipe={recipe.value}, " if recipe else ""
        before = super().extra_repr()
        return f"{before}{', ' if before else ''}{name}cast_configs={self.float8_config.short_str()}"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last_run": LastRun()}  # a copy has not run

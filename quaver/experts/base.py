"""`Float8Grouped`: what modules share whose grouped matmuls run in float8."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from quaver.experts.gemm import grouped_backends_of
from quaver.recipes.config import Float8LinearConfig


class Float8Grouped(nn.Module):
    """A module with 3-D weights that was converted; its class says how it multiplies."""

    float8_config: Float8LinearConfig
    _converted_from: type[nn.Module]

    def note_backend(self, device: torch.device) -> None:
        """Remember what multiplies on `device`; an eager forward calls it."""
        if not torch.compiler.is_compiling() and "_backend" not in self.__dict__:
            self.__dict__["_backend"] = grouped_backends_of(self.float8_config, device)

    @property
    def backend(self) -> str:
        """The backends that the eager forwards ran on, in the words of `Float8Linear.backend`."""
        backend: str = self.__dict__.get("_backend", "not run yet")
        return backend

    def extra_repr(self) -> str:
        recipe = self.float8_config.recipe_name
        name = f"recipe={recipe.value}, " if recipe else ""
        before = super().extra_repr()
        return f"{before}{', ' if before else ''}{name}cast_configs={self.float8_config.short_str()}"

    def _apply(self, fn: Any, recurse: bool = True) -> Float8Grouped:
        super()._apply(fn, recurse)
        self.__dict__.pop("_backend", None)  # it may run on another device now
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_backend"}  # a copy has not run

"""The tiny runs of the trainer's tests."""

from tests.lab.trainer.conftest import (
    before_each_step,
    drawn_curves,
    resumable_config,
    text_folder,
    tiny_config,
    tiny_float8_config,
    undrawn_curves,
)

__all__ = [
    "before_each_step",
    "drawn_curves",
    "resumable_config",
    "text_folder",
    "tiny_config",
    "tiny_float8_config",
    "undrawn_curves",
]

"""The tiny runs of the trainer's tests."""

from tests.lab.trainer.conftest import resumable_config, text_folder, tiny_config, tiny_float8_config, undrawn_curves

__all__ = ["resumable_config", "text_folder", "tiny_config", "tiny_float8_config", "undrawn_curves"]

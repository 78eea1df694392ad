"""The tiny runs of the trainer's tests."""

from tests.lab.trainer.conftest import load, text_folder, tiny_config, undrawn_curves

__all__ = ["load", "text_folder", "tiny_config", "undrawn_curves"]

"""The trainer's small configs."""

from tests.lab.trainer.conftest import text_folder, tiny_config, tiny_float8_config

__all__ = ["text_folder", "tiny_config", "tiny_float8_config"]

"""The trainer's small configs."""

from tests.unit.trainer.conftest import text_folder, tiny_config

__all__ = ["text_folder", "tiny_config"]

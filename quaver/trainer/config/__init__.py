"""Every setting of the trainer, as frozen dataclasses that pydantic validates when made.

Sections and fields carry torchtitan's names where torchtitan has them. The text in `setting` is the help of a field on
the command line and in docs/configuration.md.
"""

from quaver.trainer.config.checkpoint import Checkpoint
from quaver.trainer.config.data import Data, Validation
from quaver.trainer.config.float8 import Float8
from quaver.trainer.config.model import Model
from quaver.trainer.config.output import Job, Metrics, Numerics, Profiling
from quaver.trainer.config.settings import require
from quaver.trainer.config.train_config import TrainConfig
from quaver.trainer.config.training import ActivationCheckpoint, Comm, LRScheduler, Optimizer, Parallelism, Training

__all__ = [
    "ActivationCheckpoint",
    "Checkpoint",
    "Comm",
    "Data",
    "Float8",
    "Job",
    "LRScheduler",
    "Metrics",
    "Model",
    "Numerics",
    "Optimizer",
    "Parallelism",
    "Profiling",
    "TrainConfig",
    "Training",
    "Validation",
    "require",
]

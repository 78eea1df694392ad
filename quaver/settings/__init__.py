"""Every setting of the trainer, as frozen dataclasses that pydantic validates when made.

Sections and fields carry torchtitan's names where torchtitan has them. The text in `setting` is the help of a field on
the command line and in docs/configuration.md.
"""

from quaver.settings.checkpoint import Checkpoint
from quaver.settings.data import Data, Validation
from quaver.settings.fields import require
from quaver.settings.float8 import Float8
from quaver.settings.model import Model
from quaver.settings.output import Job, Metrics, Numerics, Profiling
from quaver.settings.train_config import TrainConfig
from quaver.settings.training import ActivationCheckpoint, Comm, LRScheduler, Optimizer, Parallelism, Training

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

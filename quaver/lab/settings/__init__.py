"""Every setting of the trainer, as frozen dataclasses that pydantic validates when made.

Sections and fields carry torchtitan's names where torchtitan has them. The text in `setting` is the help of a field on
the command line and in docs/configuration.md.
"""

from quaver.lab.settings.checkpoint import Checkpoint
from quaver.lab.settings.data import Data, Validation
from quaver.lab.settings.fields import require
from quaver.lab.settings.float8 import Float8
from quaver.lab.settings.model import Model
from quaver.lab.settings.output import Job, Metrics, Numerics, Profiling
from quaver.lab.settings.train_config import TrainConfig
from quaver.lab.settings.training import ActivationCheckpoint, Comm, LRScheduler, Optimizer, Parallelism, Training

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

"""Every setting of the trainer, as frozen dataclasses that pydantic validates when made: one file per part of a run.

Sections and fields carry torchtitan's names where torchtitan has them. The string below a field is its help on the
command line and in docs/configuration.md.
"""

from quaver.trainer.config.checkpoint import Checkpoint
from quaver.trainer.config.data import Data, Validation
from quaver.trainer.config.float8 import Float8
from quaver.trainer.config.model import Model
from quaver.trainer.config.optimizer import LRScheduler, Optimizer
from quaver.trainer.config.output import Job, Metrics
from quaver.trainer.config.parallelism import Comm, Parallelism
from quaver.trainer.config.profiling import Profiling
from quaver.trainer.config.settings import require
from quaver.trainer.config.train_config import TrainConfig
from quaver.trainer.config.training import ActivationCheckpoint, Training

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
    "Optimizer",
    "Parallelism",
    "Profiling",
    "TrainConfig",
    "Training",
    "Validation",
    "require",
]

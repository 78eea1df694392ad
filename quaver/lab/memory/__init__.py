"""The memory of a training step: recorded from a real step, or predicted with fake tensors."""

from quaver.lab.memory.predict_step import Prediction, predict_step_memory
from quaver.lab.memory.reports.compare import Comparison, compare
from quaver.lab.memory.reports.html import write_html
from quaver.lab.recorder.draw import draw_timeline
from quaver.lab.recorder.recorder import CATEGORIES
from quaver.lab.recorder.storages import TensorByteCounter
from quaver.lab.recorder.timeline import Timeline, record_timeline

__all__ = [
    "CATEGORIES",
    "Comparison",
    "Prediction",
    "TensorByteCounter",
    "Timeline",
    "compare",
    "draw_timeline",
    "predict_step_memory",
    "record_timeline",
    "write_html",
]

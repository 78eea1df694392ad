"""The memory of a training step: recorded from a real step, or predicted with fake tensors."""

from quaver.memory.predict import Prediction, explain
from quaver.memory.reports.compare import Comparison, compare
from quaver.memory.reports.html import write_html
from quaver.recorder.draw import draw_timeline
from quaver.recorder.recorder import CATEGORIES
from quaver.recorder.storages import TensorBytes
from quaver.recorder.timeline import Timeline, record_timeline

__all__ = [
    "CATEGORIES",
    "Comparison",
    "Prediction",
    "TensorBytes",
    "Timeline",
    "compare",
    "draw_timeline",
    "explain",
    "record_timeline",
    "write_html",
]

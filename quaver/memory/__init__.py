"""Where the memory of a training step goes: recorded of a real step, or predicted of one with fake tensors."""

from quaver.memory.predict import Prediction, explain
from quaver.memory.recording.recorder import CATEGORIES
from quaver.memory.recording.storages import TensorBytes
from quaver.memory.recording.timeline import Timeline, record_timeline
from quaver.memory.reports.compare import Comparison, compare
from quaver.memory.reports.draw import draw_peak, draw_timeline
from quaver.memory.reports.html import write_html

__all__ = [
    "CATEGORIES",
    "Comparison",
    "Prediction",
    "TensorBytes",
    "Timeline",
    "compare",
    "draw_peak",
    "draw_timeline",
    "explain",
    "record_timeline",
    "write_html",
]

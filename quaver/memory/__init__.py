"""Where the memory of a training step goes: every storage of every tensor, from allocation to release."""

from quaver.memory.draw import draw_timeline
from quaver.memory.predict import Prediction, explain
from quaver.memory.recorder import CATEGORIES
from quaver.memory.storages import TensorBytes
from quaver.memory.timeline import Timeline, record_timeline

__all__ = ["CATEGORIES", "Prediction", "TensorBytes", "Timeline", "draw_timeline", "explain", "record_timeline"]

"""One float8 linear: its autograd function, its module, and the forms that its weight may have."""

from quaver.linear.function import float8_linear
from quaver.linear.module import Float8Linear

__all__ = ["Float8Linear", "float8_linear"]

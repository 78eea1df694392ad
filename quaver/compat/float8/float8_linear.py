"""`torchao.float8.float8_linear`."""

from quaver.linear.module import Float8Linear

__all__ = ["Float8Linear"]

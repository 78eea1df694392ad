"""`torchao.float8.float8_tensor` of torchao 0.9, for isinstance checks only: the constructor differs."""

from quaver.linear.tensor import Float8Tensor

__all__ = ["Float8Tensor"]

"""`torchao.float8.float8_tensor` of torchao 0.9: for isinstance checks; it is constructed differently."""

from quaver.linear.tensor import Float8Tensor

__all__ = ["Float8Tensor"]

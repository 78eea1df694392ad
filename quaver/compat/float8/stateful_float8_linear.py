"""`torchao.float8.stateful_float8_linear` of torchao 0.9: one class serves every scaling type."""

from quaver.linear.module import Float8Linear as StatefulFloat8Linear

__all__ = ["StatefulFloat8Linear"]

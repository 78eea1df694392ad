"""`torchao.float8.float8_training_tensor`, for isinstance checks only: the constructor differs."""

from quaver.linear.tensor import Float8Tensor as Float8TrainingTensor

__all__ = ["Float8TrainingTensor"]

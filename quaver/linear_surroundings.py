"""What a linear asks of those around it: the scales kept for it, and the ranks that its matrices are spread over.

A linear knows them by these interfaces only. scale_state.py and distributed/linear_sharding.py implement them.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from quaver.casts import KeptScales, MatrixCasts, Operand
from quaver.config import Float8LinearConfig
from quaver.kernels.cast import KeptScale


class LinearScaling(Protocol):
    """What a linear knows of the kept scales of its operands; scale_state.py implements it."""

    def scales(self, *, recording: bool, device: torch.device) -> KeptScales:
        """The kept scales for a forward that begins now on `device`, and its backward."""

    def belongs_to(self, linear: nn.Module) -> None:
        """Called for a linear that was made by copying or unpickling another."""

    def follow(self, device: torch.device) -> None:
        """Called after the linear's parameters went to `device`."""

    def host_decides(self) -> None:
        """Called once where ranks must decide together, on the host, whether a scale is known."""


class LinearSharding(Protocol):
    """How a linear's matrices are spread over ranks: its casts, and what it exchanges with the other ranks.

    distributed/linear_sharding.py implements it; a linear on one rank has none.
    """

    mesh: Any
    """The DeviceMesh of tensor parallelism, one axis."""
    group: Any
    """Its process group."""
    weight_dim: int
    """The dim of the weight that is sharded."""
    weight_length: int
    """The length of this rank's part along it."""

    def weight_casts(self, config: Float8LinearConfig, hp_dtype: torch.dtype, kept: KeptScale | None) -> MatrixCasts:
        """The casts of this rank's part of the weight."""

    def input_casts(
        self, input: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype, kept: KeptScale | None
    ) -> MatrixCasts:
        """The casts of this rank's part of the input."""

    def local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """This rank's part of weight and bias, differentiably, and the bias that is added to the reduced output."""

    def grad_output_operands(
        self,
        grad_output: Tensor,
        config: Float8LinearConfig,
        hp_dtype: torch.dtype,
        kept: KeptScale | None,
        needs: tuple[bool, bool],
    ) -> tuple[Operand | None, Operand | None]:
        """What `grad_input` and `grad_weight` read of grad_output, each where it is needed."""

    def reduce_output(self, output: Tensor) -> Tensor:
        """The result from every rank's `output` [..., tokens, N]."""

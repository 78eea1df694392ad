"""The interfaces through which tensor parallelism and monitors take part in a linear's matmuls.

`Float8Linear` and experts call these objects. The layers above implement them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quaver.kernels.operands import Operand, Operands
from quaver.linear.quantize import Quantizer
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scaling import PersistentScale
from quaver.torch_private.dtensor import is_dtensor


class LinearSharding(Protocol):
    """The quantizers of a linear that tensor parallelism shards; parallel/linear_sharding.py implements it."""

    mesh: Any
    """The DeviceMesh of tensor parallelism, one axis."""

    def get_local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return this rank's part of weight and bias, differentiably, and a bias to add to the reduced output."""

    def make_input_quantizer(
        self,
        input: Tensor,
        casts: OperandCasts,
        hp_dtype: torch.dtype,
        scale: PersistentScale | None,
        linear_id: int | None,
    ) -> Quantizer:
        """Return the quantizer of this rank's part of the input; `linear_id` as in `choose_quantizer`."""

    def make_weight_quantizer(
        self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None
    ) -> Quantizer:
        """Return the quantizer of this rank's part of the weight."""

    def make_grad_output_quantizer(
        self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None
    ) -> Quantizer:
        """Return the quantizer of this rank's part of grad_output."""

    def forward(self, linear: Any, input: Tensor) -> Tensor:
        """Run the forward of a sharded Float8Linear, by its `forward_local` on local tensors."""

    def reduce_output(self, output: Tensor, leading: torch.Size) -> Tensor:
        """Reduce the ranks' `output` [M, N] of an input [*leading, K], to [M, N] or a sharded [*leading, N]."""


ShardingRule = Callable[[Any, Tensor], LinearSharding]
"""Derives the sharding of a linear whose weight is a DTensor, for an input."""

_sharding_rule: ShardingRule


def register_sharding_rule(rule: ShardingRule) -> None:
    """Have `find_sharding` call `rule`. quaver.distributed, which `import quaver` imports, registers one."""
    global _sharding_rule
    _sharding_rule = rule


def find_sharding(linear: Any, input: Tensor) -> LinearSharding | None:
    """Return the sharding of a linear without a Float8 style, or None if its weight is no DTensor."""
    return _sharding_rule(linear, input) if is_dtensor(linear.weight) else None


class Groups(NamedTuple):
    """Which rows of a matrix belong to which expert; experts/groups.py has the rules."""

    experts: int
    """The number of experts; 0 for the matrix of a linear, which has no groups."""
    ends: Tensor | None = None
    """int32 [experts]: where the rows of each expert end; None for weights, which have equal numbers of rows."""
    transposed: bool = False
    """Whether weights are stored [experts, K, N]."""


class MatmulProbe(Protocol):
    """Observes what a linear, or one weight of experts, computes with; numerics/probe.py implements it.

    It gets the operands and results of the matmuls themselves. Without a monitor the probe is `NO_PROBE`. Matrices of
    experts have `groups`, and their weights three dims. If the multiplied rows came from other ranks, `moved` is set;
    `input` and `grad_output` are None. A high-precision matrix is a `Float8Tensor` if it was quantized before.
    """

    def observe_operands(
        self, name: str, hp: Tensor | None, operands: Operands, groups: Groups = ..., *, moved: bool = ...
    ) -> None:
        """Observe a cast of `hp`: the "input", "weight" or "grad_output"."""

    def observe_output(
        self, output: Tensor, input: Tensor | None, weight: Tensor, bias: Tensor | None = ..., groups: Groups = ...
    ) -> None:
        """Observe the output [M, N], and the high-precision matrices whose product it approximates."""

    def observe_grad_weight(
        self, grad_weight: Tensor, grad_output: Tensor | None, input: Operand, groups: Groups = ...
    ) -> None:
        """Observe grad_weight; `input` is the saved operand."""

    def observe_grad_input(
        self,
        grad_input: Tensor,
        grad_output: Tensor | None,
        weight: Tensor | None,
        operand: Operand,
        groups: Groups = ...,
    ) -> None:
        """Observe grad_input; `weight` is None if only its float8 `operand` was saved."""


class _NoProbe:
    """Observes nothing."""

    def observe_operands(self, *args: object, **options: object) -> None:
        pass

    observe_output = observe_grad_weight = observe_grad_input = observe_operands


NO_PROBE: MatmulProbe = _NoProbe()
"""The probe of a linear without a monitor, and of evaluation."""

"""The interfaces that linears and experts call, and monitors, `cast_weights_once` and FSDP2's all-gather implement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from quaver.kernels.operands import Operand, Operands


class Groups(NamedTuple):
    """Which rows of a matrix belong to which expert, and how weights are stored; experts/groups.py has the rules."""

    num_experts: int
    """The number of experts; 0 for the matrix of a linear, which has no groups."""
    ends: Tensor | None = None
    """int32 [num_experts]: where the rows of each expert end; None for weights, which have equal numbers of rows."""
    transposed: bool = False
    """Whether weights are stored [num_experts, K, N]."""


class MatmulProbe(Protocol):
    """Observes what a linear, or one weight of experts, computes with; numerics/probe.py implements it.

    It gets the operands and results of the matmuls themselves. Without a monitor the probe is `NO_PROBE`. Matrices of
    experts have `groups`, and their weights three dims. If the multiplied rows came from other ranks, `exchanged` is
    set; `input` and `grad_output` are None. A high-precision matrix is a `Float8Tensor` if it was quantized before.
    """

    def observe_operands(
        self, name: str, hp: Tensor | None, operands: Operands, groups: Groups = ..., *, exchanged: bool = ...
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
    def observe_operands(self, *args: object, **options: object) -> None:
        pass

    observe_output = observe_grad_weight = observe_grad_input = observe_operands


NO_PROBE: MatmulProbe = _NoProbe()
"""The probe of a linear without a monitor, and of evaluation."""


class GatherState(Protocol):
    """The state of a module whose weights FSDP2 all-gathers in float8; `AllGatherState` of fsdp/ implements it."""

    @property
    def hooks(self) -> Sequence[RemovableHandle]:
        """The hooks of the module's state dicts."""

    @property
    def cast_once_shards(self) -> Mapping[str, object]:
        """Shards by the name of the weight, while a `cast_weights_once` is open."""


class CastOnceOperands(Protocol):
    """The operands of a weight in an open `cast_weights_once`; weights/cast_once.py implements it."""

    operands: Operands
    opened_by: str
    """The caller that opened the scope, for errors; "" for the user."""

    def check(self, weight: Tensor) -> None:
        """Raise RuntimeError if `weight` is not the tensor that was quantized, or was written to afterwards."""

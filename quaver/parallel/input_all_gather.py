"""The float8 all-gather of a sequence-sharded input that one or several linears read, and its reduce-scatter."""

from __future__ import annotations

import copy
import typing
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from quaver.kernels.operands import Operand, require
from quaver.linear.function import get_output_dtype
from quaver.linear.module import Float8Linear
from quaver.linear.sharding import resolve_sequence_dim, to_local
from quaver.linear.tensor import Float8Tensor
from quaver.linear.tensor_parallel_quantizer import GatheringQuantizer
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.scaling import PersistentScale
from quaver.runtime.collectives import reduce_scatter


class _AllGatherFloat8(torch.autograd.Function):
    """All-gathers a sequence-sharded activation [.., s, K] as a Float8Tensor. The backward is a reduce-scatter."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        sequence_dim: int,
        mesh: DeviceMesh,
        config: Float8LinearConfig,
        as_dtensor: bool,
        for_grad_weight: bool,
        quant_scale: Tensor | None,
        amax_buffer: Tensor | None,
        is_known: Tensor | None,
    ) -> Any:
        sequence_dim %= local.dim()
        if sequence_dim == local.dim() - 1:
            raise ValueError("expected an input that is sharded along its tokens, got one sharded along its features")
        ctx.sequence_dim, ctx.mesh = sequence_dim, mesh
        group = mesh.get_group()
        dtype = get_output_dtype(local)
        scale = None
        if quant_scale is not None and is_known is not None:
            scale = PersistentScale(quant_scale, amax_buffer, is_known)
        quantizer = GatheringQuantizer(config.casts.input, dtype, scale, group, sequence_dim)
        row, column = quantizer(local, row=True, column=for_grad_weight)
        shape = [*local.shape]
        shape[sequence_dim] *= group.size()
        gathered = Float8Tensor.from_operands(
            _view_operand(require(row, "the row operand"), shape),
            None if column is None else column._replace(data=column.data.view(shape)),
            local.dtype,
        )
        return DTensor.from_local(gathered, mesh, [Replicate()], run_check=False) if as_dtensor else gathered

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if isinstance(to_local(grad), Float8Tensor):
            # The graph ends here, so AOTAutograd passes a gradient of the result's type, Float8Tensor.
            raise NotImplementedError(
                "torch.compile ended a graph between the float8 all-gather of an input and the linears that read it. "
                "Compile a module around the one that PrepareFloat8ModuleInput was applied to, with fullgraph=True"
            )
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=[Shard(ctx.sequence_dim)]).to_local()
        else:
            group = ctx.mesh.get_group()
            grad = reduce_scatter(grad, resolve_sequence_dim(grad, ctx.sequence_dim, group), group)
        return grad, *[None] * 8


def _view_operand(operand: Operand, shape: Sequence[int]) -> Operand:
    scale = operand.dequant_scale
    if scale is not None and scale.dim():
        scale = scale.view(*shape[:-1], -1)
    return Operand(operand.data.view(shape), scale, operand.layout)


def is_all_gathered_in_float8(config: Float8LinearConfig) -> bool:
    """Return whether the input is all-gathered as codes: both its matmuls read float8, and blocks are not square.

    The scale of a square block belongs to several tokens, so leading dims could not be flattened and split.
    """
    cast = config.casts.input
    return cast.is_float8 and not (cast.row.is_blockwise and not cast.row.depends_on_direction)


class InputAllGather:
    """All-gathers the sequence-sharded inputs of one module in float8. Constructed when the module is parallelized."""

    gathers_codes: bool
    """Whether the linear's config allows it. Otherwise the caller gathers the input in high precision."""

    def __init__(self, placement: Shard, mesh: DeviceMesh, linear: Float8Linear, *, as_dtensor: bool) -> None:
        """`linear`: the first linear that reads the input. Its config and its persistent scale cast the input."""
        self._placement, self._mesh, self._linear, self._as_dtensor = placement, mesh, linear, as_dtensor
        self._calls: dict[Float8LinearConfig, Any] = {}
        self._use_new_config()
        if self.gathers_codes and placement.dim == -1:
            raise ValueError(f"expected a replicated input or one sharded along its tokens, got {placement} (features)")
        linear.config_observers = (*linear.config_observers, self._use_new_config)

    def _use_new_config(self) -> None:
        config, sequence_dim = self._linear.float8_config, self._placement.dim
        mesh, as_dtensor = self._mesh, self._as_dtensor
        self.gathers_codes = is_all_gathered_in_float8(config)

        def all_gather_float8(local: Tensor, for_grad_weight: bool, *scale: Tensor | None) -> Tensor:
            return typing.cast(
                Tensor, _AllGatherFloat8.apply(local, sequence_dim, mesh, config, as_dtensor, for_grad_weight, *scale)
            )

        # Dynamo would trace the backward with a gradient of the result's type, Float8Tensor. As one call in the graph,
        # the backward is traced by AOTAutograd, with the actual gradient. One function per config, for the guards.
        if config not in self._calls:
            self._calls[config] = torch.compiler.allow_in_graph(all_gather_float8)
        self._call = self._calls[config]

    def __call__(self, input: Tensor, *, for_grad_weight: bool) -> Tensor:
        """All-gather the input, a DTensor or this rank's part.

        `for_grad_weight`: whether a linear that reads the input trains its weight.
        """
        local = input.redistribute(placements=[self._placement]).to_local() if isinstance(input, DTensor) else input
        scale = self._linear.begin_forward_and_get_scales(local.device).input or (None, None, None)
        return self._call(local, for_grad_weight and torch.is_grad_enabled(), *scale[:3])

    def __deepcopy__(self, memo: dict[int, Any]) -> InputAllGather:
        """Return an all-gather of the copied linear's input over the same group, because groups cannot be copied."""
        memo[id(self)] = copied = copy.copy(self)
        copied._linear = copy.deepcopy(self._linear, memo)
        return copied

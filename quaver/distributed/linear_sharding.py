"""How the matrices of a tensor-parallel linear are spread over ranks, and how activations get from one to the next.

    ColwiseSharding    weight [N/T, K]   input whole       output and grad_output [.., N/T]
    RowwiseSharding    weight [N, K/T]   input [.., K/T]   output summed over the ranks: whole, or by sequence

They implement `LinearSharding` (linear_surroundings.py): what a linear asks of them happens inside its one autograd
function, on plain tensors. Only an input that several linears share is gathered outside, by `InputGather`, into a
`Float8Tensor`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from quaver.casts import MatrixCasts, Operand, casts_of_activation
from quaver.config import CastConfig, Float8LinearConfig
from quaver.distributed.collectives import all_reduce, reduce_scatter
from quaver.distributed.spread_casts import TensorParallelQuantizer, gathered_operands
from quaver.linear import Float8Linear
from quaver.linear_gemms import compute_dtype
from quaver.scaling import PersistentScale
from quaver.tensor import Float8Tensor

# ---- one linear ------------------------------------------------------------------------------------------------------


class _Sharding:
    """What column-wise and row-wise parallel linears have in common; see linear_surroundings.py."""

    weight_dim: int
    """The dim of weight [N, K] that is sharded."""

    def __init__(self, mesh: DeviceMesh, weight_length: int) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.weight_length = weight_length

    def weight_casts(
        self, config: Float8LinearConfig, hp_dtype: torch.dtype, kept: PersistentScale | None
    ) -> MatrixCasts:
        return TensorParallelQuantizer(config, hp_dtype, kept, self.group, self.weight_dim)

    def __deepcopy__(self, memo: object) -> _Sharding:
        return self  # groups cannot be copied


class ColwiseSharding(_Sharding):
    """weight [N/T, K], input whole, output and grad_output [.., N/T]."""

    weight_dim = 0

    def __init__(self, mesh: DeviceMesh, weight_length: int, gather_input: InputGather | None) -> None:
        super().__init__(mesh, weight_length)
        self.gather_input = gather_input

    def local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return local_part(weight), None if bias is None else local_part(bias), None

    def input_casts(
        self, input: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype, kept: PersistentScale | None
    ) -> MatrixCasts:
        return casts_of_activation(input, config, hp_dtype, kept)

    def grad_output_operands(
        self,
        grad_output: Tensor,
        config: Float8LinearConfig,
        hp_dtype: torch.dtype,
        kept: PersistentScale | None,
        needs: tuple[bool, bool],
    ) -> tuple[Operand | None, Operand | None]:
        casts = TensorParallelQuantizer(config, hp_dtype, kept, self.group, 1)
        return casts.both(grad_output.reshape(-1, grad_output.shape[-1]), *_needed_casts(config, needs))[:2]

    def reduce_output(self, output: Tensor) -> Tensor:
        return output


class RowwiseSharding(_Sharding):
    """weight [N, K/T], input [.., K/T], output summed over the ranks: whole, or each rank its part of the tokens."""

    weight_dim = 1

    def __init__(self, mesh: DeviceMesh, weight_length: int, sequence_dim: int | None) -> None:
        super().__init__(mesh, weight_length)
        self.sequence_dim = sequence_dim

    def local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if bias is None:
            return local_part(weight), None, None
        # Added to the sum, so that it counts once; a rank's tokens give a part of its gradient.
        partial = None if self.sequence_dim is None else [Partial()]
        return local_part(weight), None, cast(DTensor, bias).to_local(grad_placements=partial)

    def input_casts(
        self, input: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype, kept: PersistentScale | None
    ) -> MatrixCasts:
        return TensorParallelQuantizer(config, hp_dtype, kept, self.group, 1)

    def grad_output_operands(
        self,
        grad_output: Tensor,
        config: Float8LinearConfig,
        hp_dtype: torch.dtype,
        kept: PersistentScale | None,
        needs: tuple[bool, bool],
    ) -> tuple[Operand | None, Operand | None]:
        last, first = _needed_casts(config, needs)
        if self.sequence_dim is not None:
            dim = self.sequence_dim % grad_output.dim()
            return gathered_operands(grad_output, dim, self.group, last, first, config, hp_dtype, kept)
        casts = MatrixCasts(config, hp_dtype, kept)
        return casts.both(grad_output.reshape(-1, grad_output.shape[-1]), last, first)[:2]

    def reduce_output(self, output: Tensor) -> Tensor:
        if self.sequence_dim is None:
            return all_reduce(output, self.group)
        return reduce_scatter(output, _sequence_dim(output, self.sequence_dim, self.group), self.group)


def _needed_casts(config: Float8LinearConfig, needs: tuple[bool, bool]) -> tuple[CastConfig | None, CastConfig | None]:
    """How grad_output is cast for grad_input and for grad_weight, None for what is not needed."""
    casts = config.casts
    return casts.grad_output if needs[0] else None, casts.grad_output_for_grad_weight if needs[1] else None


def local_part(parameter: Tensor) -> Tensor:
    """This rank's part of a sharded parameter, differentiably; a plain one as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _sequence_dim(whole: Tensor, dim: int, group: ProcessGroup) -> int:
    dim %= whole.dim()
    if whole.shape[dim] % group.size():
        raise ValueError(
            f"sequence parallel: expected dim {dim} of {list(whole.shape)} to be a multiple of the {group.size()} "
            "ranks of tensor parallelism; pad the sequence"
        )
    return dim


# ---- activations across ranks ----------------------------------------------------------------------------------------


class _GatherFloat8(torch.autograd.Function):
    """A sequence-sharded activation [.., s, K] -> the whole, as a Float8Tensor; gradients are summed and scattered."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        dim: int,
        mesh: DeviceMesh,
        config: Float8LinearConfig,
        as_dtensor: bool,
        for_grad_weight: bool,
        quant_scale: Tensor | None,
        observed: Tensor | None,
        known: Tensor | None,
    ) -> Any:
        dim %= local.dim()
        if dim == local.dim() - 1:
            raise ValueError("expected an input that is sharded along its tokens, got one sharded along its features")
        ctx.dim, ctx.mesh = dim, mesh
        group = mesh.get_group()
        dtype = compute_dtype(local.device.type, local.dtype)
        first = config.casts.input_for_grad_weight if for_grad_weight else None
        kept = None if quant_scale is None or known is None else PersistentScale(quant_scale, observed, known)
        last_op, first_op = gathered_operands(local, dim, group, config.casts.input, first, config, dtype, kept)
        shape = [*local.shape]
        shape[dim] *= group.size()
        last_op, first_op = (
            _shaped(cast(Operand, last_op), shape),
            None if first_op is None else _shaped(first_op, shape),
        )
        whole = Float8Tensor.from_operands(last_op, first_op, local.dtype)
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False) if as_dtensor else whole

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if isinstance(local_part(grad), Float8Tensor):
            # The graph ends here, so the compiler made up a gradient, of the type of the result.
            raise NotImplementedError(
                "torch.compile ended a graph between the gathering of an input in float8 and the linears that read it. "
                "Compile a module around the one that PrepareFloat8ModuleInput was applied to, with fullgraph=True"
            )
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=[Shard(ctx.dim)]).to_local()
        else:
            grad = reduce_scatter(grad, _sequence_dim(grad, ctx.dim, ctx.mesh.get_group()), ctx.mesh.get_group())
        return grad, *[None] * 8


def _shaped(operand: Operand, shape: Sequence[int]) -> Operand:
    scale = operand.dequant_scale
    if scale is not None and scale.dim() and scale.shape[-1] == 1:
        scale = scale.view(*shape[:-1], 1)
    return Operand(operand.data.view(shape), scale)


class PartOfSum(torch.autograd.Function):
    """The local tensor of a replicated DTensor; its gradient is this rank's part of a sum, and stays so until the end.

    `to_local(grad_placements=[Partial()])` would say the same, but torch sums at once, for each linear that shares it.
    """

    @staticmethod
    def forward(ctx: Any, whole: DTensor) -> Tensor:
        ctx.mesh = whole.device_mesh
        return whole.to_local()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return DTensor.from_local(grad, ctx.mesh, [Partial()], run_check=False)


class WholeInput(torch.autograd.Function):
    """An input that every rank has whole: each rank's part of the linear gives a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


def travels_in_float8(config: Float8LinearConfig) -> bool:
    """Whether the input is gathered as codes: not if one of its matmuls reads it in high precision."""
    return not (config.casts.input.is_disabled or config.casts.input_for_grad_weight.is_disabled)


class InputGather:
    """Gathers the sequence-sharded inputs of one module; made once, when the module is parallelized."""

    def __init__(self, layout: Placement, mesh: DeviceMesh, linear: Float8Linear, *, as_dtensor: bool) -> None:
        """`linear`: the first of those that read the input; its config says how to cast, and its scale is used."""
        dim, config = cast(Shard, layout).dim, linear.config
        self._linear = linear
        if dim == -1:
            raise ValueError(f"expected an input that is whole or sharded along its tokens, got {layout} (features)")

        def gather_float8(local: Tensor, for_grad_weight: bool, *kept: Tensor | None) -> Tensor:
            return cast(Tensor, _GatherFloat8.apply(local, dim, mesh, config, as_dtensor, for_grad_weight, *kept))

        # Dynamo would trace the backward with a gradient of the type of the result, a Float8Tensor. In the graph as one
        # call, it is traced by the autograd that runs it, with the gradient that comes.
        self._call = torch.compiler.allow_in_graph(gather_float8)

    def __call__(self, local: Tensor, *, for_grad_weight: bool = True, linear: Float8Linear | None = None) -> Tensor:
        """`for_grad_weight`: whether a linear that reads it trains its weight. Without gradients none does.

        `linear`: whose kept scale to use, where it is not the one that this was made for but a copy.
        """
        kept = (linear or self._linear).kept_scales(local.device).input or (None, None, None)
        return self._call(local, for_grad_weight and torch.is_grad_enabled(), *kept)

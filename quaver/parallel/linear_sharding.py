"""The shardings of a tensor-parallel linear over T ranks, and the float8 all-gather of its input.

    ColwiseSharding      weight [N/T, K]    input replicated              output and grad_output [.., N/T]
    RowwiseSharding      weight [N, K/T]    input [.., K/T]               output reduced, or reduced and scattered
    PartialSumSharding   weight [N, K/T]    input [.., K/T]               output Partial()
    ReplicatedSharding   weight [N, K]      input replicated or by token  output as the input

They implement `LinearSharding` (linear/protocols.py): a linear calls them on plain tensors, inside its one autograd
function. Only an input that several linears share is all-gathered outside, by `AllGatherInput`, as a `Float8Tensor`.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from quaver.kernels.operands import Operand, expect
from quaver.linear.function import get_output_dtype
from quaver.linear.module import Float8Linear
from quaver.linear.quantize import Quantizer
from quaver.linear.shared_input import choose_quantizer
from quaver.linear.tensor import Float8Tensor
from quaver.parallel.tensor_parallel_quantizer import GatheringQuantizer, TensorParallelQuantizer
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scaling import PersistentScale
from quaver.runtime.collectives import all_reduce, reduce_scatter

# ---- one linear ------------------------------------------------------------------------------------------------------


class _Sharding:
    """Base class of the shardings; see `LinearSharding` in linear/protocols.py.

    The input of `forward` is a DTensor, which is redistributed in high precision as the sharding needs it; a plain
    tensor, which is this rank's part; or an all-gathered `Float8Tensor`.
    """

    weight_dim: int

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()

    def weight_quantizer(self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None) -> Quantizer:
        return TensorParallelQuantizer(casts, hp_dtype, scale, self.group, self.weight_dim)

    def reduce_output(self, output: Tensor, leading: torch.Size) -> Tensor:
        return output

    def _wrap_output(self, output: Tensor, shape: Sequence[int], placement: Placement) -> DTensor:
        """Wrap this rank's part of an output. `shape` is explicit, since parts may have different lengths."""
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            output, self.mesh, [placement], run_check=False, shape=torch.Size(shape), stride=stride
        )

    def __deepcopy__(self, memo: object) -> _Sharding:
        return self  # groups cannot be copied


class ColwiseSharding(_Sharding):
    """weight [N/T, K], input replicated, output and grad_output [.., N/T]."""

    weight_dim = 0

    def __init__(self, mesh: DeviceMesh, all_gather_input: AllGatherInput | None = None) -> None:
        super().__init__(mesh)
        self.all_gather_input = all_gather_input

    def follow_config(self) -> None:
        if self.all_gather_input is not None:
            self.all_gather_input.follow_config()

    def local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return to_local(weight), None if bias is None else to_local(bias), None

    def input_quantizer(
        self, input: Tensor, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None, reader: int
    ) -> Quantizer:
        return choose_quantizer(input, casts, hp_dtype, scale, reader)

    def grad_output_quantizer(
        self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None
    ) -> Quantizer:
        return TensorParallelQuantizer(casts, hp_dtype, scale, self.group, 1)

    def forward(self, linear: Float8Linear, input: Tensor) -> Tensor:
        """See `_Sharding`. Returns a DTensor, Shard(-1)."""
        if isinstance(input, DTensor):
            # redistribute() on a replicated input would reduce the gradient once for each linear that reads the input.
            replicated = input if input.placements[0] == Replicate() else input.redistribute(placements=[Replicate()])
            input = typing.cast(Tensor, PartialGrad.apply(replicated))
        output = linear.forward_local(input, self)
        return self._wrap_output(output, [*output.shape[:-1], linear.out_features], Shard(output.dim() - 1))


class RowwiseSharding(_Sharding):
    """weight [N, K/T], input [.., K/T], output summed over the ranks: replicated, or scattered along `sequence_dim`."""

    weight_dim = 1

    def __init__(self, mesh: DeviceMesh, sequence_dim: int | None = None) -> None:
        super().__init__(mesh)
        self.sequence_dim = sequence_dim

    def local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if bias is None:
            return to_local(weight), None, None
        # The bias is added once, after the reduction. If ranks then hold different tokens, its gradient is partial.
        partial = None if self.sequence_dim is None else [Partial()]
        return to_local(weight), None, typing.cast(DTensor, bias).to_local(grad_placements=partial)

    def input_quantizer(
        self, input: Tensor, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None, reader: int
    ) -> Quantizer:
        return TensorParallelQuantizer(casts, hp_dtype, scale, self.group, 1)

    def grad_output_quantizer(
        self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None
    ) -> Quantizer:
        if self.sequence_dim is None:
            return Quantizer(casts, hp_dtype, scale)
        return GatheringQuantizer(casts, hp_dtype, scale, self.group, self.sequence_dim)

    def forward(self, linear: Float8Linear, input: Tensor) -> Tensor:
        """See `_Sharding`. Returns a DTensor, Replicate() or Shard(sequence_dim)."""
        if isinstance(input, DTensor):
            input = input.redistribute(placements=[Shard(input.dim() - 1)]).to_local()
        output = linear.forward_local(input, self)
        layout = Replicate() if self.sequence_dim is None else Shard(self.sequence_dim)
        return DTensor.from_local(output, self.mesh, [layout], run_check=False)

    def reduce_output(self, output: Tensor, leading: torch.Size) -> Tensor:
        if self.sequence_dim is None:
            return all_reduce(output, self.group)
        if self.sequence_dim % (len(leading) + 1) == len(leading):
            raise ValueError(
                f"expected an output that is sharded along its tokens, got S({self.sequence_dim}) (features)"
            )
        output = output.view(*leading, output.shape[-1])
        return reduce_scatter(output, _check_sequence_dim(output, self.sequence_dim, self.group), self.group)


class PartialSumSharding(RowwiseSharding):
    """weight [N, K/T], input [.., K/T]; the output is Partial(), and its caller redistributes it."""

    def local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """See `LinearSharding`. The bias is zero on all ranks but the first, with the whole gradient on every rank."""
        weight, _, local_bias = super().local_parameters(weight, bias)
        if local_bias is not None and self.mesh.get_local_rank() > 0:
            local_bias = local_bias - local_bias.detach()
        return weight, None, local_bias

    def forward(self, linear: Float8Linear, input: Tensor) -> Tensor:
        """See `_Sharding`. Returns a DTensor, Partial()."""
        input = typing.cast(DTensor, input).redistribute(placements=[Shard(input.dim() - 1)]).to_local()
        return DTensor.from_local(linear.forward_local(input, self), self.mesh, [Partial()], run_check=False)

    def reduce_output(self, output: Tensor, leading: torch.Size) -> Tensor:
        return output


class ReplicatedSharding(_Sharding):
    """weight [N, K] on every rank; the input is replicated or sharded by token, and the output has its placement."""

    weight_dim = 0

    def __init__(self, mesh: DeviceMesh, layout: Placement) -> None:
        """`layout`: the placement of the input, Replicate() or Shard of a dim before the last."""
        super().__init__(mesh)
        self.layout = layout

    def local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        placements = [Replicate() if self.layout == Replicate() else Partial()]  # of the gradients
        local_bias = None if bias is None else typing.cast(DTensor, bias).to_local(grad_placements=placements)
        return typing.cast(DTensor, weight).to_local(grad_placements=placements), local_bias, None

    def weight_quantizer(self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None) -> Quantizer:
        return Quantizer(casts, hp_dtype, scale)

    def input_quantizer(
        self, input: Tensor, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None, reader: int
    ) -> Quantizer:
        if self.layout == Replicate():
            return choose_quantizer(input, casts, hp_dtype, scale, reader)
        return TensorParallelQuantizer(casts, hp_dtype, scale, self.group, 0)

    def grad_output_quantizer(
        self, casts: OperandCasts, hp_dtype: torch.dtype, scale: PersistentScale | None
    ) -> Quantizer:
        if self.layout == Replicate():
            return Quantizer(casts, hp_dtype, scale)
        return TensorParallelQuantizer(casts, hp_dtype, scale, self.group, 0)

    def forward(self, linear: Float8Linear, input: Tensor) -> Tensor:
        """See `_Sharding`. Returns a DTensor in `layout`."""
        local = typing.cast(DTensor, input).redistribute(placements=[self.layout]).to_local()
        output = linear.forward_local(local, self)
        return self._wrap_output(output, [*input.shape[:-1], linear.out_features], self.layout)


def check_can_be_sharded(linear: Float8Linear, weight_dim: int, ranks: int) -> None:
    """Raise ValueError if sharding the weight along `weight_dim` over `ranks` would split blocks that share a scale."""
    casts = linear.config.casts
    sharded = ((casts.weight, weight_dim), (casts.grad_output if weight_dim == 0 else casts.input, 1))
    # Configs give the layout of row codes; in column codes blocks are transposed.
    cast_dims = [(operand.row, dim) for operand, dim in sharded]
    cast_dims += [(operand.column, 1 - dim) for operand, dim in sharded]
    lengths = [cast.known_layout("tensor parallelism")[dim] for cast, dim in cast_dims if not cast.is_disabled]
    block = max([1, *lengths])
    name, features = (("out", linear.out_features), ("in", linear.in_features))[weight_dim]
    part = -(-features // ranks)
    if ranks > 1 and part % block:
        raise ValueError(
            f"tensor parallelism expects parts of whole blocks, a multiple of {block} features on each rank, got "
            f"{part} ({name}_features {features} on {ranks} ranks); {ranks * block * -(-part // block)} in all would "
            "fit, and row-wise recipes take any number"
        )


def derive_sharding(linear: Float8Linear, input: Tensor) -> ColwiseSharding | PartialSumSharding | ReplicatedSharding:
    """Derive the sharding of a linear whose weight other code made a DTensor, for example torch's ColwiseParallel.

    The output has the placement that nn.Linear gives it: Shard(-1), Partial(), or the input's for a replicated weight.
    """
    weight = typing.cast(DTensor, linear.weight)
    placement = weight.placements[0] if weight.device_mesh.ndim == 1 else None
    if not isinstance(input, DTensor) or placement not in (Shard(0), Shard(1), Replicate()):
        raise RuntimeError(
            f"the weight of this Float8Linear is sharded ({weight.placements} on {weight.device_mesh.ndim} mesh dims) "
            "when its forward runs. If fully_shard did that, call the module that was given to it; if tensor "
            "parallelism, use (Float8)ColwiseParallel or (Float8)RowwiseParallel on a mesh with one dim"
        )
    if linear.scaling is not None:
        linear.scaling.let_host_decide()
    if not isinstance(placement, Shard):
        layout = input.placements[0]
        by_token = isinstance(layout, Shard) and layout.dim % input.dim() < input.dim() - 1
        return ReplicatedSharding(weight.device_mesh, layout if by_token else Replicate())
    check_can_be_sharded(linear, placement.dim, weight.device_mesh.size())
    return ColwiseSharding(weight.device_mesh) if placement == Shard(0) else PartialSumSharding(weight.device_mesh)


def to_local(parameter: Tensor) -> Tensor:
    """Return `to_local()` of a DTensor, which is differentiable, and other tensors unchanged."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _check_sequence_dim(tensor: Tensor, dim: int, group: ProcessGroup) -> int:
    dim %= tensor.dim()
    if tensor.shape[dim] % group.size():
        raise ValueError(
            f"sequence parallel: expected dim {dim} of {list(tensor.shape)} to be a multiple of the {group.size()} "
            "ranks of tensor parallelism; pad the sequence"
        )
    return dim


# ---- activations across ranks ----------------------------------------------------------------------------------------


class _AllGatherFloat8(torch.autograd.Function):
    """All-gathers a sequence-sharded activation [.., s, K] as a Float8Tensor. The backward is a reduce-scatter."""

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
        amax_buffer: Tensor | None,
        is_known: Tensor | None,
    ) -> Any:
        dim %= local.dim()
        if dim == local.dim() - 1:
            raise ValueError("expected an input that is sharded along its tokens, got one sharded along its features")
        ctx.dim, ctx.mesh = dim, mesh
        group = mesh.get_group()
        dtype = get_output_dtype(local)
        scale = None
        if quant_scale is not None and is_known is not None:
            scale = PersistentScale(quant_scale, amax_buffer, is_known)
        quantizer = GatheringQuantizer(config.casts.input, dtype, scale, group, dim)
        row, column = quantizer(local, row=True, column=for_grad_weight)
        shape = [*local.shape]
        shape[dim] *= group.size()
        gathered = Float8Tensor.from_operands(
            _view_operand(expect(row), shape),
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
            grad = grad.redistribute(placements=[Shard(ctx.dim)]).to_local()
        else:
            grad = reduce_scatter(grad, _check_sequence_dim(grad, ctx.dim, ctx.mesh.get_group()), ctx.mesh.get_group())
        return grad, *[None] * 8


def _view_operand(operand: Operand, shape: Sequence[int]) -> Operand:
    scale = operand.dequant_scale
    if scale is not None and scale.dim():
        scale = scale.view(*shape[:-1], -1)
    return Operand(operand.data.view(shape), scale, operand.layout)


class PartialGrad(torch.autograd.Function):
    """The local tensor of a replicated DTensor. Its gradient is a DTensor in Partial(), which is reduced once, later.

    With `to_local(grad_placements=[Partial()])` torch would reduce it here, once for each linear that reads the input.
    """

    @staticmethod
    def forward(ctx: Any, replicated: DTensor) -> Tensor:
        ctx.mesh = replicated.device_mesh
        return replicated.to_local()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return DTensor.from_local(grad, ctx.mesh, [Partial()], run_check=False)


def is_all_gathered_in_float8(config: Float8LinearConfig) -> bool:
    """Return whether the input is all-gathered as codes: both its matmuls read float8, and blocks are not square.

    The scale of a square block belongs to several tokens, so leading dims could not be flattened and split.
    """
    cast = config.casts.input
    return cast.is_float8 and not (cast.row.is_blockwise and not cast.row.depends_on_direction)


class AllGatherInput:
    """All-gathers the sequence-sharded inputs of one module in float8. Constructed when the module is parallelized."""

    def __init__(self, layout: Placement, mesh: DeviceMesh, linear: Float8Linear, *, as_dtensor: bool) -> None:
        """`linear`: the first linear that reads the input. Its config and its persistent scale cast the input."""
        self._dim, self._mesh, self._as_dtensor = typing.cast(Shard, layout).dim, mesh, as_dtensor
        self._linear = linear
        self._calls: dict[Float8LinearConfig, Any] = {}
        self.follow_config()
        if self.is_used and self._dim == -1:
            raise ValueError(f"expected a replicated input or one sharded along its tokens, got {layout} (features)")

    def follow_config(self) -> None:
        """Cast by the linear's current config from now on, and set `is_used`, which says whether codes are gathered."""
        dim, mesh, config, as_dtensor = self._dim, self._mesh, self._linear.config, self._as_dtensor
        self.is_used = is_all_gathered_in_float8(config)

        def all_gather_float8(local: Tensor, for_grad_weight: bool, *scale: Tensor | None) -> Tensor:
            return typing.cast(
                Tensor, _AllGatherFloat8.apply(local, dim, mesh, config, as_dtensor, for_grad_weight, *scale)
            )

        # Dynamo would trace the backward with a gradient of the result's type, Float8Tensor. As one call in the graph,
        # the backward is traced by AOTAutograd, with the actual gradient. One function per config, for the guards.
        if config not in self._calls:
            self._calls[config] = torch.compiler.allow_in_graph(all_gather_float8)
        self._call = self._calls[config]

    def __call__(self, local: Tensor, *, for_grad_weight: bool = True, linear: Float8Linear | None = None) -> Tensor:
        """All-gather this rank's part of the input.

        `for_grad_weight`: whether a linear that reads the input trains its weight. `linear`: the linear whose
        persistent scale is used; the copy of a module passes its own linear.
        """
        scale = (linear or self._linear).persistent_scales(local.device).input or (None, None, None)
        return self._call(local, for_grad_weight and torch.is_grad_enabled(), *scale[:3])

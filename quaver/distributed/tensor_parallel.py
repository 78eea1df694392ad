"""Tensor and sequence parallelism of float8 linears, for `parallelize_module`, with the scales of one device.

    Float8ColwiseParallel    weight [N/T, K]   input whole           output [.., N/T]
    Float8RowwiseParallel    weight [N, K/T]   input [.., K/T]       output summed over the ranks, whole or by sequence
    PrepareFloat8ModuleInput                   a sequence-sharded input, cast, gathered as codes, for all who share it

A scale reduces a dim. Where ranks share that dim, their amaxes are reduced before the cast (a number, or a vector as
long as the other dim); where they do not, a rank's own amax is the whole one. So codes and scales are those of one
device, and results differ from it only where a sum over ranks is taken in another order.

What crosses the wire, T ranks, an activation of M tokens by K features:
    forward      M * K codes to gather a sequence-sharded input, once for all linears that share it, and one scale, or
                 one per token beside the codes. Where grad_weight reads another cast of the input than output does
                 (rowwise), both are gathered: two bytes per element, what bfloat16 takes.
    backward     the same for a sequence-sharded grad_output of Float8RowwiseParallel.
    in bfloat16  what a recipe reads in high precision (rowwise_with_gw_hp), and every sum over ranks.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from quaver import scaling
from quaver.casts import MatrixCasts, Operand, Scales, casts_of_activation
from quaver.config import CastConfig, Float8LinearConfig
from quaver.distributed.collectives import all_reduce, gather, max_over_ranks, reduce_scatter
from quaver.distributed.fsdp import keep_gatherable
from quaver.gemm import along_contracted
from quaver.kernels.cast import cast_with_scale
from quaver.linear import Float8Linear, compute_dtype
from quaver.tensor import Float8Tensor

# ---- casts of matrices that are spread over ranks --------------------------------------------------------------------


class SpreadCasts(MatrixCasts):
    """The casts of this rank's part of a matrix that a group has spread along `spread_dim`."""

    __slots__ = ("group", "spread_dim")

    def __init__(self, config: Float8LinearConfig, hp_dtype: torch.dtype, group: ProcessGroup, spread_dim: int) -> None:
        super().__init__(config, hp_dtype)
        self.group, self.spread_dim = group, spread_dim

    def tensorwise_scales(self) -> Scales | None:
        return self._scales.get(None)  # those of rows may be this rank's rows only

    def codes(self, hp: Tensor, cast: CastConfig, contracted_dim: int) -> Operand:
        """As `cast`, but in the layout of `hp`, to be gathered."""
        dim = contracted_dim if cast.is_rowwise else None
        codes = self._cast(hp, cast.float8_dtype, dim)
        return Operand(codes, self._scales[dim].dequant)

    def _cast(self, hp: Tensor, dtype: torch.dtype, dim: int | None) -> Tensor:
        if (dim is not None and dim != self.spread_dim) or dim in self._scales:
            return super()._cast(hp, dtype, dim)
        amax = max_over_ranks(scaling.amax(hp, dim).float(), self.group)
        quant = scaling.amax_to_quant_scale(amax, dtype, power_of_2=self.config.round_scales_to_power_of_2)
        self._scales[dim] = Scales(quant, scaling.to_dequant_scale(quant))
        return cast_with_scale(hp, quant, dtype)


def _gathered_operands(
    local: Tensor,
    dim: int,
    group: ProcessGroup,
    last: CastConfig | None,
    first: CastConfig | None,
    config: Float8LinearConfig,
    hp_dtype: torch.dtype,
) -> tuple[Operand | None, Operand | None]:
    """Both operands of the matrix [M, K] of which each rank of `group` holds `local` [..., K], spread along `dim`.

    Args:
        last, first: how to cast it for the matmul that contracts K, and for the one that contracts M; None for neither.
    """
    if any(cast is not None and cast.is_disabled for cast in (last, first)):
        # High precision has to travel for one of them; the other is cast from it, as on one device.
        whole = gather(local.to(hp_dtype) if local.dtype is not hp_dtype else local, dim, group)
        casts, rows = MatrixCasts(config, hp_dtype), whole.flatten(0, -2)
        return (
            None if last is None else casts.cast(rows, last, 1),
            None if first is None else casts.cast(rows, first, 0),
        )
    spread = SpreadCasts(config, hp_dtype, group, 0)
    rows = local.reshape(-1, local.shape[-1])

    def gathered(cast: CastConfig, contracted_dim: int) -> Operand:
        codes, scale = spread.codes(rows, cast, contracted_dim)
        whole = gather(codes.view(local.shape), dim, group).flatten(0, -2)
        if scale is not None and scale.dim() and contracted_dim == 1:  # one per token: they travel beside the codes
            scale = gather(scale.view(*local.shape[:-1], 1), dim, group).view(-1, 1)
        return Operand(whole, scale)

    last_op = None if last is None else gathered(last, 1)
    if first is None:
        first_op = None
    elif last_op is not None and not (cast_is_rowwise(last) or cast_is_rowwise(first)):
        first_op = last_op
    else:
        first_op = gathered(first, 0)
    return _laid_out(last_op, 1, config), _laid_out(first_op, 0, config)


def cast_is_rowwise(cast: CastConfig | None) -> bool:
    return cast is not None and cast.is_rowwise


def _laid_out(operand: Operand | None, contracted_dim: int, config: Float8LinearConfig) -> Operand | None:
    if operand is None:
        return None
    return operand._replace(data=along_contracted(operand.data, contracted_dim, emulate=config.emulate))


# ---- how one linear is spread ----------------------------------------------------------------------------------------


class _Sharding:
    """What column-wise and row-wise parallel linears have in common; see `quaver.linear.LinearSharding`."""

    weight_dim: int
    """The dim of weight [N, K] that is sharded."""

    def __init__(self, mesh: DeviceMesh, weight_length: int) -> None:
        self.mesh = mesh
        self.group = mesh.get_group()
        self.weight_length = weight_length

    def weight_casts(self, config: Float8LinearConfig, hp_dtype: torch.dtype) -> MatrixCasts:
        return SpreadCasts(config, hp_dtype, self.group, self.weight_dim)

    def __deepcopy__(self, memo: object) -> _Sharding:
        return self  # groups cannot be copied


class ColwiseSharding(_Sharding):
    """weight [N/T, K], input whole, output and grad_output [.., N/T]."""

    weight_dim = 0

    def __init__(self, mesh: DeviceMesh, weight_length: int, gather_input: InputGather | None) -> None:
        super().__init__(mesh, weight_length)
        self.gather_input = gather_input

    def local_parameters(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return _local(weight), None if bias is None else _local(bias), None

    def input_casts(self, input: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype) -> MatrixCasts:
        return casts_of_activation(input, config, hp_dtype)

    def grad_output_operands(
        self, grad_output: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype, needs: tuple[bool, bool]
    ) -> tuple[Operand | None, Operand | None]:
        casts, rows = SpreadCasts(config, hp_dtype, self.group, 1), grad_output.reshape(-1, grad_output.shape[-1])
        return (
            casts.cast(rows, config.casts.grad_output, 1) if needs[0] else None,
            casts.cast(rows, config.casts.grad_output_for_grad_weight, 0) if needs[1] else None,
        )

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
            return _local(weight), None, None
        # Added to the sum, so that it counts once; a rank's tokens give a part of its gradient.
        partial = None if self.sequence_dim is None else [Partial()]
        return _local(weight), None, cast(DTensor, bias).to_local(grad_placements=partial)

    def input_casts(self, input: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype) -> MatrixCasts:
        return SpreadCasts(config, hp_dtype, self.group, 1)

    def grad_output_operands(
        self, grad_output: Tensor, config: Float8LinearConfig, hp_dtype: torch.dtype, needs: tuple[bool, bool]
    ) -> tuple[Operand | None, Operand | None]:
        last = config.casts.grad_output if needs[0] else None
        first = config.casts.grad_output_for_grad_weight if needs[1] else None
        if self.sequence_dim is not None:
            dim = self.sequence_dim % grad_output.dim()
            return _gathered_operands(grad_output, dim, self.group, last, first, config, hp_dtype)
        casts, rows = MatrixCasts(config, hp_dtype), grad_output.reshape(-1, grad_output.shape[-1])
        return (
            None if last is None else casts.cast(rows, last, 1),
            None if first is None else casts.cast(rows, first, 0),
        )

    def reduce_output(self, output: Tensor) -> Tensor:
        if self.sequence_dim is None:
            return all_reduce(output, self.group)
        return reduce_scatter(output, _sequence_dim(output, self.sequence_dim, self.group), self.group)


def _local(parameter: Tensor) -> Tensor:
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
    ) -> Any:
        dim %= local.dim()
        if dim == local.dim() - 1:
            raise ValueError("expected an input that is sharded along its tokens, got one sharded along its features")
        ctx.dim, ctx.mesh = dim, mesh
        group = mesh.get_group()
        dtype = compute_dtype(local.device.type, local.dtype)
        first = config.casts.input_for_grad_weight if for_grad_weight else None
        last_op, first_op = _gathered_operands(local, dim, group, config.casts.input, first, config, dtype)
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
        if isinstance(_local(grad), Float8Tensor):  # a graph that ends here: the compiler makes up gradients by type
            raise NotImplementedError(
                "torch.compile ended a graph between the gathering of an input in float8 and the linears that read it. "
                "Compile a module around the one that PrepareFloat8ModuleInput was applied to, with fullgraph=True"
            )
        if isinstance(grad, DTensor):
            grad = grad.redistribute(placements=[Shard(ctx.dim)]).to_local()
        else:
            grad = reduce_scatter(grad, _sequence_dim(grad, ctx.dim, ctx.mesh.get_group()), ctx.mesh.get_group())
        return grad, None, None, None, None, None


def _shaped(operand: Operand, shape: Sequence[int]) -> Operand:
    scale = operand.dequant_scale
    if scale is not None and scale.dim() and scale.shape[-1] == 1:
        scale = scale.view(*shape[:-1], 1)
    return Operand(operand.data.view(shape), scale)


class _PartOfSum(torch.autograd.Function):
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


class _WholeInput(torch.autograd.Function):
    """An input that every rank has whole: each rank's part of the linear gives a part of its gradient."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return input.view_as(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grad, ctx.group), None


def _travels_in_float8(config: Float8LinearConfig) -> bool:
    """Whether the input is gathered as codes: not if one of its matmuls reads it in high precision."""
    return not (config.casts.input.is_disabled or config.casts.input_for_grad_weight.is_disabled)


class InputGather:
    """Gathers the sequence-sharded inputs of one module; made once, when the module is parallelized."""

    def __init__(self, layout: Placement, mesh: DeviceMesh, config: Float8LinearConfig, *, as_dtensor: bool) -> None:
        dim = cast(Shard, layout).dim
        if dim == -1:
            raise ValueError(f"expected an input that is whole or sharded along its tokens, got {layout} (features)")

        def gather_float8(local: Tensor, for_grad_weight: bool) -> Tensor:
            return cast(Tensor, _GatherFloat8.apply(local, dim, mesh, config, as_dtensor, for_grad_weight))

        # Dynamo would trace the backward with a gradient of the type of the result, a Float8Tensor. In the graph as one
        # call, it is traced by the autograd that runs it, with the gradient that comes.
        self._call = torch.compiler.allow_in_graph(gather_float8)

    def __call__(self, local: Tensor, *, for_grad_weight: bool = True) -> Tensor:
        """`for_grad_weight`: whether a linear that reads it trains its weight. Without gradients none does."""
        return self._call(local, for_grad_weight and torch.is_grad_enabled())


# ---- the styles ------------------------------------------------------------------------------------------------------


def _float8_linear(style: object, module: nn.Module) -> Float8Linear:
    if not isinstance(module, Float8Linear):
        raise ValueError(
            f"{type(style).__name__} expects a Float8Linear, got {type(module).__name__}; call "
            f"convert_to_float8_training first, or use {type(style).__name__.removeprefix('Float8')} for it"
        )
    return module


def _one_axis(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim != 1:
        raise ValueError(f"tensor parallelism runs along one mesh axis, got a mesh of {mesh.ndim}; pass mesh['tp']")
    return mesh


class Float8ColwiseParallel(ColwiseParallel):
    """torch's `ColwiseParallel` for a Float8Linear: a sequence-sharded input is cast, then gathered as codes.

    Args:
        input_layouts: Replicate() (the default), or Shard(d) of a dim before the last. What
            `PrepareFloat8ModuleInput` prepared is taken as it is.
        output_layouts: Shard(-1) (the default), or any other that torch can redistribute to, in high precision.
        use_local_output: give a plain tensor rather than a DTensor.
    Raises:
        ValueError: the module is not a Float8Linear, or the input is sharded along its features.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _float8_linear(self, module)
        mesh = _one_axis(device_mesh)
        with keep_gatherable(linear):
            super()._apply(linear, mesh)
        gather_input = None
        if self.input_layouts[0] != Replicate() and _travels_in_float8(linear.config):
            gather_input = InputGather(self.input_layouts[0], mesh, linear.config, as_dtensor=False)
        linear.sharding = ColwiseSharding(mesh, _local(linear.weight).shape[0], gather_input)
        return linear

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: DeviceMesh
    ) -> Tensor:
        input, layout = inputs[0], input_layouts[0]
        if isinstance(input, Float8Tensor):
            return input
        if isinstance(input, DTensor):
            if input.placements[0] == Replicate():
                return cast(Tensor, _PartOfSum.apply(input))
            input = input.redistribute(placements=input_layouts).to_local()
        if layout == Replicate():
            return cast(Tensor, _WholeInput.apply(input, device_mesh.get_group()))
        if mod.sharding.gather_input is not None:
            return cast(Tensor, mod.sharding.gather_input(input, for_grad_weight=mod.weight.requires_grad))
        whole = DTensor.from_local(input, device_mesh, [layout], run_check=False).redistribute(placements=[Replicate()])
        return cast(Tensor, _PartOfSum.apply(whole))

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Tensor, device_mesh: DeviceMesh
    ) -> Tensor:
        if use_local_output and output_layouts[0] in (Shard(-1), Shard(outputs.dim() - 1)):
            return outputs
        shape = torch.Size([*outputs.shape[:-1], mod.out_features])  # ranks may have different numbers of features
        stride = torch.empty(shape, device="meta").stride()
        last = [Shard(outputs.dim() - 1)]
        sharded = DTensor.from_local(outputs, device_mesh, last, run_check=False, shape=shape, stride=stride)
        return ColwiseParallel._prepare_output_fn(output_layouts, use_local_output, mod, sharded, device_mesh)


class Float8RowwiseParallel(RowwiseParallel):
    """torch's `RowwiseParallel` for a Float8Linear: a sequence-sharded grad_output is cast, then gathered as codes.

    Args:
        input_layouts: Shard(-1) (the default), or another that torch can redistribute from, in high precision.
        output_layouts: Replicate() (the default), or Shard(d) of a dim before the last (sequence parallel).
        use_local_output: give a plain tensor rather than a DTensor.
    Raises:
        ValueError: the module is not a Float8Linear, or the output would be sharded along its features.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _float8_linear(self, module)
        mesh = _one_axis(device_mesh)
        layout = self.output_layouts[0]
        if layout != Replicate() and (not isinstance(layout, Shard) or layout.dim == -1):
            raise ValueError(
                f"Float8RowwiseParallel: expected output_layouts Replicate() or Shard(tokens), got {layout}"
            )
        with keep_gatherable(linear):
            super()._apply(linear, mesh)
        sequence_dim = layout.dim if isinstance(layout, Shard) else None
        linear.sharding = RowwiseSharding(mesh, _local(linear.weight).shape[1], sequence_dim)
        return linear

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: DeviceMesh
    ) -> Tensor:
        input = inputs[0]
        last = Shard(input.dim() - 1)
        if isinstance(input, DTensor):
            return input.redistribute(placements=[last]).to_local()
        if input_layouts[0] in (Shard(-1), last):
            return cast(Tensor, input)
        sharded = DTensor.from_local(input, device_mesh, input_layouts, run_check=False)
        return sharded.redistribute(placements=[last]).to_local()

    @staticmethod
    def _prepare_output_fn(
        output_layouts: Any, use_local_output: bool, mod: Any, outputs: Tensor, device_mesh: DeviceMesh
    ) -> Tensor:
        return (
            outputs if use_local_output else DTensor.from_local(outputs, device_mesh, output_layouts, run_check=False)
        )


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """torch's `PrepareModuleInput` for a module of Float8Linears that share inputs: cast once, gathered once as codes.

    What a module's forward gets in place of a sequence-sharded input is a `Float8Tensor` of the whole input's shape (in
    a DTensor unless `use_local_output`). It can be given to column-wise parallel Float8Linears and viewed with other
    leading dims; anything else on it is an error. Where the recipe reads the input in high precision too
    (rowwise_with_gw_hp), it is gathered so, by torch.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts, use_local_output: as
            torch's.
        float8_dtype: the dtype that inputs are cast to; None for the one of the linears' config.
        fwd_config_submodule_fqn: the linear whose config is used; None to use the one that all Float8Linears share.
    Raises:
        ValueError: no Float8Linear inside, linears of several configs, or a float8_dtype that is not the config's.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        desired_input_layouts: Placement | tuple[Placement | None, ...] | None = None,
        input_kwarg_layouts: dict[str, Placement] | None = None,
        desired_input_kwarg_layouts: dict[str, Placement] | None = None,
        use_local_output: bool = False,
        float8_dtype: torch.dtype | None = None,
        fwd_config_submodule_fqn: str | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts,
            desired_input_layouts=desired_input_layouts,
            input_kwarg_layouts=input_kwarg_layouts,
            desired_input_kwarg_layouts=desired_input_kwarg_layouts,
            use_local_output=use_local_output,
        )
        self.float8_dtype = float8_dtype
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn
        self._gathers: dict[Placement | None, InputGather] = {}

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        config, mesh = self._config_of(module), _one_axis(device_mesh)
        applied = copy.copy(self)  # the same style may be applied to modules of other configs
        if _travels_in_float8(config):
            layouts = {*(self.input_layouts or ()), *self.input_kwarg_layouts.values()}
            applied._gathers = {
                layout: InputGather(layout, mesh, config, as_dtensor=not self.use_local_output)
                for layout in layouts
                if isinstance(layout, Shard)
            }
        return super(PrepareFloat8ModuleInput, applied)._apply(module, mesh)

    def _config_of(self, module: nn.Module) -> Float8LinearConfig:
        if self.fwd_config_submodule_fqn is not None:
            linears = [_float8_linear(self, module.get_submodule(self.fwd_config_submodule_fqn))]
        else:
            linears = [child for child in module.modules() if isinstance(child, Float8Linear)]
        if not linears:
            raise ValueError(
                f"PrepareFloat8ModuleInput: {type(module).__name__} has no Float8Linear; use PrepareModuleInput"
            )
        config = linears[0].config
        if any(linear.config != config for linear in linears):
            raise ValueError(
                f"PrepareFloat8ModuleInput: the Float8Linears of {type(module).__name__} have several configs; name "
                "the one whose input is prepared with fwd_config_submodule_fqn"
            )
        if self.float8_dtype not in (None, config.casts.input.float8_dtype):
            raise ValueError(
                f"PrepareFloat8ModuleInput: float8_dtype is {self.float8_dtype}, but the config casts inputs to "
                f"{config.casts.input.float8_dtype}"
            )
        return config

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        gather_input = self._gathers.get(input_layout) if desired_layout == Replicate() else None
        if gather_input is None or input_layout is None:
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        if isinstance(input, DTensor):
            input = input.redistribute(placements=[input_layout]).to_local()
        return gather_input(input)

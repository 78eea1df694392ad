"""Tensor and sequence parallelism of float8 linears, for `parallelize_module`, with the scales of one device.

    Float8ColwiseParallel       weight [N/T, K]    input replicated    output [.., N/T]
    Float8RowwiseParallel       weight [N, K/T]    input [.., K/T]     output reduced, or reduced and scattered
    PrepareFloat8ModuleInput    quantizes and all-gathers a sequence-sharded input once for all linears that read it

Codes and scales are bit-identical to one device (tensor_parallel_quantizer.py). Results differ only by the order of
sums over ranks.

The payloads over T ranks, for an activation of M tokens by K features:

    forward      The all-gather of a sequence-sharded input sends M * K codes and their scales. If grad_weight reads
                 another cast than output does (rowwise, blocks), both casts are sent: two bytes per element, as in
                 bfloat16.
    backward     The same for a sequence-sharded grad_output of Float8RowwiseParallel.
    in bfloat16  Inputs that a recipe reads in high precision (those with _gw_hp). Sequences of a rank that are not
                 a multiple of the rows of a block (128 or 32). Every sum over ranks.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel

from quaver.experts.grouped_module import Float8GroupedModule
from quaver.experts.module import is_experts
from quaver.linear.module import Float8Linear
from quaver.linear.sharding import (
    ColwiseSharding,
    LinearSharding,
    RowwiseSharding,
    ShardedLinear,
    check_can_be_sharded,
    check_ranks_agree_on_linear,
)
from quaver.linear.tensor import Float8Tensor
from quaver.parallel.input_all_gather import InputAllGather


def _require_linear(style: object, module: nn.Module) -> Float8Linear:
    if isinstance(module, Float8Linear) and isinstance(module.weight, Float8Tensor):
        raise NotImplementedError(
            f"{type(style).__name__}: expected a weight in high precision, got a frozen float8 weight"
        )
    if isinstance(module, Float8GroupedModule) or is_experts(module):
        raise ValueError(
            f"{type(style).__name__} expects a Float8Linear, got the experts {type(module).__name__}; split these by "
            "expert, with Float8ExpertParallel"
        )
    if not isinstance(module, Float8Linear):
        raise ValueError(
            f"{type(style).__name__} expects a Float8Linear, got {type(module).__name__}; call "
            f"convert_to_float8_training first, or use {type(style).__name__.removeprefix('Float8')} for it"
        )
    return module


def _require_one_axis(mesh: DeviceMesh) -> DeviceMesh:
    if mesh.ndim != 1:
        raise ValueError(f"tensor parallelism runs along one mesh axis, got a mesh of {mesh.ndim}; pass mesh['tp']")
    return mesh


def _set_sharding(linear: Float8Linear, sharding: LinearSharding) -> None:
    check_ranks_agree_on_linear(linear, sharding.group)
    linear.sharding = sharding
    if linear.scale_slots is not None:
        linear.scale_slots.conversion_slots.ranks_read_is_known = True


class _GatheringColwiseSharding(ColwiseSharding):
    """A `ColwiseSharding` that all-gathers a sequence-sharded input."""

    def __init__(self, mesh: DeviceMesh, all_gather_input: InputAllGather) -> None:
        super().__init__(mesh)
        self.all_gather_input = all_gather_input

    def _forward(self, linear: ShardedLinear, input: Tensor) -> Tensor:
        is_sharded = isinstance(input, DTensor) and input.placements[0] != Replicate()
        if is_sharded and self.all_gather_input.gathers_codes:
            input = self.all_gather_input(input, for_grad_weight=linear.weight.requires_grad)
        return super()._forward(linear, input)

    def __deepcopy__(self, memo: Any) -> _GatheringColwiseSharding:
        return _GatheringColwiseSharding(self.mesh, copy.deepcopy(self.all_gather_input, memo))


class Float8ColwiseParallel(ColwiseParallel):
    """torch's `ColwiseParallel` for a Float8Linear: a sequence-sharded input is quantized, then all-gathered.

    Args:
        input_layouts: Replicate() (the default), or Shard(d) of a dim before the last. Ignored for a `Float8Tensor`
            from `PrepareFloat8ModuleInput`.
        output_layouts: Shard(-1) (the default), or a placement to redistribute to in high precision.
        use_local_output: return a plain tensor instead of a DTensor.
    Raises:
        ValueError: the module is not a Float8Linear, or the input is sharded along its features.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _require_linear(self, module)
        mesh = _require_one_axis(device_mesh)
        check_can_be_sharded(linear, 0, mesh.size())
        super()._apply(linear, mesh)
        sharding = ColwiseSharding(mesh)
        if isinstance(self.input_layouts[0], Shard):
            all_gather_input = InputAllGather(self.input_layouts[0], mesh, linear, as_dtensor=False)
            sharding = _GatheringColwiseSharding(mesh, all_gather_input)
        _set_sharding(linear, sharding)
        return linear

    @staticmethod
    def _prepare_input_fn(
        input_layouts: Any, desired_input_layouts: Any, mod: Any, inputs: Any, device_mesh: DeviceMesh
    ) -> Tensor:
        """Say how the input is sharded. `ColwiseSharding` redistributes or all-gathers it."""
        input: Tensor = inputs[0]
        if isinstance(input, (DTensor, Float8Tensor)):
            return input
        return DTensor.from_local(input, device_mesh, input_layouts, run_check=False)


class Float8RowwiseParallel(RowwiseParallel):
    """torch's `RowwiseParallel` for a Float8Linear: a sequence-sharded grad_output is quantized, then all-gathered.

    Args:
        input_layouts: Shard(-1) (the default), or a placement to redistribute from in high precision.
        output_layouts: Replicate() (the default), or Shard(d) of a dim before the last (sequence parallel).
        use_local_output: return a plain tensor instead of a DTensor.
    Raises:
        ValueError: the module is not a Float8Linear, or the output would be sharded along its features.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear = _require_linear(self, module)
        mesh = _require_one_axis(device_mesh)
        layout = self.output_layouts[0]
        if layout != Replicate() and (not isinstance(layout, Shard) or layout.dim == -1):
            raise ValueError(
                f"Float8RowwiseParallel: expected output_layouts Replicate() or Shard(tokens), got {layout}"
            )
        check_can_be_sharded(linear, 1, mesh.size())
        super()._apply(linear, mesh)
        sequence_dim = layout.dim if isinstance(layout, Shard) else None
        _set_sharding(linear, RowwiseSharding(mesh, sequence_dim))
        return linear


class PrepareFloat8ModuleInput(PrepareModuleInput):
    """torch's `PrepareModuleInput` for Float8Linears that share inputs: quantized once, all-gathered once as codes.

    Instead of a sequence-sharded input, the module's forward gets a `Float8Tensor` of the whole input's shape (in a
    DTensor unless `use_local_output`). It can be passed to column-wise parallel Float8Linears and viewed with other
    leading dims; any other op raises. If the recipe also reads the input in high precision, torch all-gathers it in
    high precision.

    Args:
        input_layouts, desired_input_layouts, input_kwarg_layouts, desired_input_kwarg_layouts, use_local_output: see
            `PrepareModuleInput`.
        float8_dtype: the dtype that inputs are quantized to; None for the config's.
        fwd_config_submodule_fqn: the linear whose config and persistent scale are used; None for the first
            Float8Linear, if all have the same config.
    Raises:
        ValueError: no Float8Linear inside, linears with several configs, or a float8_dtype that differs from the
            config's.
    """

    def __init__(
        self, *, float8_dtype: torch.dtype | None = None, fwd_config_submodule_fqn: str | None = None, **layouts: Any
    ) -> None:
        super().__init__(**layouts)
        self.float8_dtype = float8_dtype
        self.fwd_config_submodule_fqn = fwd_config_submodule_fqn
        self._gathers: dict[Placement | None, InputAllGather] = {}
        self._module = nn.Module()
        """The module that the style was applied to."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        linear, mesh = self._find_linear(module), _require_one_axis(device_mesh)
        applied = copy.copy(self)  # the same style may be applied to modules with other configs
        applied._module = module
        layouts = {*(self.input_layouts or ()), *self.input_kwarg_layouts.values()}
        applied._gathers = {
            layout: InputAllGather(layout, mesh, linear, as_dtensor=not self.use_local_output)
            for layout in layouts
            if isinstance(layout, Shard)
        }
        module.register_forward_pre_hook(_PrepareHook(applied, mesh), with_kwargs=self.with_kwargs)
        return module

    def _find_linear(self, module: nn.Module) -> Float8Linear:
        if self.fwd_config_submodule_fqn is not None:
            linears = [_require_linear(self, module.get_submodule(self.fwd_config_submodule_fqn))]
        else:
            linears = [child for child in module.modules() if isinstance(child, Float8Linear)]
        if not linears:
            raise ValueError(
                f"PrepareFloat8ModuleInput: {type(module).__name__} has no Float8Linear; use PrepareModuleInput"
            )
        config = linears[0].float8_config
        if any(linear.float8_config != config for linear in linears):
            raise ValueError(
                f"PrepareFloat8ModuleInput: the Float8Linears of {type(module).__name__} have several configs; name "
                "the one whose input is prepared with fwd_config_submodule_fqn"
            )
        if self.float8_dtype not in (None, config.casts.input.row.float8_dtype):
            raise ValueError(
                f"PrepareFloat8ModuleInput: float8_dtype is {self.float8_dtype}, but the config quantizes inputs to "
                f"{config.casts.input.row.float8_dtype}"
            )
        return linears[0]

    def _prepare_input_arg(
        self, input: Any, mesh: DeviceMesh, input_layout: Placement | None, desired_layout: Placement | None
    ) -> Any:
        all_gather_input = self._gathers.get(input_layout) if desired_layout == Replicate() else None
        if all_gather_input is None or not all_gather_input.gathers_codes:
            return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)
        linears = (child for child in self._module.modules() if isinstance(child, Float8Linear))
        return all_gather_input(input, for_grad_weight=any(linear.weight.requires_grad for linear in linears))


class _PrepareHook:
    """Prepares the inputs of one module. torch's hook is a function, which a copy of the module would share.

    This one is copied with the module, so the copy casts with the persistent scale of the copied linear.
    """

    def __init__(self, style: PrepareFloat8ModuleInput, mesh: DeviceMesh) -> None:
        self.style, self.mesh = style, mesh

    def __call__(self, module: nn.Module, inputs: Any, kwargs: dict[str, Any] | None = None) -> Any:
        for child in module.modules():
            if isinstance(child, Float8Linear):
                check_ranks_agree_on_linear(child, self.mesh.get_group())
        if kwargs is None:
            return self.style._prepare_input_fn(inputs, self.mesh)
        return self.style._prepare_input_kwarg_fn(inputs, kwargs, self.mesh)

    def __deepcopy__(self, memo: dict[int, Any]) -> _PrepareHook:
        return _PrepareHook(copy.deepcopy(self.style, memo), self.mesh)  # groups cannot be copied

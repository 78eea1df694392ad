"""Float8 all-gather for FSDP2: each rank quantizes its shard with the scales of the whole weight and sends codes.

    convert_to_float8_training(model, config=replace(config, enable_fsdp_float8_all_gather=True))
    fully_shard(model)
    ...
    optimizer.step()
    precompute_float8_dynamic_scale_for_fsdp(model)      # optional

The parameters that FSDP2 holds and the optimizer updates stay in high precision. The payload of an all-gather is one
uint8 tensor for each cast of the weight, in forward and backward:

    two bytes per element    each matmul reads its own cast: rowwise, rowwise_with_gw_hp
    one byte per element     both matmuls read one cast: all other recipes

The unsharded parameter is a `Float8Tensor` that lives as long as FSDP2 keeps it unsharded. An unsharded weight in high
precision exists only while `high_precision_matmuls` includes a matmul that reads the weight. The 3-D weights of experts
are gathered in the same way.

[Note: when scales are dropped]
Scales are stored with the shard that they were computed from and dropped at the first write to it. There are two
kinds of writes:

    through dispatch    Every op on a shard passes `Float8AllGatherWeight.__torch_dispatch__`. This includes the
                        multi-tensor kernels of optimizers, which move no version counters. All ranks run these ops, so
                        they find a scale missing together and join the collective that computes it. An optimizer must
                        therefore step empty shards too, and no rank may skip a step that the others make. Before that
                        collective the ranks wait in a store if other weights lack scales than in earlier steps, or if
                        scales were precomputed. So a rank that wrote alone raises.
    past dispatch       A write into a tensor of a state_dict may happen on some ranks only, since shards can be empty.
                        A rank sees it in a version counter, but cannot know what the other ranks see. It raises
                        before the all-gather: to tell them, each all-gather would need a collective that waits for
                        the device. The rank must end, since the other ranks wait for it.

[Note: padding]
FSDP2 pads shorter shards to the length of the others. At its first unshard and after load_state_dict it allocates
zeros and copies the shard to their beginning. This write happens on some ranks only and does not change the weight. So
the zeros share the weight's scales from the start, and the one copy of the shard into them keeps the scales.
"""

from __future__ import annotations

import importlib
import math
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from quaver.experts.cast import expand_quant_scales
from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import ModuleWeight
from quaver.fsdp.scaled_shard import AllGatherInputs, AllGatherMetadata, ScaledShard, ScaledShardState
from quaver.fsdp.scales import list_layouts
from quaver.fsdp.shard import LocatedShard
from quaver.fsdp.weight_group import (
    check_ranks_agree_on_gather,
    get_all_gather_state,
    get_current_shard,
    get_or_compute_whole_scales,
)
from quaver.kernels.cast import cast_blocks_with_scale, cast_with_scale, compute_matrix_amax
from quaver.kernels.operands import Operand, require
from quaver.kernels.persistent_cast import cast_with_persistent_scale, record_amax
from quaver.linear.module import Float8Linear
from quaver.linear.tensor import Float8Tensor
from quaver.recipes.part_scales import select_part_scales
from quaver.recipes.scale_layout import COLUMNWISE, ScaleLayout
from quaver.recipes.scaling import CastScales
from quaver.runtime.collectives import pad_rows
from quaver.torch_private.dispatch import OpOverload
from quaver.torch_private.dtensor import get_local_tensor
from quaver.torch_private.fsdp import hide_fsdp_ops_from_checkpoint_policies
from quaver.torch_private.versions import keep_versions

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

aten = torch.ops.aten


class _Padding:
    """Marks zeros and their views until FSDP2 copies the shard to their beginning; see [Note: padding]."""

    __slots__ = ("awaits_copy",)

    def __init__(self) -> None:
        self.awaits_copy = True


class Float8AllGatherWeight(ScaledShard):
    """A weight, or a shard of one, that FSDP2 all-gathers in float8.

    Ops run on the wrapped tensor. `data_ptr`, `untyped_storage`, `numpy` and `tolist` return the wrapped tensor's.
    """

    wrapped: Tensor
    """The plain tensor in high precision, [n, K] for a linear and [e, r, C] for experts."""
    padding: _Padding | None

    @staticmethod
    def __new__(cls, wrapped: Tensor, *_: object) -> Float8AllGatherWeight:
        return cls.wrap(wrapped)

    def __init__(
        self, wrapped: Tensor, shard_state: ScaledShardState | None = None, padding: _Padding | None = None
    ) -> None:
        self.wrapped = wrapped
        self.shard_state = shard_state or ScaledShardState("weight")
        self.padding = padding

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: Float8Linear | Float8Experts,
        mp_policy: MixedPrecisionPolicy,
    ) -> AllGatherInputs:
        """Return the payloads: one uint8 tensor of the padded shard's codes for each cast of the weight.

        While `high_precision_matmuls` includes a matmul that reads the weight, one tensor in high precision instead.
        """
        weight = ModuleWeight(module, self.shard_state.name)
        check_ranks_agree_on_gather(weight)
        if not weight.config.casts.weight.is_float8:
            shard = get_current_shard(weight)._replace(local=self.wrapped)
            values = shard.local.to(mp_policy.param_dtype or shard.local.dtype)
            return (_pad_to_chunk(shard, values, None),), AllGatherMetadata([], [], shard.whole_shape, values.dtype)
        cast_once = get_all_gather_state(module).cast_once_shards.get(weight.name)
        if cast_once is None:
            return self._make_all_gather_inputs(mesh, weight)
        return cast_once.get_all_gather_inputs(lambda: self._make_all_gather_inputs(mesh, weight))

    def _make_all_gather_inputs(self, mesh: DeviceMesh, weight: ModuleWeight) -> AllGatherInputs:
        """Quantize the shard: with the persistent scale of the weight if it is known, else with dynamic scales.

        Only dynamic scales need a collective. A persistent scale is equal on every rank.
        """
        config, scale = weight.config, None
        # FSDP2 calls this on a copy of an offloaded shard that is on the mesh's device.
        shard = get_current_shard(weight)._replace(local=self.wrapped)
        if weight.scale_slots is not None:
            scale = weight.scale_slots.begin_weight_cast_and_get_scale(shard.device, self.shard_state.recorded_amax)
            self.shard_state.recorded_amax = weight.scale_slots.recorded_weight_amax
        float8_dtype, layouts = config.casts.weight.row.float8_dtype, list_layouts(weight)
        scales: Sequence[CastScales]
        if scale is not None and scale.is_known:
            row, column, power_of_2 = True, False, config.round_scales_to_power_of_2
            operands = cast_with_persistent_scale(shard.local, scale, float8_dtype, row, column, power_of_2)
            operand = require(operands.row, "the row operand")
            codes = [operand.data]
            scales = [
                CastScales(
                    require(operand.quant_scale, "the quant_scale"), require(operand.dequant_scale, "the dequant_scale")
                )
            ]
        else:
            scales = get_or_compute_whole_scales(weight)
            codes = [
                quantize_shard(shard, cast_scales.quant, float8_dtype, layout)
                for cast_scales, layout in zip(scales, layouts, strict=True)
            ]
            if scale is not None:  # so that the next sync computes it
                record_amax(scale, compute_matrix_amax(shard.local, None))
        payloads = [
            _pad_to_chunk(shard, code.contiguous().view(torch.uint8), layout)
            for code, layout in zip(codes, layouts, strict=True)
        ]
        if len(payloads) > 1 and mesh.size() == 1:
            payloads = [torch.cat(payloads)]  # without an all-gather, FSDP2 passes on the first payload only
        return tuple(payloads), AllGatherMetadata(scales, layouts, shard.whole_shape, float8_dtype)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: AllGatherMetadata,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Return the unsharded weight, a `Float8Tensor` over the memory that FSDP2 all-gathers into.

        Its dequant_scales are views of one vector, allocated once, which FSDP2 frees and reallocates with the codes.
        """
        scales, layouts, size, float8_dtype = metadata
        if not scales:
            unsharded_hp = all_gather_outputs[0].view(-1)[: math.prod(size)].view(size)
            return (unsharded_hp, ()) if out is None else None
        payloads: Sequence[Tensor] = all_gather_outputs
        if len(payloads) < len(scales):
            payloads = all_gather_outputs[0].chunk(len(scales))
        shapes = [layout.get_codes_shape(size) for layout in layouts]
        codes = [
            payload.view(-1)[: math.prod(shape)].view(shape).view(float8_dtype)  # without padding
            for payload, shape in zip(payloads, shapes, strict=True)
        ]
        lengths = [cast_scales.dequant.numel() for cast_scales in scales]
        unsharded = None
        if out is None:
            flat_dequant_scales = scales[0].dequant.new_empty(sum(lengths))
        else:
            unsharded = typing.cast(Float8Tensor, get_local_tensor(out))
            flat_dequant_scales = unsharded.dequant_scale.as_strided((sum(lengths),), (1,), 0)
        operands = []
        with torch.no_grad(), keep_versions(flat_dequant_scales):  # FSDP2 does the same for the memory of the codes
            parts = flat_dequant_scales.split(lengths)
            for code, part, cast_scales, layout in zip(codes, parts, scales, layouts, strict=True):
                scale = part.view(cast_scales.dequant.shape).copy_(cast_scales.dequant)
                operands.append(Operand(code, scale, layout, None, cast_scales.outer))
        if unsharded is None:
            return Float8Tensor.from_operands(operands[0], operands[-1], param_dtype), (flat_dequant_scales,)
        unsharded.set_operands(operands[0], operands[-1])
        return None

    def assign(self, new: Tensor) -> None:
        """Raise RuntimeError: the assignment would not reach `wrapped`."""
        raise RuntimeError(
            "cannot assign to .data of a weight that is all-gathered in float8. FSDP1 does: use fully_shard (FSDP2). "
            "Accelerate does, to upcast bfloat16 parameters: load the model in float32. In your own code write "
            "param.copy_(...) under torch.no_grad(), or turn enable_fsdp_float8_all_gather off"
        )

    @property
    def _tensor(self) -> Tensor:
        """torchao's name for `wrapped`. Accelerate reads its address under `mixed_precision="fp8"`."""
        return self.wrapped

    def get_state(self) -> tuple[Any, ...]:
        return self.wrapped, self.shard_state.name

    @classmethod
    def from_state(cls, wrapped: Tensor, name: str = "weight") -> Float8AllGatherWeight:
        hide_fsdp_hooks()
        return cls(wrapped, ScaledShardState(name))

    def __tensor_flatten__(self) -> tuple[list[str], str]:
        return ["wrapped"], self.shard_state.name

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: str, outer_size: object, outer_stride: object
    ) -> Float8AllGatherWeight:
        return Float8AllGatherWeight(inner["wrapped"], ScaledShardState(meta))

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Float8AllGatherWeight({self.wrapped})"

    def run_op(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is aten.new_zeros.default:
            return Float8AllGatherWeight(func(self.wrapped, *args[1:], **kwargs), self.shard_state, _Padding())
        return NotImplemented

    def handle_write(self, func: OpOverload, args: tuple[Any, ...], values: Tensor) -> None:
        if not _is_padding_copy(func, args):
            self.shard_state.scales = self.shard_state.recorded_amax = None
            self.shard_state.writes += 1

    def wrap_view(self, view: Tensor) -> Tensor:
        return Float8AllGatherWeight(view, self.shard_state, self.padding)

    def wrap_copy(self, func: OpOverload, copied: Tensor) -> Tensor:
        return Float8AllGatherWeight(copied, ScaledShardState(self.shard_state.name))


torch.serialization.add_safe_globals([Float8AllGatherWeight])


def hide_fsdp_hooks() -> None:
    """Import FSDP2 and hide its hooks, which compute scales, from the policies of selective checkpoints."""
    importlib.import_module("torch.distributed.fsdp")
    hide_fsdp_ops_from_checkpoint_policies()


def is_all_gather_weight(weight: ModuleWeight) -> bool:
    """Return whether `weight` is all-gathered in float8: sharded, unsharded or not wrapped by FSDP2 yet."""
    local = weight.local_tensor
    return type(local) is Float8Tensor or isinstance(local, Float8AllGatherWeight)


def _is_padding_copy(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Return whether this op copies a shard into its padded buffer, which happens once; see [Note: padding]."""
    if func is not aten.copy_.default:
        return False
    to, source = args[0], args[1]
    if not (isinstance(to, Float8AllGatherWeight) and isinstance(source, Float8AllGatherWeight)):
        return False
    padding = to.padding
    if padding is None or not padding.awaits_copy:
        return False
    if source.shard_state is not to.shard_state or source.padding is padding:
        return False
    padding.awaits_copy = False
    return True


def _pad_to_chunk(shard: LocatedShard, payload: Tensor, layout: ScaleLayout | None) -> Tensor:
    """Pad a row-major payload to the length that every rank sends.

    Args:
        payload: codes of `layout`, or values in high precision without one.
    """
    chunk = list(shard.whole_shape)
    chunk[shard.dim] = -(-shard.whole_shape[shard.dim] // shard.fsdp_group.size())
    rows = (chunk if layout is None else layout.get_codes_shape(chunk))[0]  # FSDP2 shards other dims evenly
    return pad_rows(payload.contiguous(), rows)


def quantize_shard(shard: LocatedShard, quant_scale: Tensor, float8_dtype: torch.dtype, layout: ScaleLayout) -> Tensor:
    """Quantize a shard with the `quant_scale` of the whole weight."""
    if len(shard.whole_shape) == 3:
        rows, scale_row = shard.local.flatten(0, 1), shard.find_scale_rows(layout)
        scale, row_layout = expand_quant_scales(rows, quant_scale, scale_row, layout.columns)
        return cast_blocks_with_scale(rows, scale, float8_dtype, row_layout).view(shard.local.shape)
    if layout.is_blockwise:
        scale, shard_layout = select_part_scales(quant_scale, shard.offsets, shard.local.shape, layout)
        return cast_blocks_with_scale(shard.local, scale, float8_dtype, shard_layout)
    scale = shard.narrow_scales(quant_scale, layout)
    by_column = layout == COLUMNWISE
    row_scale, column_scale = (None, scale) if by_column else (scale, None)
    codes = cast_with_scale(shard.local, float8_dtype, row_scale, column_scale, "")
    return typing.cast(Tensor, codes[by_column])

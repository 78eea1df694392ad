"""Float8 all-gather for FSDP2: weights are cast on their shards, with the scales of the whole, and gathered as codes.

    convert_to_float8_training(model, config=replace(config, enable_fsdp_float8_all_gather=True))
    fully_shard(model)
    ...
    optimizer.step()
    precompute_float8_dynamic_scale_for_fsdp(model)      # optional

The parameters that FSDP holds and the optimizer updates stay in high precision. Between pre- and post-all-gather a
weight is one uint8 payload for each cast of it: one where both of its matmuls read the same cast, two where they do not
(config.py), of which a pass gathers those that it reads (gather_passes.py). The unsharded parameter is a
`Float8Tensor`, which lives as long as FSDP keeps it gathered; no unsharded weight in high precision ever exists.

[Note: whose scales are these]
Scales are kept beside the shard that they were computed from and dropped with the first write to it: every operation
on a shard passes `Float8AllGatherWeight.__torch_dispatch__`, which sees an optimizer's multi-tensor kernels too, where
version counters do not move. What passes it runs on all ranks alike, so all ranks find a scale missing together, and
all join the collective that makes it. A write that goes around it (into a tensor of a state_dict) may happen on some
ranks only, for a shard can be empty; a rank that finds such a write in a version counter cannot know what the others
found, so it raises instead of starting a collective that the others may not join.

[Note: padding]
FSDP pads the shards of some ranks to the length of the others: at its first unshard and after load_state_dict it makes
zeros, and copies the shard to their beginning. That is a write on some ranks only, and no change of the weight. So the
zeros belong to the weight from the start, and the one copy of it into them drops no scale.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from quaver import scaling
from quaver.casts import Operand
from quaver.distributed.agreement import check_ranks_agree
from quaver.distributed.gather_passes import Gathered, follow
from quaver.distributed.shard_casts import cast_shard, cast_shard_with_kept_scale
from quaver.distributed.weight_scales import Shard, WholeScales, compute_whole_scales, shard_of
from quaver.kernels.cast import record_amax
from quaver.linear import Float8Linear
from quaver.scaling import PersistentScale
from quaver.tensor import Float8Tensor, WrappedTensor

aten = torch.ops.aten

_COPIES = frozenset(
    {
        aten._pin_memory.default,
        aten._to_copy.default,
        aten.clone.default,
        aten.empty_like.default,
    }
)


class _ScaleBox:
    """The scales of one shard, shared by all views of it."""

    __slots__ = ("cast", "scales")

    def __init__(self) -> None:
        self.scales: WholeScales | None = None
        self.cast: tuple[Tensor, int] | None = None
        """The plain tensor that the scales are of, and its version then."""

    def __deepcopy__(self, memo: object) -> _ScaleBox:
        return _ScaleBox()


class _Padding:
    """Marks zeros, and views of them, until FSDP has copied the shard to their beginning; see [Note: padding]."""

    __slots__ = ("unused",)

    def __init__(self) -> None:
        self.unused = True


class _Gather(NamedTuple):
    """What post-all-gather needs of pre-all-gather."""

    linear: Float8Linear
    scales: WholeScales
    size: tuple[int, int]
    float8_dtype: torch.dtype


class Float8AllGatherWeight(WrappedTensor):
    """A weight, or a shard of one, that FSDP2 gathers in float8; for everything else it is the tensor inside.

    Attributes:
        wrapped: the plain tensor, high precision [n, K].
    """

    wrapped: Tensor
    box: _ScaleBox
    padding: _Padding | None

    @staticmethod
    def __new__(
        cls, wrapped: Tensor, box: _ScaleBox | None = None, padding: _Padding | None = None
    ) -> Float8AllGatherWeight:
        return Tensor._make_wrapper_subclass(
            cls,
            wrapped.shape,
            strides=wrapped.stride(),
            storage_offset=wrapped.storage_offset(),
            dtype=wrapped.dtype,
            layout=wrapped.layout,
            device=wrapped.device,
            requires_grad=False,
        )

    def __init__(self, wrapped: Tensor, box: _ScaleBox | None = None, padding: _Padding | None = None) -> None:
        self.wrapped = wrapped
        self.box = box or _ScaleBox()
        self.padding = padding

    @property
    def data(self) -> Tensor:
        """The same weight without history. Setting it is refused: it would leave the tensor inside as it was."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        raise RuntimeError(
            "a weight that is gathered in float8 cannot be given other data (param.data = ...), as FSDP1 does: use "
            "fully_shard (FSDP2), or turn enable_fsdp_float8_all_gather off"
        )

    def plain(self) -> Tensor:
        return cast(Tensor, _Plain.apply(self))

    def remember(self, scales: WholeScales) -> None:
        """Keep the scales of the whole weight until the shard is written to."""
        self.box.scales, self.box.cast = scales, (self.wrapped, self.wrapped._version)

    def scales(self) -> WholeScales | None:
        """The scales of the whole weight, None if they are unknown or the shard has been written to since.

        Raises:
            RuntimeError: the tensor inside was written to by another way; see [Note: whose scales are these].
        """
        box = self.box
        if box.scales is not None and box.cast is not None:
            of, version = box.cast
            if of is not self.wrapped:  # padded since
                box.cast = self.wrapped, self.wrapped._version
            elif version != of._version:
                raise RuntimeError(
                    "the shard of a float8 weight was written to directly (through a state_dict?) after its scale was "
                    "computed. After such a write call model.load_state_dict, or "
                    "precompute_float8_dynamic_scale_for_fsdp(model), on every rank"
                )
        return box.scales

    # ---- what FSDP2 asks of a parameter --------------------------------------------------------------------------

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: Float8Linear,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], _Gather]:
        """Cast this shard: one uint8 tensor of the padded shard's shape for each cast of the weight that is needed."""
        config = module.config
        kept = _kept_scale(module)
        shard = _shard(module)._replace(local=self.wrapped)
        float8_dtype = config.casts.weight.float8_dtype
        if kept is not None and kept.is_initialized:
            code, scale = cast_shard_with_kept_scale(shard, kept, float8_dtype, config.round_scales_to_power_of_2)
            codes = [code]
            scales = WholeScales.of_one(scale)
        else:
            scales = local_weight(module).scales() or _compute_scales_of_siblings(module)
            two = _gathering(module).two_casts_of(module)
            quants = scales.views(scales.quant)
            needed = quants if two is None else [quants[place] for place in two.begin()]
            codes = [cast_shard(shard, quant, float8_dtype) for quant in needed]
            if kept is not None and kept.amax_buffer is not None:
                record_amax(kept, scaling.amax(shard.local).float())
        if len(codes) > 1 and mesh.size() == 1:
            codes = [torch.cat(codes)]  # with nothing to gather, torch passes on the first payload only
        return tuple(codes), _Gather(module, scales, shard.size, float8_dtype)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: _Gather,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """The gathered weight, a `Float8Tensor` over the memory that FSDP gathers into.

        Its dequant_scales are one vector, whose memory FSDP frees and fills with that of the codes: it is made once.
        """
        linear, scales, size, float8_dtype = metadata
        gathering = _gathering(linear)
        two = gathering.two_casts_of(linear)
        if two is not None:
            two.end()
            codes = two.codes
        else:
            payloads: Sequence[Tensor] = all_gather_outputs
            if len(payloads) < len(scales.parts):
                payloads = all_gather_outputs[0].chunk(len(scales.parts))
            elements = size[0] * size[1]
            # without FSDP's padding
            codes = [payload.view(-1)[:elements].view(size).view(float8_dtype) for payload in payloads]
            if len(all_gather_outputs) > 1:
                two = follow(linear, codes)
                gathering.two_casts = linear.weight, two
        forward_reads = None if two is None else two.forward_reads
        if out is None:
            vector = torch.empty_like(scales.quant)
            gathered = Float8Tensor.from_operands(*_operands(codes, scales, vector), param_dtype)
            gathered.forward_reads = forward_reads
            return gathered, (vector,)
        gathered = cast(Float8Tensor, out._local_tensor if isinstance(out, DTensor) else out)
        vector = gathered.dequant_scale.as_strided(scales.quant.shape, (1,), 0)
        gathered.set_operands(*_operands(codes, scales, vector))
        gathered.forward_reads = forward_reads
        return None

    # ---- what torch asks of a subclass ---------------------------------------------------------------------------

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], meta: None, outer_size: object, outer_stride: object
    ) -> Float8AllGatherWeight:
        return Float8AllGatherWeight(inner["wrapped"])

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"Float8AllGatherWeight({self.wrapped})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        args_wrapped, kwargs_wrapped = tree_map_only(cls, lambda weight: weight.wrapped, (args, kwargs))
        out = func(*args_wrapped, **kwargs_wrapped)
        if func._schema.is_mutable:
            if not _is_padding_copy(func, args):
                for weight in _written(func, args, kwargs):
                    weight.box.scales = None
            return args[0] if isinstance(out, Tensor) and isinstance(args[0], cls) else out
        if _is_view(func):
            weight = args[0]
            return tree_map_only(Tensor, lambda view: cls(view, weight.box, weight.padding), out)
        if func is aten.new_zeros.default:
            return cls(out, args[0].box, _Padding())
        return cls(out) if func in _COPIES else out


def _operands(codes: Sequence[Tensor], scales: WholeScales, vector: Tensor) -> tuple[Operand, Operand]:
    """The weight as `output` reads it and as `grad_input` does; their dequant_scales are written to `vector`."""
    scales.write_dequant(vector)
    operands = [Operand(code, dequant) for code, dequant in zip(codes, scales.views(vector), strict=True)]
    return operands[0], operands[-1]


@functools.cache
def _is_view(func: Any) -> bool:
    """Whether results are views of the first argument; a write to one is a write to the weight."""
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _is_padding_copy(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether this copies a shard to the beginning of its padding; see [Note: padding]."""
    if func is not aten.copy_.default:
        return False
    to, source = args[0], args[1]
    if not (isinstance(to, Float8AllGatherWeight) and isinstance(source, Float8AllGatherWeight)):
        return False
    padding = to.padding
    if padding is None or not padding.unused or source.box is not to.box or source.padding is padding:
        return False
    padding.unused = False
    return True


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterable[Float8AllGatherWeight]:
    """The weights that a call writes to."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for item in value if isinstance(value, list | tuple) else [value]:
                if isinstance(item, Float8AllGatherWeight):
                    yield item


class _Plain(torch.autograd.Function):
    """The tensor inside a weight; its gradient is the weight's."""

    @staticmethod
    def forward(ctx: Any, weight: Float8AllGatherWeight) -> Tensor:
        return weight.wrapped.view_as(weight.wrapped)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _kept_scale(linear: Float8Linear) -> PersistentScale | None:
    """The kept scale of the weight; FSDP gathers without gradients, so training alone says whether to record."""
    return linear.kept_scales(_shard(linear).device, recording=linear.training).weight


def _is_known(linear: Float8Linear) -> bool:
    """Whether a kept scale makes the exchange of amaxes unnecessary."""
    kept = _kept_scale(linear)
    return kept is not None and bool(kept.is_initialized)


# ---- the linears whose weights are gathered together -----------------------------------------------------------------


NamedLinears = Sequence[tuple[str, Float8Linear]]


class Siblings:
    """The linears of one model, whose scales are computed together; each of them holds this object."""

    def __init__(self, named: NamedLinears) -> None:
        self.named = named
        self.checked: set[ProcessGroup] = set()


@dataclass
class Gathering:
    """What a linear knows of the gathering of its weight; not copied with it, for a copy has other siblings."""

    siblings: Siblings
    hooks: tuple[RemovableHandle, ...] = ()
    laid_out: tuple[Tensor, Shard] | None = None
    """A sharded weight, and where its shard lies (`local` is empty): asking DTensor each time costs too much."""
    two_casts: tuple[Tensor, Gathered | None] | None = None
    """A sharded weight, and what each pass gathers of it."""

    def two_casts_of(self, linear: Float8Linear) -> Gathered | None:
        """What each pass gathers of the weight of `linear`, once both of its casts have been gathered."""
        if self.two_casts is None or self.two_casts[0] is not linear.weight or torch.compiler.is_compiling():
            return None
        return self.two_casts[1]


def local_weight(linear: Float8Linear) -> Float8AllGatherWeight:
    """The weight of `linear`, or this rank's shard of it, that FSDP2 gathers in float8."""
    weight = linear.weight
    return cast(Float8AllGatherWeight, weight._local_tensor if isinstance(weight, DTensor) else weight)


def _gathering(linear: Float8Linear) -> Gathering:
    if linear.gathering is None:  # a copy
        linear.gathering = Gathering(Siblings([("", linear)]))
    return cast(Gathering, linear.gathering)


def _shard(linear: Float8Linear) -> Shard:
    gathering, local = _gathering(linear), local_weight(linear).wrapped
    if gathering.laid_out is None or gathering.laid_out[0] is not linear.weight:
        gathering.laid_out = linear.weight, shard_of(linear, local.new_empty(0))  # keep no memory alive
    return gathering.laid_out[1]._replace(local=local)


def _is_sharded(linear: Float8Linear) -> bool:
    """Whether FSDP holds the weight of `linear` sharded, to be gathered in float8."""
    weight = linear.weight
    if not isinstance(weight, DTensor) or not isinstance(weight._local_tensor, Float8AllGatherWeight):
        return False
    return linear.sharding is None or weight.device_mesh.ndim > linear.sharding.mesh.ndim


def _compute_scales_of_siblings(module: Float8Linear) -> WholeScales:
    """Compute the scales of `module` and of every sibling that has none, in one collective."""
    siblings = _gathering(module).siblings
    own = _shard(module)
    stale, shards = [], []
    for name, linear in siblings.named:
        if _is_sharded(linear) and not _is_known(linear) and local_weight(linear).scales() is None:
            shard = _shard(linear)
            if (shard.fsdp_group, shard.tp_group) == (own.fsdp_group, own.tp_group):
                stale.append((name, linear))
                shards.append(shard)
    if own.fsdp_group not in siblings.checked:
        check_ranks_agree(_describe(stale), own.fsdp_group, own.device, what="the weights to gather in float8")
        siblings.checked.add(own.fsdp_group)
    _compute_and_remember([linear for _, linear in stale], shards)
    return cast(WholeScales, local_weight(module).scales())


def _compute_and_remember(linears: Sequence[Float8Linear], shards: Sequence[Shard]) -> None:
    with torch.no_grad():
        scales = compute_whole_scales(shards, [linear.config for linear in linears])
    for linear, of_weight in zip(linears, scales, strict=True):
        local_weight(linear).remember(of_weight)


def _describe(named: NamedLinears) -> list[str]:
    return [f"{name} {list(linear.weight.shape)}: {linear.config}" for name, linear in named]


def precompute_float8_dynamic_scale_for_fsdp(module: nn.Module) -> None:
    """Compute the dynamic scales of every weight under `module` that FSDP2 gathers in float8, in one all-reduce.

    Call it after `optimizer.step()`, on every rank. Without it the first gather of the next step does the same work, at
    a moment when the gather has to wait for it. Scales stay in use until their weight is written to, by an optimizer,
    by `load_state_dict` or by any operation on the parameter. A module without such weights is left alone, and so are
    weights with a delayed or static scale that is known.

    One collective whatever the number of weights: over the ranks that share the weights' shards, and over those of
    tensor parallelism at the same time if both together are all ranks; otherwise one more for tensor parallelism.
    The first call for a module also checks, in a collective of 16 bytes, that the ranks agree about the weights.

    Raises:
        RuntimeError: on every rank, if ranks have different weights to gather or different configs for them.
    """
    named = [
        (name, child)
        for name, child in module.named_modules()
        if isinstance(child, Float8Linear) and _is_sharded(child)
    ]
    _check_once(module, named)
    together: dict[tuple[ProcessGroup, ProcessGroup | None], tuple[list[Float8Linear], list[Shard]]] = {}
    for _, linear in named:
        if _is_known(linear):
            continue
        shard = _shard(linear)
        linears, shards = together.setdefault((shard.fsdp_group, shard.tp_group), ([], []))
        linears.append(linear)
        shards.append(shard)
    for linears, shards in together.values():
        _compute_and_remember(linears, shards)


def _check_once(module: nn.Module, named: NamedLinears) -> None:
    """Check that the ranks agree, in a group that exists on a rank without such weights too."""
    checked = [id(linear) for _, linear in named]
    if getattr(module, "_float8_gather_checked", None) == checked:
        return
    sharded = next((p for p in module.parameters() if isinstance(p, DTensor)), None)
    if sharded is None:
        return
    axis = next((i for i, placement in enumerate(sharded.placements) if hasattr(placement, "dim")), 0)
    mesh = sharded.device_mesh
    group, device = mesh.get_group(axis), torch.device(mesh.device_type)
    check_ranks_agree(_describe(named), group, device, what="the weights to gather in float8")
    module._float8_gather_checked = checked  # type: ignore[assignment]

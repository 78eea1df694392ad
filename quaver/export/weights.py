"""The tensors of a float8 checkpoint, one after another: codes and scales of the linears, the rest as it is.

The codes come from the quantizers that the forward of `Float8Linear` uses, on the weight that this forward reads, so
they are those of the next training step, to the bit. Two exceptions, whose cost `Float8Weights.requantized` states:
    one scale per tensor    servers fuse q, k, v and gate, up into one linear with one scale. Such siblings share the
                            smallest of their scales, unless the caller asks for their own.
    blocks                  formats of blocks hold blocks of 128 x 128, or those of MXFP8; weights of other recipes are
                            quantized again.

The weights of a frozen base (`freeze_to_float8`, `load_frozen`) are written with the codes that they hold.

A model with experts gets the names of its checkpoints (checkpoint_names.py), and each expert its own matrices with
their codes and scales (experts.py), one expert after the other.
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quaver.export import comfyui
from quaver.export.checkpoint_names import KEPT_IN_FLOAT32, Parts
from quaver.export.experts import quantize_expert, store_expert
from quaver.export.formats import COMPRESSED_TENSORS, FORMATS, FUSED, HIGH_PRECISION
from quaver.export.kv_cache import kv_scales_of
from quaver.export.plan import Plan, frozen_weights, named_tensors, plan_export
from quaver.kernels.operands import Operand, present
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.module import Float8Linear
from quaver.linear.quantize import Quantizer
from quaver.linear.weight_form import WrappedTensor
from quaver.recipes.scaling import PersistentScales, Scales, dequantize, sqnr_db, to_dequant_scale
from quaver.runtime.names import plain_name
from quaver.torch_private.dtensor import local_tensor


class Requantized(NamedTuple):
    """SQNR in dB of a weight that the format stores with other codes than the training forward had."""

    training_db: float
    """With the codes and scales of the training forward."""
    stored_db: float
    """With those of the checkpoint."""


def iter_float8_weights(
    model: nn.Module,
    *,
    format: str = COMPRESSED_TENSORS,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    forward_dtype: torch.dtype | None = None,
    share_fused_scales: bool = True,
) -> Float8Weights:
    """The tensors of `model` under the names that servers load, for a checkpoint or a hand-off to an inference engine.

        for name, tensor in iter_float8_weights(model):
            engine.load_weights([(name, tensor)])

    Args:
        model: converted to float8; plain, or sharded by FSDP2 or tensor parallelism. All ranks iterate together, and
            no forward runs meanwhile: each gathers one whole weight at a time (the weights of fused linears together,
            and of all experts in a stack), or, where FSDP2 shards float8 weights, the weights of one FSDPModule.
        format: "compressed-tensors", "compressed-tensors-block", "compressed-tensors-mxfp8", "fp8" or "comfyui" (see
            formats.py); "high-precision" for the plain tensors, which is the control.
        weights: the tensors by name, where `model` is on the meta device; the model's own by default. Experts may be
            stacks, as in the model, or matrices, as in a checkpoint.
        dtype: of the tensors that stay in high precision, but for e_score_correction_bias, which routers add to scores;
            their own by default.
        forward_dtype: the dtype in which the forward reads the weights, where that is not their own. Not needed for the
            own tensors of a model that FSDP2 shards: `unshard()` gathers them as for the forward.
        share_fused_scales: give fused linears one scale where scales are per tensor. Without it codes are those of
            training, and a server that fuses quantizes them again. ComfyUI fuses none: each has its own there.
    Raises (when called):
        ValueError: no linear or expert is float8, a float8 weight is tied, a weight is missing, or PEFT's adapters are
            not merged.
        NotImplementedError: no format holds the recipe, weights have different ones, this rank has some of the experts,
            or groups of MXFP8 do not divide the inputs of a weight.
    Raises (in the iteration):
        ValueError: a weight is not finite or on the meta device, or the scale of an input is unknown.
    """
    return Float8Weights(model, format, weights, dtype, forward_dtype, share_fused_scales)


class Float8Weights:
    """An iterator over (name, tensor); see `iter_float8_weights`.

    Attributes:
        bytes_yielded: of the tensors so far.
        bytes_moved: of the whole tensors that were gathered from shards so far, in the dtype of the forward for the
            float8 weights of FSDP2; 0 for a model that is not sharded.
        requantized: the linears that are stored with other codes than those of training, and the stacks of experts,
            each with the expert that loses the most.
        kv_scales: of the model's float8 KV cache, from `calibrate_kv_cache` or a checkpoint; they come last.
    """

    def __init__(
        self,
        model: nn.Module,
        format: str,
        weights: Mapping[str, Tensor] | None,
        dtype: torch.dtype | None,
        forward_dtype: torch.dtype | None,
        share_fused_scales: bool,
    ) -> None:
        if format not in (*FORMATS, HIGH_PRECISION):
            raise ValueError(f"format: expected one of {', '.join(FORMATS)}, {HIGH_PRECISION}, got {format!r}")
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self._is_float8 = format != HIGH_PRECISION
        self.plan = plan_export(model, format, weights)
        self.bytes_yielded = self.bytes_moved = 0
        self.requantized: dict[str, Requantized] = {}
        self._weights = weights if weights is not None else named_tensors(model)
        self._given = {
            name: stored for stored, name in self.plan.checkpoint.in_model(self.plan.names, weights or ()).items()
        }
        self._dtype = dtype
        format_of_plan = self.plan.format
        self._shares = share_fused_scales and format_of_plan.weights == "tensor" and not format_of_plan.is_file
        self._forward_dtype = forward_dtype
        self._frozen = frozen_weights(model)
        self._buffers = {plain_name(name) for name, _ in model.named_buffers()}
        kv_scales = {} if format_of_plan.is_file else kv_scales_of(model)
        self.kv_scales = {self.plan.checkpoint.renamed(name): each for name, each in kv_scales.items()}
        self._fsdp_modules = {} if forward_dtype or weights is not None else _fsdp_modules(model, self.plan)
        self._gathered: dict[str, Tensor] = {}
        self._tensors = self._run()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    @torch.no_grad()
    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._tensors)
        self.bytes_yielded += tensor.nbytes
        return name, tensor

    def _run(self) -> Iterator[tuple[str, Tensor]]:
        done: set[str] = set()
        for name in self.plan.names:
            linear = name.removesuffix(".weight")
            if name in self.plan.experts and self._is_float8:
                yield from self._quantized_experts(name)
            elif name in self.plan.checkpoint.stacks:
                for parts, matrix, _ in self._matrices(name, None):
                    for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                        yield part, self._converted(part, rows)
            elif linear not in self.plan.linears or not name.endswith(".weight") or not self._is_float8:
                yield self.plan.checkpoint.renamed(name), self._converted(name, self._read(name))
            elif linear not in done:
                fused = self._fused_with(linear) if self._shares else [linear]
                done.update(fused)
                yield from self._quantized(fused)
        for name, scale in self.kv_scales.items():
            yield name, torch.tensor([scale])

    def _converted(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor that stays in high precision."""
        is_kept = self._dtype is None or not tensor.is_floating_point() or name.endswith(KEPT_IN_FLOAT32)
        return tensor if is_kept else tensor.to(self._dtype)

    def _fused_with(self, name: str) -> list[str]:
        """The float8 linears that a server fuses with this one, itself included."""
        parent, dot, leaf = name.rpartition(".")
        group = next((names for names in FUSED if leaf in names), (leaf,))
        return [each for each in (f"{parent}{dot}{sibling}" for sibling in group) if each in self.plan.linears]

    def _quantized(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """The codes and scales of linears that share a scale, or of one linear."""
        own = [self._of_forward(name) for name in names]
        shared = min((each[2] for each in own), key=lambda scales: scales.quant.item()) if len(names) > 1 else None
        format = self.plan.format
        for name, (weight, operand, scales) in zip(names, own, strict=True):
            held = format.held(operand, self.plan.linears[name].config.casts.weight.row)
            stored = format.quantized(weight) if held is None else held
            if shared is not None and scales.quant != shared.quant:
                stored = self._quantize(name, weight, shared)[0]
            if stored is not held:
                self.requantized[name] = Requantized(_cost(weight, operand), _cost(weight, stored))
            weight_name = self.plan.checkpoint.renamed(f"{name}.weight")
            yield from self._stored(weight_name, stored)
            if format.is_static:
                yield f"{weight_name.removesuffix('weight')}input_scale", format.stored_scale(self._input_scale(name))

    def _stored(self, name: str, operand: Operand) -> Iterator[tuple[str, Tensor]]:
        format, prefix = self.plan.format, name.removesuffix("weight")
        yield name, format.stored_codes(operand.data)
        yield f"{prefix}{format.scale_name}", format.stored_scale(typing.cast(Tensor, operand.dequant_scale))
        if (mark := format.mark) is not None:
            yield f"{prefix}{comfyui.MARK}", mark

    def _quantized_experts(self, name: str) -> Iterator[tuple[str, Tensor]]:
        """The codes and scales of a stack, one expert after the other."""
        casts = self.plan.experts[name].float8_config.casts.weight
        for parts, weight, frozen in self._matrices(name, self._forward_dtype):
            of_forward = frozen or quantize_expert(weight, casts)
            stored, is_requantized = store_expert(weight, of_forward, casts, len(parts), self.plan.format)
            if is_requantized:
                cost = Requantized(_cost(weight, of_forward), _cost(weight, *stored))
                known = self.requantized.get(name, cost)
                self.requantized[name] = min(known, cost, key=lambda each: each.stored_db)
            for part, operand in zip(parts, stored, strict=True):
                yield from self._stored(part, operand)

    def _matrices(self, name: str, dtype: torch.dtype | None) -> Iterator[tuple[Parts, Tensor, Operand | None]]:
        """The matrix [N, K] of each expert of a stack in `dtype`, with the names of its parts and its frozen codes."""
        stack, transposed = self.plan.checkpoint.stacks[name], name in self.plan.checkpoint.transposed
        if name in self._frozen and name in self._weights:
            frozen = self._frozen_weight(name)
            for parts, stored in zip(stack, frozen.matrices(), strict=True):
                operand = stored.t() if transposed else stored
                yield parts, dequantize(operand.data, typing.cast(Tensor, operand.dequant_scale), frozen.dtype), operand
            return
        held: Tensor | None = None
        if name in self._fsdp_modules:
            held = self._unsharded(name)
        elif name in self._weights:
            held = self._whole(name)
        for index, parts in enumerate(stack):
            if held is None:
                matrix = torch.cat([self._whole(part) for part in parts])
            else:
                matrix = held[index].t().contiguous() if transposed else held[index]
            yield parts, _finite(f"expert {index} of {name}", matrix if dtype is None else matrix.to(dtype)), None

    def _quantize(self, name: str, weight: Tensor, scales: Scales | None = None) -> tuple[Operand, Scales]:
        """The operand of the forward's matmul, and the scales that it was quantized with."""
        linear = self.plan.linears[name]
        quantizer = Quantizer(linear.config.casts.weight, weight.dtype, _scales(linear).weight)
        operand = present(quantizer(weight, row=True, column=False, scales=scales).row)
        if operand.quant_scale is None or operand.dequant_scale is None:
            raise RuntimeError(f"{name}: the weight of a float8 linear stayed in high precision")
        return operand, Scales(operand.quant_scale, operand.dequant_scale)

    def _input_scale(self, name: str) -> Tensor:
        scale = _scales(self.plan.linears[name]).input
        if scale is None or not scale.quant_scale > 0:
            raise ValueError(
                f"the scale of the input of {name} is unknown: train a step, or calibrate, before the export; or give "
                "a recipe with dynamic scaling"
            )
        return to_dequant_scale(scale.quant_scale)

    def _of_forward(self, name: str) -> tuple[Tensor, Operand, Scales]:
        """The weight that the forward reads, the operand of its matmul, and the scales of that."""
        if f"{name}.weight" in self._frozen:
            frozen = self._frozen_weight(f"{name}.weight")
            dequant = frozen.dequant_scale
            operand = Operand(frozen.data_fp8, dequant)
            return frozen.to_high_precision(), operand, Scales(to_dequant_scale(dequant), dequant)
        if f"{name}.weight" in self._fsdp_modules:
            weight = _finite(f"{name}.weight", self._unsharded(f"{name}.weight"))
        else:
            weight = self._read(f"{name}.weight")
            weight = weight if self._forward_dtype is None else weight.to(self._forward_dtype)
        return weight, *self._quantize(name, weight)

    def _unsharded(self, name: str) -> Tensor:
        """A weight as FSDP2 gathers it for the forward, in `mp_policy.param_dtype`, which has no public reader.

        The first float8 weight of an FSDPModule gathers those of all of them; each is taken once.
        """
        if name not in self._gathered:
            module = self._fsdp_modules[name]
            parameters = typing.cast(nn.Module, module).parameters
            sharded = list(parameters())
            module.unshard()
            try:
                gathered = [new for old, new in zip(sharded, parameters(), strict=True) if new is not old]
                self.bytes_moved += sum(each.nbytes for each in gathered)
                for each in (each for each, owner in self._fsdp_modules.items() if owner is module):
                    weight = self.plan.float8_weight(each).detach()  # a DTensor still under tensor parallelism
                    self._gathered[each] = weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()
            finally:
                module.reshard()
        return self._gathered.pop(name)

    def _frozen_weight(self, name: str) -> FrozenFloat8Weight:
        """The whole of a frozen weight."""
        held, local = self._held(name).detach(), self._frozen[name]
        codes = held.data_fp8 if isinstance(held, FrozenFloat8Weight) else held
        if isinstance(codes, DTensor):  # gathered as bytes, which every backend can
            shard, mesh, placements = local.data_fp8.view(torch.uint8), codes.device_mesh, codes.placements
            whole = DTensor.from_local(
                shard, mesh, placements, run_check=False, shape=codes.shape, stride=codes.stride()
            ).full_tensor()
            self.bytes_moved += whole.nbytes
            codes = whole.view(local.data_fp8.dtype)
        return FrozenFloat8Weight.from_codes(codes, local.dequant_scale, local.dtype)

    def _read(self, name: str) -> Tensor:
        if name in self._frozen:
            return self._frozen_weight(name).to_high_precision()
        whole = self._whole(name)
        if name in self._buffers and not whole.isnan().any():
            return whole  # infinite limits, as those of Gemma 4's clipped linears, are a model's choice
        return _finite(name, whole)

    def _held(self, name: str) -> Tensor:
        """A tensor under its name in the model or in a checkpoint."""
        return self._weights[name if name in self._weights else self._given.get(name, name)]

    def _whole(self, name: str) -> Tensor:
        tensor = self._held(name).detach()
        if tensor.is_meta:
            raise ValueError(
                f"{name} is on the meta device, where Accelerate's offload leaves weights, too: load the model whole "
                "before the export, or give its tensors as `weights`"
            )
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
            self.bytes_moved += tensor.nbytes
        return tensor


def _finite(name: str, tensor: Tensor) -> Tensor:
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise ValueError(f"{name} has an inf or a NaN: the model has diverged; export an earlier checkpoint")
    return tensor


def _cost(hp: Tensor, *operands: Operand) -> float:
    """The SQNR of dequantized values, one operand above the other, in dB."""
    return sqnr_db(hp, torch.cat([dequantize(each.data, typing.cast(Tensor, each.dequant_scale)) for each in operands]))


def _scales(linear: Float8Linear) -> PersistentScales:
    weight = linear.weight
    return linear.persistent_scales(weight.device, recording=False)


def _fsdp_modules(model: nn.Module, plan: Plan) -> dict[str, FSDPModule]:
    """The module whose `unshard()` gathers a float8 weight in high precision, by the names of such weights."""
    innermost: dict[int, FSDPModule] = {}
    for module in model.modules():  # parents come before their children
        if isinstance(module, FSDPModule):
            innermost |= dict.fromkeys(map(id, typing.cast(nn.Module, module).modules()), module)
    owners: dict[str, nn.Module] = {f"{name}.weight": linear for name, linear in plan.linears.items()}
    owners |= plan.experts
    return {
        name: innermost[id(owner)]
        for name, owner in owners.items()
        if id(owner) in innermost
        and isinstance(plan.float8_weight(name), DTensor)
        and not isinstance(local_tensor(plan.float8_weight(name)), FrozenFloat8Weight | WrappedTensor)
    }

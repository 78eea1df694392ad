"""The tensors of a float8 checkpoint, one after another: codes and scales of the linears, the rest as it is.

The codes come from the quantizers that the forward of `Float8Linear` uses, on the weight that this forward reads, so
they are those of the next training step, to the bit. Two exceptions, whose cost `Float8Weights.requantized` states:
    one scale per tensor    servers fuse q, k, v and gate, up into one linear with one scale. Such siblings share the
                            smallest of their scales, unless the caller asks for their own.
    blocks                  formats of blocks hold blocks of 128 x 128, or those of MXFP8; weights of other recipes are
                            quantized again. So are gate and up, which are one matrix in the forward of experts and two
                            in a checkpoint, where a block has rows of both: each in blocks from its own first row.

The weights of a frozen base (`freeze_to_float8`, `load_frozen`) are written with the codes that they hold.

A model that trains in high precision is read through a view that is converted to a recipe (unconverted.py). Where ranks
share its weights, they gather codes and agree on scales (shards.py).

A model with experts gets the names of its checkpoints (checkpoint_names.py), and each expert its own matrices with
their codes and scales, one expert after the other. A linear is a stack of one matrix.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from quaver.conversion.convert import ModuleFilter
from quaver.experts.module_weight import ModuleWeight
from quaver.export.checkpoint_names import KEPT_IN_FLOAT32, Parts
from quaver.export.formats import COMPRESSED_TENSORS
from quaver.export.formats.base import WeightFormat
from quaver.export.kv_cache import kv_scales_of
from quaver.export.plan import Plan, frozen_weights, linear_of, named_tensors, plan_export
from quaver.export.shards import whole_amaxes, whole_operands
from quaver.export.unconverted import ConvertedView, Recipe, converted_view, has_adapters
from quaver.kernels.operands import Operand, present
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.module import Float8Linear
from quaver.linear.quantize import Quantizer
from quaver.linear.weight_form import WrappedTensor
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scaling import Scales, dequantize, sqnr_db, to_dequant_scale
from quaver.runtime.names import plain_name
from quaver.torch_private.dtensor import local_tensor

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Sibling linears that servers fuse into one, which has one scale where scales are per tensor."""


_Matrix = tuple[Parts, Tensor | None, Operand]
"""The names of a matrix, or of its parts, in the checkpoint, its values and the operand of its forward; no values
where only codes are gathered."""


class Requantized(NamedTuple):
    """SQNR in dB of a weight that the format stores with other codes than the training forward had."""

    training_db: float
    """With the codes and scales of the training forward."""
    stored_db: float
    """With those of the checkpoint."""


def iter_float8_weights(
    model: nn.Module,
    *,
    recipe: Recipe | None = None,
    rounded_from: torch.dtype | str | None = None,
    format: str = COMPRESSED_TENSORS,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    share_fused_scales: bool = True,
    module_filter_fn: ModuleFilter | None = None,
) -> Float8Weights:
    """The tensors of `model` under the names that servers load, for a checkpoint or a hand-off to an inference engine.

        for name, tensor in iter_float8_weights(model):
            engine.load_weights([(name, tensor)])

    Args:
        model: converted to float8, or with a `recipe` in high precision; plain, or sharded by FSDP2 or tensor
            parallelism, with experts split or not. Adapters of PEFT are merged (`model.merge_adapter()`); they need not
            be unloaded. All ranks iterate together, and no forward runs meanwhile. Of a converted model each gathers
            one whole weight at a time (the weights of fused linears together, and of all experts in a stack), or, where
            FSDP2 shards float8 weights, the weights of one FSDPModule. Of a model in high precision ranks agree on the
            scales and gather the codes.
        recipe: converts a model that trains in high precision, for this export alone: a config, a recipe or a recipe's
            name, of dynamic scales, whose codes `format` holds.
        rounded_from: the dtype in which weights are quantized, where it is not their own: "bfloat16" rounds float32
            masters as an engine that is sent bfloat16 quantizes them, and as a forward under autocast reads them. Not
            needed for the own tensors of a model that FSDP2 shards: it is the `param_dtype` of the policy.
        format: "compressed-tensors", "compressed-tensors-block", "compressed-tensors-mxfp8", "fp8" or "comfyui" (see
            formats/); "high-precision" for the plain tensors, which is the control.
        weights: the tensors by name, where `model` is on the meta device; the model's own by default. Experts may be
            stacks, as in the model, or matrices, as in a checkpoint.
        dtype: of the tensors that stay in high precision, but for e_score_correction_bias, which routers add to scores;
            their own by default.
        share_fused_scales: give fused linears one scale where scales are per tensor. Without it codes are those of
            training, and a server that fuses quantizes them again. ComfyUI fuses none: each has its own there.
        module_filter_fn: with `recipe`, says which layers it is for, as for `convert_to_float8_training`. By default
            all but `lm_head`, routers and tied linears.
    Raises (when called):
        ValueError: no linear or expert is float8, a float8 weight is tied, a weight is missing, PEFT's adapters are not
            merged, the recipe has delayed or static scales, or is another one than that of a converted layer.
        NotImplementedError: no format holds the recipe, weights have different ones, this rank has some of the experts,
            or groups of MXFP8 do not divide the inputs of a weight.
    Raises (in the iteration):
        ValueError: a weight is not finite or on the meta device, or the scale of an input is unknown.
    """
    forward_dtype = _rounding(rounded_from)
    model, view = unwrapped(model), None
    if recipe is None and module_filter_fn is not None:
        raise ValueError("module_filter_fn: expected none without a recipe: the model's layers are converted, or not")
    if recipe is not None or has_adapters(model):
        view = converted_view(model, recipe, module_filter_fn)
        model = view.model
    return Float8Weights(model, format, weights, dtype, forward_dtype, share_fused_scales, view, recipe is not None)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model


def _rounding(rounded_from: torch.dtype | str | None) -> torch.dtype | None:
    named = getattr(torch, rounded_from, None) if isinstance(rounded_from, str) else rounded_from
    if rounded_from is not None and named not in HP_DTYPES:
        names = ", ".join(str(each).removeprefix("torch.") for each in HP_DTYPES)
        raise ValueError(f"rounded_from: expected one of {names}, got {rounded_from!r}")
    return typing.cast("torch.dtype | None", named)


class Float8Weights:
    """An iterator over (name, tensor); see `iter_float8_weights`.

    Attributes:
        bytes_yielded: of the tensors so far.
        bytes_moved: of the whole tensors that were gathered from shards so far, in the dtype of the forward for the
            float8 weights of FSDP2; 0 for a model that is not sharded.
        requantized: the linears that are stored with other codes than those of training, and the stacks of experts,
            each with the expert that loses the most. Empty with a `recipe`, with which no layer trained.
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
        view: ConvertedView | None,
        has_recipe: bool,
    ) -> None:
        self.plan = plan_export(model, format, weights)
        if has_recipe:
            _check_recipe(self.plan, format)
        self.bytes_yielded = self.bytes_moved = 0
        self.requantized: dict[str, Requantized] = {}
        self._weights = weights if weights is not None else named_tensors(model)
        is_file = self.plan.format.is_file
        self._shares = share_fused_scales and self.plan.format.weights == "tensor" and not is_file
        self._dtype, self._forward_dtype, self._view, self._has_recipe = dtype, forward_dtype, view, has_recipe
        self._frozen = frozen_weights(model)
        self._buffers = {plain_name(name) for name, _ in model.named_buffers()}
        kv_scales = {} if is_file else kv_scales_of(model)
        self.kv_scales = {self.plan.checkpoint.renamed(name): each for name, each in kv_scales.items()}
        self._fsdp_modules = {} if forward_dtype or weights is not None else _fsdp_modules(model, self.plan)
        self._streamed: dict[str, DTensor] = {}
        """The weights that ranks share, whose codes and scales are those of the checkpoint: only these are gathered."""
        for name in self.plan.float8 if has_recipe else ():
            held = self._weights.get(name)
            if isinstance(held, DTensor) and self._is_streamed(name, held.shape[-2]):
                self._streamed[name] = held
        self._gathered: dict[str, Tensor] = {}
        self._tensors = self._run()

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    @torch.no_grad()
    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._tensors)
        self.bytes_yielded += tensor.nbytes
        return name, tensor

    def _is_streamed(self, name: str, rows: int) -> bool:
        """Whether a weight, if ranks share it, is streamed; no block of its matrices may have rows of two parts."""
        if name in self._frozen or name in self.plan.checkpoint.transposed:
            return False
        parts, block = len(self.plan.checkpoint.parts(name)[0]), self.plan.format.block_size
        return parts == 1 or block is None or rows // parts % block[0] == 0

    def _read_dtype(self, name: str) -> torch.dtype | None:
        """The dtype in which the forward reads a float8 weight, where that is not its own."""
        if self._forward_dtype is not None or self._view is None:
            return self._forward_dtype
        return self._view.forward_dtypes.get(id(self.plan.float8[name].parameter))

    def _run(self) -> Iterator[tuple[str, Tensor]]:
        done: set[str] = set()
        for name in self.plan.names:
            if name not in self.plan.float8:
                for parts, matrix in self._matrices(name):
                    rows_of_parts = matrix.chunk(len(parts)) if len(parts) > 1 else [matrix]
                    for part, rows in zip(parts, rows_of_parts, strict=True):
                        yield part, self._converted(part, rows)
            elif name not in done:
                fused = self._fused_with(name) if self._shares else [name]
                done.update(fused)
                yield from self._quantized(fused)
        for name, scale in self.kv_scales.items():
            yield name, torch.tensor([scale])

    def _converted(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor that stays in high precision."""
        is_kept = self._dtype is None or not tensor.is_floating_point() or name.endswith(KEPT_IN_FLOAT32)
        return tensor if is_kept else tensor.to(self._dtype)

    def _fused_with(self, name: str) -> list[str]:
        """The float8 linears that a server fuses with this one, itself included, by the names of their weights."""
        parent, dot, leaf = linear_of(name).rpartition(".")
        group = next((names for names in FUSED if leaf in names), (leaf,))
        siblings = [f"{parent}{dot}{sibling}.weight" for sibling in group]
        return [each for each in siblings if each in self.plan.float8] or [name]

    def _quantized(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """The codes and scales of a weight, one matrix after the other, or of linears that share a scale."""
        format, shared, amaxes = self.plan.format, None, None
        are_streamed = self._streamed.keys() >= set(names)
        if len(names) > 1 and are_streamed:
            amaxes = torch.stack([self._amaxes(name) for name in names]).amax(0)
        matrices: list[Iterable[_Matrix]] = [self.of_forward(name, amaxes) for name in names]
        if len(names) > 1 and not are_streamed:
            matrices = [list(each) for each in matrices]
            scales = [_scales_of(operand) for linear in matrices for _, _, operand in linear]
            shared = min(scales, key=lambda each: each.quant.item())
        for name, of_weight in zip(names, matrices, strict=True):
            weight_of = self.plan.float8[name]
            for parts, weight, operand in of_weight:
                if shared is not None and _scales_of(operand).quant != shared.quant:
                    stored, is_requantized = [_quantize(weight_of, present(weight), shared)], True
                else:
                    casts = weight_of.config.casts.weight
                    stored, is_requantized = store_matrix(weight, operand, casts, len(parts), format)
                if is_requantized and not self._has_recipe:
                    cost = Requantized(_cost(present(weight), operand), _cost(present(weight), *stored))
                    known = self.requantized.get(linear_of(name), cost)
                    self.requantized[linear_of(name)] = min(known, cost, key=lambda each: each.stored_db)
                for part, each in zip(parts, stored, strict=True):
                    yield from format.tensors(part, each)
            if format.is_static and isinstance(weight_of.module, Float8Linear):
                prefix = self.plan.checkpoint.renamed(name).removesuffix("weight")
                yield f"{prefix}input_scale", format.stored_scale(input_scale(linear_of(name), weight_of.module))

    def _local(self, name: str) -> Tensor:
        """This rank's part of a weight, in the dtype of the forward."""
        local, dtype = local_tensor(self._weights[name]).detach(), self._read_dtype(name)
        return local if dtype is None else local.to(dtype)

    def _amaxes(self, name: str) -> Tensor:
        """The amaxes of the whole of a weight that is streamed; a collective."""
        amaxes = whole_amaxes(self._streamed[name], self._local(name), self.plan.float8[name].config)
        if not amaxes.isfinite().all():
            raise _diverged(name)
        return amaxes

    def of_forward(self, name: str, amaxes: Tensor | None = None) -> Iterator[_Matrix]:
        """Each matrix of a float8 weight, as the forward reads it and as it multiplies by it.

        `amaxes`: of the linears that share a scale, where they are streamed.
        """
        weight_of, transposed = self.plan.float8[name], name in self.plan.checkpoint.transposed
        if name in self._streamed:
            whole, amaxes = self._streamed[name], self._amaxes(name) if amaxes is None else amaxes
            operands = whole_operands(whole, self._local(name), weight_of.config, amaxes)
            self.bytes_moved += sum(each.data.nbytes for each in operands)
            for parts, operand in zip(self.plan.checkpoint.parts(name), operands, strict=True):
                yield parts, None, operand
            return
        if name not in self._frozen or (name in self.plan.checkpoint.stacks and name not in self._weights):
            for parts, matrix in self._matrices(name, self._read_dtype(name)):
                yield parts, matrix, _quantize(weight_of, matrix)
            return
        frozen = self._frozen_weight(name)
        for parts, stored in zip(self.plan.checkpoint.parts(name), frozen.matrices(), strict=True):
            operand = stored.t() if transposed else stored
            yield parts, _dequantized(operand, frozen.dtype), operand

    def _matrices(self, name: str, dtype: torch.dtype | None = None) -> Iterator[tuple[Parts, Tensor]]:
        """A tensor, or each matrix [N, K] of a stack, in `dtype`, with the names of its parts in the checkpoint."""
        checkpoint, is_stack = self.plan.checkpoint, name in self.plan.checkpoint.stacks
        held: Iterable[Tensor]
        if not is_stack:
            held = [self._read(name)]
        elif name in self._fsdp_modules or name in self._weights:
            transposed = name in checkpoint.transposed
            held = (matrix.t().contiguous() if transposed else matrix for matrix in self._read(name))
        else:
            held = (torch.cat([self._whole(part) for part in parts]) for parts in checkpoint.stacks[name])
        for index, (parts, whole) in enumerate(zip(checkpoint.parts(name), held, strict=True)):
            matrix = whole if dtype is None else whole.to(dtype)
            is_free = name in self._buffers and not matrix.isnan().any()  # as limits of Gemma 4's clipped linears, inf
            if matrix.is_floating_point() and not (is_free or matrix.isfinite().all()):
                raise _diverged(f"expert {index} of {name}" if is_stack else name)
            yield parts, matrix

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
                    weight = self.plan.float8[each].parameter.detach()  # a DTensor still under tensor parallelism
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
        return FrozenFloat8Weight.from_codes(codes, local.dequant_scale, local.dtype, local.scale_layout)

    def _read(self, name: str) -> Tensor:
        if name in self._frozen:
            return self._frozen_weight(name).to_high_precision()
        return self._unsharded(name) if name in self._fsdp_modules else self._whole(name)

    def _held(self, name: str) -> Tensor:
        """A tensor under its name in the model or in a checkpoint."""
        return self._weights[name if name in self._weights else self.plan.given.get(name, name)]

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


def _diverged(what: str) -> ValueError:
    return ValueError(f"{what} has an inf or a NaN: the model has diverged; export an earlier checkpoint")


def _check_recipe(plan: Plan, format: str) -> None:
    """Raise NotImplementedError if a format would store other codes than those of the recipe that a user gave."""
    for weight in plan.float8.values():
        if not plan.format.holds(weight.config.casts.weight.row):
            raise NotImplementedError(
                f"recipe: the format {format!r} holds weights with a scale per {plan.format.weights}, got "
                f"{plan.recipe!r} with weights {weight.config.casts.weight.row}; give a recipe that it holds"
            )


def store_matrix(
    weight: Tensor | None, of_forward: Operand, casts: OperandCasts, parts: int, format: WeightFormat
) -> tuple[list[Operand], bool]:
    """A matrix as a checkpoint stores it, with the codes of its forward where they fit, or quantized again.

    Args:
        weight: [N, K], as the forward reads it; None where the format holds the codes of the forward.
        of_forward: the operand of its matmul.
        casts: of the weight.
        parts: into how many matrices of N / parts rows a checkpoint cuts it.
        format: of the checkpoint.
    Returns:
        The parts, and whether they have other codes or scales than the forward.
    """
    held, rows = format.held(of_forward, casts.row), of_forward.data.shape[0] // parts
    if held is None or (parts > 1 and format.block_size is not None and rows % format.block_size[0]):
        power_of_2 = held is not None and casts.power_of_2
        return [format.quantized(each, power_of_2=power_of_2) for each in present(weight).chunk(parts)], True
    scale = typing.cast(Tensor, held.dequant_scale)
    scales = scale.chunk(parts) if scale.dim() else [scale] * parts
    return [Operand(*each, held.layout) for each in zip(held.data.chunk(parts), scales, strict=True)], False


def _quantize(weight_of: ModuleWeight, weight: Tensor, scales: Scales | None = None) -> Operand:
    """A matrix [N, K] as the forward multiplies by it, or with other `scales`."""
    module, scale = weight_of.module, None
    if isinstance(module, Float8Linear):
        scale = module.persistent_scales(module.weight.device, recording=False).weight
    quantizer = Quantizer(weight_of.config.casts.weight, weight.dtype, scale)
    return present(quantizer(weight, row=True, column=False, scales=scales).row)


def _scales_of(operand: Operand) -> Scales:
    dequant = typing.cast(Tensor, operand.dequant_scale)
    return Scales(to_dequant_scale(dequant) if operand.quant_scale is None else operand.quant_scale, dequant)


def input_scale(name: str, linear: Float8Linear) -> Tensor:
    """The dequant_scale, float32 (), of the input of a linear with persistent scales. Raises ValueError if unknown."""
    scale = linear.persistent_scales(linear.weight.device, recording=False).input
    if scale is None or not scale.quant_scale > 0:
        raise ValueError(
            f"the scale of the input of {name} is unknown: train a step, or calibrate, before the export; or give a "
            "recipe with dynamic scaling"
        )
    return to_dequant_scale(scale.quant_scale)


def _dequantized(operand: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantize(operand.data, present(operand.dequant_scale), dtype, operand.layout)


def _cost(hp: Tensor, *operands: Operand) -> float:
    """The SQNR of dequantized values, one operand above the other, in dB."""
    return sqnr_db(hp, torch.cat([_dequantized(each) for each in operands]))


def _fsdp_modules(model: nn.Module, plan: Plan) -> dict[str, FSDPModule]:
    """The module whose `unshard()` gathers a float8 weight in high precision, by the names of such weights."""
    innermost: dict[int, FSDPModule] = {}
    for module in model.modules():  # parents come before their children
        if isinstance(module, FSDPModule):
            innermost |= dict.fromkeys(map(id, typing.cast(nn.Module, module).modules()), module)
    return {
        name: innermost[id(weight.module)]
        for name, weight in plan.float8.items()
        if id(weight.module) in innermost
        and isinstance(weight.parameter, DTensor)
        and not isinstance(weight.local, FrozenFloat8Weight | WrappedTensor)
    }

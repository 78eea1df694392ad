"""`iter_float8_weights`: yields the tensors of a float8 checkpoint of a model, one at a time.

The codes come from the quantizers of `Float8Linear`'s forward, on the weight that this forward reads. They are
bit-identical to the next training step's, with two exceptions, whose SQNR is in `CheckpointTensors.requantized`:
    one scale per tensor    Servers fuse q, k, v and gate, up into one linear with one scale. Such linears share the
                            smallest of their scales, unless the caller asks for separate scales.
    blocks                  Formats hold blocks of 128 x 128 or of MXFP8; weights of other recipes are quantized again.
                            Gate and up are one matrix in the forward of experts and two in a checkpoint. If a block
                            has rows of both, each is quantized again, in blocks from its first row.

Frozen weights (`freeze_to_float8`, `load_frozen`) are written with their codes.

A model that trains in high precision is read through a view that is converted to a recipe (converted_view.py). If its
weights are sharded, ranks reduce amaxes and all-gather codes (shards.py).

A mixture gets the names of its checkpoints (checkpoint_names.py). Its experts follow each other, each with its
matrices, codes and scales. A linear is a stack of one matrix.
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
from quaver.export.checkpoint_names import FLOAT32_LEAF, PartNames
from quaver.export.converted_view import ConvertedView, Recipe, has_adapters, make_converted_view
from quaver.export.formats import COMPRESSED_TENSORS
from quaver.export.formats.base import WeightFormat
from quaver.export.kv_cache import get_kv_scales
from quaver.export.plan import ExportPlan, find_frozen_weights, get_linear_name, get_named_tensors, plan_export
from quaver.export.shards import compute_whole_amaxes, gather_whole_operands
from quaver.kernels.operands import Operand, require
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.module import Float8Linear
from quaver.linear.quantize import Quantizer
from quaver.linear.weight_form import WrapperWeight
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.linear_casts import OperandCasts
from quaver.recipes.scaling import CastScales, dequantize, to_dequant_scale
from quaver.recipes.sqnr import compute_sqnr_db
from quaver.runtime.errors import InputError
from quaver.runtime.module_names import strip_wrappers
from quaver.torch_private.dtensor import get_local_tensor

FUSED_BY_SERVERS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Linears that servers fuse into one, by the names of checkpoints. With scales per tensor the fused linear has one
scale, which quantizes some of the weights again. `SHARED_INPUTS` has more groups: a shared cast changes no codes."""

_Matrix = tuple[PartNames, Tensor | None, Operand]
"""The stored names of a matrix's parts, its values (None if ranks gather only codes), and the forward's operand."""


class Requantized(NamedTuple):
    """SQNR in dB of a weight that the checkpoint stores with other codes than the training forward had."""

    training_db: float
    """The SQNR with the codes and scales of the training forward."""
    stored_db: float
    """The SQNR with the codes and scales of the checkpoint."""


def iter_float8_weights(
    model: nn.Module,
    *,
    recipe: Recipe | None = None,
    forward_dtype: torch.dtype | str | None = None,
    format: str = COMPRESSED_TENSORS,
    weights: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype | None = None,
    share_fused_scales: bool = True,
    module_filter_fn: ModuleFilter | None = None,
) -> CheckpointTensors:
    """Yield the tensors of `model` under the names that servers load, for a checkpoint or an inference engine.

        for name, tensor in iter_float8_weights(model):
            engine.load_weights([(name, tensor)])

    Args:
        model: converted to float8, or in high precision with a `recipe`; plain, or sharded by FSDP2 or tensor
            parallelism, with or without expert parallelism. Adapters of PEFT must be merged (`model.merge_adapter()`);
            they need not be unloaded. All ranks iterate together, and run no forward meanwhile. In a converted model a
            rank gathers one whole weight at a time, the weights of fused linears together, or a stack of experts. If
            FSDP2 shards float8 weights, it gathers the weights of one FSDPModule. In a high-precision model ranks
            reduce amaxes and gather codes.
        recipe: the recipe for this export of a model that trains in high precision: a config, a recipe or its name,
            with dynamic scales, whose codes `format` holds.
        forward_dtype: the dtype in which a forward reads the weights, to which they are rounded before they are
            quantized; None for their dtype. With "bfloat16", float32 masters get the codes of an engine that receives
            bfloat16, and of a forward under autocast. Not needed for an FSDP2 model's own weights, which are rounded to
            `param_dtype`.
        format: "compressed-tensors", "compressed-tensors-block", "compressed-tensors-mxfp8", "fp8" or "comfyui" (see
            formats/); "high-precision" for the plain tensors, as a control.
        weights: the tensors by name if `model` is on the meta device; None for the model's own. Experts may be stacks,
            as in the model, or matrices, as in a checkpoint.
        dtype: the dtype of the tensors in high precision, except e_score_correction_bias, which routers add to scores;
            None keeps their dtypes.
        share_fused_scales: with scales per tensor, give fused linears one scale. If false, the codes are training's,
            and a server that fuses linears quantizes them again. ComfyUI does not fuse linears and ignores this.
        module_filter_fn: chooses the layers for `recipe`, as for `convert_to_float8_training`. None for all except
            `lm_head`, routers and tied linears.
    Raises (when called):
        ValueError: `dtype` or `forward_dtype` is not float32, bfloat16 or float16; no linear or expert is float8; a
            float8 weight is tied; a weight is missing; PEFT's adapters are not merged; the recipe has delayed or static
            scales; a layer is converted with another recipe.
        NotImplementedError: the format does not hold the recipe, weights have several recipes, this rank has only some
            of the experts, or groups of MXFP8 do not divide the inputs of a weight.
    Raises (in the iteration):
        ValueError: a weight is not finite, on the meta device or of another shape than the model's, or the scale of an
            input is unknown.
    """
    dtype, forward_dtype = _parse_dtype("dtype", dtype), _parse_dtype("forward_dtype", forward_dtype)
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    view = None
    if recipe is None and module_filter_fn is not None:
        raise ValueError("module_filter_fn: expected none without a recipe: the model's layers are converted, or not")
    if recipe is not None or has_adapters(model):
        view = make_converted_view(model, recipe, module_filter_fn)
        model = view.model
    return CheckpointTensors(model, format, weights, dtype, forward_dtype, share_fused_scales, view, recipe is not None)


def _parse_dtype(argument: str, value: torch.dtype | str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = getattr(torch, value, None) if isinstance(value, str) else value
    if value is not None and dtype not in HP_DTYPES:
        names = ", ".join(str(hp_dtype).removeprefix("torch.") for hp_dtype in HP_DTYPES)
        raise ValueError(f"{argument}: expected one of {names}, got {value!r}")
    return dtype


class CheckpointTensors:
    """An iterator over (name, tensor); see `iter_float8_weights`."""

    bytes_yielded: int
    """The bytes of the tensors yielded so far."""
    bytes_moved: int
    """The bytes of the whole tensors that were gathered from shards so far; weights that FSDP2 unshards count in the
    dtype of the forward. 0 for a model that is not sharded."""
    requantized: dict[str, Requantized]
    """The linears and stacks of experts with other codes than in training; a stack has the lowest SQNR of its experts.
    Empty with a `recipe`, because no layer trained with it."""
    kv_scales: dict[str, float]
    """The scales of the model's float8 KV cache, from `calibrate_kv_cache` or a checkpoint, yielded last."""

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
        self.requantized = {}
        self._weights = weights if weights is not None else get_named_tensors(model)
        self._shapes = {} if weights is None else {name: t.shape for name, t in get_named_tensors(model).items()}
        """The shapes of the user's weights; whole stacks may be transposed."""
        is_file = self.plan.format.is_file
        self._shares_scales = share_fused_scales and self.plan.format.weight_strategy == "tensor" and not is_file
        self._dtype, self._forward_dtype, self._view, self._has_recipe = dtype, forward_dtype, view, has_recipe
        self._frozen = find_frozen_weights(model)
        self._buffers = {strip_wrappers(name) for name, _ in model.named_buffers()}
        kv_scales = {} if is_file else get_kv_scales(model)
        self.kv_scales = {self.plan.checkpoint_names.get_stored_name(name): scale for name, scale in kv_scales.items()}
        self._fsdp_modules = {} if forward_dtype or weights is not None else _find_fsdp_modules(model, self.plan)
        self._gathered_as_codes: dict[str, DTensor] = {}
        """The sharded weights whose codes and scales the checkpoint holds: ranks gather no high-precision values."""
        for name in self.plan.float8 if has_recipe else ():
            sharded = self._weights.get(name)
            if isinstance(sharded, DTensor) and self._can_gather_codes(name, sharded.shape[-2]):
                self._gathered_as_codes[name] = sharded
        self._unsharded: dict[str, Tensor] = {}
        """The weights of an FSDPModule that `_unshard_weight` gathered and did not return yet."""
        self._tensors = self._iter_tensors()

    def __repr__(self) -> str:
        ignored = f", in high precision: {', '.join(self.plan.ignore)}" if self.plan.ignore else ""
        return (
            f"CheckpointTensors({self.plan.matrix_count} float8 weights, {self.bytes_yielded:,} bytes yielded{ignored})"
        )

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self

    @torch.no_grad()
    def __next__(self) -> tuple[str, Tensor]:
        name, tensor = next(self._tensors)
        self.bytes_yielded += tensor.nbytes
        return name, tensor

    def _can_gather_codes(self, name: str, rows: int) -> bool:
        """Return whether ranks gather only codes and scales of a weight. No block may have rows of two parts."""
        if name in self._frozen or name in self.plan.checkpoint_names.transposed:
            return False
        parts, block = len(self.plan.checkpoint_names.get_parts(name)[0]), self.plan.format.block_size
        return parts == 1 or block is None or rows // parts % block[0] == 0

    def _find_read_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype in which the forward reads a float8 weight; None for the dtype of the weight."""
        if self._forward_dtype is not None or self._view is None:
            return self._forward_dtype
        return self._view.forward_dtypes.get(id(self.plan.float8[name].parameter))

    def _iter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        yielded: set[str] = set()
        for name in self.plan.names:
            if name not in self.plan.float8:
                for parts, matrix in self._iter_matrices(name):
                    rows_of_parts = matrix.chunk(len(parts)) if len(parts) > 1 else [matrix]
                    for part, rows in zip(parts, rows_of_parts, strict=True):
                        yield part, self._cast_high_precision(part, rows)
            elif name not in yielded:
                fused = self._list_fused_weights(name) if self._shares_scales else [name]
                yielded.update(fused)
                yield from self._quantize_fused(fused)
        for name, scale in self.kv_scales.items():
            yield name, torch.tensor([scale], dtype=torch.float32, device="cpu")

    def _cast_high_precision(self, name: str, tensor: Tensor) -> Tensor:
        is_kept = self._dtype is None or not tensor.is_floating_point() or name.endswith(FLOAT32_LEAF)
        return tensor if is_kept else tensor.to(self._dtype)

    def _list_fused_weights(self, name: str) -> list[str]:
        parent, dot, leaf = get_linear_name(name).rpartition(".")
        group = next((leaves for leaves in FUSED_BY_SERVERS if leaf in leaves), (leaf,))
        fused = [f"{parent}{dot}{leaf}.weight" for leaf in group]
        return [weight for weight in fused if weight in self.plan.float8] or [name]

    def _quantize_fused(self, names: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield the codes and scales of each matrix of a weight, or of linears that share a scale."""
        format, shared, amaxes = self.plan.format, None, None
        gathers_codes = self._gathered_as_codes.keys() >= set(names)
        if len(names) > 1 and gathers_codes:
            amaxes = torch.stack([self._compute_amaxes(name) for name in names]).amax(0)
        matrices: list[Iterable[_Matrix]] = [self.iter_forward_operands(name, amaxes) for name in names]
        if len(names) > 1 and not gathers_codes:
            matrices = [*map(list, matrices)]
            scales = [_get_scales(operand) for linear in matrices for _, _, operand in linear]
            shared = min(scales, key=lambda scale: scale.quant.item())
        for name, matrices_of_weight in zip(names, matrices, strict=True):
            weight = self.plan.float8[name]
            for parts, matrix, operand in matrices_of_weight:
                if shared is not None and _get_scales(operand).quant != shared.quant:
                    whole = _quantize_matrix(weight, require(matrix, "the high-precision weight"), shared)
                    stored, is_requantized = [whole], True
                else:
                    casts = weight.config.casts.weight
                    stored, is_requantized = store_matrix(matrix, operand, casts, len(parts), format)
                if is_requantized and not self._has_recipe:
                    self._record_requantized(name, require(matrix, "the high-precision weight"), operand, stored)
                for part, stored_operand in zip(parts, stored, strict=True):
                    yield from format.iter_tensors(part, stored_operand)
            if format.has_activation_scales and isinstance(weight.module, Float8Linear):
                prefix = self.plan.checkpoint_names.get_stored_name(name).removesuffix("weight")
                input_scale = get_input_scale(get_linear_name(name), weight.module)
                yield f"{prefix}input_scale", format.convert_scale(input_scale)

    def _record_requantized(self, name: str, matrix: Tensor, operand: Operand, stored: list[Operand]) -> None:
        requantized = Requantized(_compute_sqnr_db(matrix, operand), _compute_sqnr_db(matrix, *stored))
        lowest = self.requantized.setdefault(get_linear_name(name), requantized)
        if requantized.stored_db < lowest.stored_db:
            self.requantized[get_linear_name(name)] = requantized

    def _get_local_shard(self, name: str) -> Tensor:
        local, dtype = get_local_tensor(self._weights[name]).detach(), self._find_read_dtype(name)
        return local if dtype is None else local.to(dtype)

    def _compute_amaxes(self, name: str) -> Tensor:
        sharded, config = self._gathered_as_codes[name], self.plan.float8[name].config
        amaxes = compute_whole_amaxes(sharded, self._get_local_shard(name), config)
        if not amaxes.isfinite().all():
            raise _make_diverged_error(name)
        return amaxes

    def iter_forward_operands(self, name: str, amaxes: Tensor | None = None) -> Iterator[_Matrix]:
        """Yield each matrix of a float8 weight, with its operand in the forward.

        `amaxes`: of the linears that share a scale, if only codes and scales are gathered.
        """
        weight, transposed = self.plan.float8[name], name in self.plan.checkpoint_names.transposed
        if name in self._gathered_as_codes:
            sharded, amaxes = self._gathered_as_codes[name], self._compute_amaxes(name) if amaxes is None else amaxes
            operands = gather_whole_operands(sharded, self._get_local_shard(name), weight.config, amaxes)
            self.bytes_moved += sum(operand.data.nbytes for operand in operands)
            for parts, operand in zip(self.plan.checkpoint_names.get_parts(name), operands, strict=True):
                yield parts, None, operand
            return
        if name not in self._frozen or (name in self.plan.checkpoint_names.stacks and name not in self._weights):
            for parts, matrix in self._iter_matrices(name, self._find_read_dtype(name)):
                yield parts, matrix, _quantize_matrix(weight, matrix)
            return
        frozen = self._gather_frozen(name)
        for parts, stored in zip(self.plan.checkpoint_names.get_parts(name), frozen.list_matrices(), strict=True):
            operand = stored.t() if transposed else stored
            yield parts, _dequantize(operand, frozen.dtype), operand

    def _iter_matrices(self, name: str, dtype: torch.dtype | None = None) -> Iterator[tuple[PartNames, Tensor]]:
        """Yield a tensor, or each matrix [N, K] of a stack, in `dtype`, with the stored names of its parts."""
        names = self.plan.checkpoint_names
        is_stack = name in names.stacks
        matrices: Iterable[Tensor]
        if not is_stack:
            matrices = [self._read(name)]
        elif name in self._fsdp_modules or name in self._weights:
            transposed = name in names.transposed
            matrices = (matrix.t().contiguous() if transposed else matrix for matrix in self._read(name))
        else:
            matrices = (torch.cat([self._gather_whole(part) for part in parts]) for parts in names.stacks[name])
        for index, (parts, matrix) in enumerate(zip(names.get_parts(name), matrices, strict=True)):
            matrix = matrix if dtype is None else matrix.to(dtype)
            may_be_infinite = name in self._buffers and not matrix.isnan().any()  # limits of Gemma 4's clipped linears
            if matrix.is_floating_point() and not (may_be_infinite or matrix.isfinite().all()):
                raise _make_diverged_error(f"expert {index} of {name}" if is_stack else name)
            yield parts, matrix

    def _unshard_weight(self, name: str) -> Tensor:
        """Return a weight as FSDP2 gathers it for the forward, in `mp_policy.param_dtype`.

        FSDP2 has no public reader of this dtype, so `unshard` gathers the weights. The first float8 weight of an
        FSDPModule gathers all of its weights; each call removes one from the cache.
        """
        if name not in self._unsharded:
            module = self._fsdp_modules[name]
            parameters = typing.cast(nn.Module, module).parameters
            sharded = list(parameters())
            module.unshard()
            try:
                gathered = [new for old, new in zip(sharded, parameters(), strict=True) if new is not old]
                self.bytes_moved += sum(weight.nbytes for weight in gathered)
                for key in (key for key, owner in self._fsdp_modules.items() if owner is module):
                    weight = self.plan.float8[key].parameter.detach()  # still a DTensor under tensor parallelism
                    self._unsharded[key] = weight.full_tensor() if isinstance(weight, DTensor) else weight.clone()
            finally:
                module.reshard()
        return self._unsharded.pop(name)

    def _gather_frozen(self, name: str) -> FrozenFloat8Weight:
        weight, local = self._get_tensor(name).detach(), self._frozen[name]
        codes = weight.data_fp8 if isinstance(weight, FrozenFloat8Weight) else weight
        if isinstance(codes, DTensor):  # gathered as bytes, which every backend supports
            shard, mesh, placements = local.data_fp8.view(torch.uint8), codes.device_mesh, codes.placements
            gathered = DTensor.from_local(
                shard, mesh, placements, run_check=False, shape=codes.shape, stride=codes.stride()
            ).full_tensor()
            self.bytes_moved += gathered.nbytes
            codes = gathered.view(local.data_fp8.dtype)
        return FrozenFloat8Weight.from_codes(codes, local.dequant_scale, local.dtype, local.scale_layout)

    def _read(self, name: str) -> Tensor:
        if name in self._frozen:
            return self._gather_frozen(name).to_high_precision()
        return self._unshard_weight(name) if name in self._fsdp_modules else self._gather_whole(name)

    def _get_tensor(self, name: str) -> Tensor:
        return self._weights[name if name in self._weights else self.plan.names_in_weights.get(name, name)]

    def _gather_whole(self, name: str) -> Tensor:
        tensor = self._get_tensor(name).detach()
        if tensor.is_meta:
            raise InputError(
                f"{name} is on the meta device, where Accelerate's offload also leaves weights: load all weights "
                "before the export, or give them as `weights`"
            )
        expected = self._shapes.get(name, tensor.shape)
        if tensor.shape != expected and name not in self.plan.checkpoint_names.whole_stacks:
            raise InputError(f"{name}: expected {list(expected)}, as the model has, got {list(tensor.shape)}")
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
            self.bytes_moved += tensor.nbytes
        return tensor


def _make_diverged_error(name: str) -> InputError:
    return InputError(f"{name} has an inf or a NaN: the model has diverged; export an earlier checkpoint")


def _check_recipe(plan: ExportPlan, format: str) -> None:
    """Raise NotImplementedError if the format cannot store the codes of the recipe that the user gave."""
    for weight in plan.float8.values():
        if not plan.format.can_hold(weight.config.casts.weight.row):
            strategy, cast = plan.format.weight_strategy, weight.config.casts.weight.row
            raise NotImplementedError(
                f"recipe: expected weights with a scale per {strategy}, which the format {format!r} holds, got "
                f"{plan.recipe!r} with weights {cast}; give another recipe or format"
            )


def store_matrix(
    weight: Tensor | None, forward_operand: Operand, casts: OperandCasts, num_parts: int, format: WeightFormat
) -> tuple[list[Operand], bool]:
    """Return a matrix as the checkpoint stores it: with the forward's codes if the format holds them, else requantized.

    Args:
        weight: [N, K], as the forward reads it; None if the format holds the codes of the forward.
        forward_operand: the operand of the forward's matmul.
        casts: the casts of the weight.
        num_parts: the number of matrices of N / num_parts rows in the checkpoint.
        format: the format of the checkpoint.
    Returns:
        The parts, and whether their codes or scales differ from the forward's.
    """
    converted, rows = format.convert_operand(forward_operand, casts.row), forward_operand.data.shape[0] // num_parts
    if converted is None or (num_parts > 1 and format.block_size is not None and rows % format.block_size[0]):
        power_of_2 = converted is not None and casts.power_of_2
        matrices = require(weight, "the high-precision weight").chunk(num_parts)
        return [format.quantize(matrix, power_of_2=power_of_2) for matrix in matrices], True
    scale = require(converted.dequant_scale, "the dequant_scale")
    scales = scale.chunk(num_parts) if scale.dim() else [scale] * num_parts
    parts = zip(converted.data.chunk(num_parts), scales, strict=True)
    return [Operand(*part, converted.layout) for part in parts], False


def _quantize_matrix(weight: ModuleWeight, matrix: Tensor, scales: CastScales | None = None) -> Operand:
    module, scale = weight.module, None
    if isinstance(module, Float8Linear):
        scale = module.get_persistent_scales(module.weight.device).weight
    quantizer = Quantizer(weight.config.casts.weight, matrix.dtype, scale)
    return require(quantizer(matrix, row=True, column=False, scales=scales).row, "the row operand")


def _get_scales(operand: Operand) -> CastScales:
    dequant = require(operand.dequant_scale, "the dequant_scale")
    return CastScales(to_dequant_scale(dequant) if operand.quant_scale is None else operand.quant_scale, dequant)


def get_input_scale(name: str, linear: Float8Linear) -> Tensor:
    """Return the dequant_scale, float32 (), of the input of a linear with persistent scales.

    Raises ValueError if it is unknown.
    """
    scale = linear.get_persistent_scales(linear.weight.device).input
    if scale is None or not scale.quant_scale > 0:
        raise InputError(
            f"the scale of the input of {name} is unknown: train a step, or calibrate, before the export; or give a "
            "recipe with dynamic scaling"
        )
    return to_dequant_scale(scale.quant_scale)


def _dequantize(operand: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantize(operand.data, require(operand.dequant_scale, "the dequant_scale"), dtype, operand.layout)


def _compute_sqnr_db(hp: Tensor, *operands: Operand) -> float:
    return compute_sqnr_db(hp, torch.cat([_dequantize(operand) for operand in operands]))


def _find_fsdp_modules(model: nn.Module, plan: ExportPlan) -> dict[str, FSDPModule]:
    """Return, by the name of a float8 weight, the module whose `unshard()` gathers it in high precision."""
    innermost: dict[int, FSDPModule] = {}
    for module in model.modules():  # parents come before their children
        if isinstance(module, FSDPModule):
            innermost |= dict.fromkeys(map(id, module.modules()), module)
    return {
        name: innermost[id(weight.module)]
        for name, weight in plan.float8.items()
        if id(weight.module) in innermost
        and isinstance(weight.parameter, DTensor)
        and not isinstance(weight.local_tensor, FrozenFloat8Weight | WrapperWeight)
    }

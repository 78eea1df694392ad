"""`load_frozen`: loads a float8 checkpoint as a model's frozen weights, without quantizing again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quaver.conversion.convert import FilterDecision, convert_to_float8_training
from quaver.conversion.freeze import explain_storing_obstacle, make_blockwise_config, store_float8_weight
from quaver.conversion.report import explain_conversion_obstacle
from quaver.experts.module import Float8Experts, explain_experts_obstacle, get_expert_weights, is_experts, is_transposed
from quaver.export.checkpoint_names import PartNames
from quaver.export.formats.stored import StoredScale
from quaver.export.kv_cache import set_kv_scales
from quaver.export.load import Float8Checkpoint, ModelTensors
from quaver.export.plan import get_linear_name
from quaver.linear.module import Float8Linear
from quaver.linear.shared_input import share_input_casts
from quaver.recipes.config import CastConfig, Float8LinearConfig, Float8LinearRecipeName, ScalingGranularity
from quaver.recipes.formats import E4M3
from quaver.recipes.scale_layout import BLOCK_SIZES, ROWWISE, SQUARE_BLOCKS, ScaleLayout
from quaver.recipes.serving import get_serving_casts, serving_config
from quaver.runtime.errors import InputError
from quaver.runtime.module_names import find_parameter_names, join_names

_STORED_IN_HP = FilterDecision(convert=False, reason="in high precision in the checkpoint")
_DEQUANTIZED_EXPERTS = FilterDecision(
    convert=False,
    reason="experts, dequantized from the checkpoint: the scales of gate and up do not fit their concatenation",
)


def load_frozen(model: nn.Module, folder: Path | str, *, serving: str | None = None) -> nn.Module:
    """Load a float8 checkpoint into `model`, in place, with its codes and scales as frozen float8 weights.

        with accelerate.init_empty_weights():                             # parameters on the meta device
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        load_frozen(model, folder)

    Loads the codes and scales bit-exactly. Where a scale is 0 the weights are zeros. Tensors in high precision are
    loaded in the dtype of the model. The forward quantizes activations dynamically, and ignores a stored input_scale:

        weights with blocks of 128 x 128 or 32 x 32                         per 128 or 32 elements of a row
        weights with a scale per row, or a checkpoint that says per token   per row
        other weights                                                       per tensor

    Gate and up of experts are one matrix in the model. If their scales do not fit this matrix, these experts are
    dequantized and stay in high precision. All checks run before the model changes; only an error of the disk can come
    later. As after `freeze_to_float8`, frozen weights do not train, and `conversion_report(model)` lists each layer.
    Scales of a float8 KV cache are kept for `save_float8`.

    Args:
        model: in high precision, on any device; weights on the meta device move to the CPU. Its names match the
            checkpoint's, or transformers maps them. Call this before sharding, compiling or adding adapters.
        folder: as for `load_float8`.
        serving: an engine of quaver/recipes/serving.py whose rule quantizes activations; None for quaver's rule.
    Returns:
        `model`.
    Raises:
        OSError, ValueError, NotImplementedError: as `load_float8`.
        ValueError: `serving` is unknown, or an engine with static scales or another granularity of weights.
        ValueError: names or shapes of the model and of the checkpoint differ; a float8 weight belongs to no nn.Linear
            or experts, is tied, or converted to float8 already; a scale is below 0; a buffer that the checkpoint
            lacks is on the meta device.
        NotImplementedError: the checkpoint has scales of several granularities.
    """
    checkpoint = Float8Checkpoint(Path(folder), torch.float32)
    is_empty = any(parameter.is_meta for parameter in model.parameters())
    if is_empty and callable(tie := getattr(model, "tie_weights", None)):
        tie()  # init_empty_weights replaced the parameters that transformers had tied
    tensors, loaded = model.state_dict(keep_vars=True), ModelTensors(model, checkpoint)
    stored = StoredWeights(model, checkpoint, loaded, serving=serving)
    problem = next(_iter_problems(model, tensors, checkpoint, loaded, stored.weights), None)
    if problem is not None:
        raise ValueError(problem)
    set_kv_scales(model, checkpoint.kv_scales)
    stored.convert(model)
    for name in stored.frozen:
        weight = model.get_parameter(name)
        stored.store(model, name, weight.dtype, torch.device("cpu") if weight.is_meta else weight.device)
    share_input_casts(model, Float8Linear)
    _load_high_precision_tensors(model, tensors, loaded, [name for name in loaded if name not in stored.frozen])
    return model


class StoredWeights:
    """The float8 weights of a checkpoint that a model can hold with the stored codes and scales.

    Raises (in the constructor):
        NotImplementedError: the scales have several granularities.
        ValueError: as `load_frozen` for `serving`.
    """

    weights: dict[str, list[PartNames]]
    """The float8 weights of linears and experts: the stored parts of each matrix, by name in the model."""
    frozen: dict[str, list[PartNames]]
    """The `weights` whose scales fit the model's matrices; the others are dequantized."""
    config: Float8LinearConfig
    """The config of the forward that the checkpoint describes, with the casts of `serving` if it is given."""

    def __init__(
        self,
        model: nn.Module,
        checkpoint: Float8Checkpoint,
        loaded: ModelTensors,
        left_out: Mapping[str, FilterDecision] | None = None,
        serving: str | None = None,
    ) -> None:
        """`left_out`: the reasons why weights are dequantized, by module. `serving`: as for `load_frozen`."""
        self._checkpoint, self._loaded, self._left_out = checkpoint, loaded, left_out or {}
        float8 = _find_float8_weights(model, checkpoint, loaded)
        self.weights = {name: stack for name, stack in float8.items() if _get_owner(name) not in self._left_out}
        names = [part for stack in self.weights.values() for parts in stack for part in parts]
        self._granularity = _find_granularity(checkpoint, names)
        config = _make_config(checkpoint, self._granularity, names)
        self.config = config if serving is None else _use_casts_of_engine(config, serving)
        self._dequantized = {
            _get_owner(name) for name, stack in self.weights.items() if not _has_scales_of_stack(checkpoint, stack)
        }
        self.frozen = {name: stack for name, stack in self.weights.items() if _get_owner(name) not in self._dequantized}

    def convert(self, model: nn.Module, *, include_subclasses: bool = False) -> None:
        """Convert the modules of the frozen weights. They may be on the meta device."""
        frozen = set(map(_get_owner, self.frozen))

        def decide(_: nn.Module, name: str) -> FilterDecision:
            if name in frozen:
                return FilterDecision(convert=True)
            return self._left_out.get(name, _DEQUANTIZED_EXPERTS if name in self._dequantized else _STORED_IN_HP)

        convert_to_float8_training(
            model, config=self.config, module_filter_fn=decide, include_subclasses=include_subclasses
        )

    def store(self, model: nn.Module, name: str, dtype: torch.dtype, device: torch.device) -> None:
        """Store the codes and scales of the weight `name` in its converted module, on `device`.

        `dtype`: the high-precision dtype that the weight presents.
        """
        module, leaf = model.get_submodule(_get_owner(name)), name.rpartition(".")[2]
        shape = getattr(module, leaf).shape
        stack, granularity = self.frozen[name], self._granularity
        if len(shape) == 3 and name not in self._loaded.stacks:
            transposed = name in self._loaded.transposed_whole_stacks
            codes, scale = _read_whole_stack(self._checkpoint, stack[0][0], module, transposed, granularity, device)
        else:
            transposed = name in self._loaded.transposed
            codes, scale = _read_parts(self._checkpoint, stack, shape, transposed, granularity, device)
        store_float8_weight(module, codes, scale, config=self.config, dtype=dtype, name=leaf)


def _get_owner(name: str) -> str:
    return name.rpartition(".")[0]


def _find_float8_weights(
    model: nn.Module, checkpoint: Float8Checkpoint, loaded: ModelTensors
) -> dict[str, list[PartNames]]:
    """Return the weights of linears and experts that the checkpoint has in float8, tied weights under one name."""
    float8, modules = set(checkpoint.float8_names), dict(model.named_modules())
    weights = {}
    for name, stack in loaded.parts.items():
        if not float8.issuperset(itertools.chain(*stack)) or name in loaded.tied:
            continue
        module = modules.get(_get_owner(name))
        is_linear = name.endswith(".weight") and isinstance(module, nn.Linear)
        if name in loaded.stacks or is_linear or _is_whole_stack(module, name, checkpoint, loaded):
            weights[name] = stack
    return weights


def _is_whole_stack(module: nn.Module | None, name: str, checkpoint: Float8Checkpoint, loaded: ModelTensors) -> bool:
    """Return whether a tensor is a stack of experts whose scales a frozen stack can hold: a row is an output."""
    if module is None or not is_experts(module) or name.rpartition(".")[2] not in get_expert_weights(module):
        return False
    granularities = {scale.granularity for scale in checkpoint.read_scales(loaded.parts[name][0][0])}
    return "channel" not in granularities or is_transposed(module) == (name in loaded.transposed_whole_stacks)


def _has_scales_of_stack(checkpoint: Float8Checkpoint, stack: list[PartNames]) -> bool:
    """Return whether the parts of each expert, concatenated along rows, have the scales of one matrix."""
    for parts in stack if len(stack[0]) > 1 else []:
        scales = [checkpoint.get_scale(part) for part in parts]
        if scales[0].granularity == "tensor" and any(scale.values != scales[0].values for scale in scales):
            return False
        rows, *_ = checkpoint.get_shape(parts[0])
        if scales[0].block_size is not None and rows % scales[0].block_size[0]:
            return False
    return True


def _read_parts(
    checkpoint: Float8Checkpoint,
    stack: list[PartNames],
    shape: torch.Size,
    transposed: bool,
    granularity: str,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Read the codes and the scale of a weight of `shape` [N, K], or of a stack, into new memory."""
    codes, scales = torch.empty(shape, dtype=E4M3.dtype, device=device), []
    for index, parts in enumerate(stack):
        pairs = [_replace_zero_scales(checkpoint.read_codes(part), checkpoint.get_scale(part)) for part in parts]
        matrix = codes if codes.dim() == 2 else codes[index].t() if transposed else codes[index]
        for rows, (part, _) in zip(matrix.chunk(len(parts)), pairs, strict=True):
            rows.copy_(part)
        expanded = [_expand_scale(scale, part.shape, granularity) for part, scale in pairs]
        scale = torch.cat(expanded) if expanded[0].dim() else expanded[0]
        scales.append(scale.t() if transposed and scale.dim() else scale)
    scale = torch.stack(scales) if codes.dim() == 3 else scales[0].clone()  # the scale may be a view of the file
    return codes, scale.to(device)


def _read_whole_stack(
    checkpoint: Float8Checkpoint,
    part: str,
    experts: nn.Module,
    transposed: bool,
    granularity: str,
    device: torch.device,
) -> tuple[Tensor, Tensor]:
    """Read the codes and scales of a stack that is one tensor. `transposed`: relative to the model."""
    stored, scales = checkpoint.read_codes(part), checkpoint.read_scales(part)
    codes = torch.empty((stored.mT if transposed else stored).shape, dtype=E4M3.dtype, device=device)
    has_inputs_first, values_of_matrices = is_transposed(experts), []
    for matrix_codes, matrix, scale in zip(codes, stored, scales * (len(stored) // len(scales)), strict=True):
        matrix, scale = _replace_zero_scales(matrix, scale)
        matrix_codes.copy_(matrix.t() if transposed else matrix)
        rows, columns = reversed(matrix_codes.shape) if has_inputs_first else matrix_codes.shape
        if transposed != has_inputs_first and scale.values.dim():
            scale = scale._replace(values=scale.values.t())
        values = _expand_scale(scale, torch.Size((rows, columns)), granularity)
        values_of_matrices.append(values.t() if has_inputs_first and values.dim() else values)
    return codes, torch.stack(values_of_matrices).contiguous().to(device)


def _replace_zero_scales(codes: Tensor, scale: StoredScale) -> tuple[Tensor, StoredScale]:
    """Replace scales of 0, with which some writers store rows and blocks of zeros, by 1, and their codes by 0."""
    is_zero_scale = scale.values == 0
    if not is_zero_scale.any():
        return codes, scale
    is_zero = scale.dequantize(torch.ones_like(codes), torch.float32) == 0
    zeroed = codes.view(torch.uint8).masked_fill(is_zero, 0).view(codes.dtype)
    return zeroed, scale._replace(values=scale.values.masked_fill(is_zero_scale, 1.0))


_LAYOUTS = {
    "tensor": ROWWISE,
    "channel": ROWWISE,
    **{f"block {rows} x {columns}": ScaleLayout(rows, columns) for rows, columns in BLOCK_SIZES if rows == columns},
}
"""The layout of the scales of frozen weights by their granularity. A single number counts as rowwise."""


def _find_granularity(checkpoint: Float8Checkpoint, names: list[str]) -> str:
    """Return the granularity of the scales of the weights `names`. A scale per tensor fits any granularity."""
    granularities = {scale.granularity for name in names for scale in checkpoint.read_scales(name)} or {"tensor"}
    granularities = granularities - {"tensor"} or granularities
    e5m2 = [name for name in names if checkpoint.get_code_dtype(name) != "F8_E4M3"]
    if len(granularities) > 1 or not granularities <= _LAYOUTS.keys() or e5m2:
        actual = ", ".join(sorted(granularities)) + (f"; {join_names(e5m2)} in F8_E5M2" if e5m2 else "")
        raise NotImplementedError(
            f"frozen weights: expected F8_E4M3 with scales of one granularity of {', '.join(_LAYOUTS)}, got "
            f"{actual}; use load_float8, which dequantizes them, and freeze_to_float8"
        )
    return next(iter(granularities))


def _expand_scale(scale: StoredScale, shape: torch.Size, granularity: str) -> Tensor:
    if scale.granularity == granularity or scale.granularity != "tensor":
        return scale.values
    return scale.values.expand(_LAYOUTS[granularity].get_scale_shape(shape[0], shape[1]))


def _make_config(checkpoint: Float8Checkpoint, granularity: str, names: list[str]) -> Float8LinearConfig:
    """Return the config of the forward that the checkpoint describes; gradients are as in the matching recipe.

    Only the weights `names` count: tensors outside the model, such as layers that predict further tokens, may differ.
    """
    scales = (scale.values for name in names for scale in checkpoint.read_scales(name))
    power_of_2 = all(bool((torch.frexp(values)[0].eq(0.5) | values.eq(0)).all()) for values in scales)
    layout = _LAYOUTS[granularity]
    if layout == SQUARE_BLOCKS:
        return make_blockwise_config(power_of_2=power_of_2)
    if layout.is_blockwise:
        mx = Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.MXFP8)
        return mx if power_of_2 else _use_float32_scales(mx)
    if granularity == "tensor" and not checkpoint.format.has_token_scales(names):
        return Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.TENSORWISE)
    rowwise = Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.ROWWISE)
    weight_granularity = ScalingGranularity.ROWWISE if granularity == "channel" else ScalingGranularity.TENSORWISE
    weight = CastConfig(scaling_granularity=weight_granularity, target_dtype=E4M3.dtype)
    return replace(rowwise, cast_config_weight=weight, round_scales_to_power_of_2=power_of_2)


def _use_casts_of_engine(config: Float8LinearConfig, serving: str) -> Float8LinearConfig:
    """Return the config with the casts of an engine; the backward reads the stored codes."""
    engine_casts, weight = get_serving_casts(serving), config.casts.weight.row
    if engine_casts.input.is_persistent or engine_casts.weight.granularity != weight.granularity:
        raise InputError(
            f"serving: expected an engine with dynamic scales and {weight.granularity} weights as the checkpoint, "
            f"got {serving!r}"
        )
    return replace(serving_config(serving, config), cast_config_weight_for_grad_input=engine_casts.weight)


def _use_float32_scales(config: Float8LinearConfig) -> Float8LinearConfig:
    names = [f"cast_config_{operand}" for operand in ("input", "weight", "grad_output")]
    casts = {name: replace(getattr(config, name), scale_calculation_mode=None) for name in names}
    return replace(config, round_scales_to_power_of_2=False, **casts)


def _iter_problems(
    model: nn.Module,
    tensors: dict[str, Tensor],
    checkpoint: Float8Checkpoint,
    loaded: ModelTensors,
    weights: Mapping[str, list[PartNames]],
) -> Iterator[str]:
    modules, owners = dict(model.named_modules()), find_parameter_names(model)
    unknown = [name for name in loaded if name not in tensors]
    loaded_ids = {id(tensors[name]) for name in loaded if name in tensors}
    missing = [name for name, tensor in tensors.items() if id(tensor) not in loaded_ids]
    if unknown or missing:
        lists = (("the model lacks", unknown), ("the checkpoint lacks", missing))
        differences = [f"{prefix} {join_names(names)}" for prefix, names in lists if names]
        yield f"names differ: {', '.join(differences)}"
    for name in loaded:
        if loaded.get_shape(name) != list(tensors[name].shape):
            yield f"{name}: expected {list(tensors[name].shape)}, as the model has, got {loaded.get_shape(name)}"
    on_meta = [name for name, buffer in model.named_buffers() if buffer.is_meta and name not in loaded]
    if on_meta:
        yield (
            f"buffers outside the checkpoint are on the meta device: {join_names(on_meta)}; make the model in "
            "accelerate's init_empty_weights(), which leaves buffers where they are"
        )
    frozen = set()
    for name, stack in weights.items():
        module, label = modules[_get_owner(name)], get_linear_name(name)
        if isinstance(module, Float8Linear | Float8Experts):
            yield f"{label} is converted to float8 already; call convert_to_high_precision first"
        elif obstacle := explain_frozen_obstacle(module):
            yield f"{label} cannot be stored in float8: {obstacle}"
        elif obstacle := explain_storing_obstacle(label, tensors[name], owners):
            yield obstacle
        for stored in itertools.chain(*stack):
            frozen.add(stored)
            if not all((scale.values >= 0).all() for scale in checkpoint.read_scales(stored)):
                yield f"the scale of {stored}: expected numbers of 0 or more, got one below"
            checkpoint.read_codes(stored)
    dequantized = {part for stack in loaded.parts.values() for parts in stack for part in parts} - frozen
    for stored in dequantized.intersection(checkpoint.float8_names):
        checkpoint.read_codes(stored)  # raises ValueError for a NaN, for example in an embedding


def explain_frozen_obstacle(module: nn.Module, include_subclasses: bool = False) -> str:
    """Return why a linear, or experts, cannot hold codes of a checkpoint, or ""."""
    if isinstance(module, nn.Linear):
        return explain_conversion_obstacle(module, include_subclasses=include_subclasses)
    return explain_experts_obstacle(module, Float8LinearConfig())


@torch.no_grad()
def _load_high_precision_tensors(
    model: nn.Module, tensors: dict[str, Tensor], loaded: Mapping[str, Tensor], names: list[str]
) -> None:
    """Copy the tensors `names` into parameters and buffers. Replaces those on the meta device, tied ones everywhere."""
    replaced: dict[int, Any] = {}
    for name in names:
        old, tensor = tensors[name], loaded[name]
        if not old.is_meta:
            old.copy_(tensor)
            continue
        new = tensor.to(old.dtype, copy=True)
        replaced[id(old)] = nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new
    for module in model.modules():
        for registry in (module._parameters, module._buffers):
            registry.update({leaf: replaced[id(old)] for leaf, old in registry.items() if id(old) in replaced})

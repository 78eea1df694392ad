"""`freeze_to_float8`: stores the base weights of a fine-tuned model once in float8; adapters train on top.

    output      = input       @ codes.t()     the stored codes and scales
    grad_input  = grad_output @ codes         the same codes and scales; there is no grad_weight

The weights of linears and of experts are `FrozenFloat8Weight`s (linear/frozen_weight.py): one byte per element, and
scales. Both matmuls read tensorwise and blockwise codes. Rowwise scales run along the contracted dim of grad_input. So
the exact matmul (kernels/exact_mm.py) dequantizes the weight for grad_input: a second cast would give the backward
other weights than the forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from quaver.conversion.convert import FilterDecision, ModuleFilter, apply_filter, convert_with_layer_configs
from quaver.conversion.report import explain_conversion_obstacle
from quaver.experts.module import (
    Float8Experts,
    explain_experts_obstacle,
    get_expert_weights,
    is_experts,
    is_transposed,
)
from quaver.experts.module_weight import ModuleWeight, iter_module_weights
from quaver.kernels.operands import require
from quaver.linear.class_change import change_class
from quaver.linear.float8_module import Float8Module, change_to_float8, restore_class
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.module import Float8Linear
from quaver.linear.quantize import Quantizer
from quaver.linear.shared_input import share_input_casts, stop_sharing_input_casts
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, ScaleCalculationMode, resolve_config
from quaver.recipes.formats import HP_DTYPES
from quaver.recipes.scaling import compute_amax
from quaver.runtime.errors import check_is_module
from quaver.runtime.module_names import find_parameter_names, format_module_name, quote_module_name
from quaver.weights.frozen_modules import FrozenFloat8Experts, FrozenFloat8Linear, FrozenModule
from quaver.weights.primary_weight import Float8PrimaryWeight


def make_blockwise_config(*, power_of_2: bool = True) -> Float8LinearConfig:
    """Return the config of the recipe `blockwise` with or without scales that are powers of two.

    `power_of_2`: round scales to powers of two, so that the exact matmul runs on bfloat16 units. False for the float32
    scales of DeepSeek's and Qwen's checkpoints.
    """
    config = Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.BLOCKWISE)
    return replace(config, round_scales_to_power_of_2=power_of_2)


def freeze_to_float8(
    module: nn.Module,
    *,
    config: Float8LinearConfig | Float8LinearRecipeName | str | None = None,
    module_filter_fn: ModuleFilter | None = None,
    include_subclasses: bool = False,
) -> nn.Module:
    """Store the weights of all linears and experts of `module` in float8, in place. They no longer train.

    Call it on the loaded model, before adapters, `fully_shard`, DistributedDataParallel or `torch.compile`. Weights
    present the same shape and dtype as before; biases and other modules do not change. All weights are checked before
    the first one changes. If a later error interrupts it, such as a lack of memory, each layer is frozen or unchanged,
    and a second call freezes the rest. `conversion_report(module)` lists each layer.

    Args:
        module: a model in high precision, on any device.
        config: "blockwise" (the default), "mxfp8", "tensorwise", "rowwise", another recipe with one weight cast, or a
            config, such as `serving_config("vllm-per-token")` for the codes of an engine.
            `enable_fsdp_float8_all_gather` has no effect: FSDP2 always all-gathers frozen codes.
        module_filter_fn: called with each linear or module of experts and its name; false leaves it in high precision.
        include_subclasses: as for `convert_to_float8_training`.
    Returns:
        `module`.
    Raises:
        ValueError: the config has delayed or static scaling, two casts of a weight, or E8M0 scales by FLOOR.
        ValueError: a weight holds NaN or inf, is tied, sharded or on the meta device, or has a wrong dtype.
        ValueError: some of the weights require a gradient and others do not.
        NotImplementedError: the layout of the weight is unknown or has 4-bit codes.
        TypeError: `config` or `module` has a wrong type.
        TypeError: `module_filter_fn` takes other arguments or fails for experts.
    """
    config = resolve_frozen_config(config)
    check_is_module(module, argument="module")
    decisions: dict[str, FilterDecision] = {}
    to_freeze: dict[str, nn.Module] = {}
    for name, child in module.named_modules():
        if isinstance(child, nn.Linear) or is_experts(child):
            decisions[name] = apply_filter(module_filter_fn, child, name)
            if decisions[name] and not _is_skipped(child, config, include_subclasses):
                to_freeze[name] = child
    problem = next(_iter_problems(to_freeze, find_parameter_names(module), config), None)
    if problem is not None:
        raise ValueError(problem)
    in_high_precision = [child for child in to_freeze.values() if not isinstance(child, Float8Module)]
    convert_with_layer_configs(
        module,
        get_config=lambda _: config,
        serving=None,
        module_filter_fn=lambda _, name: decisions[name],
        include_subclasses=include_subclasses,
        verb="freeze",
    )
    try:
        for child in to_freeze.values():
            quantized = [(weight, _quantize_weight(weight)) for weight in iter_module_weights(child)]
            for weight, codes in quantized:
                _store_quantized(weight, codes, config)
    except BaseException:
        for child in in_high_precision:
            if isinstance(child, Float8Module) and not isinstance(child, FrozenModule):
                restore_class(child)
        stop_sharing_input_casts(module)
        share_input_casts(module, Float8Linear)
        raise
    return module


def freeze_weight(weight: ModuleWeight, config: Float8LinearConfig) -> None:
    """Store a finite weight of a converted module in float8, in place. `config`: from `resolve_frozen_config`."""
    _store_quantized(weight, _quantize_weight(weight), config)


def _store_quantized(weight: ModuleWeight, codes_and_scale: tuple[Tensor, Tensor], config: Float8LinearConfig) -> None:
    dtype = weight.parameter.dtype
    store_float8_weight(weight.module, *codes_and_scale, config=config, dtype=dtype, name=weight.name)


def _is_skipped(module: nn.Module, config: Float8LinearConfig, include_subclasses: bool) -> bool:
    """Return whether a linear, or experts, cannot be converted or are already frozen with this config."""
    if isinstance(module, FrozenModule) and all(weight.config == config for weight in iter_module_weights(module)):
        return True
    if isinstance(module, nn.Linear):
        return bool(explain_conversion_obstacle(module, include_subclasses=include_subclasses))
    return bool(explain_experts_obstacle(module, config))


@torch.no_grad()
def _quantize_weight(weight: ModuleWeight) -> tuple[Tensor, Tensor]:
    quantizer = Quantizer(weight.config.casts.weight, weight.parameter.dtype)
    if weight.parameter.dim() == 2:
        return _quantize_to_codes(quantizer, weight.parameter.detach())
    transposed, stack = is_transposed(weight.module), weight.parameter.detach()
    codes = torch.empty(stack.shape, dtype=weight.config.casts.weight.row.float8_dtype, device=stack.device)
    scales = []
    for stored_codes, matrix in zip(codes, stack, strict=True):
        matrix_codes, scale = _quantize_to_codes(quantizer, matrix.t() if transposed else matrix)
        stored_codes.copy_(matrix_codes.t() if transposed else matrix_codes)
        scales.append(scale.t() if transposed else scale)
    return codes, torch.stack(scales)


def _quantize_to_codes(quantizer: Quantizer, matrix: Tensor) -> tuple[Tensor, Tensor]:
    operand = require(quantizer(matrix, row=True, column=False).row, "the row operand")
    return operand.data, require(operand.dequant_scale, "the dequant_scale")


def store_float8_weight(
    module: nn.Module,
    codes: Tensor,
    dequant_scale: Tensor,
    *,
    config: Float8LinearConfig,
    dtype: torch.dtype,
    name: str = "weight",
) -> None:
    """Freeze a weight of one linear or of experts, in place, with codes and scales from a checkpoint.

    Args:
        module: an nn.Linear or experts, on any device including meta, or already converted with `config`.
        codes: float8 [N, K], or a stack in the layout of the experts. Not copied.
        dequant_scale: float32; (), [N, 1] or one number for each block of `config`, or a stack of these. Not copied.
        config: the casts of activations and gradients, and of the weight. With `weight_scales_are_powers_of_2` every
            dequant_scale must be a power of two.
        dtype: the high-precision dtype that the weight presents.
        name: the name of the weight in `module`.
    Raises:
        ValueError: codes and scales do not fit each other, the module or the config.
    """
    frozen = FrozenFloat8Weight.from_codes(codes, dequant_scale, dtype)
    expected, shape = config.casts.weight.row.granularity, getattr(module, name).shape
    if frozen.shape != shape or (frozen.granularity != expected and frozen.scales_per_matrix > 1):
        raise ValueError(
            f"expected a {expected} weight of {list(shape)}, got {frozen.granularity} {list(frozen.shape)}"
        )
    frozen.check_codes_and_scales(power_of_2=config.weight_scales_are_powers_of_2)
    if not isinstance(module, Float8Linear | Float8Experts):
        change_to_float8(module, Float8Linear if isinstance(module, nn.Linear) else Float8Experts, config)
    setattr(module, name, nn.Parameter(frozen, requires_grad=False))
    frozen_class = FrozenFloat8Linear if isinstance(module, nn.Linear) else FrozenFloat8Experts
    change_class(module, float8=frozen_class)


def resolve_frozen_config(config: Float8LinearConfig | Float8LinearRecipeName | str | None) -> Float8LinearConfig:
    """Return the config for frozen weights; None means "blockwise".

    Raises:
        ValueError: the config cannot freeze weights; see `freeze_to_float8`.
        NotImplementedError: the layout of its weight is unknown or has 4-bit codes.
        TypeError: `config` has a wrong type.
    """
    config = resolve_config("blockwise" if config is None else config)
    if config.casts.weight.row.scale_rule is not None:  # the backward also multiplies the stored codes
        config = replace(config, cast_config_weight_for_grad_input=config.cast_config_weight)
    weight = config.casts.weight
    if config.has_persistent_scales:
        raise ValueError(f"freeze_to_float8 scales dynamically: expected no delayed or static scaling, got {config}")
    weight.row.require_layout("freeze_to_float8")
    if weight.row.is_disabled or not (weight.has_equal_casts or config.backward != "float8"):
        raise ValueError(
            "freeze_to_float8 stores a weight once: expected one float8 cast for both of its matmuls, got "
            f"{weight.row} for output, {weight.column} for grad_input"
        )
    if weight.row.scale_calculation_mode is ScaleCalculationMode.FLOOR:
        raise ValueError(
            f"a frozen weight is quantized so that nothing saturates: expected the scales of RCEIL, got {weight.row}"
        )
    return replace(config, enable_fsdp_float8_all_gather=False)


def _iter_problems(
    to_freeze: dict[str, nn.Module], owners: dict[int, list[str]], config: Float8LinearConfig
) -> Iterator[str]:
    """Yield the reasons why weights cannot be frozen with `config`."""
    weights: dict[str, Tensor] = {}
    for name, module in to_freeze.items():
        if isinstance(module, Float8Module) and not isinstance(module, FrozenModule) and module.float8_config != config:
            yield (
                f"freeze_to_float8 expects a model in high precision: {quote_module_name(name)} is already converted; "
                "call convert_to_high_precision first, or filter it out (module_filter_fn)"
            )
        module_weights = {"": module.weight} if isinstance(module, nn.Linear) else get_expert_weights(module)
        weights |= {f"{name}.{leaf}".strip("."): weight for leaf, weight in module_weights.items()}
    training = [name for name, weight in weights.items() if weight.requires_grad]
    if 0 < len(training) < len(weights):
        yield (
            f"{quote_module_name(training[0])} requires a gradient and other weights do not: call freeze_to_float8 "
            "before adapters are added, or filter out what trains (module_filter_fn)"
        )
    for name, weight in weights.items():
        layer = format_module_name(name)
        if problem := explain_storing_obstacle(name, weight, owners):
            yield problem
        elif weight.is_meta:
            yield f"the weight of {layer} is on the meta device; load it first"
        elif not bool(compute_amax(weight.detach()).isfinite()):
            yield f"the weight of {layer} holds NaN or inf"


def explain_storing_obstacle(name: str, weight: Tensor, owners: dict[int, list[str]]) -> str:
    """Return why a weight cannot be replaced with float8 codes, or "".

    `name`: the name of a linear, or of a weight of experts. `owners`: see `find_parameter_names`.
    """
    names = [f".{owner}".removesuffix(".weight").lstrip(".") for owner in owners.get(id(weight), [])]
    tied = [owner for owner in names if owner != name]
    name = format_module_name(name)
    if isinstance(weight, FrozenFloat8Weight):
        return f"the weight of {name} is frozen already, with another config: call convert_to_high_precision first"
    if isinstance(weight, Float8PrimaryWeight):
        return f"the weight of {name} is a float8 primary weight; freeze instead of use_float8_primary_weights"
    if type(weight) is not nn.Parameter:
        return f"the weight of {name} is a {type(weight).__name__}; freeze before fully_shard and other wrappers"
    if weight.dtype not in HP_DTYPES:
        return f"the weight of {name}: expected {', '.join(map(str, HP_DTYPES))}, got {weight.dtype}"
    if tied:
        return (
            f"the weight of {name} is tied to {', '.join(tied)}, so it cannot be stored in float8; untie them, or "
            "filter the layer out (module_filter_fn)"
        )
    return ""

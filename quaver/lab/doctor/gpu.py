"""Says which matmuls of each recipe, and which linears of a model, a GPU runs natively, from its specification."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from quaver.conversion.high_precision import iter_float8_modules
from quaver.conversion.report import conversion_report
from quaver.experts.function import explain_config_obstacle
from quaver.experts.gemm import fits_grouped_matmul
from quaver.experts.gpu_gemm import GROUPED_MM_CAPABILITIES
from quaver.kernels.native_mm import ALIGNMENT, ScaleKind
from quaver.linear.backends import predict_scale_kind
from quaver.recipes.cast_config import CastConfig
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName
from quaver.recipes.linear_casts import MATMULS, disable_cast
from quaver.roofline.cost import explain_native_obstacle
from quaver.roofline.device_specs import DEVICE_SPECS, DeviceSpec
from quaver.runtime.module_names import mask_layer_numbers

NVIDIA_GPUS = tuple(spec.name for spec in DEVICE_SPECS if spec.compute_capability)
"""The names of the GPUs whose kernels are known."""


@dataclass(frozen=True)
class MatmulOnGpu:
    """How a GPU runs one matmul of a linear, or of an expert."""

    matmul: str
    """output, grad_input or grad_weight."""
    backend: str
    """One of "native", "exact" and "high precision"."""
    detail: str
    """The kernel, or the reason why it is not native."""


@dataclass(frozen=True)
class RecipeOnGpu:
    """A recipe's matmuls of linears and experts on a GPU."""

    recipe: str
    linear: list[MatmulOnGpu]
    experts: list[MatmulOnGpu]


@dataclass(frozen=True)
class LayersOnGpu:
    """Layers that differ only in the number of their block."""

    name: str
    """The name of the layer, with * for the number of its block."""
    count: int
    in_features: int
    out_features: int
    converted: bool
    note: str
    """The reason why they are not converted; or another recipe than the model's, and dims that matmuls pad."""


@dataclass(frozen=True)
class GpuFindings:
    """The findings of `quaver doctor --gpu`."""

    gpu: str
    capability: str
    casts: str
    recipes: list[RecipeOnGpu]
    recipe: str
    """The recipe of `layers`; `recipes` has it too."""
    layers: list[LayersOnGpu] | None = None


def describe_gpu(
    spec: DeviceSpec,
    model: nn.Module | None = None,
    recipe: str = "tensorwise",
    config: Float8LinearConfig | None = None,
) -> GpuFindings:
    """Return what the GPU runs natively.

    Args:
        spec: the specification of one of NVIDIA_GPUS.
        model: a converted model, which may be on the meta device.
        recipe: the name of its recipe.
        config: the recipe's config, if `recipe` is not a name of one.
    """
    config = config or Float8LinearConfig.from_recipe_name(recipe)
    configs = {name.value: Float8LinearConfig.from_recipe_name(name) for name in Float8LinearRecipeName}
    recipes = [
        _describe_recipe(name, recipe_config, spec) for name, recipe_config in (configs | {recipe: config}).items()
    ]
    layers = None if model is None else _describe_layers(model, config, spec)
    return GpuFindings(spec.name, f"sm_{spec.compute_capability}", _describe_casts(spec), recipes, recipe, layers)


def _describe_casts(spec: DeviceSpec) -> str:
    from quaver.kernels.triton_blocks import MIN_CAPABILITY  # imports triton

    if divmod(spec.compute_capability or 0, 10) >= MIN_CAPABILITY:
        return "Triton's kernels in eager code, one or two a cast; Inductor's in compiled code"
    return "PyTorch's operators in eager code, in several passes: Triton converts to float8 from sm_90 on"


def _pair_casts(config: Float8LinearConfig) -> dict[str, tuple[CastConfig, CastConfig]]:
    return {name: (config.casts.get(*left), config.casts.get(*right)) for name, (left, right) in MATMULS.items()}


def _describe_recipe(recipe: str, config: Float8LinearConfig, spec: DeviceSpec) -> RecipeOnGpu:
    pairs = _pair_casts(config)
    linear = [_describe_linear_matmul(name, *pair, spec) for name, pair in pairs.items()]
    if explain_config_obstacle(config):  # experts stay in high precision
        pairs = {name: (disable_cast(left), disable_cast(right)) for name, (left, right) in pairs.items()}
    powers_of_2 = config.round_scales_to_power_of_2
    experts = [
        _describe_expert_matmul(name, *pair, spec, scales_are_powers_of_2=powers_of_2) for name, pair in pairs.items()
    ]
    return RecipeOnGpu(recipe, linear, experts)


def _describe_linear_matmul(matmul: str, left: CastConfig, right: CastConfig, spec: DeviceSpec) -> MatmulOnGpu:
    if left.is_disabled or right.is_disabled:
        return MatmulOnGpu(matmul, "high precision", "torch.mm")
    kind = predict_scale_kind(left, right)
    obstacle = "no hardware multiplies such scales" if kind is None else explain_native_obstacle(spec, kind)
    if kind is None or obstacle is not None:
        return MatmulOnGpu(matmul, "exact", f"codes widened to bfloat16: {obstacle}")
    name = "torch.nn.functional.scaled_mm" if kind.block_length else "torch._scaled_mm"
    return MatmulOnGpu(matmul, "native", f"{name}, {kind.value} scales")


def _describe_expert_matmul(
    matmul: str, left: CastConfig, right: CastConfig, spec: DeviceSpec, *, scales_are_powers_of_2: bool
) -> MatmulOnGpu:
    has_grouped_mm = (spec.compute_capability or 0) // 10 in GROUPED_MM_CAPABILITIES
    one_by_one = "experts one by one, after a wait for the sizes of their groups"
    if left.is_disabled or right.is_disabled:
        return MatmulOnGpu(matmul, "high precision", "torch._grouped_mm" if has_grouped_mm else one_by_one)
    if fits_grouped_matmul(left, right) and explain_native_obstacle(spec, ScaleKind.GROUPS) is None:
        return MatmulOnGpu(matmul, "native", "torch._scaled_grouped_mm")
    if scales_are_powers_of_2 and has_grouped_mm:
        return MatmulOnGpu(matmul, "exact", "codes widened to bfloat16: torch._grouped_mm")
    return MatmulOnGpu(matmul, "exact", one_by_one)


def _describe_layers(model: nn.Module, model_config: Float8LinearConfig, spec: DeviceSpec) -> list[LayersOnGpu]:
    configs = {name: module.float8_config for name, module in iter_float8_modules(model)}
    counts: Counter[tuple[Any, ...]] = Counter()
    for layer in conversion_report(model).layers:
        note = layer.reason
        if layer.converted:
            config = configs.get(layer.name) or configs[layer.name.rpartition(".")[0]]
            padding = _describe_padding(layer.in_features, layer.out_features, _find_padding_multiple(config, spec))
            note = "; ".join(filter(None, (_describe_other_recipe(config, model_config), padding)))
        counts[mask_layer_numbers(layer.name), layer.in_features, layer.out_features, layer.converted, note] += 1
    return [LayersOnGpu(name, count, *rest) for (name, *rest), count in counts.items()]


def _describe_other_recipe(config: Float8LinearConfig, model_config: Float8LinearConfig) -> str:
    """Return "in rowwise:dequantized" if a layer casts otherwise than the model's recipe, else ""."""
    if config.casts == model_config.casts:
        return ""
    recipe_name = replace(config, backward="float8").recipe_name
    name = recipe_name.value if recipe_name else config.short_str()
    return f"in {name}" + (f":{config.backward}" if config.backward != "float8" else "")


def _find_padding_multiple(config: Float8LinearConfig, spec: DeviceSpec) -> int:
    """Return the number whose multiples native matmuls need the dims of a weight to be; 1 without native matmuls."""
    kinds = [predict_scale_kind(left, right) for left, right in _pair_casts(config).values() if not left.is_disabled]
    native = [kind for kind in kinds if kind is not None and explain_native_obstacle(spec, kind) is None]
    return max((max(ALIGNMENT, kind.block_length) for kind in native), default=1)


def _describe_padding(in_features: int, out_features: int, multiple: int) -> str:
    """Name the dims of a weight that native matmuls pad to a multiple, which copies the codes each time."""
    padded = [
        f"{name} {size:,} to {-(-size // multiple) * multiple:,}"
        for name, size in (("in", in_features), ("out", out_features))
        if size % multiple
    ]
    return f"its codes are copied at each matmul, padded: {', '.join(padded)}" if padded else ""

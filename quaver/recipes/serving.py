"""How serving engines quantize a float8 linear, by name; `serving_config` trains with the same codes.

Engines read the codes of weights from a checkpoint, or quantize weights while loading.
The rule of a weight is the rule of the engine's own quantizer, so that both ways give the same codes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from quaver.recipes.cast_config import CastConfig, ScalingGranularity, ScalingType
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.recipes.formats import E4M3
from quaver.runtime.errors import InputError
from quaver.runtime.module_names import suggest_name


class ServingCasts(NamedTuple):
    """How an engine quantizes the two operands of a linear."""

    input: CastConfig
    weight: CastConfig
    recipe: str
    """The recipe for the backward, unless the caller passes another."""
    format: str
    """The format of quaver.export that the engine reads for this weight."""


def _make_serving_casts(granularity: ScalingGranularity, input: str, weight: str, format: str) -> ServingCasts:
    """Define how an engine quantizes. `input` and `weight` are names of rules (scale_rules.py).

    Blocks are 1 x 128 for the input and 128 x 128 for the weight.
    """
    is_blockwise = granularity is ScalingGranularity.BLOCKWISE

    def cast(rule: str, block_size: tuple[int, int]) -> CastConfig:
        return CastConfig(
            scaling_granularity=granularity,
            target_dtype=E4M3.dtype,
            block_size=block_size if is_blockwise else None,
            scale_rule=rule,
        )

    recipe = "blockwise" if is_blockwise else granularity.name.lower()
    return ServingCasts(cast(input, (1, 128)), cast(weight, (128, 128)), recipe, format)


_ROWS, _TENSOR, _BLOCKS = ScalingGranularity.ROWWISE, ScalingGranularity.TENSORWISE, ScalingGranularity.BLOCKWISE
_COMPRESSED, _FP8 = "compressed-tensors", "fp8"
SERVING_CASTS: dict[str, ServingCasts] = {
    "vllm-per-token": _make_serving_casts(_ROWS, "vllm", "vllm", _COMPRESSED),  # QuantFP8 in PyTorch
    "vllm-per-token-kernel": _make_serving_casts(_ROWS, "vllm-kernel", "vllm-kernel", _COMPRESSED),  # its CUDA kernel
    "vllm-per-tensor": _make_serving_casts(_TENSOR, "vllm", "vllm", _COMPRESSED),  # QuantFP8 in PyTorch
    "vllm-static": _make_serving_casts(_ROWS, "vllm", "vllm", _COMPRESSED)._replace(  # static_scaled_fp8_quant
        input=CastConfig(ScalingType.STATIC, target_dtype=E4M3.dtype, scale_rule="vllm"), recipe="tensorwise"
    ),
    "vllm-block": _make_serving_casts(_BLOCKS, "vllm-group", "deepgemm", _FP8),  # per_token_group_quant
    "vllm-block-ue8m0": _make_serving_casts(
        _BLOCKS, "vllm-group-ue8m0", "deepgemm-ue8m0", _FP8
    ),  # the same on Blackwell
    "sglang-per-token": _make_serving_casts(_ROWS, "sglang", "sglang", _COMPRESSED),  # sgl_per_token_quant_fp8
    "sglang-per-tensor": _make_serving_casts(_TENSOR, "sglang-tensor", "sglang-tensor", _COMPRESSED),  # input_to_float8
    "sglang-block": _make_serving_casts(_BLOCKS, "sglang-group", "deepgemm", _FP8),  # per_token_group_quant
    "sglang-block-ue8m0": _make_serving_casts(
        _BLOCKS, "sglang-group-ue8m0", "deepgemm-ue8m0", _FP8
    ),  # the same on Blackwell
    "deepgemm": _make_serving_casts(_BLOCKS, "deepgemm", "deepgemm", _FP8),  # per_block_cast_to_fp8
    "deepgemm-ue8m0": _make_serving_casts(_BLOCKS, "deepgemm-ue8m0", "deepgemm-ue8m0", _FP8),  # the same on SM100
    "transformers": _make_serving_casts(_BLOCKS, "transformers-group", "transformers", _FP8),  # finegrained_fp8
    "compressed-tensors": _make_serving_casts(
        _ROWS, "compressed-tensors", "compressed-tensors", _COMPRESSED
    ),  # fake quantization
}
"""How engines quantize, by name. A comment names the engine's function."""


def get_serving_casts(name: str) -> ServingCasts:
    """Return the entry of `SERVING_CASTS`. Raises InputError for an unknown name, listing the choices."""
    if name not in SERVING_CASTS:
        raise InputError(
            f"serving: expected one of {', '.join(SERVING_CASTS)}, got {name!r}{suggest_name(name, SERVING_CASTS)}"
        )
    return SERVING_CASTS[name]


def serving_config(
    serving: str, config: Float8LinearConfig | Float8LinearRecipeName | str | None = None
) -> Float8LinearConfig:
    """Return the config of a linear whose forward multiplies the codes that the engine `serving` multiplies.

    `config` determines the backward. The engine's cast also serves the backward for a weight in square blocks, and
    for an operand that is tensorwise in both directions.

    Args:
        serving: a key of `SERVING_CASTS`.
        config: a config, a recipe or its name, with dynamic scaling; None for the recipe of the engine's granularity.
            The input of vllm-static has a static scale: call `calibrate_float8_static_scales(model)`.
    Raises:
        ValueError: an unknown name, delayed or static scaling, or casts that cannot be combined.
        TypeError: `config` has a wrong type.
    """
    served = get_serving_casts(serving)
    base = resolve_config(served.recipe if config is None else config)
    if base.has_persistent_scales and base.cast_config_input != served.input:
        raise InputError(f"expected a recipe with dynamic scaling beside serving={serving!r}, got {_describe(base)}")
    casts = base.casts

    if casts.weight.column.is_blockwise and not served.weight.is_blockwise and not casts.weight.column.is_disabled:
        raise InputError(
            f"expected a recipe without blocks, such as {served.recipe!r}, beside serving={serving!r}, got "
            f"{_describe(base)}"
        )

    def choose_column_cast(served_cast: CastConfig, base_cast: CastConfig) -> CastConfig:
        is_shared = served_cast.is_blockwise or served_cast.granularity == base_cast.granularity
        serves_both = is_shared and not served_cast.depends_on_direction and not base_cast.is_disabled
        return served_cast if serves_both else base_cast

    return replace(
        base,
        cast_config_input=served.input,
        cast_config_input_for_grad_weight=choose_column_cast(served.input, casts.input.column),
        cast_config_weight=served.weight,
        cast_config_weight_for_grad_input=choose_column_cast(served.weight, casts.weight.column),
    )


def _describe(config: Float8LinearConfig) -> str:
    recipe = config.recipe_name
    return str(config) if recipe is None else repr(recipe.value)


def find_serving_name(config: Float8LinearConfig) -> str | None:
    """Return the first engine with the forward casts of `config`; None if no engine has them."""
    forward = config.casts.input.row, config.casts.weight.row
    return next((name for name, served in SERVING_CASTS.items() if (served.input, served.weight) == forward), None)

"""Configs and recipes: how each operand is quantized, how it is scaled, and how each matmul runs.

Configs are frozen, and are validated and resolved when they are constructed: every `cast_config_*` of a
`Float8LinearConfig` becomes a `CastConfig` with a dtype. A recipe's name is accepted wherever a config is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, fields, replace

import torch

from quaver.foreign.torchao import LinearMMConfig, ScaledMMConfig, convert_from_torchao, convert_op_config
from quaver.recipes.cast_checks import check_casts, has_powers_of_2
from quaver.recipes.cast_config import CastConfig, ScaleCalculationMode, ScalingGranularity, ScalingType
from quaver.recipes.delayed_config import DelayedScalingConfig
from quaver.recipes.derived_fields import hide_derived_fields
from quaver.recipes.field_checks import check_field, convert_field
from quaver.recipes.formats import E4M3, E5M2, get_format
from quaver.recipes.linear_casts import (
    BACKWARD_MATMULS,
    MATMULS,
    LinearCasts,
    LinearMatmuls,
    MatmulOptions,
    OperandCasts,
    disable_cast,
    name_cast,
)
from quaver.recipes.recipe_name import BACKWARD_MODES, Float8LinearRecipeName, split_recipe
from quaver.recipes.scale_layout import BLOCK_SIZES

__all__ = [
    "BLOCK_SIZES",
    "SHARED_INPUTS",
    "CastConfig",
    "DelayedScalingConfig",
    "Float8GemmConfig",
    "Float8LinearConfig",
]
__all__ += ["Float8LinearRecipeName", "ScaleCalculationMode", "ScalingGranularity", "ScalingType", "resolve_config"]


SHARED_INPUTS: tuple[tuple[str, ...], ...] = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("gate", "up"),
    ("wq", "wk", "wv"),
    ("w1", "w3"),
    ("query", "key", "value"),
    ("to_q", "to_k", "to_v"),
    ("q", "k", "v"),
    ("wi_0", "wi_1"),
)
"""Names of sibling linears that read one input, in Hugging Face's models, Llama, diffusers and T5."""


@dataclass(frozen=True)
class Float8GemmConfig:
    """How one float8 matmul runs.

    Args:
        use_fast_accum: let Hopper's tensor cores accumulate in fewer bits, which is faster and less exact. It has no
            effect on exact matmuls (CPUs, `emulate`).
    """

    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        convert_field(self, "use_fast_accum", bool)


@hide_derived_fields
@dataclass(frozen=True)
class Float8LinearConfig:
    """How a `Float8Linear` computes its three matmuls:

        output      = input       @ weight.t()     casts.input.row,          casts.weight.row
        grad_input  = grad_output @ weight         casts.grad_output.row,    casts.weight.column
        grad_weight = grad_output.t() @ input      casts.grad_output.column, casts.input.column

    Args:
        cast_config_input, cast_config_weight, cast_config_grad_output: the cast of each operand. The constructor fills
            in target_dtype on copies and does not change the CastConfigs that it was given. A disabled cast keeps only
            its dtype.
        cast_config_input_for_grad_weight, cast_config_weight_for_grad_input, cast_config_grad_output_for_grad_weight:
            the cast of the operand in its other matmul. None uses the same cast. `dataclasses.replace` recomputes a
            cast that was None and keeps one that was passed.
        gemm_config_output, gemm_config_grad_input, gemm_config_grad_weight: each matmul.
        enable_fsdp_float8_all_gather: under FSDP2 (`fully_shard`), quantize weights on their shards with the scales
            of the whole weight, and all-gather the codes. If one cast serves both matmuls of the weight, a pass gathers
            one byte per element. Otherwise (rowwise, 1 x 32) it gathers two, as bfloat16 does. Both casts must be
            float8. One process and DDP compute the same with it; FSDP1 refuses it.
        pad_inner_dim: pad every matmul to multiples of 16. Padding is automatic where the hardware needs it; set this
            to pad on other devices too, for example to compare. Results do not change.
        emulate: multiply exactly in high precision even where the hardware multiplies float8.
        round_scales_to_power_of_2: round every quant_scale down to a power of two. A `scale_rule` decides this by
            itself, and the scales of e2m1 are never rounded.
        backward: the operands of grad_input and grad_weight. "float8": the casts above. Otherwise both matmuls and
            grad_output are in high precision. "dequantized" multiplies by the codes of the forward times their scales,
            rounded to the dtype of the output. It saves the input's codes for backward. "high_precision" multiplies by
            input and weight, and saves the input in high precision.
        high_precision_matmuls: the names of matmuls ("output", "grad_input", "grad_weight") to run in high precision,
            whatever their casts are. `set_high_precision_matmuls` changes them between steps.
        keep_float8_weight_for_backward: save the float8 weight for backward (one byte per element) instead of
            quantizing the weight again in the backward.
        delayed_scaling_config: how delayed scaling computes scales from earlier amaxes.
        shared_inputs: names of sibling linears (children of one module) that read one input. With delayed or static
            scaling of the input they share its scale and its cast. Siblings that read different tensors still work:
            their scale fits the larger tensor.
        enable_amax_init, enable_pre_and_post_forward: accepted for torchao 0.9, without effect. The first use of a
            delayed scale is always scaled dynamically, and no code runs before or after the forward.
        force_recompute_fp8_weight_in_bwd: torchao's inverse of `keep_float8_weight_for_backward`, which it sets.
            torchao's default, False, saves the float8 weight in 0.9 and has no effect in 0.18. None quantizes again, as
            0.18 does; an explicit False saves the weight, as 0.9 does.
    Raises:
        ValueError: a field has the wrong type or value, or no matmul can run the combination; the message names it.
    """

    cast_config_input: CastConfig = CastConfig()
    cast_config_input_for_grad_weight: CastConfig | None = None
    cast_config_weight: CastConfig = CastConfig()
    cast_config_weight_for_grad_input: CastConfig | None = None
    cast_config_grad_output: CastConfig = CastConfig()
    cast_config_grad_output_for_grad_weight: CastConfig | None = None

    gemm_config_output: Float8GemmConfig = Float8GemmConfig(use_fast_accum=True)
    gemm_config_grad_input: Float8GemmConfig = Float8GemmConfig()
    gemm_config_grad_weight: Float8GemmConfig = Float8GemmConfig()

    enable_fsdp_float8_all_gather: bool = False
    pad_inner_dim: bool = False
    emulate: bool = False
    round_scales_to_power_of_2: bool = False
    backward: str = "float8"
    high_precision_matmuls: tuple[str, ...] = ()
    keep_float8_weight_for_backward: bool = False

    delayed_scaling_config: DelayedScalingConfig = DelayedScalingConfig()
    shared_inputs: tuple[tuple[str, ...], ...] = SHARED_INPUTS
    enable_amax_init: bool = True
    enable_pre_and_post_forward: bool = True
    force_recompute_fp8_weight_in_bwd: bool | None = field(default=None, repr=False, compare=False)

    _derived: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)
    """The names of the fields that the constructor filled in; see derived_fields.py."""
    casts: LinearCasts = field(init=False, repr=False, compare=False)
    """The casts by operand and direction, with `backward` and `high_precision_matmuls` applied."""
    matmuls: LinearMatmuls = field(init=False, repr=False, compare=False)
    """The options of the three matmuls."""
    has_persistent_scales: bool = field(init=False, repr=False, compare=False)
    """Whether any operand has a delayed or static scale, whatever `high_precision_matmuls` is."""

    def __post_init__(self) -> None:
        self._check_types()
        self._resolve_options()
        casts = self._resolve_casts()
        if self.backward != "float8":
            casts = casts.disable_matmuls(BACKWARD_MATMULS, dequantized=self.backward == "dequantized")
        check_casts(
            casts,
            power_of_2=self.round_scales_to_power_of_2,
            gathers_in_float8=self.enable_fsdp_float8_all_gather,
            backward=self.backward,
        )
        persistent = any(cast.is_persistent for cast in casts.list_casts())
        object.__setattr__(self, "has_persistent_scales", persistent)
        object.__setattr__(self, "casts", casts.disable_matmuls(self.high_precision_matmuls))
        object.__setattr__(self, "matmuls", self._resolve_matmuls(casts))

    def _check_types(self) -> None:
        for option in fields(self):
            if option.name.startswith("gemm_config"):
                convert_field(self, option.name, Float8GemmConfig)
            elif option.name.startswith("cast_config"):
                if getattr(self, option.name) is not None or option.default is not None:
                    convert_field(self, option.name, CastConfig)
            elif option.init and isinstance(option.default, bool):
                convert_field(self, option.name, bool)
        convert_field(self, "delayed_scaling_config", DelayedScalingConfig)
        groups = self.shared_inputs if isinstance(self.shared_inputs, tuple) else (None,)
        are_names = all(isinstance(group, tuple) and all(isinstance(name, str) for name in group) for group in groups)
        check_field(are_names, "shared_inputs", "a tuple of tuples of names", self.shared_inputs)

    def _resolve_options(self) -> None:
        check_field(self.backward in BACKWARD_MODES, "backward", f"one of {', '.join(BACKWARD_MODES)}", self.backward)
        names = self.high_precision_matmuls
        is_list = isinstance(names, Collection) and not isinstance(names, str)
        are_known = is_list and all(name in tuple(MATMULS) for name in names)
        check_field(are_known, "high_precision_matmuls", f"names of {', '.join(MATMULS)}", names)
        object.__setattr__(self, "high_precision_matmuls", tuple(name for name in MATMULS if name in names))
        if (forced := self.force_recompute_fp8_weight_in_bwd) is not None:
            is_valid = isinstance(forced, bool) and not (forced and self.keep_float8_weight_for_backward)
            expected = "a bool, and not True with keep_float8_weight_for_backward"
            check_field(is_valid, "force_recompute_fp8_weight_in_bwd", expected, forced)
            object.__setattr__(self, "keep_float8_weight_for_backward", not forced)
        object.__setattr__(self, "force_recompute_fp8_weight_in_bwd", not self.keep_float8_weight_for_backward)

    def _resolve_matmuls(self, casts: LinearCasts) -> LinearMatmuls:
        def make_options(gemm: Float8GemmConfig, operands: Iterable[tuple[str, str]]) -> MatmulOptions:
            power_of_2 = self.round_scales_to_power_of_2
            powers_of_2 = all(has_powers_of_2(casts.get_source(*operand), power_of_2) for operand in operands)
            return MatmulOptions(gemm.use_fast_accum, powers_of_2, self.emulate, self.pad_inner_dim)

        gemms = self.gemm_config_output, self.gemm_config_grad_input, self.gemm_config_grad_weight
        return LinearMatmuls(*map(make_options, gemms, MATMULS.values()))

    def _resolve_casts(self) -> LinearCasts:
        """Fill in the `cast_config_*` fields, and return the casts of the operands."""
        casts: list[OperandCasts] = []
        derived = {"force_recompute_fp8_weight_in_bwd"}
        for operand, default_dtype in zip(LinearCasts._fields, (E4M3.dtype, E4M3.dtype, E5M2.dtype), strict=True):
            row_name, column_name = (f"cast_config_{name_cast(operand, direction)}" for direction in ("row", "column"))
            column_cast: CastConfig | None = getattr(self, column_name)
            row, column = _resolve_operand(operand, getattr(self, row_name), column_cast, default_dtype)
            object.__setattr__(self, row_name, row)
            object.__setattr__(self, column_name, column)
            casts.append(OperandCasts(row, column, self.round_scales_to_power_of_2, row == column))
            derived |= set() if column_cast else {column_name}
        object.__setattr__(self, "_derived", frozenset(derived))
        return LinearCasts(*casts)

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """Make a config of a recipe, whose name may end in a `backward`, as "rowwise:dequantized" does.

        Raises:
            ValueError: the name is unknown; the message lists the choices.
        """
        return replace(_get_named_config(recipe_name))

    @property
    def weight_scales_are_powers_of_2(self) -> bool:
        """Whether every scale of the weight in the forward is a power of two."""
        return has_powers_of_2(self.casts.weight.row, self.round_scales_to_power_of_2)

    @property
    def recipe_name(self) -> Float8LinearRecipeName | None:
        """The recipe with the same casts, whatever the other options are; None if no recipe has them."""
        recipes = _RECIPE_CONFIGS[BACKWARD_MODES[0]].items()
        return next((recipe for recipe, config in recipes if config.casts == self.casts), None)

    @property
    def linear_mm_config(self) -> LinearMMConfig:
        """How the three matmuls run, in torchao's form."""
        configs = (
            ScaledMMConfig(mm.emulate, mm.use_fast_accum, fp8_output=False, pad_inner_dim=mm.pad) for mm in self.matmuls
        )
        return LinearMMConfig(*configs)

    def short_str(self) -> str:
        """Return torchao's short form, "i:dyn_ten_e4m3,w:dyn_ten_e4m3,go:dyn_ten_e5m2".

        A column cast that differs from its row cast follows as "i_gw:", "w_gi:" or "go_gw:".
        """
        parts = [f"{name}:{casts.row.short_str()}" for name, casts in zip(("i", "w", "go"), self.casts, strict=True)]
        for name, casts in zip(("i_gw", "w_gi", "go_gw"), self.casts, strict=True):
            if not casts.has_equal_casts:
                parts.append(f"{name}:{'deq' if casts.is_dequantized else casts.column.short_str()}")
        return ",".join(parts)

    def __str__(self) -> str:
        def describe(operand: str, direction: str) -> str:
            reads_row = direction == "column" and getattr(self.casts, operand).is_dequantized
            cast = "dequantized" if reads_row else self.casts.get(operand, direction)
            return f"{name_cast(operand, direction)} {cast}"

        matmuls = [f"{matmul}: {describe(*left)} x {describe(*right)}" for matmul, (left, right) in MATMULS.items()]
        scales = f"scales {'power of two' if self.round_scales_to_power_of_2 else 'float32'}"
        is_delayed = any(cast.scaling_type is ScalingType.DELAYED for cast in self.casts.list_casts())
        return "; ".join([*matmuls, scales, *([str(self.delayed_scaling_config)] if is_delayed else [])])


def _make_recipe_configs() -> dict[Float8LinearRecipeName, Float8LinearConfig]:
    tensor = CastConfig(target_dtype=E4M3.dtype)
    row = CastConfig(scaling_granularity=ScalingGranularity.ROWWISE, target_dtype=E4M3.dtype)
    hp = CastConfig(scaling_type=ScalingType.DISABLED)
    from_history = CastConfig(scaling_type=ScalingType.DELAYED)

    def cast_all(cast: CastConfig) -> Float8LinearConfig:
        return Float8LinearConfig(cast_config_input=cast, cast_config_weight=cast, cast_config_grad_output=cast)

    rowwise, delayed = replace(cast_all(row), round_scales_to_power_of_2=True), cast_all(from_history)
    return {
        Float8LinearRecipeName.TENSORWISE: Float8LinearConfig(),
        Float8LinearRecipeName.ROWWISE: rowwise,
        Float8LinearRecipeName.ROWWISE_WITH_GW_HP: replace(
            rowwise,
            cast_config_weight_for_grad_input=tensor,
            cast_config_input_for_grad_weight=hp,
            cast_config_grad_output_for_grad_weight=hp,
        ),
        Float8LinearRecipeName.ROWWISE_WITH_TENSORWISE_WEIGHT: replace(rowwise, cast_config_weight=tensor),
        **_make_block_recipe_configs(),
        Float8LinearRecipeName.DELAYED: delayed,
        Float8LinearRecipeName.DELAYED_WITH_DYNAMIC_WEIGHT: replace(delayed, cast_config_weight=CastConfig()),
    }


def _make_block_recipe_configs() -> dict[Float8LinearRecipeName, Float8LinearConfig]:
    hp = CastConfig(scaling_type=ScalingType.DISABLED)
    configs = {}
    for length, mode, recipe, recipe_with_gw_hp in (
        (128, None, Float8LinearRecipeName.BLOCKWISE, Float8LinearRecipeName.BLOCKWISE_WITH_GW_HP),
        (32, ScaleCalculationMode.RCEIL, Float8LinearRecipeName.MXFP8, Float8LinearRecipeName.MXFP8_WITH_GW_HP),
    ):
        square, along = (
            CastConfig(
                scaling_granularity=ScalingGranularity.BLOCKWISE,
                target_dtype=E4M3.dtype,
                block_size=(dot_products, length),
                scale_calculation_mode=mode,
            )
            for dot_products in (length, 1)
        )
        configs[recipe] = Float8LinearConfig(
            cast_config_input=along,
            cast_config_weight=square,
            cast_config_grad_output=along,
            round_scales_to_power_of_2=True,
        )
        configs[recipe_with_gw_hp] = replace(
            configs[recipe], cast_config_input_for_grad_weight=hp, cast_config_grad_output_for_grad_weight=hp
        )
    return configs


def _get_named_config(name: Float8LinearRecipeName | str) -> Float8LinearConfig:
    recipe, backward = split_recipe(name)
    return _RECIPE_CONFIGS[backward or BACKWARD_MODES[0]][recipe]


def resolve_config(config: Float8LinearConfig | Float8LinearRecipeName | str | None) -> Float8LinearConfig:
    """Convert a config, a recipe or its name to a config; None for the tensorwise recipe.

    torchao's configs and recipes are accepted too.

    Raises:
        ValueError: the name is unknown, or an option of torchao's config has no counterpart.
        TypeError: the value has another type.
    """
    if isinstance(config, Float8LinearConfig):
        return config
    if config is None:
        return _RECIPE_CONFIGS[BACKWARD_MODES[0]][Float8LinearRecipeName.TENSORWISE]
    if isinstance(config, Float8LinearRecipeName | str):
        return _get_named_config(config)
    op_config: Float8LinearConfig | None = convert_op_config(config, Float8LinearConfig.from_recipe_name)
    if op_config is not None:
        return op_config
    accepted = convert_from_torchao(convert_from_torchao(config, Float8LinearConfig), Float8LinearRecipeName)
    if accepted is not config:
        return resolve_config(accepted)
    raise TypeError(
        f"config: expected a Float8LinearConfig, a recipe's name such as 'rowwise' or None, got {config!r}; "
        "for several, pass LayerRecipes to prepare_model_for_float8, or convert once per recipe with a module_filter_fn"
    )


def _resolve_operand(
    operand: str, row: CastConfig, column: CastConfig | None, default_dtype: torch.dtype
) -> tuple[CastConfig, CastConfig]:
    column = column or row
    dtypes = {cast.target_dtype or default_dtype for cast in (row, column) if not cast.is_disabled}
    if len(dtypes) > 1:
        names = " and ".join(sorted(get_format(dtype).name for dtype in dtypes))
        raise ValueError(f"{operand}: expected one dtype for both of its matmuls, got {names}")
    dtype = next(iter(dtypes), default_dtype)
    scalings = {(cast.scaling_type, cast.static_quant_scale) for cast in (row, column) if not cast.is_disabled}
    if (row.is_persistent or column.is_persistent) and len(scalings) > 1:
        raise ValueError(
            f"{operand} has one persistent scale, which serves both of its matmuls: expected both casts delayed, both "
            f"static with one scale, or one in high precision, got {row} and {column}"
        )
    row, column = (disable_cast(cast) if cast.is_disabled else cast for cast in (row, column))
    return replace(row, target_dtype=dtype), replace(column, target_dtype=dtype)


_RECIPE_CONFIGS = {
    backward: {name: replace(config, backward=backward) for name, config in _make_recipe_configs().items()}
    for backward in BACKWARD_MODES
}
"""The configs of all recipes, by `backward` and name."""

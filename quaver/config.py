"""What to cast, how to scale it, and how to multiply it: frozen configs, and the recipes by name.

A config is checked when it is made and never changes. Fields left at None mean "as the other matmul of this operand";
`Float8LinearConfig.casts` holds the six casts with everything filled in.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import NamedTuple

import torch

from quaver.formats import E4M3, E5M2, FORMATS


class ScalingType(enum.Enum):
    """When the scale of a tensor is computed."""

    DYNAMIC = "dynamic"
    """From the tensor itself, at each cast."""
    DELAYED = "delayed"
    """From the amaxes of earlier steps. Not implemented yet."""
    STATIC = "static"
    """Given once. Not implemented yet."""
    DISABLED = "disabled"
    """Never: the tensor stays in high precision for this matmul."""


class ScalingGranularity(enum.Enum):
    """How many elements share a scale."""

    TENSORWISE = "tensorwise"
    """All of the tensor."""
    ROWWISE = "rowwise"
    """The elements along the dim that the matmul contracts: one scale per row of the left operand."""
    AXISWISE = "rowwise"  # noqa: PIE796 - an alias on purpose
    """Another name of ROWWISE."""

    @classmethod
    def _missing_(cls, value: object) -> ScalingGranularity | None:
        return cls.ROWWISE if value == "axiswise" else None


def _check_type(config: object, name: str, expected: type) -> None:
    value = getattr(config, name)
    if not isinstance(value, expected):
        raise ValueError(f"{name}: expected {expected.__name__}, got {value!r}")


@dataclass(frozen=True)
class CastConfig:
    """How one operand is cast for one matmul.

    Args:
        scaling_type: when its scale is computed.
        scaling_granularity: how many elements share a scale.
        target_dtype: a float8 dtype; None for the default of the operand (e4m3 for input and weight, e5m2 for
            grad_output).
    Raises:
        ValueError: a field of the wrong type, or a dtype that is not float8.
        NotImplementedError: delayed or static scaling.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None

    # Attributes and not properties, since they are read at each cast of each linear.
    is_disabled: bool = field(init=False, repr=False, compare=False)
    is_rowwise: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_disabled", self.scaling_type is ScalingType.DISABLED)
        object.__setattr__(self, "is_rowwise", self.scaling_granularity is ScalingGranularity.ROWWISE)
        _check_type(self, "scaling_type", ScalingType)
        _check_type(self, "scaling_granularity", ScalingGranularity)
        if self.scaling_type in (ScalingType.DELAYED, ScalingType.STATIC):
            raise NotImplementedError(
                f"scaling_type={self.scaling_type.value!r} is not implemented yet; use ScalingType.DYNAMIC"
            )
        if self.target_dtype is not None and self.target_dtype not in FORMATS:
            names = ", ".join(str(dtype) for dtype in FORMATS)
            raise ValueError(f"target_dtype: expected a float8 dtype ({names}) or None, got {self.target_dtype}")

    @property
    def float8_dtype(self) -> torch.dtype:
        """The target dtype of a resolved cast. Raises RuntimeError where it was left to the default."""
        if self.target_dtype is None:
            raise RuntimeError("target_dtype is not resolved; take the cast from Float8LinearConfig.casts")
        return self.target_dtype

    def __str__(self) -> str:
        if self.is_disabled:
            return "high precision"
        name = FORMATS[self.target_dtype].name if self.target_dtype is not None else "default format"
        return f"{self.scaling_type.value} {self.scaling_granularity.value} {name}"


@dataclass(frozen=True)
class Float8GemmConfig:
    """How one float8 matmul runs.

    Args:
        use_fast_accum: let Hopper's tensor cores keep partial sums in fewer bits. Faster, less exact. It means nothing
            where float8 is multiplied exactly (CPUs, `emulate`).
    """

    use_fast_accum: bool = False

    def __post_init__(self) -> None:
        _check_type(self, "use_fast_accum", bool)


class Float8LinearRecipeName(enum.Enum):
    """The recipes by name; their older names are accepted too."""

    TENSORWISE = "tensorwise"
    """One scale per tensor, e4m3 forward and e5m2 gradients. The fastest."""
    ROWWISE = "rowwise"
    """One power-of-two scale per row of each operand, e4m3 throughout. Robust to outliers."""
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    """As rowwise, with grad_weight computed in high precision. The most accurate."""
    ROWWISE_WITH_TENSORWISE_WEIGHT = "rowwise_with_tensorwise_weight"
    """As rowwise, with one scale per weight: one cast serves both of its matmuls, and one byte per element a gather."""

    @classmethod
    def _missing_(cls, value: object) -> Float8LinearRecipeName:
        aliases = {"all_axiswise": cls.ROWWISE, "lw_axiswise_with_gw_hp": cls.ROWWISE_WITH_GW_HP}
        if isinstance(value, str) and value in aliases:
            return aliases[value]
        raise ValueError(f"unknown recipe {value!r}: expected one of {', '.join(name.value for name in cls)}")


class OperandCasts(NamedTuple):
    """How each operand is cast for each of its two matmuls."""

    input: CastConfig
    input_for_grad_weight: CastConfig
    weight: CastConfig
    weight_for_grad_input: CastConfig
    grad_output: CastConfig
    grad_output_for_grad_weight: CastConfig


@dataclass(frozen=True)
class Float8LinearConfig:
    """How a `Float8Linear` computes its three matmuls:

        output      = input       @ weight.t()     input, weight
        grad_input  = grad_output @ weight         grad_output, weight_for_grad_input
        grad_weight = grad_output.t() @ input      grad_output_for_grad_weight, input_for_grad_weight

    Args:
        cast_config_input, cast_config_weight, cast_config_grad_output: each operand's cast.
        cast_config_input_for_grad_weight, cast_config_weight_for_grad_input,
            cast_config_grad_output_for_grad_weight: the same operand in its other matmul; None for "the same".
        gemm_config_output, gemm_config_grad_input, gemm_config_grad_weight: each matmul.
        enable_fsdp_float8_all_gather: under FSDP2 (`fully_shard`), cast weights on their shards with the scales of
            the whole weight, and gather codes: one byte per element where one cast serves both matmuls of a weight
            (tensorwise), two where they differ. Both casts must be float8. One process and DDP compute the same
            with it; FSDP1 refuses it.
        pad_inner_dim: pad every matmul to multiples of 16 on every device. Hardware that needs padding gets it
            without this flag; the flag lets a device that needs none take the same path. Results do not change.
        emulate: multiply exactly in high precision even where the hardware multiplies float8.
        round_scales_to_power_of_2: round every quant_scale down to a power of two.
        keep_float8_weight_for_backward: keep the float8 weight from forward to backward (a byte per element) instead
            of casting the weight again.
    Raises:
        ValueError: a combination that no matmul can run; the message says which.
        NotImplementedError: an option that is not there yet.
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
    keep_float8_weight_for_backward: bool = False

    casts: OperandCasts = field(init=False, repr=False, compare=False)
    """The six casts, none of them None and none without its target dtype."""

    def __post_init__(self) -> None:
        for option in fields(self):
            if option.name.startswith("gemm_config"):
                _check_type(self, option.name, Float8GemmConfig)
            elif option.name.startswith("cast_config"):
                if getattr(self, option.name) is not None or option.default is not None:
                    _check_type(self, option.name, CastConfig)
            elif option.init:
                _check_type(self, option.name, bool)
        casts = OperandCasts(
            *_resolve("input", self.cast_config_input, self.cast_config_input_for_grad_weight, E4M3.dtype),
            *_resolve("weight", self.cast_config_weight, self.cast_config_weight_for_grad_input, E4M3.dtype),
            *_resolve(
                "grad_output", self.cast_config_grad_output, self.cast_config_grad_output_for_grad_weight, E5M2.dtype
            ),
        )
        for matmul, left, right in _MATMULS:
            _check_matmul(matmul, casts, left, right)
        if self.enable_fsdp_float8_all_gather and (casts.weight.is_disabled or casts.weight_for_grad_input.is_disabled):
            raise ValueError(
                "enable_fsdp_float8_all_gather: expected the weight in float8 in both of its matmuls, got output "
                f"{casts.weight}, grad_input {casts.weight_for_grad_input}; gather in high precision instead"
            )
        object.__setattr__(self, "casts", casts)

    def resolved(self) -> Float8LinearConfig:
        """The same config with every None filled in: both casts and the target dtype of each operand."""
        return replace(self, **{f"cast_config_{name}": cast for name, cast in self.casts._asdict().items()})

    @staticmethod
    def from_recipe_name(recipe_name: Float8LinearRecipeName | str) -> Float8LinearConfig:
        """The config of a recipe. Raises ValueError for an unknown name, listing the choices."""
        return _RECIPES[Float8LinearRecipeName(recipe_name)]()

    @property
    def recipe_name(self) -> Float8LinearRecipeName | None:
        """The recipe whose casts and scales these are, whatever the options beside them; None if there is none."""
        for recipe, make in _RECIPES.items():
            config = make()
            if (self.casts, self.round_scales_to_power_of_2) == (config.casts, config.round_scales_to_power_of_2):
                return recipe
        return None

    def __str__(self) -> str:
        matmuls = [
            f"{matmul}: {left} {getattr(self.casts, left)} x {right} {getattr(self.casts, right)}"
            for matmul, left, right in _MATMULS
        ]
        return "; ".join(matmuls) + f"; scales {'power of two' if self.round_scales_to_power_of_2 else 'float32'}"


_MATMULS = (
    ("output", "input", "weight"),
    ("grad_input", "grad_output", "weight_for_grad_input"),
    ("grad_weight", "grad_output_for_grad_weight", "input_for_grad_weight"),
)


def _rowwise() -> Float8LinearConfig:
    row = CastConfig(scaling_granularity=ScalingGranularity.ROWWISE, target_dtype=E4M3.dtype)
    return Float8LinearConfig(
        cast_config_input=row,
        cast_config_weight=row,
        cast_config_grad_output=row,
        round_scales_to_power_of_2=True,
    )


def _rowwise_with_gw_hp() -> Float8LinearConfig:
    hp = CastConfig(scaling_type=ScalingType.DISABLED)
    return replace(
        _rowwise(),
        cast_config_weight_for_grad_input=CastConfig(target_dtype=E4M3.dtype),
        cast_config_input_for_grad_weight=hp,
        cast_config_grad_output_for_grad_weight=hp,
    )


def _rowwise_with_tensorwise_weight() -> Float8LinearConfig:
    return replace(_rowwise(), cast_config_weight=CastConfig(target_dtype=E4M3.dtype))


_RECIPES: dict[Float8LinearRecipeName, Callable[[], Float8LinearConfig]] = {
    Float8LinearRecipeName.TENSORWISE: Float8LinearConfig,
    Float8LinearRecipeName.ROWWISE: _rowwise,
    Float8LinearRecipeName.ROWWISE_WITH_GW_HP: _rowwise_with_gw_hp,
    Float8LinearRecipeName.ROWWISE_WITH_TENSORWISE_WEIGHT: _rowwise_with_tensorwise_weight,
}


def _resolve(
    operand: str, cast: CastConfig, other: CastConfig | None, default_dtype: torch.dtype
) -> tuple[CastConfig, CastConfig]:
    """Both casts of one operand, filled in."""
    other = other or cast
    dtypes = {c.target_dtype or default_dtype for c in (cast, other) if not c.is_disabled}
    if len(dtypes) > 1:
        names = " and ".join(sorted(FORMATS[dtype].name for dtype in dtypes))
        raise ValueError(f"{operand} must be cast to one dtype in both of its matmuls, got {names}")
    dtype = next(iter(dtypes), default_dtype)
    return replace(cast, target_dtype=dtype), replace(other, target_dtype=dtype)


def _check_matmul(matmul: str, casts: OperandCasts, left_name: str, right_name: str) -> None:
    left: CastConfig = getattr(casts, left_name)
    right: CastConfig = getattr(casts, right_name)
    if left.is_disabled != right.is_disabled:
        fp8, hp = (right_name, left_name) if left.is_disabled else (left_name, right_name)
        raise ValueError(
            f"{matmul}: {fp8} is cast to float8 but {hp} stays in high precision; "
            f"a matmul needs both operands in the same precision"
        )
    if not left.is_disabled and left.target_dtype == right.target_dtype == E5M2.dtype:
        raise ValueError(f"{matmul}: no hardware multiplies e5m2 by e5m2; make {left_name} or {right_name} e4m3")

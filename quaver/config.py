"""What to cast, how to scale it, and how to multiply it: frozen configs, and the recipes by name.

A config is checked when it is made and never changes. Fields left at None mean "as the other matmul of this operand";
`Float8LinearConfig.casts` holds the six casts with everything filled in.
"""

from __future__ import annotations

import enum
import math
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
    """From the amaxes of earlier steps, by `sync_float8_amax_and_scale_history`; see `DelayedScalingConfig`."""
    STATIC = "static"
    """Once: given (`CastConfig.static_quant_scale`), or measured on batches (`calibrate_float8_static_scales`)."""
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
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise ValueError(f"{name}: expected {expected.__name__}, got {value!r}")


def _check(holds: bool, name: str, expected: str, got: object) -> None:
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


@dataclass(frozen=True)
class CastConfig:
    """How one operand is cast for one matmul.

    Args:
        scaling_type: when its scale is computed.
        scaling_granularity: how many elements share a scale.
        target_dtype: a float8 dtype; None for the default of the operand (e4m3 for input and weight, e5m2 for
            grad_output).
        static_quant_scale: with `ScalingType.STATIC`, the quant_scale of this operand in every linear, a number or a
            tensor of one; None to measure one for each linear with `calibrate_float8_static_scales`.
    Raises:
        ValueError: a field of the wrong type, a dtype that is not float8, delayed or static scaling of rows, or a
            static scale that is out of range or belongs to another scaling type.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None
    static_quant_scale: float | None = None

    # Attributes and not properties, since they are read at each cast of each linear.
    is_disabled: bool = field(init=False, repr=False, compare=False)
    is_rowwise: bool = field(init=False, repr=False, compare=False)
    is_persistent: bool = field(init=False, repr=False, compare=False)
    """Whether the scale is kept from before the tensor is seen: delayed or static."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "is_disabled", self.scaling_type is ScalingType.DISABLED)
        object.__setattr__(self, "is_rowwise", self.scaling_granularity is ScalingGranularity.ROWWISE)
        object.__setattr__(self, "is_persistent", self.scaling_type in (ScalingType.DELAYED, ScalingType.STATIC))
        _check_type(self, "scaling_type", ScalingType)
        _check_type(self, "scaling_granularity", ScalingGranularity)
        if self.is_persistent and self.is_rowwise:
            raise ValueError(
                f"scaling_granularity: {self.scaling_type.value} scaling keeps one scale per tensor (tensorwise), got "
                "rowwise; the rows of a tensor are not the same ones from step to step"
            )
        if self.target_dtype is not None and self.target_dtype not in FORMATS:
            names = ", ".join(str(dtype) for dtype in FORMATS)
            raise ValueError(f"target_dtype: expected a float8 dtype ({names}) or None, got {self.target_dtype}")
        if self.static_quant_scale is not None:
            self._check_static_scale(self.static_quant_scale)

    def _check_static_scale(self, given: float) -> None:
        is_number = isinstance(given, int | float) or (isinstance(given, torch.Tensor) and given.numel() == 1)
        _check(is_number and not isinstance(given, bool), "static_quant_scale", "a number", given)
        scale = float(given)
        _check(2.0**-126 <= scale <= 2.0**126, "static_quant_scale", "a number from 2**-126 to 2**126", scale)
        _check(
            self.scaling_type is ScalingType.STATIC,
            "static_quant_scale",
            "None unless scaling_type is static",
            f"{scale} with {self.scaling_type.value}",
        )
        object.__setattr__(self, "static_quant_scale", scale)

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
        scale = "" if self.static_quant_scale is None else f" quant_scale {self.static_quant_scale!r}"
        return f"{self.scaling_type.value} {self.scaling_granularity.value} {name}{scale}"


@dataclass(frozen=True)
class DelayedScalingConfig:
    """How a scale follows its tensor's amaxes in delayed scaling; `sync_float8_amax_and_scale_history` applies it.

        amax        = max or most recent of the history, this step's amax included
        quant_scale = (format.max / (amax * headroom)) / 2**margin        unchanged where amax is 0 or not finite

    With the defaults of `margin` and `headroom`, and `nonfinite_amax="keep_scale"`, this is TransformerEngine's rule.

    Args:
        history_len: how many steps are remembered. After a spike the scale stays small for as many steps; after growth
            by any factor it fits again after one.
        scale_fn_name: "max" or "most_recent".
        margin: how many powers of two to stay away from the largest number of the format.
        headroom: the factor by which a tensor may grow from one step to the next before it saturates.
        nonfinite_amax: what a step in which a tensor had an inf or a NaN does to its history. "skip": nothing.
            "keep_scale": the amax is remembered, and the scale stays as it is for as long as the history holds it.
        dynamic_window: (low, high); None never. A tensor is scaled dynamically for one step after each in which the
            ratio of its kept scale (used or not) to the one that would have fit was outside. A ratio above 1 saturates,
            and one of 1 / 2**n leaves n powers of two of the format unused. (The rule itself aims at
            1 / (headroom * 2**margin), and lies below it for as long as a larger amax is remembered.)
    Raises:
        ValueError: a field of the wrong type or out of range.
    """

    history_len: int = 16
    scale_fn_name: str = "max"
    margin: int = 0
    headroom: float = 1.0
    nonfinite_amax: str = "skip"
    dynamic_window: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        for name in ("history_len", "margin"):
            _check_type(self, name, int)
        _check(1 <= self.history_len <= 65536, "history_len", "1 to 65536 steps", self.history_len)
        _check(self.scale_fn_name in _SCALE_FNS, "scale_fn_name", f"one of {', '.join(_SCALE_FNS)}", self.scale_fn_name)
        _check(0 <= self.margin <= 16, "margin", "0 to 16 powers of two", self.margin)
        is_number = isinstance(self.headroom, int | float) and not isinstance(self.headroom, bool)
        _check(is_number and 1 <= self.headroom <= 65536, "headroom", "a factor of 1 to 65536", self.headroom)
        policies = ", ".join(_NONFINITE_AMAX)
        _check(self.nonfinite_amax in _NONFINITE_AMAX, "nonfinite_amax", f"one of {policies}", self.nonfinite_amax)
        if self.dynamic_window is not None:
            window = self.dynamic_window
            _check(isinstance(window, tuple) and len(window) == 2, "dynamic_window", "a pair or None", window)
            target = 1 / (self.headroom * 2**self.margin)
            expected = f"0 <= low <= {target:g} (1 / (headroom * 2**margin)) <= high"
            _check(0 <= window[0] <= target <= window[1], "dynamic_window", expected, window)


_SCALE_FNS = ("max", "most_recent")
_NONFINITE_AMAX = ("skip", "keep_scale")

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
"""Names that siblings in a transformer have which read one input: Hugging Face's, Llama's, diffusers' and T5's."""


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
    DELAYED = "delayed"
    """As tensorwise, with every scale from the amaxes of earlier steps: each tensor is read once."""
    DELAYED_WITH_DYNAMIC_WEIGHT = "delayed_with_dynamic_weight"
    """As delayed, with weights scaled dynamically: they are cast once a step, and loading them never saturates."""

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
            the whole weight, and gather codes: one byte per element, and two in a pass that reads both casts of a
            weight whose matmuls read different ones (row-wise, where the backward recomputes the forward). Both
            casts must be float8. One process and DDP compute the same with it; FSDP1 refuses it.
        pad_inner_dim: pad every matmul to multiples of 16 on every device. Hardware that needs padding gets it
            without this flag; the flag lets a device that needs none take the same path. Results do not change.
        emulate: multiply exactly in high precision even where the hardware multiplies float8.
        round_scales_to_power_of_2: round every quant_scale down to a power of two.
        keep_float8_weight_for_backward: keep the float8 weight from forward to backward (a byte per element) instead
            of casting the weight again.
        delayed_scaling_config: how the scales of delayed scaling follow the amaxes.
        shared_inputs: names of sibling linears (children of one module) that read one input. With delayed or static
            scaling of the input they have one scale for it, and one cast. It only has to be a good guess: siblings that
            read different tensors get a scale that fits the larger one.
        enable_amax_init, enable_pre_and_post_forward: accepted from older float8 configs, where they worked around
            autocast, compile and FSDP in delayed scaling. Neither changes anything: a first use is always scaled
            dynamically, and no code runs before or after the forward.
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

    delayed_scaling_config: DelayedScalingConfig = DelayedScalingConfig()
    shared_inputs: tuple[tuple[str, ...], ...] = SHARED_INPUTS
    enable_amax_init: bool = True
    enable_pre_and_post_forward: bool = True

    casts: OperandCasts = field(init=False, repr=False, compare=False)
    """The six casts, none of them None and none without its target dtype."""
    has_persistent_scales: bool = field(init=False, repr=False, compare=False)
    """Whether any operand has a scale that is kept from before it is seen: delayed or static."""

    def __post_init__(self) -> None:
        for option in fields(self):
            if option.name.startswith("gemm_config"):
                _check_type(self, option.name, Float8GemmConfig)
            elif option.name.startswith("cast_config"):
                if getattr(self, option.name) is not None or option.default is not None:
                    _check_type(self, option.name, CastConfig)
            elif option.init and isinstance(option.default, bool):
                _check_type(self, option.name, bool)
        _check_type(self, "delayed_scaling_config", DelayedScalingConfig)
        _check(_is_names(self.shared_inputs), "shared_inputs", "a tuple of tuples of names", self.shared_inputs)
        casts = OperandCasts(
            *_resolve("input", self.cast_config_input, self.cast_config_input_for_grad_weight, E4M3.dtype),
            *_resolve("weight", self.cast_config_weight, self.cast_config_weight_for_grad_input, E4M3.dtype),
            *_resolve(
                "grad_output", self.cast_config_grad_output, self.cast_config_grad_output_for_grad_weight, E5M2.dtype
            ),
        )
        for matmul, left, right in _MATMULS:
            _check_matmul(matmul, casts, left, right)
        if self.round_scales_to_power_of_2:
            _check_powers_of_2(casts)
        if self.enable_fsdp_float8_all_gather and (casts.weight.is_disabled or casts.weight_for_grad_input.is_disabled):
            raise ValueError(
                "enable_fsdp_float8_all_gather: expected the weight in float8 in both of its matmuls, got output "
                f"{casts.weight}, grad_input {casts.weight_for_grad_input}; gather in high precision instead"
            )
        object.__setattr__(self, "casts", casts)
        object.__setattr__(self, "has_persistent_scales", any(cast.is_persistent for cast in casts))

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
        scales = f"scales {'power of two' if self.round_scales_to_power_of_2 else 'float32'}"
        delayed = any(cast.scaling_type is ScalingType.DELAYED for cast in self.casts)
        return "; ".join([*matmuls, scales, *([str(self.delayed_scaling_config)] if delayed else [])])


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


def _delayed() -> Float8LinearConfig:
    kept = CastConfig(scaling_type=ScalingType.DELAYED)
    return Float8LinearConfig(cast_config_input=kept, cast_config_weight=kept, cast_config_grad_output=kept)


def _delayed_with_dynamic_weight() -> Float8LinearConfig:
    return replace(_delayed(), cast_config_weight=CastConfig())


_RECIPES: dict[Float8LinearRecipeName, Callable[[], Float8LinearConfig]] = {
    Float8LinearRecipeName.TENSORWISE: Float8LinearConfig,
    Float8LinearRecipeName.ROWWISE: _rowwise,
    Float8LinearRecipeName.ROWWISE_WITH_GW_HP: _rowwise_with_gw_hp,
    Float8LinearRecipeName.ROWWISE_WITH_TENSORWISE_WEIGHT: _rowwise_with_tensorwise_weight,
    Float8LinearRecipeName.DELAYED: _delayed,
    Float8LinearRecipeName.DELAYED_WITH_DYNAMIC_WEIGHT: _delayed_with_dynamic_weight,
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
    how = {(c.scaling_type, c.static_quant_scale) for c in (cast, other) if not c.is_disabled}
    if (cast.is_persistent or other.is_persistent) and (len(how) > 1 or cast.is_rowwise or other.is_rowwise):
        raise ValueError(
            f"{operand} has one kept scale, which serves both of its matmuls: expected both casts delayed, both static "
            f"with one scale, or one in high precision, got {cast} and {other}"
        )
    return replace(cast, target_dtype=dtype), replace(other, target_dtype=dtype)


def _is_names(value: object) -> bool:
    return isinstance(value, tuple) and all(
        isinstance(names, tuple) and all(isinstance(name, str) for name in names) for names in value
    )


def _check_powers_of_2(casts: OperandCasts) -> None:
    for operand, how in casts._asdict().items():
        scale = how.static_quant_scale
        if scale is not None and math.frexp(scale)[0] != 0.5:
            raise ValueError(
                f"cast_config_{operand}: expected a static_quant_scale that is a power of two, since "
                f"round_scales_to_power_of_2 is on, got {scale!r}"
            )


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

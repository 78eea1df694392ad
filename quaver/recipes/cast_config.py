"""`CastConfig`: how one operand is quantized for one matmul.

config.py puts the casts of the three operands together. Import these names from there, or from `quaver`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from quaver.recipes.derived_fields import hide_derived_fields
from quaver.recipes.field_checks import check_field, convert_field
from quaver.recipes.formats import E2M1, E4M3, FLOAT8_FORMATS, get_format
from quaver.recipes.scale_layout import (
    BLOCK_SIZES,
    PACKED_BLOCK_SIZES,
    ROWWISE,
    TENSORWISE,
    ScaleLayout,
    make_block_layout,
)
from quaver.recipes.scale_rules import SCALE_RULES


class ScalingType(enum.Enum):
    """When the scale of a tensor is computed."""

    DYNAMIC = "dynamic"
    """Each time the tensor is quantized, from the tensor itself."""
    DELAYED = "delayed"
    """Once a step, by `sync_float8_amax_and_scale_history`, from earlier amaxes; see `DelayedScalingConfig`."""
    STATIC = "static"
    """Once: given (`CastConfig.static_quant_scale`), or measured on batches (`calibrate_float8_static_scales`)."""
    DISABLED = "disabled"
    """Never: the operand stays in high precision for this matmul."""

    def short_str(self) -> str:
        """Return "dyn", "del", "sta" or "dis"."""
        return self.value[:3]


class ScalingGranularity(enum.Enum):
    """How many elements share a scale."""

    TENSORWISE = "tensorwise"
    """All elements of the tensor."""
    ROWWISE = "axiswise"
    """The elements along the dim that the matmul contracts: one scale per row of the left operand."""
    AXISWISE = "axiswise"  # noqa: PIE796 - an alias on purpose
    """torchao's name for ROWWISE, the same member. `ScalingGranularity("rowwise")` is accepted, too."""
    BLOCKWISE = "blockwise"
    """The elements of a block of `CastConfig.block_size`."""

    @classmethod
    def _missing_(cls, value: object) -> ScalingGranularity | None:
        return cls.ROWWISE if value == "rowwise" else None

    def short_str(self) -> str:
        """Return "ten", "axs" or "blk"."""
        return {ScalingGranularity.ROWWISE: "axs", ScalingGranularity.BLOCKWISE: "blk"}.get(self, self.value[:3])

    def get_layout(self, block_size: tuple[int, int] | None) -> ScaleLayout | None:
        """Return which elements of row codes share a scale; column codes have the transposed layout.

        Returns None for a granularity without a known layout. Code that needs the layout calls
        `CastConfig.require_layout`, which raises instead.
        """
        if self is ScalingGranularity.BLOCKWISE and block_size is not None:
            return ScaleLayout(*block_size)
        return {ScalingGranularity.TENSORWISE: TENSORWISE, ScalingGranularity.ROWWISE: ROWWISE}.get(self)


class ScaleCalculationMode(enum.Enum):
    """How the E8M0 scale of a block, a power of two, is computed from its amax; e8m0.py has the equations."""

    RCEIL = "rceil"
    """The smallest power of two with which no element saturates: NVIDIA's rule."""
    FLOOR = "floor"
    """2^(floor(log2 amax) - floor(log2 format.max)): the rule of the OCP MX specification. Scaled elements reach 8/7 of
    format.max, and saturate above it."""


@hide_derived_fields
@dataclass(frozen=True)
class CastConfig:
    """How one operand is quantized for one matmul.

    Args:
        scaling_type: when its scale is computed.
        scaling_granularity: how many elements share a scale.
        block_size: with `ScalingGranularity.BLOCKWISE`, how many dot products, and how many elements along them, share
            a scale. (1, 128) means 128 elements of a row if dot products run along rows. It means 128 elements of a
            column if they run along columns. Square blocks are the same in both directions, so one cast serves both.
            None for (128, 128). e2m1 supports (1, 16) and (16, 16).
        scale_calculation_mode: with blocks, how an E8M0 scale (MXFP8) is computed; None for quaver's rule.
        scale_rule: the name of a serving engine's rule for scales and codes (scale_rules.py); None for quaver's rule.
            A rule also decides whether scales are powers of two. It needs e4m3 and dynamic scaling. A rule that
            multiplies by the reciprocal of the scale that a checkpoint stores also supports static scaling.
        target_dtype: a float8 dtype, or with blocks `torch.float4_e2m1fn_x2` (recipes/e2m1.py); None for the default
            of the operand (e4m3 for input and weight, e5m2 for grad_output), which `Float8LinearConfig` fills in.
        static_quant_scale: with `ScalingType.STATIC`, the quant_scale of this operand in every linear, a number or a
            tensor of one element; None to measure one per linear with `calibrate_float8_static_scales`.
        static_scale: torchao's name for `static_quant_scale`; pass only one of them. Both attributes are equal.
    Raises:
        ValueError: a field has the wrong type or a dtype that is not float8; delayed or static scaling is rowwise or
            blockwise; a static scale is out of range or given with another scaling type.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None
    static_quant_scale: float | None = None
    static_scale: float | torch.Tensor | None = field(default=None, repr=False, compare=False)
    block_size: tuple[int, int] | None = None
    scale_calculation_mode: ScaleCalculationMode | None = None
    scale_rule: str | None = None
    _derived: ClassVar = frozenset({"static_scale"})
    """See derived_fields.py."""

    # Computed once and stored in the instance: every forward reads them, and Dynamo sees plain attributes.

    @cached_property
    def is_disabled(self) -> bool:
        """Whether the operand stays in high precision."""
        return self.scaling_type is ScalingType.DISABLED

    @cached_property
    def is_tensorwise(self) -> bool:
        return not self.is_disabled and self.scaling_granularity is ScalingGranularity.TENSORWISE

    @cached_property
    def is_rowwise(self) -> bool:
        return self.scaling_granularity is ScalingGranularity.ROWWISE

    @cached_property
    def is_blockwise(self) -> bool:
        return self.scaling_granularity is ScalingGranularity.BLOCKWISE

    @cached_property
    def is_persistent(self) -> bool:
        """Whether the scale is known before the tensor is: delayed or static."""
        return self.scaling_type in (ScalingType.DELAYED, ScalingType.STATIC)

    @cached_property
    def layout(self) -> ScaleLayout | None:
        """`ScalingGranularity.get_layout`, and for e2m1 which codes share a byte."""
        if self.target_dtype is E2M1.dtype and self.block_size is not None:
            return make_block_layout(self.target_dtype, *self.block_size)
        return self.scaling_granularity.get_layout(self.block_size)

    @cached_property
    def depends_on_direction(self) -> bool:
        """Whether row codes and column codes have different scales, so that each direction needs its own cast."""
        return self.layout is None or self.layout.rows != self.layout.columns

    @cached_property
    def trailing_arguments(self) -> tuple[int | str, ...]:
        """The last arguments of a cast: the block size, if it has blocks, and `rule`."""
        return *(self.block_size or ()), self.rule

    def __post_init__(self) -> None:
        convert_field(self, "scaling_type", ScalingType)
        convert_field(self, "scaling_granularity", ScalingGranularity)
        self._check_blocks()
        self._check_rule()
        if self.is_persistent and not self.is_tensorwise:
            raise ValueError(
                f"scaling_granularity: {self.scaling_type.value} scaling keeps one scale per tensor: expected "
                f"tensorwise, got {_describe_granularity(self)}; row i is a different token in each step, so its scale "
                "cannot be reused"
            )
        is_packed = self.target_dtype is E2M1.dtype
        has_blocks = self.is_blockwise or self.is_disabled
        check_field(has_blocks or not is_packed, "target_dtype", "float8 without blocks", self.target_dtype)
        if self.target_dtype is not None and not is_packed and self.target_dtype not in tuple(FLOAT8_FORMATS):
            names = ", ".join(map(str, FLOAT8_FORMATS))
            raise ValueError(f"target_dtype: expected a float8 dtype ({names}) or None, got {self.target_dtype}")
        if self.static_scale is not None:
            is_only = self.static_quant_scale is None
            check_field(is_only, "static_scale", "None next to static_quant_scale", self.static_scale)
            object.__setattr__(self, "static_quant_scale", self.static_scale)
        if self.static_quant_scale is not None:
            self._check_static_scale(self.static_quant_scale)
        object.__setattr__(self, "static_scale", self.static_quant_scale)
        for name in _CACHED_PROPERTIES:
            getattr(self, name)

    def _check_blocks(self) -> None:
        mode, blocks = self.scale_calculation_mode, ScalingGranularity.BLOCKWISE
        if mode is not None:
            convert_field(self, "scale_calculation_mode", ScaleCalculationMode)
        if not self.is_blockwise:
            for name, value in (("block_size", self.block_size), ("scale_calculation_mode", mode)):
                check_field(value is None, name, f"None unless scaling_granularity is {blocks}", value)
            return
        is_packed = self.target_dtype is E2M1.dtype
        takes_mode = mode is None or not is_packed
        check_field(takes_mode, "scale_calculation_mode", "None with e2m1, whose scales are in e4m3", mode)
        size = (128, 128) if self.block_size is None else self.block_size
        size = tuple(size) if isinstance(size, list) else size
        sizes = PACKED_BLOCK_SIZES if is_packed else BLOCK_SIZES
        check_field(size in sizes, "block_size", f"one of {', '.join(map(str, sizes))}", size)
        object.__setattr__(self, "block_size", size)

    def _check_rule(self) -> None:
        if (rule := self.scale_rule) is None:
            return
        check_field(
            isinstance(rule, str) and rule in SCALE_RULES,
            "scale_rule",
            f"None or one of {', '.join(SCALE_RULES)}",
            rule,
        )
        mode, scaling, dtype = self.scale_calculation_mode, self.scaling_type, self.target_dtype
        check_field(mode is None, "scale_calculation_mode", "None next to scale_rule", mode)
        is_static = scaling is ScalingType.STATIC and SCALE_RULES[rule].takes_dequant_scales
        is_known = scaling is ScalingType.DYNAMIC or is_static
        check_field(is_known, "scaling_type", f"dynamic with the scale_rule {rule}", scaling.value)
        check_field(dtype in (None, E4M3.dtype), "target_dtype", f"e4m3 with the scale_rule {rule}", dtype)

    def require_layout(self, feature: str, *, allows_packed: bool = False) -> ScaleLayout:
        """Return `layout`, for a feature that depends on it.

        Args:
            feature: its name, for the error.
            allows_packed: whether it supports 4-bit codes.
        Raises:
            NotImplementedError: `ScalingGranularity.get_layout` does not know the granularity, or the feature supports
                no 4-bit codes.
        """
        if self.layout is None:
            raise NotImplementedError(
                f"{feature}: {self.granularity} casts do not say which elements share a scale "
                f"(ScalingGranularity.get_layout); use tensorwise, rowwise or blockwise scales, or turn {feature} off"
            )
        if self.layout.is_packed and not allows_packed:
            raise NotImplementedError(f"{feature}: expected codes of eight bits, got {self}")
        return self.layout

    def _check_static_scale(self, value: float) -> None:
        is_number = isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.numel() == 1)
        check_field(is_number and not isinstance(value, bool), "static_quant_scale", "a number", value)
        scale = float(value)
        check_field(2.0**-126 <= scale <= 2.0**126, "static_quant_scale", "a number from 2**-126 to 2**126", scale)
        scaling = self.scaling_type
        expected = "None unless scaling_type is static"
        check_field(scaling is ScalingType.STATIC, "static_quant_scale", expected, f"{scale} with {scaling.value}")
        object.__setattr__(self, "static_quant_scale", scale)

    @property
    def rule(self) -> str:
        """The rule that computes the scales: `scale_rule`, "rceil" or "floor" (E8M0), or "" for quaver's own rule."""
        e8m0_rule = "" if self.scale_calculation_mode is None else self.scale_calculation_mode.value
        return self.scale_rule or e8m0_rule

    @property
    def float8_dtype(self) -> torch.dtype:
        """`target_dtype`, which a `Float8LinearConfig` fills in. Raises RuntimeError for None."""
        if self.target_dtype is None:
            raise RuntimeError("target_dtype: expected a dtype, got None; read the CastConfig of a Float8LinearConfig")
        return self.target_dtype

    @property
    def granularity(self) -> str:
        """ "tensorwise", "rowwise" or "blockwise ROWS x COLUMNS"."""
        name = self.scaling_granularity.name.lower()
        return name if self.block_size is None else "{} {} x {}".format(name, *self.block_size)

    def short_str(self) -> str:
        """Return torchao's short form, "dyn_ten_e4m3"; without a dtype "dyn_ten_default".

        A suffix names the `scale_calculation_mode` unless it is the default for these blocks: "_rceil", "_floor", or
        "_float32" for None with blocks of 32.
        """
        dtype = "default" if self.target_dtype is None else get_format(self.target_dtype).name
        blocks = "" if self.block_size in (None, (128, 128)) else "{}x{}".format(*self.block_size)
        usual = ScaleCalculationMode.RCEIL.value if 32 in (self.block_size or ()) else ""
        rule = "" if self.rule == usual else f"_{self.rule or 'float32'}"
        return f"{self.scaling_type.short_str()}_{self.scaling_granularity.short_str()}{blocks}_{dtype}{rule}"

    def __str__(self) -> str:
        if self.is_disabled:
            return "high precision"
        name = "default format" if self.target_dtype is None else get_format(self.target_dtype).name
        scale = "" if self.static_quant_scale is None else f" quant_scale {self.static_quant_scale!r}"
        return f"{self.scaling_type.value} {_describe_granularity(self)} {name}{scale}"


_CACHED_PROPERTIES = [name for name, attribute in vars(CastConfig).items() if isinstance(attribute, cached_property)]


def _describe_granularity(cast: CastConfig) -> str:
    mode = cast.scale_calculation_mode
    by_rule = "" if cast.scale_rule is None else f" by the rule {cast.scale_rule}"
    return (cast.granularity if mode is None else f"{cast.granularity} E8M0 {mode.value}") + by_rule

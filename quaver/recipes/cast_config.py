"""How one operand is quantized for one matmul: `CastConfig`, and how its scale follows earlier steps.

config.py puts the casts of the three operands together. Import these names from there, or from `quaver`.
"""

from __future__ import annotations

import enum
from dataclasses import InitVar, dataclass, is_dataclass
from functools import cached_property

import torch

from quaver.recipes.formats import E2M1, E4M3, FORMATS, format_of
from quaver.recipes.scale_layout import (
    BLOCK_SIZES,
    PACKED_BLOCK_SIZES,
    ROWWISE,
    TENSORWISE,
    ScaleLayout,
    layout_of_blocks,
)
from quaver.recipes.scale_rules import RULES
from quaver.recipes.torchao_forms import from_torchao


class ScalingType(enum.Enum):
    """When the scale of a tensor is computed."""

    DYNAMIC = "dynamic"
    """From the tensor itself, each time it is quantized."""
    DELAYED = "delayed"
    """From the amaxes of earlier steps, by `sync_float8_amax_and_scale_history`; see `DelayedScalingConfig`."""
    STATIC = "static"
    """Once: given (`CastConfig.static_quant_scale`), or measured on batches (`calibrate_float8_static_scales`)."""
    DISABLED = "disabled"
    """Never: the operand stays in high precision for this matmul."""

    def short_str(self) -> str:
        """ "dyn", "del", "sta" or "dis"."""
        return self.value[:3]


class ScalingGranularity(enum.Enum):
    """How many elements share a scale."""

    TENSORWISE = "tensorwise"
    """All elements of the tensor."""
    ROWWISE = "axiswise"
    """The elements along the dim that the matmul contracts: one scale per row of the left operand."""
    AXISWISE = "axiswise"  # noqa: PIE796 - an alias on purpose
    """torchao's name of ROWWISE: the same member. Both values, "axiswise" and "rowwise", are accepted."""
    BLOCKWISE = "blockwise"
    """The elements of a block of `CastConfig.block_size`."""

    @classmethod
    def _missing_(cls, value: object) -> ScalingGranularity | None:
        return cls.ROWWISE if value == "rowwise" else None

    def short_str(self) -> str:
        """ "ten", "axs" or "blk"."""
        return {ScalingGranularity.ROWWISE: "axs", ScalingGranularity.BLOCKWISE: "blk"}.get(self, self.value[:3])

    def layout(self, block_size: tuple[int, int] | None) -> ScaleLayout | None:
        """Which elements of row codes share a scale; column codes have the transposed layout.

        None for a granularity that is not in the table: who cuts, sends, stores or checks scales asks
        `CastConfig.known_layout`, which refuses it.
        """
        if self is ScalingGranularity.BLOCKWISE and block_size is not None:
            return ScaleLayout(*block_size)
        return {ScalingGranularity.TENSORWISE: TENSORWISE, ScalingGranularity.ROWWISE: ROWWISE}.get(self)


class ScaleCalculationMode(enum.Enum):
    """How the E8M0 scale of a block, a power of two, follows from its amax; scaling.py has the equations."""

    RCEIL = "rceil"
    """The smallest power of two with which nothing saturates; NVIDIA's rule."""
    FLOOR = "floor"
    """The power of two below: the rule of the OCP MX specification. Elements up to 8/7 of the range saturate."""


def check_type(config: object, name: str, expected: type) -> None:
    """Check a field. quaver's `expected` takes the place of torchao's counterpart, and of a dict of its fields."""
    value = from_torchao(getattr(config, name), expected)
    if isinstance(value, dict) and is_dataclass(expected):
        value = expected(**value)
    object.__setattr__(config, name, value)
    if not isinstance(value, expected) or (expected is int and isinstance(value, bool)):
        raise ValueError(f"{name}: expected {expected.__name__}, got {value!r}")


def check(holds: bool, name: str, expected: str, got: object) -> None:
    """Raise ValueError about the field `name` unless `holds`."""
    if not holds:
        raise ValueError(f"{name}: expected {expected}, got {got!r}")


@dataclass(frozen=True)
class CastConfig:
    """How one operand is quantized for one matmul.

    Args:
        scaling_type: when its scale is computed.
        scaling_granularity: how many elements share a scale.
        block_size: with `ScalingGranularity.BLOCKWISE`, how many dot products, and how many elements along them, share
            a scale: (1, 128) are 128 elements of a row where the matmul contracts rows, and of a column where it
            contracts columns. Square blocks are the same in both directions, so one cast serves both. None for
            (128, 128). Of e2m1 (1, 16) or (16, 16).
        scale_calculation_mode: with blocks, how an E8M0 scale follows from the amax (MXFP8); None for quaver's rule.
        scale_rule: the name of a serving engine's rule for scales and codes (scale_rules.py), which then also decides
            about powers of two; None for quaver's. For dynamic scales of e4m3, and for static ones where the rule
            multiplies by the reciprocal of the scale that a checkpoint stores.
        target_dtype: a float8 dtype, or with blocks `torch.float4_e2m1fn_x2` (recipes/e2m1.py); None for the default
            of the operand (e4m3 for input and weight, e5m2 for grad_output), which `Float8LinearConfig` fills in.
        static_quant_scale: with `ScalingType.STATIC`, the quant_scale of this operand in every linear, a number or a
            tensor of one element; None to measure one per linear with `calibrate_float8_static_scales`.
        static_scale: torchao's name of `static_quant_scale`; give only one of them, and read `static_quant_scale`.
    Raises:
        ValueError: a field of the wrong type, a dtype that is not float8, row-wise or block-wise delayed or static
            scaling, or a static scale that is out of range or belongs to another scaling type.
    """

    scaling_type: ScalingType = ScalingType.DYNAMIC
    scaling_granularity: ScalingGranularity = ScalingGranularity.TENSORWISE
    target_dtype: torch.dtype | None = None
    static_quant_scale: float | None = None
    static_scale: InitVar[float | torch.Tensor | None] = None
    block_size: tuple[int, int] | None = None
    scale_calculation_mode: ScaleCalculationMode | None = None
    scale_rule: str | None = None

    # Derived once, into the instance: every forward of every linear reads them, and Dynamo sees plain attributes.

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
        """`ScalingGranularity.layout`."""
        if self.target_dtype is E2M1.dtype and self.block_size is not None:
            return layout_of_blocks(self.target_dtype, *self.block_size)
        return self.scaling_granularity.layout(self.block_size)

    @cached_property
    def has_two_casts(self) -> bool:
        """Whether rows and columns have scales of their own, so that each direction takes its own cast."""
        return self.layout is None or self.layout.rows != self.layout.columns

    @cached_property
    def options(self) -> tuple[int | str, ...]:
        """The last arguments of a cast: the size of blocks and `mode`; () for quaver's rule without blocks."""
        mode = () if self.block_size is None and not self.mode else (self.mode,)
        return (*(self.block_size or ()), *mode)

    def __post_init__(self, static_scale: float | torch.Tensor | None) -> None:
        check_type(self, "scaling_type", ScalingType)
        check_type(self, "scaling_granularity", ScalingGranularity)
        self._check_blocks()
        self._check_rule()
        if self.is_persistent and not self.is_tensorwise:
            raise ValueError(
                f"scaling_granularity: {self.scaling_type.value} scaling keeps one scale per tensor: expected "
                f"tensorwise, got {_granularity(self)}; the rows of a tensor are different ones in each step"
            )
        is_packed = self.target_dtype is E2M1.dtype
        check(not is_packed or self.is_blockwise, "target_dtype", "float8 without blocks", self.target_dtype)
        if self.target_dtype is not None and not is_packed and self.target_dtype not in FORMATS:
            names = ", ".join(map(str, FORMATS))
            raise ValueError(f"target_dtype: expected a float8 dtype ({names}) or None, got {self.target_dtype}")
        if static_scale is not None:
            check(self.static_quant_scale is None, "static_scale", "None next to static_quant_scale", static_scale)
            object.__setattr__(self, "static_quant_scale", static_scale)
        if self.static_quant_scale is not None:
            self._check_static_scale(self.static_quant_scale)
        for name in _DERIVED:
            getattr(self, name)

    def _check_blocks(self) -> None:
        mode, blocks = self.scale_calculation_mode, ScalingGranularity.BLOCKWISE
        if mode is not None:
            check_type(self, "scale_calculation_mode", ScaleCalculationMode)
        if not self.is_blockwise:
            for name, given in (("block_size", self.block_size), ("scale_calculation_mode", mode)):
                check(given is None, name, f"None unless scaling_granularity is {blocks}", given)
            return
        size = (128, 128) if self.block_size is None else self.block_size
        size = tuple(size) if isinstance(size, list) else size
        sizes = PACKED_BLOCK_SIZES if self.target_dtype is E2M1.dtype else BLOCK_SIZES
        check(size in sizes, "block_size", f"one of {', '.join(map(str, sizes))}", size)
        object.__setattr__(self, "block_size", size)

    def _check_rule(self) -> None:
        if (rule := self.scale_rule) is None:
            return
        check(rule in RULES, "scale_rule", f"None or one of {', '.join(RULES)}", rule)
        mode, scaling, dtype = self.scale_calculation_mode, self.scaling_type, self.target_dtype
        check(mode is None, "scale_calculation_mode", "None next to scale_rule", mode)
        is_static = scaling is ScalingType.STATIC and RULES[rule].takes_stored_scales
        is_known = scaling is ScalingType.DYNAMIC or is_static
        check(is_known, "scaling_type", f"dynamic with the scale_rule {rule}", scaling.value)
        check(dtype in (None, E4M3.dtype), "target_dtype", f"e4m3 with the scale_rule {rule}", dtype)

    def known_layout(self, asker: str) -> ScaleLayout:
        """`layout`, for `asker`, the name of a feature that depends on it.

        Raises:
            NotImplementedError: a granularity that does not say which elements share a scale.
        """
        if self.layout is None:
            raise NotImplementedError(
                f"{asker}: which elements of a {self.granularity} cast share a scale is not known "
                "(ScalingGranularity.layout); use tensorwise, row-wise or block-wise scales, or turn it off"
            )
        if self.layout.is_packed and asker not in _TAKE_FOUR_BITS:
            raise NotImplementedError(f"{asker}: expected codes of eight bits, got {self}")
        return self.layout

    def _check_static_scale(self, given: float) -> None:
        is_number = isinstance(given, int | float) or (isinstance(given, torch.Tensor) and given.numel() == 1)
        check(is_number and not isinstance(given, bool), "static_quant_scale", "a number", given)
        scale = float(given)
        check(2.0**-126 <= scale <= 2.0**126, "static_quant_scale", "a number from 2**-126 to 2**126", scale)
        scaling = self.scaling_type
        expected = "None unless scaling_type is static"
        check(scaling is ScalingType.STATIC, "static_quant_scale", expected, f"{scale} with {scaling.value}")
        object.__setattr__(self, "static_quant_scale", scale)

    @property
    def e8m0_mode(self) -> str:
        """The value of `scale_calculation_mode`, "" for None."""
        return "" if self.scale_calculation_mode is None else self.scale_calculation_mode.value

    @property
    def mode(self) -> str:
        """`scale_rule` or `e8m0_mode`, as operations take them; "" for quaver's rule."""
        return self.scale_rule or self.e8m0_mode

    @property
    def scales_mode(self) -> str | None:
        """`mode` as `scaling.scales_of` takes it."""
        return self.mode if self.is_blockwise else self.mode or None

    @property
    def float8_dtype(self) -> torch.dtype:
        """The target dtype of a cast that belongs to a `Float8LinearConfig`. Raises RuntimeError where it has none."""
        if self.target_dtype is None:
            raise RuntimeError("target_dtype is None; read the CastConfig from Float8LinearConfig, which fills it in")
        return self.target_dtype

    @property
    def granularity(self) -> str:
        """ "tensorwise", "rowwise" or "blockwise ROWS x COLUMNS"."""
        name = self.scaling_granularity.name.lower()
        return name if self.block_size is None else "{} {} x {}".format(name, *self.block_size)

    def short_str(self) -> str:
        """torchao's short form: "dyn_ten_e4m3"; "default" where the dtype is None."""
        dtype = "default" if self.target_dtype is None else format_of(self.target_dtype).name
        blocks = "" if self.block_size in (None, (128, 128)) else "{}x{}".format(*self.block_size)
        rule = "" if self.scale_rule is None else f"_{self.scale_rule}"
        return f"{self.scaling_type.short_str()}_{self.scaling_granularity.short_str()}{blocks}_{dtype}{rule}"

    def __str__(self) -> str:
        if self.is_disabled:
            return "high precision"
        name = "default format" if self.target_dtype is None else format_of(self.target_dtype).name
        scale = "" if self.static_quant_scale is None else f" quant_scale {self.static_quant_scale!r}"
        return f"{self.scaling_type.value} {_granularity(self)} {name}{scale}"


_TAKE_FOUR_BITS = ("float8 all-gather", "enable_fsdp_float8_all_gather")
_DERIVED = [name for name, each in vars(CastConfig).items() if isinstance(each, cached_property)]


def _granularity(cast: CastConfig) -> str:
    mode = cast.scale_calculation_mode
    by_rule = "" if cast.scale_rule is None else f" by the rule {cast.scale_rule}"
    return (cast.granularity if mode is None else f"{cast.granularity} E8M0 {mode.value}") + by_rule


@dataclass(frozen=True)
class DelayedScalingConfig:
    """How a scale follows its tensor's amaxes in delayed scaling; `sync_float8_amax_and_scale_history` applies it.

        amax        = max or most recent of the history, this step's amax included
        quant_scale = (format.max / (amax * headroom)) / 2**margin        unchanged where amax is 0 or not finite

    With the defaults of `margin` and `headroom`, and `nonfinite_amax="keep_scale"`, this is TransformerEngine's rule.

    Args:
        history_len: the number of steps in the history. After a spike the scale stays small for as many steps; after
            growth by any factor it fits again after one step.
        scale_fn_name: "max" or "most_recent".
        margin: how many powers of two to stay away from the largest number of the format.
        headroom: the factor by which a tensor may grow from one step to the next before it saturates.
        nonfinite_amax: what an inf or a NaN amax does to the history. "skip": nothing. "keep_scale": the amax enters
            the history, and the scale stays unchanged for as long as the history holds it.
    Raises:
        ValueError: a field of the wrong type or out of range.
    """

    history_len: int = 16
    scale_fn_name: str = "max"
    margin: int = 0
    headroom: float = 1.0
    nonfinite_amax: str = "skip"

    def __post_init__(self) -> None:
        for name in ("history_len", "margin"):
            check_type(self, name, int)
        check(1 <= self.history_len <= 65536, "history_len", "1 to 65536 steps", self.history_len)
        for name, choices in (("scale_fn_name", _SCALE_FNS), ("nonfinite_amax", _POLICIES)):
            value = getattr(self, name)
            check(value in choices, name, f"one of {', '.join(choices)}", value)
        check(0 <= self.margin <= 16, "margin", "0 to 16 powers of two", self.margin)
        is_number = isinstance(self.headroom, int | float) and not isinstance(self.headroom, bool)
        check(is_number and 1 <= self.headroom <= 65536, "headroom", "a factor of 1 to 65536", self.headroom)


_SCALE_FNS = ("max", "most_recent")
_POLICIES = ("skip", "keep_scale")

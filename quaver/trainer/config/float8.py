"""[float8]: which linears compute in float8, and how."""

from dataclasses import dataclass, fields
from typing import Annotated

from tyro.conf import arg

from quaver.config import DelayedScalingConfig, Float8LinearConfig, Float8LinearRecipeName
from quaver.trainer.config.require import require, require_default

RECIPES = ", ".join(name.value for name in Float8LinearRecipeName)
DELAYED_RECIPES = ", ".join(
    name.value for name in Float8LinearRecipeName if Float8LinearConfig.from_recipe_name(name).has_persistent_scales
)


@dataclass(frozen=True)
class Float8:
    """Which linears compute in float8, and how."""

    enable_float8_linear: bool = True
    """Convert linears to float8; off trains in bfloat16."""
    recipe_name: Annotated[str, arg(help=f"One of {RECIPES}.")] = "tensorwise"
    filter_fqns: tuple[str, ...] = ("lm_head",)
    """A linear stays in high precision when its full name contains one of these."""
    skip_first_layers: int = 0
    """Transformer blocks at the input that stay in high precision."""
    skip_last_layers: int = 0
    """Transformer blocks at the output that stay in high precision."""
    last_steps_high_precision: int = 0
    """Steps at the end of the run that compute every linear in high precision, validation included. Neither with
    tensor parallelism nor with enable_fsdp_float8_all_gather, whose inputs and weights travel in float8."""
    auto_filter: bool = False
    """Also keep in high precision what a cost model expects to gain nothing on this GPU (without one, on an H100)."""
    emulate: bool = False
    """Multiply with the exact emulation even where the device multiplies float8."""
    fused_producers: bool = True
    """RMSNorm and SwiGLU in front of float8 linears keep for backward only their own inputs; and on GPUs that multiply
    float8, in eager code, they write float8 for them and nothing else."""
    enable_fsdp_float8_all_gather: bool = False
    """FSDP2 gathers the weights of float8 linears in float8: half the bytes of bfloat16."""
    precompute_float8_dynamic_scale_for_fsdp: bool = False
    """Compute the scales of all gathered weights together after each optimizer step, with one collective."""
    delayed_history_len: int = 16
    """Delayed scaling: how many steps' amaxes are remembered."""
    delayed_scale_fn_name: str = "max"
    """Delayed scaling: the scale follows the max of the remembered amaxes, or the most_recent."""
    delayed_margin: int = 0
    """Delayed scaling: how many powers of two to stay away from the largest number of the format."""
    delayed_headroom: float = 1.0
    """Delayed scaling: the factor by which a tensor may grow from one step to the next before it saturates."""
    delayed_nonfinite_amax: str = "skip"
    """Delayed scaling: what an inf or NaN does to a tensor's history. skip: nothing; keep_scale: it is remembered, and
    the scale stays as it is for as long."""
    delayed_dynamic_window: tuple[float, ...] = ()
    """Delayed scaling: low and high; a tensor is scaled dynamically for one step after each in which the ratio of its
    scale to the one that would have fit was outside. Empty: never."""
    enable_amax_init: bool = True
    """Accepted from older configs, unnecessary: a first use is always scaled dynamically. Changes nothing."""
    enable_pre_and_post_forward: bool = True
    """Accepted from older configs, unnecessary: no code runs before or after a forward. Changes nothing."""

    def __post_init__(self) -> None:
        Float8LinearConfig.from_recipe_name(self.recipe_name)  # raises ValueError listing the choices
        require(all(self.filter_fqns), "float8.filter_fqns", "names or parts of names", self.filter_fqns)
        for name in ("skip_first_layers", "skip_last_layers", "last_steps_high_precision"):
            value = getattr(self, name)
            require(value >= 0, f"float8.{name}", "not negative", value)
            if not self.enable_float8_linear:
                require_default("float8", self, name, "float8.enable_float8_linear")
        if not self.enable_float8_linear:
            require_default("float8", self, "fused_producers", "float8.enable_float8_linear")
        require(
            self.enable_float8_linear or not self.enable_fsdp_float8_all_gather,
            "float8.enable_float8_linear",
            "true with float8.enable_fsdp_float8_all_gather",
            self.enable_float8_linear,
            "weights of linears in high precision are gathered in high precision",
        )
        require(
            self.enable_fsdp_float8_all_gather or not self.precompute_float8_dynamic_scale_for_fsdp,
            "float8.enable_fsdp_float8_all_gather",
            "true with float8.precompute_float8_dynamic_scale_for_fsdp",
            self.enable_fsdp_float8_all_gather,
            "the scales are those of weights that are gathered in float8",
        )
        self._check_delayed_scaling()

    @property
    def has_persistent_scales(self) -> bool:
        """Whether the recipe has scales that are kept from step to step."""
        return self.enable_float8_linear and Float8LinearConfig.from_recipe_name(self.recipe_name).has_persistent_scales

    @property
    def delayed_scaling_config(self) -> DelayedScalingConfig:
        """What the delayed_* settings say.

        Raises:
            ValueError: one of them is out of range.
        """
        values = {each.name: getattr(self, f"delayed_{each.name}") for each in fields(DelayedScalingConfig)}
        try:
            return DelayedScalingConfig(**{**values, "dynamic_window": values["dynamic_window"] or None})
        except ValueError as error:
            name, _, expected = str(error).partition(": expected ")
            raise ValueError(f"float8.delayed_{name} must be {expected}") from error

    def _check_delayed_scaling(self) -> None:
        window = self.delayed_dynamic_window
        require(len(window) in (0, 2), "float8.delayed_dynamic_window", "two numbers, low and high, or empty", window)
        self.delayed_scaling_config  # noqa: B018 - raises ValueError
        has_persistent_scales = self.has_persistent_scales
        for setting in fields(self):
            value = getattr(self, setting.name)
            require(
                has_persistent_scales or not setting.name.startswith("delayed_") or value == setting.default,
                f"float8.{setting.name}",
                f"its default, {setting.default!r}, without delayed scaling",
                value,
                f"set float8.enable_float8_linear and one of the recipes {DELAYED_RECIPES}",
            )

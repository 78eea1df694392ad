"""[float8]: which linears compute in float8, and how."""

import functools
from dataclasses import dataclass, fields
from typing import Annotated

from pydantic import AfterValidator

from quaver.conversion.layer_recipes import HIGH_PRECISION, LayerRecipes
from quaver.lab.settings.fields import NotNegative, OneOf, Settings, setting
from quaver.lab.settings.schedule import ScheduleEntry
from quaver.recipes.config import DelayedScalingConfig, Float8LinearConfig, Float8LinearRecipeName
from quaver.recipes.recipe_name import BACKWARD_MODES, canonicalize_recipe
from quaver.recipes.serving import get_serving_casts, serving_config
from quaver.runtime.errors import InputError, reraise_as_input_error

BFLOAT16 = "bfloat16"
"""The precision of a run or a contestant without a recipe."""
RECIPES = tuple(name.value for name in Float8LinearRecipeName)


def _check_recipe(name: str) -> str:
    canonicalize_recipe(name)
    return name


RecipeName = Annotated[str, OneOf(RECIPES, has_aliases=True), AfterValidator(_check_recipe)]
"""A recipe, by its name or an alias, with or without its `backward`."""


@functools.cache
def _has_persistent_scales(recipe_name: str) -> bool:
    """Return whether the recipe has persistent scales; cached, because a plan makes thousands of settings."""
    return Float8LinearConfig.from_recipe_name(recipe_name).has_persistent_scales


DELAYED_RECIPES = ", ".join(filter(_has_persistent_scales, RECIPES))


def make_file_name(label: str) -> str:
    """Return `Float8.label`, or the name of a dtype, as the name of a file; Windows allows no colon in it."""
    return label.replace(":", "-")


@dataclass(frozen=True)
class Float8(Settings, section="float8"):
    """Which linears compute in float8, and how. delayed_*: for the delayed recipes."""

    enable_float8_linear: bool = setting(True, "Convert linears to float8; false trains in bfloat16.")
    recipe_name: RecipeName = setting("tensorwise", "How operands are scaled; docs/which-recipe.md chooses.")
    backward: Annotated[str, OneOf(BACKWARD_MODES)] = setting(
        BACKWARD_MODES[0],
        "Operands of grad_input and grad_weight: float8 (cast again), dequantized (the forward's codes), or "
        "high_precision.",
    )
    serving: str = setting(
        "", "Train with the codes of this serving engine; recipe_name is then for the backward. See docs/serving.md."
    )
    filter_fqns: tuple[str, ...] = setting(
        ("lm_head",), "Names of linears, or parts of names, that stay in high precision."
    )
    layer_recipes: tuple[str, ...] = setting(
        (),
        'Recipes of single layers, such as "model.layers.0.mlp.down_proj=rowwise", "NAME=rowwise:dequantized" (recipe '
        'and backward) or "NAME=high_precision".',
    )
    skip_first_layers: NotNegative = setting(0, "Number of first blocks in high precision.")
    skip_last_layers: NotNegative = setting(0, "Number of last blocks in high precision.")
    high_precision_schedule: tuple[str, ...] = setting(
        (),
        "Matmuls in high precision in some steps or blocks: "
        '"forward: last 18% of steps", "grad_weight: last 15% of blocks", "all: last 9 steps in first 2 blocks".',
    )
    auto_filter: bool = setting(
        False, "Skip experts, and linears that gain nothing on this GPU (without one, an H100), by a cost model."
    )
    emulate: bool = setting(False, "Use the exact matmul even on float8 hardware.")
    use_fast_accum: bool = setting(
        True, "Let Hopper's tensor cores add up each output in few bits: see docs/numerics.md."
    )
    fused_producers: bool = setting(True, "RMSNorm and SwiGLU before float8 linears save only their inputs.")
    enable_fsdp_float8_all_gather: bool = setting(False, "FSDP2 gathers weights in float8.")
    precompute_float8_dynamic_scale_for_fsdp: bool = setting(
        False, "Compute the scales of the gathered weights in one collective after each optimizer step."
    )
    cast_weights_once: bool = setting(
        False, "Quantize shards once per step and hold the codes meanwhile. One process always does so."
    )
    grad_weight_from_codes: bool = setting(
        False, "With expert parallelism send tokens as codes in training too; grad_weight then reads quantized tokens."
    )
    delayed_history_len: int = setting(16, "Steps in the history of amaxes.")
    delayed_scale_fn_name: str = setting("max", "Scale to the max of the history, or to the most_recent amax.")
    delayed_margin: int = setting(0, "Powers of two left below the format's largest number.")
    delayed_headroom: float = setting(1.0, "Factor by which a tensor may grow in a step without saturating.")
    delayed_nonfinite_amax: str = setting(
        "skip", "An inf or NaN is left out of the history (skip), or freezes the scale while in it (keep_scale)."
    )

    def check(self) -> None:
        """Raise InputError for settings that the recipe does not have, and for most settings that nothing reads."""
        self.require(all(self.filter_fqns), "filter_fqns", "names or parts of names")
        self._check_serving()
        self.parse_layer_recipes()
        self.parse_schedule()
        if not self.enable_float8_linear:
            names = ["backward", "serving", "layer_recipes", "skip_first_layers", "skip_last_layers"]
            names += ["high_precision_schedule", "auto_filter", "emulate", "use_fast_accum", "fused_producers"]
            self.require_default(*names, unless="float8.enable_float8_linear")
        self.require(
            self.enable_float8_linear or not self.enable_fsdp_float8_all_gather,
            "enable_float8_linear",
            "true with float8.enable_fsdp_float8_all_gather",
            "weights of linears in high precision are gathered in high precision",
        )
        in_high_precision = [name for name in (self.recipe, *self.layer_recipes) if name.endswith(":high_precision")]
        self.require(
            not (in_high_precision and self.enable_fsdp_float8_all_gather),
            "enable_fsdp_float8_all_gather",
            f"false with the backward of {', '.join(in_high_precision)}",
            "weights in high precision are not gathered; float8.backward = dequantized reads the codes that are",
        )
        self.require(
            self.enable_fsdp_float8_all_gather or not self.precompute_float8_dynamic_scale_for_fsdp,
            "enable_fsdp_float8_all_gather",
            "true with float8.precompute_float8_dynamic_scale_for_fsdp",
            "the scales are those of weights that are gathered in float8",
        )
        self.require(
            self.enable_fsdp_float8_all_gather or not self.cast_weights_once,
            "enable_fsdp_float8_all_gather",
            "true with float8.cast_weights_once",
            "other shards are gathered in high precision",
        )
        self._check_delayed_scaling()

    def _check_serving(self) -> None:
        if not self.serving:
            return
        with reraise_as_input_error("float8."):
            get_serving_casts(self.serving)
        for recipe in (self.recipe_name, *self.parse_layer_recipes().layers.values()):
            if recipe == HIGH_PRECISION:
                continue
            setting_name = "recipe_name" if recipe == self.recipe_name else "layer_recipes"
            with reraise_as_input_error(f"float8.{setting_name}: "):
                served = serving_config(self.serving, recipe)
            hint = "a static scale is calibrated before the training"
            self.require(not served.has_persistent_scales, "serving", "an engine that scales dynamically", hint)

    @property
    def has_persistent_scales(self) -> bool:
        """Whether the recipe reuses scales from step to step."""
        return self.enable_float8_linear and _has_persistent_scales(self.recipe_name)

    @property
    def recipe(self) -> str:
        """The recipe with its `backward`, as `Float8LinearConfig.from_recipe_name` takes both."""
        return self.append_backward(self.recipe_name)

    @property
    def label(self) -> str:
        """The name of the run's precision in tables and records: "vllm-per-token+rowwise:dequantized"."""
        return f"{self.serving}+{self.recipe}" if self.serving else self.recipe

    def append_backward(self, recipe: str) -> str:
        """Return `recipe` with `backward` appended, unless it names a backward itself."""
        return canonicalize_recipe(recipe if ":" in recipe else f"{recipe}:{self.backward}")

    def parse_schedule(self) -> tuple[ScheduleEntry, ...]:
        """Return the entries of high_precision_schedule. Raises InputError."""
        with reraise_as_input_error("float8.high_precision_schedule must be "):
            return tuple(map(ScheduleEntry.parse, self.high_precision_schedule))

    def parse_layer_recipes(self) -> LayerRecipes:
        """Return the recipe of each layer. Raises InputError."""
        with reraise_as_input_error("float8.layer_recipes: "):
            return LayerRecipes.parse(self.recipe_name, self.layer_recipes)

    def make_delayed_scaling_config(self) -> DelayedScalingConfig:
        """Return the delayed_* settings. Raises InputError if one is out of range."""
        values = {field.name: getattr(self, f"delayed_{field.name}") for field in fields(DelayedScalingConfig)}
        try:
            return DelayedScalingConfig(**values)
        except ValueError as error:
            name, _, expected = str(error).partition(": expected ")
            raise InputError(f"float8.delayed_{name} must be {expected}") from error

    def _check_delayed_scaling(self) -> None:
        self.make_delayed_scaling_config()
        if not self.has_persistent_scales:
            names = [field.name for field in fields(self) if field.name.startswith("delayed_")]
            hint = f"set float8.enable_float8_linear and one of the recipes {DELAYED_RECIPES}"
            self.require_default(*names, unless="scaling is delayed", hint=hint)

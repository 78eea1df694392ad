"""The names of recipes, optionally with a `backward`: "rowwise", "rowwise:dequantized"."""

from __future__ import annotations

import enum

from quaver.foreign.torchao import convert_from_torchao
from quaver.runtime.errors import InputError
from quaver.runtime.module_names import suggest_name

BACKWARD_MODES = ("float8", "dequantized", "high_precision")
"""The values of `Float8LinearConfig.backward`."""


class Float8LinearRecipeName(enum.Enum):
    """The recipes by name; torchao's older names are accepted too."""

    TENSORWISE = "tensorwise"
    """One scale per tensor, e4m3 forward and e5m2 gradients. The fastest."""
    ROWWISE = "rowwise"
    """One power-of-two scale per row of each operand, e4m3 throughout. Robust to outliers."""
    ROWWISE_WITH_GW_HP = "rowwise_with_gw_hp"
    """rowwise, with grad_weight computed in high precision and a tensorwise weight in grad_input. The most
    accurate."""
    ROWWISE_WITH_TENSORWISE_WEIGHT = "rowwise_with_tensorwise_weight"
    """rowwise, with one scale per weight, so that FSDP2 gathers one byte per element instead of two."""
    DELAYED = "delayed"
    """tensorwise, with scales from the amaxes of earlier steps: each tensor is read once."""
    DELAYED_WITH_DYNAMIC_WEIGHT = "delayed_with_dynamic_weight"
    """delayed, with weights scaled dynamically: weights that were just loaded never saturate."""
    BLOCKWISE = "blockwise"
    """DeepSeek-V3's: weights in blocks of 128 x 128, input and grad_output in blocks of 1 x 128, e4m3 throughout,
    power-of-two scales. One cast of the weight serves both matmuls."""
    BLOCKWISE_WITH_GW_HP = "blockwise_with_gw_hp"
    """blockwise, with grad_weight computed in high precision."""
    MXFP8 = "mxfp8"
    """Blackwell's: weights in blocks of 32 x 32, input and grad_output in blocks of 1 x 32, e4m3 throughout, E8M0
    scales (RCEIL)."""
    MXFP8_WITH_GW_HP = "mxfp8_with_gw_hp"
    """mxfp8, with grad_weight computed in high precision."""

    @classmethod
    def _missing_(cls, value: object) -> Float8LinearRecipeName:
        aliases = {"all_tensorwise": cls.TENSORWISE, "axiswise": cls.ROWWISE, "all_axiswise": cls.ROWWISE}
        aliases |= {"lw_axiswise_with_gw_hp": cls.ROWWISE_WITH_GW_HP, "fp8_blockwise": cls.BLOCKWISE}
        aliases |= {"mxfp8_rceil": cls.MXFP8, "mxfp8_rceil_wgrad_with_hp": cls.MXFP8_WITH_GW_HP}
        if isinstance(value, str) and value in aliases:
            return aliases[value]
        accepted = convert_from_torchao(value, cls)
        if isinstance(accepted, cls):
            return accepted
        names = [name.value for name in cls]
        raise InputError(f"unknown recipe {value!r}: expected one of {', '.join(names)}{suggest_name(value, names)}")


def split_recipe(name: Float8LinearRecipeName | str) -> tuple[Float8LinearRecipeName, str]:
    """Split a name such as "rowwise:dequantized" into recipe and `backward`, which is "" if the name has none.

    Raises:
        InputError: the recipe or the `backward` is unknown; the message lists the choices.
    """
    recipe, colon, backward = name.partition(":") if isinstance(name, str) else (name, "", "")
    expected = f"one of {', '.join(BACKWARD_MODES)} after the :"
    if colon and backward not in BACKWARD_MODES:
        raise InputError(f"recipe {name!r}: expected {expected}, got {backward!r}")
    return Float8LinearRecipeName(recipe), backward


def canonicalize_recipe(name: Float8LinearRecipeName | str) -> str:
    """Return a recipe's name without aliases, with a `backward` only if it is not "float8".

    Raises:
        InputError: as `split_recipe`.
    """
    recipe, backward = split_recipe(name)
    return recipe.value if backward in ("", BACKWARD_MODES[0]) else f"{recipe.value}:{backward}"

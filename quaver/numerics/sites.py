"""Which matrices of a linear are observed, and in which row of its slots.

A linear has three operands, each with one cast for both of its matmuls or with one for each, and three results. A row
of the slots belongs to a pass: a compiled graph may write to a tensor in its forward or in its backward, not in both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from quaver.recipes.config import CastConfig, Float8LinearConfig
from quaver.recipes.linear_casts import OperandCasts

OPERANDS = ("input", "weight", "grad_output")
RESULTS = ("output", "grad_input", "grad_weight")


class Site(NamedTuple):
    """One matrix of a linear: an operand as one of its casts gives it, or a result."""

    operand: str
    cast: str
    """"row" or "column", "both" where one cast serves both matmuls, "result"."""

    @property
    def name(self) -> str:
        return f"{self.operand}.{self.cast}"


OUTPUT, GRAD_INPUT, GRAD_WEIGHT = (Site(result, "result") for result in RESULTS)

FORWARD = (
    *(Site(operand, cast) for operand in ("input", "weight") for cast in ("row", "column", "both")),
    OUTPUT,
)
BACKWARD = (
    *(Site("grad_output", cast) for cast in ("row", "column", "both")),
    Site("weight", "column"),
    GRAD_INPUT,
    GRAD_WEIGHT,
)


def sites_of(config: Float8LinearConfig, trains_weight: bool) -> list[Site]:
    """The sites that a linear with this config uses, in the order of a record."""
    sites = []
    for operand in OPERANDS:
        casts: OperandCasts = getattr(config.casts, operand)
        for name, cast in (("row", casts.row), ("column", casts.column)):
            if casts.has_one_set:
                name = "both"
            is_read = trains_weight or operand == "weight" or name != "column"
            if is_read and not cast.is_disabled and Site(operand, name) not in sites:
                sites.append(Site(operand, name))
    return [*sites, *(Site(result, "result") for result in RESULTS if trains_weight or result != "grad_weight")]


def describe(site: Site, config: Float8LinearConfig) -> dict[str, Any]:
    """The entry of a site in a record's header: operand, cast, granularity, dtype, scaling and recipe."""
    about: dict[str, Any] = {"operand": site.operand, "cast": site.cast, "granularity": "none", "block": None}
    about |= {"dtype": None, "scaling": None}
    if site.cast != "result":
        casts: OperandCasts = getattr(config.casts, site.operand)
        cast: CastConfig = casts.column if site.cast == "column" else casts.row
        about["granularity"] = cast.scaling_granularity.name.lower()
        about["dtype"] = str(cast.float8_dtype).removeprefix("torch.")
        about["scaling"] = cast.scaling_type.name.lower()
        if cast.block_size is not None:
            about["block"] = "x".join(map(str, cast.block_size))
    recipe = config.recipe_name
    return {**about, "recipe": recipe.value if recipe else config.short_str()}

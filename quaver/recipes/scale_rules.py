"""The scales of serving engines: rules by name, which `CastConfig.scale_rule` uses instead of quaver's own.

A rule computes two float32 numbers from an amax: a dequant_scale, and a multiplier for the codes. m is the largest
number of the format, RN rounds to float32, RNE8 to float8.

    amax          = max(amax, smallest_amax)

    equations     dequant_scale              multiplier                of
    scale         RN(amax / m)               RN(1 / dequant_scale)     vLLM, DeepGEMM, SGLang's tokens
    amax          RN(amax * RN(1 / m))       RN(m / amax)              SGLang's groups
    reciprocal    RN(1 / multiplier)         RN(m * RN(1 / amax))      transformers, SGLang's tensors: a number divided
                                                                       by a tensor in PyTorch

    dequant_scale = max(dequant_scale, smallest_scale); where rounds_up, 2^ceil(log2 of it); multiplier = 1 / it
    codes         = RNE8(clamp(RN(hp * multiplier), -m, m)); where divides, RNE8(clamp(RN(hp / dequant_scale), -m, m))

Non-finite values propagate in every rule, as in quaver's own. An inf makes the dequant_scale inf, and its code and the
results of its block NaN. A NaN makes all of them NaN. The CUDA kernels of the engines lose a NaN in `fmaxf` and
saturate an inf (docs/serving.md).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quaver.recipes.formats import FLOAT32_MANTISSA_MASK, get_format, round_to_float32
from quaver.runtime.slow_paths import report_slow_path
from quaver.torch_private.tracing import assume_constant_result


class ScaleRule(NamedTuple):
    """One rule; the top of the file has the equations."""

    equations: str = "scale"
    """ "scale", "amax" or "reciprocal"."""
    smallest_amax: float = 0.0
    smallest_scale: float = 0.0
    zero_scales: tuple[float, float] | None = None
    """The multiplier and the dequant_scale for an amax of 0; None to use the equations."""
    rounds_up: bool = False
    divides: bool = False
    in_hp_dtype: bool = False
    """Whether dequant_scale and quotient are also rounded to the dtype of hp. A dequant_scale of 0 is then replaced by
    the dtype's epsilon, and a quotient of -0 by 0."""

    @property
    def takes_dequant_scales(self) -> bool:
        """Whether the multiplier follows from the dequant_scale of a checkpoint."""
        return self.equations == "scale" and not (self.divides or self.rounds_up)


_VLLM = ScaleRule(smallest_scale=round_to_float32(1 / (448 * 512)))
_VLLM_GROUP = ScaleRule(smallest_amax=round_to_float32(1e-10), divides=True)
_SGLANG_GROUP = ScaleRule("amax", smallest_amax=round_to_float32(1e-10))
_DEEPGEMM = ScaleRule(smallest_amax=round_to_float32(1e-4))
_TRANSFORMERS = ScaleRule("reciprocal", zero_scales=(1.0, 1.0))

SCALE_RULES: dict[str, ScaleRule] = {
    "vllm": _VLLM,
    "vllm-kernel": _VLLM._replace(divides=True),
    "vllm-group": _VLLM_GROUP,
    "vllm-group-ue8m0": _VLLM_GROUP._replace(smallest_scale=round_to_float32(1e-10), rounds_up=True),
    "sglang": ScaleRule(zero_scales=(0.0, 0.0)),
    "sglang-tensor": ScaleRule("reciprocal", smallest_amax=round_to_float32(1e-12)),
    "sglang-group": _SGLANG_GROUP,
    "sglang-group-ue8m0": _SGLANG_GROUP._replace(rounds_up=True),
    "deepgemm": _DEEPGEMM,
    "deepgemm-ue8m0": _DEEPGEMM._replace(rounds_up=True),
    "transformers": _TRANSFORMERS,
    "transformers-ue8m0": _TRANSFORMERS._replace(smallest_scale=2.0**-126, rounds_up=True),
    "transformers-group": ScaleRule(smallest_scale=round_to_float32(1e-12), divides=True),
    "compressed-tensors": ScaleRule(divides=True, in_hp_dtype=True),
}
"""The rules by name; docs/serving.md lists the function of the engine that each rule follows."""


def check_rule(rule: str) -> None:
    """Raise ValueError unless `rule` is in `SCALE_RULES`, "rceil" or "floor" (for blocks), or "" for quaver's rule."""
    if rule not in ("", "rceil", "floor", *SCALE_RULES):
        raise ValueError(f"rule: expected '', 'rceil', 'floor' or one of {', '.join(SCALE_RULES)}; got {rule!r}")


def get_rule(rule: str) -> ScaleRule:
    """Return the equations of a rule in `SCALE_RULES`, or the default `ScaleRule` for other rules."""
    return ScaleRule(*_get_fields(rule))


def divides(rule: str) -> bool:
    """Return whether codes are quotients by the dequant_scale under a rule, instead of products."""
    return bool(rule) and get_rule(rule).divides


def has_cast_kernel(rule: str) -> bool:
    """Return whether kernels implement a rule. None computes in the dtype of hp."""
    return not rule or not get_rule(rule).in_hp_dtype


def report_missing_kernel(rule: str) -> None:
    """Report once that casts by this rule run in PyTorch, unless `has_cast_kernel`. Compiled code needs no kernel."""
    if not (torch.compiler.is_dynamo_compiling() or has_cast_kernel(rule)):
        report_slow_path(
            f"casts by the rule {rule}",
            f"float8 casts by the scale_rule {rule} run in PyTorch: no kernel implements it",
        )


@assume_constant_result  # [Note: floats under dynamic shapes] in scaling.py
def _get_fields(rule: str) -> tuple[object, ...]:
    return tuple(SCALE_RULES.get(rule, ScaleRule()))


@assume_constant_result
def _get_largest(float8_dtype: torch.dtype) -> float:
    return get_format(float8_dtype).max


def compute_scales_by_rule(amax: Tensor, float8_dtype: torch.dtype, rule: str) -> tuple[Tensor, Tensor]:
    """Compute the multipliers and the dequant_scales, float32, for amaxes in the dtype of hp.

    Quotients are computed in float64 and rounded: see [Note: one division, two formulas] in scaling.py.
    """
    scale_rule, largest, hp_dtype = get_rule(rule), _get_largest(float8_dtype), amax.dtype
    clamped = amax.double().clamp(min=scale_rule.smallest_amax)
    if scale_rule.equations == "reciprocal":
        quant = (1.0 / clamped).float() * largest
        dequant = (1.0 / quant.double()).float()
    elif scale_rule.equations == "amax":
        quant, dequant = (largest / clamped).float(), (clamped * round_to_float32(1 / largest)).float()
    else:
        dequant = (clamped / largest).float()
        if scale_rule.in_hp_dtype:
            dequant = dequant.to(hp_dtype).float()
            dequant = torch.where(dequant == 0, torch.finfo(hp_dtype).eps, dequant)
        dequant = dequant.clamp(min=scale_rule.smallest_scale)
        quant = (1.0 / dequant.double()).float()
    if scale_rule.rounds_up:
        dequant = round_up_to_power_of_2(dequant.clamp(min=scale_rule.smallest_scale))
        quant = (1.0 / dequant.double()).float()
    if scale_rule.zero_scales is not None:
        is_zero = amax == 0
        quant = torch.where(is_zero, scale_rule.zero_scales[0], quant)
        dequant = torch.where(is_zero, scale_rule.zero_scales[1], dequant)
    return quant, dequant


def invert_twice(quant_scale: Tensor) -> Tensor:
    """Return RN(1 / RN(1 / quant_scale)), float32: the multiplier of an engine that reads RN(1 / quant_scale).

    It differs from quant_scale by an ulp for 17% of the mantissas. Its reciprocal is the number that the engine reads.
    """
    # The clamp keeps a compiler from dropping the rounding to float32; see `amax_to_quant_scale` in scaling.py.
    return (1.0 / (1.0 / quant_scale.double()).float().clamp(min=0).double()).float()


def round_up_to_power_of_2(scale: Tensor) -> Tensor:
    """Round normal float32 numbers up to powers of two; inf and NaN are unchanged."""
    rounded = (scale.view(torch.int32) + FLOAT32_MANTISSA_MASK).bitwise_and(~FLOAT32_MANTISSA_MASK).view(torch.float32)
    return torch.where(scale < torch.inf, rounded, scale)

"""`freeze_to_float8`: the base of a fine-tuned model, stored once in float8, for adapters that train on top of it.

    output      = input       @ codes.t()     the codes and scales that are stored
    grad_input  = grad_output @ codes         the same ones; grad_weight does not exist

The weights are `FrozenFloat8Weight`s (weights/frozen.py): one byte per element and scales. Tensorwise and blockwise
codes serve both matmuls. Row-wise scales run along the contracted dim of grad_input, so there the weight is dequantized
inside the exact matmul (gemm.py): a second cast would give the backward other weights than the forward.
"""

from __future__ import annotations

import logging
import typing
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from quaver.class_change import float8_class
from quaver.config import (
    Float8LinearConfig,
    Float8LinearRecipeName,
    ScaleCalculationMode,
    resolve_config,
)
from quaver.conversion_report import obstacle_of, owners_of_weights
from quaver.convert import (
    FilterDecision,
    ModuleFilter,
    convert_to_float8_training,
    to_float8,
)
from quaver.distributed.weight_scales import local_weight
from quaver.experts.module import is_experts
from quaver.formats import FORMATS, HP_DTYPES
from quaver.linear import Float8Linear
from quaver.quantize import Quantizer, present
from quaver.scaling import amax
from quaver.weights.frozen import FrozenFloat8Weight
from quaver.weights.module_weight import first_names

logger = logging.getLogger(__name__)

SCALE = "weight_dequant_scale"
"""The name of the scales in a state_dict, next to `weight`, the codes."""


class FrozenFloat8Linear(Float8Linear):
    """A Float8Linear whose weight is stored in float8; `freeze_to_float8` makes it.

    Its state_dict holds plain tensors: `weight`, the float8 codes, and `weight_dequant_scale`. It loads those, and a
    weight in high precision, which it quantizes.
    """

    @property
    def weight_dequant_scale(self) -> Tensor:
        """float32, (), [N, 1] or one a block; of the whole weight, also where FSDP2 shards it."""
        return self._stored().dequant_scale

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        local = self._stored()
        if keep_vars or not isinstance(local, FrozenFloat8Weight):
            return
        destination[prefix + "weight"] = _as(self.weight, local.data_fp8)
        destination[prefix + SCALE] = local.dequant_scale

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool, *lists: list[str]
    ) -> None:
        state_dict = dict(state_dict)
        weight, scale = state_dict.get(prefix + "weight"), state_dict.pop(prefix + SCALE, None)
        try:
            if weight is not None and isinstance(self._stored(), FrozenFloat8Weight):
                state_dict[prefix + "weight"] = self._loadable(weight, scale)
        except ValueError as error:
            lists[-1].append(f"{prefix}weight: {error}")
            del state_dict[prefix + "weight"]
            strict = False
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, *lists)

    def _stored(self) -> FrozenFloat8Weight:
        """The weight, or this rank's shard of it."""
        return typing.cast(FrozenFloat8Weight, local_weight(self))

    def _loadable(self, weight: Tensor, scale: Tensor | None) -> Tensor:
        """What a state_dict holds, as a frozen weight like this linear's."""
        own, local = self._stored(), weight.to_local() if isinstance(weight, DTensor) else weight
        if isinstance(local, FrozenFloat8Weight):
            return weight
        if local.dtype not in FORMATS:
            if scale is not None or own.is_part or local.shape != own.shape:
                expected = f"expected float8 codes {list(self.weight.shape)} and {SCALE}"
                raise ValueError(f"{expected}, got {weight.dtype} {list(weight.shape)}")
            quantized = typing.cast(FrozenFloat8Weight, own.clone())
            quantized.write(local)
            return quantized
        if scale is None or scale.shape != own.dequant_scale.shape:
            got = "none" if scale is None else str(list(scale.shape))
            raise ValueError(f"expected {SCALE} {list(own.dequant_scale.shape)} with float8 codes, got {got}")
        return _as(weight, own.like(local, scale, part=isinstance(weight, DTensor)))


def _as(weight: Tensor, local: Tensor) -> Tensor:
    """`local` as a DTensor where `weight` is one."""
    if not isinstance(weight, DTensor):
        return local
    layout = weight.device_mesh, weight.placements
    return DTensor.from_local(local, *layout, run_check=False, shape=weight.shape, stride=weight.stride())


# ---- freezing --------------------------------------------------------------------------------------------------------


def blockwise_config(*, power_of_2: bool = True) -> Float8LinearConfig:
    """The recipe `blockwise`, with another rounding of its scales.

    `power_of_2`: scales that are powers of two, so that the exact matmul runs on bfloat16 units; off for the float32
    scales of DeepSeek's and Qwen's checkpoints.
    """
    config = Float8LinearConfig.from_recipe_name(Float8LinearRecipeName.BLOCKWISE)
    return replace(config, round_scales_to_power_of_2=power_of_2)


_LINEARS_ALONE = "freeze_to_float8 stores the weights of linears alone"


def freeze_to_float8(
    module: nn.Module,
    config: Float8LinearConfig | Float8LinearRecipeName | str | None = None,
    *,
    module_filter_fn: ModuleFilter | None = None,
    include_subclasses: bool = False,
) -> nn.Module:
    """Store the weight of every `nn.Linear` of `module` in float8, in place; it does not train any more.

    Call it on the loaded model, before adapters, `fully_shard`, DistributedDataParallel or `torch.compile`. Weights
    keep their shape and dtype outside; biases and other modules stay as they are, and so do experts, which a WARNING
    names. All weights are checked before the first is changed. `conversion_report(module)` lists each layer.

    Args:
        module: a model in high precision, on any device.
        config: "blockwise" (the default), "mxfp8", "tensorwise", "rowwise", another recipe with one weight cast, or a
            config. `enable_fsdp_float8_all_gather` has no effect: frozen codes are all-gathered as they are.
        module_filter_fn: called with each linear and its name; false leaves it in high precision.
        include_subclasses: as for `convert_to_float8_training`.
    Returns:
        `module`.
    Raises:
        ValueError: a config that scales delayed or statically, casts a weight in two ways or has E8M0 scales by FLOOR;
            a weight that holds NaN or inf, is tied, sharded, on the meta device or of another dtype; linears of which
            only some train.
        TypeError: `config` or `module` is of another type.
    """
    config = _resolved(config)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected an nn.Module, got {type(module).__name__}")
    linears = {name: each for name, each in module.named_modules() if isinstance(each, nn.Linear)}
    decisions: dict[str, bool | FilterDecision] = {
        name: module_filter_fn(linear, name) if module_filter_fn else True for name, linear in linears.items()
    }
    chosen = {
        name: linear
        for name, linear in linears.items()
        if decisions[name]
        and not obstacle_of(linear, include_subclasses)
        and not (isinstance(linear, FrozenFloat8Linear) and linear.config == config)
    }
    problem = next(_problems(chosen, owners_of_weights(module)), None)
    if problem is not None:
        raise ValueError(problem)
    experts = [name for name, each in module.named_modules() if is_experts(each)]
    if experts:
        logger.warning("%s; experts stay as they are: %s", _LINEARS_ALONE, first_names(experts))
    decisions |= dict.fromkeys(experts, FilterDecision(False, _LINEARS_ALONE))
    convert_to_float8_training(
        module,
        config=config,
        module_filter_fn=lambda each, name: decisions[name],
        include_subclasses=include_subclasses,
    )
    for linear in chosen.values():
        weight = linear.weight
        quantizer = Quantizer(config.casts.weight, weight.dtype)
        codes, scale, _ = present(quantizer(weight.detach(), row=True, column=False).row)
        store_float8_weight(linear, codes, typing.cast(Tensor, scale), config=config, dtype=weight.dtype)
        del weight  # its memory goes before the next is quantized
    return module


def store_float8_weight(
    linear: nn.Linear, codes: Tensor, dequant_scale: Tensor, *, config: Float8LinearConfig, dtype: torch.dtype
) -> None:
    """Freeze one linear, in place, with codes and scales from a checkpoint: what an import calls.

    Args:
        linear: an nn.Linear, which may be on the meta device, or a Float8Linear with this config.
        codes, dequant_scale: float8 [N, K] and float32 (), [N, 1] or one a block of `config`; kept, not copied.
        config: how activations and gradients are cast. Its `round_scales_to_power_of_2` promises that every
            dequant_scale is a power of two.
        dtype: the high-precision dtype that the weight presents.
    Raises:
        ValueError: operands that do not fit each other, the linear or the config.
    """
    frozen = FrozenFloat8Weight.from_codes(codes, dequant_scale, dtype)
    expected = config.casts.weight.row.granularity
    if frozen.shape != linear.weight.shape or (frozen.granularity != expected and dequant_scale.numel() > 1):
        got = f"{frozen.granularity} {list(frozen.shape)}"
        raise ValueError(f"expected a {expected} weight of {list(linear.weight.shape)}, got {got}")
    fmt = FORMATS[codes.dtype]
    no_numbers = torch.tensor(fmt.nan_codes + fmt.infinity_codes, dtype=torch.uint8, device=codes.device)
    if bool(torch.isin(codes.view(torch.uint8), no_numbers).any()):
        raise ValueError("expected finite codes, got NaN or inf")
    if not bool(((dequant_scale > 0) & dequant_scale.isfinite()).all()):
        raise ValueError("expected finite dequant_scales above 0")
    if config.round_scales_to_power_of_2 and not frozen.has_power_of_2_scales:
        raise ValueError("expected scales that are powers of two, as config.round_scales_to_power_of_2 promises")
    if not isinstance(linear, Float8Linear):
        to_float8(linear, config)
    linear.weight = nn.Parameter(frozen, requires_grad=False)
    linear.__class__ = float8_class(typing.cast(Any, linear)._converted_from, FrozenFloat8Linear)


def _resolved(config: Float8LinearConfig | Float8LinearRecipeName | str | None) -> Float8LinearConfig:
    config = resolve_config("blockwise" if config is None else config)
    weight = config.casts.weight
    if config.has_persistent_scales:
        raise ValueError(f"freeze_to_float8 scales dynamically: expected no delayed or static scaling, got {config}")
    if not weight.is_one or weight.row.is_disabled:
        raise ValueError(
            "freeze_to_float8 stores a weight once: expected one float8 cast for both of its matmuls, got "
            f"{weight.row} for output, {weight.column} for grad_input"
        )
    if weight.row.scale_calculation_mode is ScaleCalculationMode.FLOOR:
        raise ValueError(
            f"a frozen weight is quantized so that nothing saturates: expected the scales of RCEIL, got {weight.row}"
        )
    return replace(config, enable_fsdp_float8_all_gather=False)


def _problems(chosen: dict[str, nn.Linear], owners: dict[int, list[str]]) -> Iterator[str]:
    """Why the first linear that cannot be frozen cannot."""
    training = [name for name, linear in chosen.items() if linear.weight.requires_grad]
    if 0 < len(training) < len(chosen):
        yield (
            f"{training[0]} requires a gradient and other linears do not: call freeze_to_float8 before adapters are "
            "added, or filter out what trains (module_filter_fn)"
        )
    for name, linear in chosen.items():
        weight = linear.weight
        if problem := obstacle_to_storing(name, linear, owners):
            yield problem
        elif weight.is_meta:
            yield f"the weight of {name} is on the meta device; load it first"
        elif not bool(amax(weight.detach()).isfinite()):
            yield f"the weight of {name} holds NaN or inf"


def obstacle_to_storing(name: str, linear: nn.Linear, owners: dict[int, list[str]]) -> str:
    """Why the weight of `linear` cannot be replaced with float8 codes; "" where it can."""
    weight = linear.weight
    tied = [owner for owner in owners.get(id(weight), []) if owner != name]
    if type(weight) is not nn.Parameter:
        return f"the weight of {name} is a {type(weight).__name__}; freeze before fully_shard and other wrappers"
    if weight.dtype not in HP_DTYPES:
        return f"the weight of {name}: expected {', '.join(map(str, HP_DTYPES))}, got {weight.dtype}"
    if tied:
        return (
            f"the weight of {name} is tied to {', '.join(tied)}, so it cannot be stored in float8; untie them, or "
            "filter the layer out (module_filter_fn)"
        )
    return ""

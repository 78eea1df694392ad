"""The module swap: `nn.Linear` to `Float8Linear` in place, a report of every matmul weight, and the exact way back."""

from __future__ import annotations

import functools
import logging
import re
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any, SupportsIndex, cast

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from quaver.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.delayed import add_persistent_scales
from quaver.distributed.fsdp import (
    Float8AllGatherWeight,
    is_all_gather_weight,
    make_all_gather_weights,
    restore_plain_weight,
)
from quaver.distributed.weight_scales import local_weight
from quaver.formats import FORMATS
from quaver.frozen_weight import FrozenFloat8Weight
from quaver.linear import OWN_ATTRIBUTES, Float8Linear
from quaver.scale_state import LinearScales

logger = logging.getLogger(__name__)

_FILTER_REASON = "_float8_filter_reason"
"""The attribute of a linear that holds the filter's reason; a report computes everything else when it is made."""


@dataclass(frozen=True)
class FilterDecision:
    """What a filter may return instead of a bool: the decision and the reason for the report."""

    convert: bool
    reason: str

    def __bool__(self) -> bool:
        return self.convert


ModuleFilter = Callable[[nn.Module, str], "bool | FilterDecision"]
"""Takes a linear and its fully qualified name; says whether to convert it."""


@dataclass(frozen=True)
class LayerReport:
    """One matmul weight of the model: whether its matmuls run in float8, and why (or why not).

    Attributes:
        name: of the linear, or of the parameter where the weight belongs to another module.
        in_features, out_features: the last two dims of the weight; it may be a stack of such matrices.
    """

    name: str
    in_features: int
    out_features: int
    converted: bool
    reason: str

    @property
    def flops_per_token(self) -> int:
        """Of the three matmuls with one [out_features, in_features] matrix, a multiply and an add counted apart."""
        return 6 * self.in_features * self.out_features


@dataclass(frozen=True)
class ConversionReport:
    """Every matmul weight of a model, converted or skipped and why.

    Attributes:
        config: the configs of the float8 linears, one a line.
        notes: what the user should know about these configs.
        convolutions: how many convolutions the model has. They stay in high precision, and `float8_flops_fraction` does
            not count them, because their FLOPs depend on the size of the input.
    """

    config: str
    layers: list[LayerReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    convolutions: int = 0

    @property
    def converted(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.converted]

    @property
    def skipped(self) -> list[LayerReport]:
        return [layer for layer in self.layers if not layer.converted]

    @property
    def float8_flops_fraction(self) -> float:
        """The share of the matmul FLOPs with these weights that runs in float8 linears."""
        total = sum(layer.flops_per_token for layer in self.layers)
        return sum(layer.flops_per_token for layer in self.converted) / total if total else 0.0

    def why_nothing(self) -> str:
        """One line, for a model of which nothing was converted."""
        if not self.layers:
            return "nothing to convert: the module has no nn.Linear"
        reasons = [f"{layer.name}: {layer.reason}" for layer in self.layers]
        return f"nothing to convert: all {len(reasons)} matmul weights were skipped ({_first(reasons, '; ')})"

    def summary(self) -> str:
        """One line."""
        plural = "s" if self.convolutions > 1 else ""
        uncounted = f"; {self.convolutions} convolution{plural} in high precision" if self.convolutions else ""
        return (
            f"{len(self.converted)} of {len(self.layers)} matmul weights in float8, "
            f"{self.float8_flops_fraction:.1%} of their FLOPs{uncounted}"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "float8_flops_fraction": self.float8_flops_fraction}

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=4)
        rows = [
            f"{layer.name:<{width}}  {layer.in_features:>6} -> {layer.out_features:<6}  "
            f"{'float8' if layer.converted else 'skipped':<7}  {layer.reason}".rstrip()
            for layer in self.layers
        ]
        return "\n".join([self.summary(), self.config, *self.notes, *rows])


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | Float8LinearRecipeName | str | None = None,
    module_filter_fn: ModuleFilter | None = None,
    include_subclasses: bool = False,
) -> nn.Module:
    """Make every `nn.Linear` of `module` a `Float8Linear`, in place. An error leaves the module as it was.

    Modules keep their identity, parameters, hooks, attributes and training mode; subclasses of `nn.Linear` that do not
    override `forward` keep all but that. With delayed or static scaling the linears of one call share one state
    (scale_state.py); call `sync_float8_amax_and_scale_history(model)` once a step. With
    `enable_fsdp_float8_all_gather` the weights become new parameters around the same memory: convert before
    `fully_shard`, and make the optimizer after both. `conversion_report(module)` lists each layer.

    A second call leaves converted layers alone; those that its filter admits must have its config.

    Args:
        module: any module, or an `nn.Linear` itself.
        config: a config, a recipe or a recipe's name; None for the tensorwise recipe.
        module_filter_fn: called with each linear and its fully qualified name; false leaves it in high precision. It
            may return a `FilterDecision`, whose reason goes to the report.
        include_subclasses: also convert subclasses of `nn.Linear` that override `forward`; their forward is not called.
    Returns:
        `module`. A UserWarning says why if nothing was converted; linears that the filter admits but that cannot be
        converted are logged at WARNING.
    Raises:
        ValueError: an unknown recipe, an admitted layer that is converted under another config, or a weight to gather
            in float8 that is tied to another module's.
        TypeError: `config` or `module` is of another type.
    """
    config = resolve_config(config)
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: expected an nn.Module, got {type(module).__name__}")
    chosen: list[tuple[str, nn.Linear]] = []
    reasons: list[tuple[nn.Linear, str]] = []
    missed: dict[str, list[str]] = {}
    owners = owners_of_weights(module)
    for name, linear in module.named_modules():
        if not isinstance(linear, nn.Linear):
            continue
        decision = module_filter_fn(linear, name) if module_filter_fn else True
        if not isinstance(decision, FilterDecision):
            decision = FilterDecision(bool(decision), "" if decision else "filter")
        obstacle = obstacle_of(linear, include_subclasses) if decision else ""
        if not isinstance(linear, Float8Linear):
            reasons.append((linear, "" if obstacle else decision.reason))
        if obstacle:
            missed.setdefault(obstacle, []).append(name or "the module")
        elif decision:
            _check_can_convert(linear, name, config, [x for x in owners.get(id(linear.weight), []) if x != name])
            chosen.append((name, linear))
    _convert(module, chosen, config)
    for linear, reason in reasons:
        vars(linear).pop(_FILTER_REASON, None)
        vars(linear).update({_FILTER_REASON: reason} if reason else {})
    _tell(conversion_report(module), bool(chosen), missed)
    return module


def convert_to_high_precision(module: nn.Module) -> nn.Module:
    """Make every `Float8Linear` of `module` the `nn.Linear` that it was, in place. An error leaves it as it was.

    `module` may be, or contain, a wrapper such as DistributedDataParallel, torch.compile's or PEFT's. Weights that
    were prepared for a float8 all-gather become new parameters: make the optimizer after it. Returns `module`.

    Raises:
        RuntimeError: a linear cannot be converted back: `fully_shard` gathers its weight in float8,
            DistributedDataParallel holds a weight that was prepared for that, or its class was changed since.
    """
    linears = [(name, each) for name, each in module.named_modules() if isinstance(each, Float8Linear)]
    has_ddp = any(isinstance(each, nn.parallel.DistributedDataParallel) for each in module.modules())
    for name, linear in linears:
        _check_way_back(linear, name, has_ddp)
    for _, linear in linears:
        restore_plain_weight(linear)
        before, cls = type(linear), type(_to_linear(linear))
        if issubclass(before, FSDPModule):  # fully_shard(linear) put it in front of the linear's own class
            namespace = {"__deepcopy__": vars(before)["__deepcopy__"]}
            linear.__class__ = type(f"FSDP{cls.__name__}", (FSDPModule, cls), namespace)
    for each in module.modules():
        vars(each).pop(_FILTER_REASON, None)
    return module


def conversion_report(module: nn.Module) -> ConversionReport:
    """What of `module` runs in float8 now: every matmul weight, converted or skipped and why.

    It is computed from the modules as they are at the call: it holds for wrapped models (under the wrapper's names),
    submodules, copies, and layers that were replaced or made by hand. Weights of modules other than `nn.Linear` are
    found by shape and name: 2-D and 3-D parameters but those of embeddings, convolutions, norms and the like.
    """
    layers: list[LayerReport] = []
    configs: dict[str, None] = {}
    notes: dict[str, None] = {}
    scale_owners: dict[tuple[int, int], str] = {}
    owners = owners_of_weights(module)
    for name, child in module.named_modules():
        if not isinstance(child, nn.Linear):
            layers += _other_matmul_weights(child, name, owners)
            continue
        converted, said = isinstance(child, Float8Linear), vars(child).get(_FILTER_REASON, "")
        if isinstance(child, Float8Linear):
            configs[str(child.config)] = None
            notes.update(dict.fromkeys(_notes(child.config)))
            tied = [owner for owner in owners.get(id(child._parameters.get("weight")), []) if owner != name]
            ties = f"weight tied to {', '.join(tied)}" if tied else ""
            shares = _shared_input_scale(child, name, scale_owners)
            reason = "; ".join(filter(None, [said, ties, shares, _stored(child), *unfinished(child)]))
        else:
            reason = said or obstacle_of(child, False) or "not converted, or new since the conversion"
        layers.append(LayerReport(name, child.in_features, child.out_features, converted, reason))
    convolutions = sum(isinstance(each, _ConvNd) for each in module.modules())
    return ConversionReport("\n".join(configs), layers, list(notes), convolutions)


# ---- the decision ----------------------------------------------------------------------------------------------------


def obstacle_of(linear: nn.Linear, include_subclasses: bool) -> str:
    """Why `linear` cannot be converted; "" where it can, or is."""
    cls = type(linear)
    if isinstance(linear, Float8Linear):
        return ""
    if "forward" in vars(linear):
        return "its forward was replaced on the instance (by an Accelerate hook or a tp_plan, say): convert before that"
    if isinstance(linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "its parent reads the weight without calling the module (nn.MultiheadAttention)"
    if parametrize.is_parametrized(linear):
        return "it is parametrized (torch.nn.utils.parametrize): remove the parametrization first"
    if linear._parameters.get("weight") is None:
        return "its weight is no parameter but computed (weight_norm, spectral_norm, pruning) or flattened (FSDP1)"
    if cls.forward is not nn.Linear.forward and not include_subclasses:
        return f"subclass {cls.__name__} of nn.Linear overrides forward (include_subclasses=True replaces its forward)"
    if isinstance(linear, nn.LazyLinear):
        return "a LazyLinear without a shape: run a forward, or initialize_parameters, before the conversion"
    if linear.in_features == 0 or linear.out_features == 0:
        return "shape: a feature dimension is 0"
    taken = [name for name in OWN_ATTRIBUTES if hasattr(linear, name)]
    return f"it has attributes of its own that Float8Linear needs: {', '.join(taken)}" if taken else ""


def _check_can_convert(linear: nn.Linear, name: str, config: Float8LinearConfig, tied: list[str]) -> None:
    if isinstance(linear, Float8Linear) and linear.config != config:
        raise ValueError(
            f"{name or 'the module'} is already converted, with another config ({linear.config}); filter it out, or "
            "call convert_to_high_precision first"
        )
    if tied and config.enable_fsdp_float8_all_gather:
        raise ValueError(
            f"the weight of {name} is tied to {', '.join(tied)}, so it cannot be gathered in float8; "
            "untie them, filter the layer out, or turn enable_fsdp_float8_all_gather off"
        )


def _convert(module: nn.Module, chosen: list[tuple[str, nn.Linear]], config: Float8LinearConfig) -> None:
    """Convert the chosen linears, all or none; of those that are Float8Linears, set up what is missing."""
    with ExitStack() as undo:
        converted: list[tuple[str, Float8Linear]] = []
        for name, linear in chosen:
            if not isinstance(linear, Float8Linear):
                undo.callback(_to_linear, to_float8(linear, config))
            converted.append((name, linear))  # type: ignore[arg-type]
        stateless = [(name, linear) for name, linear in converted if linear.scaling is None]
        plain = [(name, linear) for name, linear in converted if not is_all_gather_weight(linear)]
        for _, linear in stateless:
            undo.callback(setattr, linear, "scaling", None)
        for _, linear in plain:
            undo.callback(linear.register_parameter, "weight", linear._parameters.get("weight"))
            undo.callback(restore_plain_weight, linear)
        add_persistent_scales(module, stateless, config)
        if config.enable_fsdp_float8_all_gather:
            make_all_gather_weights(plain)
        undo.pop_all()


def _check_way_back(linear: Float8Linear, name: str, has_ddp: bool) -> None:
    local = local_weight(linear)
    if isinstance(local, FrozenFloat8Weight) and local is not linear.weight:
        obstacle = "fully_shard shards its frozen float8 weight"
    elif is_all_gather_weight(linear) and not isinstance(linear.weight, Float8AllGatherWeight):
        obstacle = "fully_shard gathers its weight in float8"
    elif is_all_gather_weight(linear) and has_ddp:
        obstacle = "DistributedDataParallel holds its weight, which was prepared for a float8 all-gather"
    elif type(linear).forward is not Float8Linear.forward or parametrize.is_parametrized(linear):
        obstacle = f"its class was changed to {type(linear).__name__} (by checkpointing or a parametrization, say)"
    else:
        return
    raise RuntimeError(f"{name or 'the module'} cannot be converted back: {obstacle}; convert back before that")


def _tell(report: ConversionReport, found: bool, missed: dict[str, list[str]]) -> None:
    logger.info(report.summary())
    for note in report.notes:
        logger.warning(note)
    for obstacle, names in missed.items():
        logger.warning("%d linears stay in high precision (%s): %s", len(names), _first(names), obstacle)
    if not found:
        warnings.warn(report.why_nothing(), stacklevel=3)


def _first(names: list[str], separator: str = ", ") -> str:
    return separator.join(names[:3] + [f"and {len(names) - 3} more"] * (len(names) > 3))


# ---- [Note: a change of class] ---------------------------------------------------------------------------------------
# The class of a module changes, not the object, so every reference to it stays valid: a second parent's, a hook's, an
# optimizer's name map. The way back is exact for the same reason.


def to_float8(linear: nn.Linear, config: Float8LinearConfig) -> Float8Linear:
    """Turn `linear` itself into a Float8Linear: same object, parameters, hooks and attributes."""
    converted_from = type(linear)
    linear.__class__ = float8_class(converted_from, Float8Linear)  # type: ignore[arg-type]
    float8 = cast(Float8Linear, linear)
    float8.set_up(config, converted_from)
    return float8


def _to_linear(linear: Float8Linear) -> nn.Linear:
    """Turn `linear` back into what it was converted from: same object, parameters, hooks and attributes."""
    linear.__class__ = linear._converted_from  # type: ignore[assignment]
    for name in OWN_ATTRIBUTES:
        delattr(linear, name)
    return linear


@functools.cache
def float8_class(cls: type[nn.Linear], float8: type[Float8Linear]) -> type[Float8Linear]:
    """The class of a converted `cls`: `float8` for nn.Linear, and for a subclass of it one of both.

    `float8` comes first: forward is its own, and everything else that `cls` defines stays.
    """
    if cls is nn.Linear:
        return float8
    name = f"{float8.__name__.removesuffix('Linear')}{cls.__name__}"
    namespace = {"__module__": cls.__module__, "__reduce_ex__": _reduce_of_both}
    return types.new_class(name, (float8, cls), exec_body=lambda body: body.update(namespace))


def _reduce_of_both(self: Float8Linear, protocol: SupportsIndex) -> Any:
    """pickle finds a class by its name; a class that `_float8_class` makes has none, and is made again instead."""
    float8 = type(self).__mro__[1]
    if not issubclass(float8, Float8Linear) or type(self) is not float8_class(self._converted_from, float8):  # type: ignore[arg-type]
        return object.__reduce_ex__(self, protocol)
    return _new_of_both, (self._converted_from, float8), self.__getstate__()


def _new_of_both(cls: type[nn.Linear], float8: type[Float8Linear] = Float8Linear) -> Float8Linear:
    return object.__new__(float8_class(cls, float8))  # type: ignore[arg-type]


# ---- the report ------------------------------------------------------------------------------------------------------


def _stored(linear: Float8Linear) -> str:
    """How a frozen weight is stored, and what an adapter that was merged into it lost."""
    weight = local_weight(linear)
    if not isinstance(weight, FrozenFloat8Weight):
        return ""
    merged = weight.requantized_sqnr_db
    written = "" if merged is None else f", quantized again after a write at {merged:.1f} dB SQNR"
    return f"frozen, stored in {weight.granularity} {FORMATS[weight.data_fp8.dtype].name}{written}"


def unfinished(linear: Float8Linear) -> Iterator[str]:
    """What keeps a Float8Linear from doing what its config says."""
    if "forward" in vars(linear):
        yield "its forward was replaced on the instance after the conversion: float8 only if that calls the original"
    if linear.config.enable_fsdp_float8_all_gather and not is_all_gather_weight(linear):
        yield "gathered in high precision until convert_to_float8_training has prepared its weight"
    if linear.config.has_persistent_scales and linear.scaling is None:
        yield "cannot run until convert_to_float8_training has made the state of its scales"


def _notes(config: Float8LinearConfig) -> Iterator[str]:
    if config.enable_fsdp_float8_all_gather and any(cast.is_rowwise for cast in config.casts[2:4]):
        yield (
            "enable_fsdp_float8_all_gather: both casts of a row-wise weight are gathered, 2 bytes per element as in "
            "bfloat16; the row-wise recipe for FSDP2 is rowwise_with_tensorwise_weight (1 byte)"
        )


def _shared_input_scale(linear: Float8Linear, name: str, owners: dict[tuple[int, int], str]) -> str:
    """Says which linear before it has the persistent scale of its input, if one has."""
    if not isinstance(linear.scaling, LinearScales) or linear.scaling.rows[0] is None:
        return ""
    owner = owners.setdefault((id(linear.scaling.state), linear.scaling.rows[0]), name)
    return "" if owner == name else f"input scale of {owner}"


_NO_MATMULS = (nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd, parametrize.ParametrizationList)
_NO_WEIGHTS = re.compile("norm|embed|bias|token|position|scale", re.IGNORECASE)


def _other_matmul_weights(module: nn.Module, name: str, owners: dict[int, list[str]]) -> Iterator[LayerReport]:
    """The parameters of a module other than nn.Linear that matmuls read, by their shape and name."""
    kind = type(module).__name__
    for leaf, parameter in module.named_parameters(recurse=False):
        tied = any(owner != name for owner in owners.get(id(parameter), []))
        if isinstance(module, _NO_MATMULS) or _NO_WEIGHTS.search(f"{kind}.{leaf}") or tied:
            continue
        if not nn.parameter.is_lazy(parameter) and parameter.dim() in (2, 3) and min(parameter.shape) > 1:
            out_features, in_features = parameter.shape[-2:]
            reason = f"{parameter.dim()}-D parameter of {kind}, which is no nn.Linear"
            yield LayerReport(f"{name}.{leaf}".lstrip("."), in_features, out_features, False, reason)


def owners_of_weights(module: nn.Module) -> dict[int, list[str]]:
    """The names of the modules that hold each parameter called `weight`, by the parameter's id."""
    owners: dict[int, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        weight = child._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    return owners

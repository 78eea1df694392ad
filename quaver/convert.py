"""The module swap: `nn.Linear` to `Float8Linear` in place, a report of every layer, and the exact way back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from quaver.config import Float8LinearConfig
from quaver.delayed import input_owners, keep_scales
from quaver.distributed.gatherable_linears import make_gatherable, make_plain
from quaver.linear import Float8Linear

logger = logging.getLogger(__name__)

_REPORT = "_float8_conversion_report"


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
    """One linear of the model: what became of it, and why."""

    name: str
    in_features: int
    out_features: int
    converted: bool
    reason: str

    @property
    def flops_per_token(self) -> int:
        """Of its three matmuls, a multiply and an add counted apart."""
        return 6 * self.in_features * self.out_features


@dataclass(frozen=True)
class ConversionReport:
    """Every linear of a model, converted or skipped and why."""

    config: str
    layers: list[LayerReport] = field(default_factory=list)

    @property
    def converted(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.converted]

    @property
    def skipped(self) -> list[LayerReport]:
        return [layer for layer in self.layers if not layer.converted]

    @property
    def float8_flops_fraction(self) -> float:
        """The share of the linears' matmul FLOPs that now run in converted layers."""
        total = sum(layer.flops_per_token for layer in self.layers)
        return sum(layer.flops_per_token for layer in self.converted) / total if total else 0.0

    def summary(self) -> str:
        """One line."""
        return (
            f"{len(self.converted)} of {len(self.layers)} linears in float8, "
            f"{self.float8_flops_fraction:.1%} of their FLOPs"
        )

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "config": self.config,
            "float8_flops_fraction": self.float8_flops_fraction,
            "layers": [asdict(layer) for layer in self.layers],
        }

    def __str__(self) -> str:
        width = max((len(layer.name) for layer in self.layers), default=4)
        rows = [
            f"{layer.name:<{width}}  {layer.in_features:>6} -> {layer.out_features:<6}  "
            f"{'float8' if layer.converted else 'skipped':<7}  {layer.reason}".rstrip()
            for layer in self.layers
        ]
        return "\n".join([self.summary(), self.config, *rows])


def convert_to_float8_training(
    module: nn.Module,
    *,
    config: Float8LinearConfig | None = None,
    module_filter_fn: ModuleFilter | None = None,
    include_subclasses: bool = False,
) -> nn.Module:
    """Make every `nn.Linear` of `module` a `Float8Linear`, in place.

    Modules keep their identity, parameters, hooks, attributes and training mode. A second call with the same config
    changes nothing. With delayed or static scaling the linears of one call share one state (scale_state.py); call
    `sync_float8_amax_and_scale_history(model)` once a step. `conversion_report(module)` tells what happened to each
    layer. With `enable_fsdp_float8_all_gather` the weights are wrapped, and so are new parameters (with the same
    memory): convert before `fully_shard`, and make the optimizer after both.

    Args:
        module: any module, or an `nn.Linear` itself.
        config: None for the tensorwise recipe.
        module_filter_fn: called with each linear and its fully qualified name; false leaves it in high precision. It
            may return a `FilterDecision`, whose reason goes to the report.
        include_subclasses: also convert modules of subclasses of `nn.Linear`; they lose their own forward.
    Returns:
        `module`.
    Raises:
        ValueError: there is no linear to convert, the filter took none, a layer is already converted under another
            config, or a weight to gather in float8 is tied to another module's. The module is then unchanged.
    """
    config = config or Float8LinearConfig()
    chosen: list[tuple[str, nn.Linear]] = []
    layers: list[LayerReport] = []
    owners = _owners_of_weights(module)
    for name, linear in module.named_modules():
        if isinstance(linear, nn.Linear):
            convert, reason = _decide(linear, name, config, module_filter_fn, include_subclasses)
            shared = [owner for owner in owners[id(linear.weight)] if owner != name]
            if convert and shared:
                if config.enable_fsdp_float8_all_gather:
                    raise ValueError(
                        f"the weight of {name} is tied to {', '.join(shared)}, so it cannot be gathered in float8; "
                        "untie them, filter the layer out, or turn enable_fsdp_float8_all_gather off"
                    )
                reason = "; ".join(filter(None, [reason, f"weight tied to {', '.join(shared)}"]))
            layers.append(LayerReport(name, linear.in_features, linear.out_features, convert, reason))
            if convert:
                chosen.append((name, linear))
    _check_something_converts(layers)
    new = [
        (name, Float8Linear.from_linear(linear, config=config))
        for name, linear in chosen
        if not isinstance(linear, Float8Linear)
    ]
    stateless = [(name, x) for name, x in chosen if isinstance(x, Float8Linear) and x.scaling is None]
    keep_scales(module, stateless, config)
    if config.enable_fsdp_float8_all_gather:
        make_gatherable(new)
    report = ConversionReport(str(config), _with_shared_inputs(layers, config))
    setattr(module, _REPORT, report)
    logger.info(report.summary())
    return module


def convert_to_high_precision(module: nn.Module) -> nn.Module:
    """Make every `Float8Linear` of `module` the `nn.Linear` that it was, in place. Returns `module`."""
    for linear in list(module.modules()):
        if isinstance(linear, Float8Linear):
            make_plain(linear)
            linear.to_linear()
    if hasattr(module, _REPORT):
        delattr(module, _REPORT)
    return module


def conversion_report(module: nn.Module) -> ConversionReport:
    """What the last `convert_to_float8_training(module)` did. Raises ValueError for a module that it was not given."""
    report = getattr(module, _REPORT, None)
    if report is None:
        raise ValueError("this module was not given to convert_to_float8_training, or was converted back since")
    return report


def _decide(
    linear: nn.Linear,
    name: str,
    config: Float8LinearConfig,
    module_filter_fn: ModuleFilter | None,
    include_subclasses: bool,
) -> tuple[bool, str]:
    """Whether to convert one linear, and why (or why not)."""
    if isinstance(linear, Float8Linear):
        if linear.config.resolved() != config.resolved():
            raise ValueError(
                f"{name or 'the module'} is already converted, with another config ({linear.config}); "
                "call convert_to_high_precision first"
            )
        return True, "already converted"
    if isinstance(linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return False, "its parent reads the weight without calling the module (nn.MultiheadAttention)"
    if type(linear) is not nn.Linear and not include_subclasses:
        return False, f"subclass {type(linear).__name__} of nn.Linear (include_subclasses=True converts it)"
    if linear.in_features == 0 or linear.out_features == 0:
        return False, "shape: a feature dimension is 0"
    if module_filter_fn is None:
        return True, ""
    decision = module_filter_fn(linear, name)
    if isinstance(decision, FilterDecision):
        return decision.convert, decision.reason
    return bool(decision), "" if decision else "filter"


def _with_shared_inputs(layers: list[LayerReport], config: Float8LinearConfig) -> list[LayerReport]:
    """The same report, saying which linears use a sibling's kept input scale."""
    if not config.casts.input.is_persistent and not config.casts.input_for_grad_weight.is_persistent:
        return layers
    owners = input_owners([(layer.name, layer.in_features) for layer in layers if layer.converted], config)
    return [
        replace(layer, reason="; ".join(filter(None, [layer.reason, f"input scale of {owners[layer.name]}"])))
        if layer.name in owners
        else layer
        for layer in layers
    ]


def _check_something_converts(layers: list[LayerReport]) -> None:
    if not layers:
        raise ValueError("nothing to convert: the module has no nn.Linear")
    if not any(layer.converted for layer in layers):
        reasons = "; ".join(f"{layer.name}: {layer.reason}" for layer in layers[:3])
        more = f"; and {len(layers) - 3} more" if len(layers) > 3 else ""
        raise ValueError(f"nothing to convert: all {len(layers)} linears were skipped ({reasons}{more})")


def _owners_of_weights(module: nn.Module) -> dict[int, list[str]]:
    """The names of the modules that hold each parameter called `weight`, by the parameter's id."""
    owners: dict[int, list[str]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        weight = child._parameters.get("weight")
        if weight is not None:
            owners.setdefault(id(weight), []).append(name)
    return owners

"""`conversion_report`: lists every matmul weight of a model, whether its matmuls run in float8, and why not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from quaver.conversion.active_experts import ActiveExperts
from quaver.conversion.idle_modules import explain_missing_weight, explain_replaced_forward, find_idle_modules
from quaver.experts.grouped_module import Float8GroupedModule
from quaver.experts.module import Float8Experts, get_expert_weights, is_experts, is_transposed
from quaver.experts.module_weight import iter_module_weights
from quaver.foreign.torchao import explain_inference_only
from quaver.fsdp.all_gather_weight import is_all_gather_weight
from quaver.linear.backends import list_matmul_casts
from quaver.linear.class_change import get_class_parts
from quaver.linear.float8_module import Float8Module, list_taken_attributes
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.last_run import describe_last_backends, find_traces
from quaver.linear.module import Float8Linear
from quaver.linear.scale_state import LinearScaleSlots
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.formats import FLOAT8_FORMATS, HP_DTYPES
from quaver.recipes.linear_casts import MATMULS
from quaver.runtime.errors import check_is_module
from quaver.runtime.module_names import find_weight_modules, format_module_name, join_names
from quaver.runtime.slow_paths import list_slow_paths
from quaver.torch_private.dtensor import get_local_tensor

FILTER_REASON_ATTRIBUTE = "_float8_filter_reason"
"""The attribute of a module with the filter's reason; `conversion_report` computes all other reasons."""

SLOW_PATH_PREFIX = "in this process: "
"""The prefix of a note about a slow path, which may be that of another model."""

NOT_CONVERTED_REASON = "not converted, or new since the conversion"
"""The reason of a linear in high precision, if nothing else is known."""

HIGH_PRECISION_REASON = "its config computes all matmuls in high precision"
"""The reason of a converted layer without a float8 matmul."""


@dataclass(frozen=True)
class LayerReport:
    """One matmul weight of the model: whether its matmuls run in float8, and why (or why not)."""

    name: str
    """The name of the linear, or of the parameter if another module has the weight."""
    in_features: int
    """The last dim of the weight, a matrix or a stack of matrices."""
    out_features: int
    """The last dim but one of the weight."""
    converted: bool
    reason: str
    matrices_per_token: float = 1.0
    """How many matrices of this weight multiply a token. 1 for a linear; the active experts for a stack; k / E for a
    linear that is one of E experts, k of them active."""
    backend: str = ""
    """How the float8 matmuls ran last: "native" (on float8 units), "exact" (the same numbers without float8 units),
    "native and exact", "high precision" or "not run yet"; "" for skipped layers."""
    float8_matmuls: tuple[str, ...] = ()
    """Which of "output", "grad_input" and "grad_weight" the layer's config computes in float8; () for skipped
    layers."""
    config: int = 0
    """The line of the report's `config` that the layer has, from 1; 0 for skipped layers."""

    @property
    def flops_per_token(self) -> float:
        """FLOPs of the three matmuls of each [out_features, in_features] matrix; a multiply-add counts as two."""
        return 6 * self.in_features * self.out_features * self.matrices_per_token

    @property
    def float8_flops_per_token(self) -> float:
        """The part of `flops_per_token` that `float8_matmuls` compute."""
        return self.flops_per_token * len(self.float8_matmuls) / len(MATMULS)

    def format_line(self, width: int, *, names_config: bool = False) -> str:
        """Return the layer as a line, with `width` characters for the name, and the number of its config if asked."""
        shape = f"{self.in_features:>6} -> {self.out_features:<6}"
        matrices = "" if self.matrices_per_token == 1 else f"{self.matrices_per_token:g} a token  "
        precision = "float8" if self.converted else "skipped"
        number = f"config {self.config}  " if names_config and self.config else ""
        note = f"{matrices}{number}{self.reason}"
        return f"{format_module_name(self.name):<{width}}  {shape}  {precision:<7}  {self.backend:<11}  {note}".rstrip()


@dataclass(frozen=True)
class ConversionReport:
    """Every matmul weight of a model, converted or skipped and why."""

    config: str
    """The configs of the layers in float8, one per line."""
    layers: list[LayerReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Notes about these configs, about what expert parallelism sends, about mixtures whose number of active experts is
    unknown, and about the slow paths that this process took for any model (slow_paths.py)."""
    convolutions: int = 0
    """The number of convolutions. They stay in high precision, and `float8_flops_fraction` does not count them, because
    their FLOPs depend on the size of the input."""

    @property
    def converted(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.converted]

    @property
    def skipped(self) -> list[LayerReport]:
        return [layer for layer in self.layers if not layer.converted]

    @property
    def float8_flops_fraction(self) -> float:
        """The share of the FLOPs of all `layers` that runs in float8, matmul by matmul."""
        total = sum(layer.flops_per_token for layer in self.layers)
        return sum(layer.float8_flops_per_token for layer in self.layers) / total if total else 0.0

    def explain_no_conversion(self, *, verb: str = "convert") -> str:
        """Return why nothing was converted, in one line. `verb`: what the caller does with linears."""
        if not self.layers:
            return f"nothing to {verb}: the module has no nn.Linear"
        reasons = [f"{format_module_name(layer.name)}: {layer.reason}" for layer in self.layers]
        skipped = "the only matmul weight was" if len(reasons) == 1 else f"all {len(reasons)} matmul weights were"
        return f"nothing to {verb}: {skipped} skipped ({join_names(reasons, '; ')})"

    def summary(self) -> str:
        """Return the counts in one line."""
        plural = "s" if self.convolutions > 1 else ""
        uncounted = f"; {self.convolutions} convolution{plural} in high precision" if self.convolutions else ""
        return (
            f"{len(self.converted)} of {len(self.layers)} matmul weights in float8, "
            f"{self.float8_flops_fraction:.1%} of their FLOPs{uncounted}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {**asdict(self), "float8_flops_fraction": self.float8_flops_fraction}

    def __str__(self) -> str:
        width = max((len(format_module_name(layer.name)) for layer in self.layers), default=4)
        configs = self.config.splitlines()
        lines = [layer.format_line(width, names_config=len(configs) > 1) for layer in self.layers]
        if len(configs) > 1:
            configs = [f"config {number}: {config}" for number, config in enumerate(configs, 1)]
        return "\n".join([self.summary(), *configs, *self.notes, *lines])


def conversion_report(module: nn.Module) -> ConversionReport:
    """List every matmul weight of `module`: converted to float8, or skipped and why.

    The report shows the modules at the time of the call. It works for wrapped models (under the wrapper's names),
    submodules, copies, and layers that were replaced or made by hand. Of modules other than `nn.Linear` it lists all
    2-D and 3-D parameters, except those of embeddings, convolutions and norms, and those whose own name says that no
    matmul reads them, such as `gate_bias`, `pos_embed` or `mask_token`.

    A converted layer counts as skipped while its config computes all three matmuls in high precision. After a step, so
    does a layer that did not run while others trained, or while it has a gradient: its parent reads its weight without
    calling it, or it takes no part in training. In compiled code a layer counts as run once another one of its shape
    was compiled, and has the backend of the last one that was compiled in this model.
    """
    check_is_module(module, argument="module")
    layers: list[LayerReport] = []
    float8_modules: list[Float8Module] = []
    config_numbers: dict[str, int] = {}
    scale_owners: dict[tuple[int, int], str] = {}
    owners, experts, idle = find_weight_modules(module), ActiveExperts(module), find_idle_modules(module)
    traces = find_traces(module.modules())
    for name, child in module.named_modules():
        backend = describe_last_backends(child, traces) if isinstance(child, Float8Module) else ""
        if isinstance(child, nn.Linear):
            reports = [_report_linear(child, name, owners, experts, idle.get(name, ""), scale_owners, backend)]
        else:
            reports = [*_report_other_weights(child, name, owners, experts, idle.get(name, ""), backend)]
        if isinstance(child, Float8Module) and any(layer.converted for layer in reports):
            float8_modules.append(child)
            config = child.float8_config
            matmuls = tuple(list_matmul_casts(config))
            number = config_numbers.setdefault(str(config), len(config_numbers) + 1)
            reports = [
                replace(layer, float8_matmuls=matmuls, config=number) if layer.converted else layer for layer in reports
            ]
        layers += reports
    configs = dict.fromkeys(child.float8_config for child in float8_modules)
    notes = [note for config in configs for note in _iter_notes(config)]
    for child in float8_modules:
        if isinstance(child, Float8Experts) and child.dispatcher is not None:
            notes.append(child.dispatcher.describe_precision(child))
    if experts.unknown:
        notes.append(
            f"the number of experts in {join_names(experts.unknown)} that a token uses is unknown, so the FLOP share "
            "counts one; set num_experts_per_tok in the model's config, or top_k of the router"
        )
    notes += [f"{SLOW_PATH_PREFIX}{message}" for message in list_slow_paths()] if configs else []
    convolutions = sum(isinstance(child, _CONVOLUTIONS) for child in module.modules())
    return ConversionReport("\n".join(config_numbers), layers, list(dict.fromkeys(notes)), convolutions)


def _report_linear(
    linear: nn.Linear,
    name: str,
    owners: dict[int, list[str]],
    experts: ActiveExperts,
    idle_reason: str,
    scale_owners: dict[tuple[int, int], str],
    backend: str,
) -> LayerReport:
    """Report on a linear. Adds to `scale_owners`, the names of the first linears with each input scale."""
    weight, filter_reason = linear._parameters.get("weight"), vars(linear).get(FILTER_REASON_ATTRIBUTE, "")
    obstacle = explain_inference_only(weight) or explain_missing_weight(linear) or idle_reason
    if isinstance(linear, Float8Linear):
        obstacle = obstacle or explain_dtype(linear)
    converted = isinstance(linear, Float8Linear) and not obstacle and not is_in_high_precision(linear)
    if obstacle:
        reason, backend = obstacle, ""
    elif isinstance(linear, Float8Linear):
        tied_owners = [owner for owner in owners.get(id(weight), []) if owner != name]
        tie = f"weight tied to {', '.join(tied_owners)}" if tied_owners else ""
        shared_scale = _describe_shared_scale(linear, name, scale_owners)
        storage = _describe_frozen(get_local_tensor(linear.weight))
        reasons = [filter_reason, tie, shared_scale, storage, explain_replaced_forward(linear)]
        reasons += [*iter_unfinished_reasons(linear), "" if converted else HIGH_PRECISION_REASON]
        reason = "; ".join(filter(None, reasons))
    else:
        reason = filter_reason or explain_conversion_obstacle(linear) or explain_dtype(linear) or NOT_CONVERTED_REASON
    shape = linear.in_features, linear.out_features
    return LayerReport(name, *shape, converted, reason, experts.count_linear(name), backend)


def is_in_high_precision(module: Float8Module) -> bool:
    """Return whether the config of a float8 linear, or of experts, computes all matmuls in high precision."""
    return not list_matmul_casts(module.float8_config)


def explain_conversion_obstacle(linear: nn.Linear, *, include_subclasses: bool = False) -> str:
    """Return why `linear` cannot be converted, or ""."""
    cls = get_class_parts(linear).original
    if isinstance(linear, Float8Linear):
        return explain_missing_weight(linear)
    weight = linear._parameters.get("weight")
    if weight is not None and weight.dtype.itemsize == 1:
        if not any("scale" in name for name in (*linear._parameters, *linear._buffers)):
            return (
                f"its weight is stored in {weight.dtype} without a scale, and cast before each forward (for example "
                "by layerwise casting): convert before that"
            )
        return (
            f"its weight is stored in {weight.dtype}, which another library quantized: load its checkpoint in high "
            "precision (quaver.export.load_float8) to train it"
        )
    if "forward" in vars(linear):
        return "its forward was replaced on the instance (by an Accelerate hook or a tp_plan): convert before that"
    if isinstance(linear, nn.modules.linear.NonDynamicallyQuantizableLinear):
        return "its parent reads the weight without calling the module (nn.MultiheadAttention)"
    if parametrize.is_parametrized(linear):
        return "it is parametrized (torch.nn.utils.parametrize): remove the parametrization first"
    if weight is None:
        return "its weight is not a parameter: it is computed (weight_norm, pruning) or flattened (FSDP1)"
    if cls.forward is not nn.Linear.forward and not include_subclasses:
        return (
            f"subclass {_name_class(cls)} of nn.Linear overrides forward (include_subclasses=True replaces its forward)"
        )
    if isinstance(linear, nn.LazyLinear):
        return "a LazyLinear without a shape: run a forward, or initialize_parameters, before the conversion"
    if linear.in_features == 0 or linear.out_features == 0:
        return "shape: a feature dimension is 0"
    taken = list_taken_attributes(linear, Float8Linear)
    return f"it has attributes with names that Float8Linear uses: {', '.join(taken)}" if taken else ""


def explain_dtype(module: nn.Module) -> str:
    """Return why float8 matmuls cannot read the parameters of a linear, or of experts, or "".

    Parameters of one byte per element are left out: layerwise casting converts them before each forward.
    """
    names = ("weight", "bias") if isinstance(module, nn.Linear) else get_expert_weights(module)
    for name, parameter in module.named_parameters(recurse=False):
        if name in names and parameter.dtype.itemsize > 1 and parameter.dtype not in HP_DTYPES:
            return f"its {name} is {parameter.dtype}, and float8 matmuls read {', '.join(map(str, HP_DTYPES))}"
    return ""


def _name_class(cls: type[nn.Module]) -> str:
    """Return the name of a class, with its module if torch.nn has another class with this name."""
    is_namesake = hasattr(nn, cls.__name__) and not cls.__module__.startswith("torch.")
    return f"{cls.__module__}.{cls.__name__}" if is_namesake else cls.__name__


def _describe_frozen(weight: Tensor) -> str:
    """Describe how a frozen weight is stored, with the SQNR of a merge; "" for other weights."""
    if not isinstance(weight, FrozenFloat8Weight):
        return ""
    sqnr_db = weight.requantized_sqnr_db
    written = "" if sqnr_db is None else f", quantized again after a write at {sqnr_db:.1f} dB SQNR"
    return f"frozen, stored in {weight.granularity} {FLOAT8_FORMATS[weight.data_fp8.dtype].name}{written}"


def iter_unfinished_reasons(module: Float8Module) -> Iterator[str]:
    """Yield the reasons why a float8 linear, or experts, do not run as their config says."""
    weights = iter_module_weights(module)
    if any(weight.config.enable_fsdp_float8_all_gather and not is_all_gather_weight(weight) for weight in weights):
        yield "gathered in high precision until convert_to_float8_training is called"
    if isinstance(module, Float8Linear) and module.float8_config.has_persistent_scales and module.scale_slots is None:
        yield "cannot run until convert_to_float8_training has made the state of its scales"


def _iter_notes(config: Float8LinearConfig) -> Iterator[str]:
    weight = config.casts.weight
    has_two_casts = not weight.is_dequantized and any(cast.depends_on_direction for cast in weight.directions)
    if config.enable_fsdp_float8_all_gather and has_two_casts:
        yield (
            "enable_fsdp_float8_all_gather: both casts of a weight are gathered, 2 bytes per element as in bfloat16; "
            "with one scale per tensor or square block it is 1 byte (rowwise_with_tensorwise_weight, blockwise)"
        )


def _describe_shared_scale(linear: Float8Linear, name: str, owners: dict[tuple[int, int], str]) -> str:
    if not isinstance(linear.scale_slots, LinearScaleSlots) or linear.scale_slots.slots[0] is None:
        return ""
    owner = owners.setdefault((id(linear.scale_slots.conversion_slots), linear.scale_slots.slots[0]), name)
    return "" if owner == name else f"input scale of {owner}"


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CLASSES_WITHOUT_MATMULS = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.LayerNorm,
    nn.RMSNorm,
    *_CONVOLUTIONS,
    parametrize.ParametrizationList,
)
_NAME_WITHOUT_MATMUL = re.compile(r"(.*_)?(bias(es)?|\w*embed(dings?|s)?|tokens?|scales?(_inv)?|table)")
"""Names of parameters that are added, looked up or scale something. The class of their module does not tell."""


def _report_other_weights(
    module: nn.Module, name: str, owners: dict[int, list[str]], experts: ActiveExperts, idle_reason: str, backend: str
) -> Iterator[LayerReport]:
    """Yield the matmul weights of a module other than nn.Linear, by its class and their shapes and names."""
    if isinstance(module, Float8GroupedModule):
        idle_reason = idle_reason or explain_dtype(module)
    if isinstance(module, _CLASSES_WITHOUT_MATMULS) or hasattr(module, "num_embeddings"):
        return
    for leaf, parameter in module.named_parameters(recurse=False):
        if _NAME_WITHOUT_MATMUL.fullmatch(leaf) or any(owner != name for owner in owners.get(id(parameter), [])):
            continue
        if nn.parameter.is_lazy(parameter) or parameter.dim() not in (2, 3) or min(parameter.shape) <= 1:
            continue
        filter_reason = vars(module).get(FILTER_REASON_ATTRIBUTE, "")
        if idle_reason:
            reason, backend = idle_reason, ""
        elif isinstance(module, Float8GroupedModule):
            storage = _describe_frozen(get_local_tensor(parameter))
            reasons = [filter_reason, storage, explain_replaced_forward(module), *iter_unfinished_reasons(module)]
            reasons += [HIGH_PRECISION_REASON] if is_in_high_precision(module) else []
            reason = "; ".join(filter(None, reasons))
        elif is_experts(module):
            reason = filter_reason or "experts, not converted or new since the conversion"
        else:
            reason = f"{parameter.dim()}-D parameter of {_name_class(type(module))}, which is not an nn.Linear"
            reason += "; if these are experts, multiply by quaver.float8_grouped_mm" if parameter.dim() == 3 else ""
        out_features, in_features = parameter.shape[-2:]
        if is_experts(module) and is_transposed(module):
            in_features, out_features = out_features, in_features
        full_name = f"{name}.{leaf}".lstrip(".")
        matrices_per_token = experts.count_stack(full_name, module, len(parameter)) if parameter.dim() == 3 else 1.0
        converted = isinstance(module, Float8GroupedModule) and not idle_reason and not is_in_high_precision(module)
        yield LayerReport(full_name, in_features, out_features, converted, reason, matrices_per_token, backend)

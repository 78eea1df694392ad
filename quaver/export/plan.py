"""Plans an export before it reads a tensor: which weights are stored in float8, how, and under which names."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from quaver.conversion.report import ConversionReport, conversion_report
from quaver.experts.grouped_mm_method import Float8GroupedMM
from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import ModuleWeight, iter_model_weights
from quaver.export.checkpoint_names import CheckpointNames, make_checkpoint_names
from quaver.export.formats import CHECKPOINT_FORMATS, find_format_class, make_weight_format
from quaver.export.formats.base import WeightFormat
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.scale_layout import BLOCK_SIZE
from quaver.recipes.serving import find_serving_name
from quaver.runtime.errors import InputError
from quaver.runtime.module_names import find_parameter_names, join_names, strip_wrappers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExportPlan:
    """The tensors that an export of a model writes, decided before a tensor is read."""

    float8: dict[str, ModuleWeight]
    """The weights of linears and experts that are stored in float8, by their names without wrappers."""
    whole_stacks: list[str]
    """The stacks of float8 experts that stay in high precision, because checkpoints hold each as one tensor."""
    high_precision_linears: list[str]
    """The float8 linears that stay in high precision, because transformers does not read them in float8."""
    names: list[str]
    """The names of the tensors in the order of the model; tied tensors have one name."""
    names_in_weights: dict[str, str]
    """The name of a tensor among the user's `weights`, by its name in the model."""
    checkpoint_names: CheckpointNames
    ignore: list[str]
    """The modules whose matrices stay in high precision, by their names in the model and in the checkpoint."""
    format: WeightFormat
    ragged: list[str]
    """The weights with incomplete last blocks, because a dimension is not a multiple of 128."""
    ragged_inputs: list[str]
    """The modules whose inputs are not a multiple of 128, by their names in the model and in the checkpoint."""
    recipe: str
    """The name of the recipe, or of the engine with the same forward; otherwise the casts."""
    report: ConversionReport

    @property
    def matrix_count(self) -> int:
        """The number of matrices that are stored in float8."""
        return sum(len(self.checkpoint_names.get_stored_names(name)) for name in self.float8)


def get_linear_name(name: str) -> str:
    """Return the name of the linear of a float8 weight; a stack of experts keeps its name."""
    return name.removesuffix(".weight")


def plan_export(model: nn.Module, format: str, weights: Mapping[str, Tensor] | None) -> ExportPlan:
    """Decide which tensors an export of `model` writes; see `iter_float8_weights` for arguments and errors."""
    format_class = find_format_class(format)
    converted = {
        name: weight
        for name, weight in find_float8_weights(model).items()
        if not weight.config.casts.weight.row.is_disabled
    }
    _check_experts(converted)
    checkpoint_names = make_checkpoint_names(model, has_linears=format_class.has_linears)
    float8, whole_stacks, high_precision_linears = _select_weights(model, converted, format_class, checkpoint_names)
    config, weight_format = _choose_common_format(format, float8)
    names, tied, names_in_weights = _select_names(model, weights, float8, checkpoint_names)
    ignore = _list_ignored_modules(model, names, tied, float8, checkpoint_names)
    sizes = {name: _compute_matrix_size(name, weight, checkpoint_names) for name, weight in float8.items()}
    weight_format.check_weights(model, sizes, ignore)
    has_blocks = weight_format.block_size == (BLOCK_SIZE, BLOCK_SIZE)
    ragged = [name for name, size in sizes.items() if has_blocks and any(length % BLOCK_SIZE for length in size)]
    with_ragged_inputs = [name for name in ragged if sizes[name][1] % BLOCK_SIZE]
    return ExportPlan(
        float8=float8 if format in CHECKPOINT_FORMATS else {},
        whole_stacks=whole_stacks + _list_torchtitan_stacks(model),
        high_precision_linears=high_precision_linears,
        names=names,
        names_in_weights=names_in_weights,
        checkpoint_names=checkpoint_names,
        ignore=ignore,
        format=weight_format,
        ragged=[get_linear_name(name) for name in ragged],
        ragged_inputs=list(dict.fromkeys(itertools.chain(*map(checkpoint_names.list_modules, with_ragged_inputs)))),
        recipe=config.recipe_name.value if config.recipe_name else find_serving_name(config) or str(config),
        report=conversion_report(model),
    )


def _select_weights(
    model: nn.Module,
    converted: Mapping[str, ModuleWeight],
    format_class: type[WeightFormat],
    checkpoint_names: CheckpointNames,
) -> tuple[dict[str, ModuleWeight], list[str], list[str]]:
    """Return `float8`, `whole_stacks` and `high_precision_linears` of an `ExportPlan`."""
    stacks = [name for name, weight in converted.items() if isinstance(weight.module, Float8Experts)]
    transposed = [
        name for name, weight in converted.items() if getattr(weight.module, "state_dict_is_transposed", False)
    ]
    linears = [get_linear_name(name) for name in converted if name not in (*stacks, *transposed)]
    high_precision_linears = format_class.list_unsupported(model, linears, stacks)
    whole_stacks = [name for name in stacks if name not in checkpoint_names.stacks]
    left_out = {*transposed, *whole_stacks, *(f"{name}.weight" for name in high_precision_linears)}
    float8 = {name: weight for name, weight in converted.items() if name not in left_out}
    if transposed and not float8:
        raise InputError(
            f"no server reads Conv1D weights in float8, and all float8 layers of the model are Conv1Ds "
            f"({join_names(list(map(get_linear_name, transposed)))}); save_pretrained writes them in high precision"
        )
    return float8, whole_stacks, high_precision_linears


def _select_names(
    model: nn.Module, weights: Mapping[str, Tensor] | None, float8: Iterable[str], checkpoint_names: CheckpointNames
) -> tuple[list[str], list[str], dict[str, str]]:
    """Return the names of the tensors to write, all names of tied parameters, and `names_in_weights` of the plan."""
    names, tied = _list_names(model)
    _check_names(model, names, [name for name in tied if name in float8])
    if weights is None:
        return names, tied, {}
    names_in_weights = _match_given_names(names, weights, checkpoint_names, float8)
    untied = [strip_wrappers(name) for name, _ in model.named_parameters() if strip_wrappers(name) not in tied]
    missing = [name for name in untied if name not in names_in_weights]
    if missing:
        logger.warning("weights: got none for %s of the model, which the export lacks, too", join_names(missing))
    return list(names_in_weights), tied, names_in_weights


def _check_experts(float8: Mapping[str, ModuleWeight]) -> None:
    for name, weight in float8.items():
        if getattr(weight.module, "_is_expert_parallel", False):
            raise NotImplementedError(
                f"{name.rpartition('.')[0] or 'the model'}: expected all experts of a layer, got those of one rank of "
                "an expert parallel model; save it with save_pretrained, load it without expert parallelism and export "
                "that"
            )


def _check_names(model: nn.Module, names: list[str], tied_float8: list[str]) -> None:
    if hasattr(model, "get_base_model") or any(".base_layer." in name for name in names):
        raise InputError(
            "the model has adapters of PEFT, under names that no server loads; export model.merge_and_unload(), or "
            "model.get_base_model() where the adapters are prompts"
        )
    if tied_float8:
        raise InputError(
            f"a tied weight cannot be stored in float8: {join_names(tied_float8)}; filter the linear out, or untie it"
        )


def _list_torchtitan_stacks(model: nn.Module) -> list[str]:
    return [
        strip_wrappers(f"{prefix}.{leaf}".lstrip("."))
        for prefix, module in model.named_modules()
        if isinstance(module, Float8GroupedMM)
        for leaf, weight in module.named_parameters(recurse=False)
        if weight.dim() > 2
    ]


def _choose_common_format(format: str, float8: Mapping[str, ModuleWeight]) -> tuple[Float8LinearConfig, WeightFormat]:
    configs = {str(weight.config): weight.config for weight in float8.values()}
    if not configs:
        raise InputError("expected a model with float8 linears, got none; convert it, or give a recipe")
    formats = [make_weight_format(format, config) for config in configs.values()]
    if any(weight_format != formats[0] for weight_format in formats):
        raise NotImplementedError(
            f"expected one recipe for all float8 linears, got {'; '.join(configs)}; export the layers of each "
            "recipe separately"
        )
    return next(iter(configs.values())), formats[0]


def _match_given_names(
    names: list[str], weights: Mapping[str, Tensor], checkpoint_names: CheckpointNames, float8: Iterable[str]
) -> dict[str, str]:
    """Return the user's name of each tensor, or of the last matrix of a stack, by its name in the model."""
    names_in_weights = {name: stored for stored, name in checkpoint_names.find_model_names(names, weights).items()}
    missing = [name for name in float8 if name not in names_in_weights]
    missing += [
        part
        for name in checkpoint_names.stacks
        if name in names_in_weights and name not in weights
        for part in checkpoint_names.get_stored_names(name)
        if part not in weights
    ]
    if missing:
        raise InputError(f"weights: expected all float8 weights of the model, got none for {join_names(missing)}")
    return names_in_weights


def _list_ignored_modules(
    model: nn.Module, names: list[str], tied: list[str], in_float8: Iterable[str], checkpoint_names: CheckpointNames
) -> list[str]:
    """Return the modules whose matrices stay in high precision, by every name that readers look for.

    In fp8, transformers also skips everything inside an ignored module, and modules whose names end with its name. The
    list therefore has no module that contains a float8 linear, such as a Mamba mixer with parameters, and no name that
    ends the name of a float8 linear.
    """
    tensors = model.state_dict(keep_vars=True)
    dims = {strip_wrappers(name): tensor.dim() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    matrices = [name for name in (*names, *tied) if name not in in_float8 and (dims.get(name, 2) >= 2 or name in tied)]
    ignored = {module for name in matrices for module in _iter_reader_module_names(name, checkpoint_names)}
    quantized = {module for name in in_float8 for module in checkpoint_names.list_modules(name)}
    suffixes = {
        module[index + 1 :] for module in quantized for index, character in enumerate(module) if character == "."
    }
    base = checkpoint_names.conversions.base_prefix  # a model that is loaded without its head lacks this prefix
    ignored |= {module.removeprefix(base) for module in ignored} - suffixes
    while quantized:
        ignored -= quantized
        quantized = {module.rpartition(".")[0] for module in quantized if module}
    return sorted(ignored)


def _iter_reader_module_names(name: str, checkpoint_names: CheckpointNames) -> Iterator[str]:
    """Yield the modules of a tensor, and the names by which readers ignore experts.

    transformers looks for the module of all experts: any module called `experts`. In compressed-tensors, vLLM and
    SGLang look for the three linears of the first expert under their most common names.
    """
    modules = checkpoint_names.list_modules(name)
    if name in checkpoint_names.stacks or name in checkpoint_names.whole_stacks:
        experts = name.rpartition(".")[0]
        modules += [experts, checkpoint_names.get_stored_name(f"{experts}.").removesuffix(".")]
        modules += [f"{modules[-1]}.0.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
    modules += [f"{module.partition('.experts.')[0]}.experts" for module in modules if ".experts." in module]
    yield from modules


def _compute_matrix_size(name: str, weight: ModuleWeight, checkpoint_names: CheckpointNames) -> Sequence[int]:
    size = list(weight.parameter.shape[-2:])
    rows, columns = reversed(size) if name in checkpoint_names.transposed else size
    return [rows // len(checkpoint_names.get_parts(name)[0]), columns]


def get_named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of `model` with names without wrappers. A sharded weight is a plain DTensor."""
    return {strip_wrappers(name): tensor for name, tensor in model.state_dict().items()}


def find_float8_weights(model: nn.Module) -> dict[str, ModuleWeight]:
    """Return the weights of float8 modules, by their names without wrappers."""
    return {
        strip_wrappers(f"{name}.weight".lstrip(".") if weight.name == "weight" else name): weight
        for name, weight in iter_model_weights(model)
    }


def find_frozen_weights(model: nn.Module) -> dict[str, FrozenFloat8Weight]:
    """Return the frozen float8 weights of `model`, or this rank's shards of them, by their names without wrappers."""
    weights = {name: weight.local_tensor for name, weight in find_float8_weights(model).items()}
    return {name: local for name, local in weights.items() if isinstance(local, FrozenFloat8Weight)}


def _list_names(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return one name of each tensor, and all names of tied parameters."""
    owners = [[strip_wrappers(name) for name in names] for names in find_parameter_names(model).values()]
    later_aliases = {name for names in owners for name in names[1:]}
    tied = [name for names in owners if len(names) > 1 for name in names]
    return [name for name in get_named_tensors(model) if name not in later_aliases], tied

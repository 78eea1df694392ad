"""Plans an export: which weights are stored in float8, how, and under which names, before a tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from quaver.conversion.report import ConversionReport, conversion_report
from quaver.experts.module import Float8Experts, weights_of
from quaver.experts.module_weight import weights_under
from quaver.experts.seam import Float8GroupedMM
from quaver.export.checkpoint_names import CheckpointNames, checkpoint_names, is_of_transformers
from quaver.export.formats import (
    BLOCKS,
    COMFYUI,
    COMPRESSED_TENSORS,
    FORMATS,
    FP8,
    GROUP_SIZE,
    HIGH_PRECISION,
    WeightFormat,
    weight_format,
)
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.linear.module import Float8Linear
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.scaling import BLOCK_SIZE
from quaver.runtime.names import listed, owners_of_parameters, plain_name
from quaver.weights.frozen_modules import SCALE_SUFFIX

_HAS_LINEARS = tuple(each for each in FORMATS if each.startswith(COMPRESSED_TENSORS))
"""The formats that hold a linear for each of Llama 4's experts; others, and high precision, hold stacks."""


@dataclass(frozen=True)
class Plan:
    """The tensors that an export of a model writes, decided before a tensor is read."""

    linears: dict[str, Float8Linear]
    """The linears that are stored in float8, by their names without wrappers."""
    experts: dict[str, Float8Experts]
    """The experts that are stored in float8, by the name of each stack of their weights."""
    whole_stacks: list[str]
    """The stacks of float8 experts that stay in high precision, because checkpoints hold no matrices of theirs."""
    kept: list[str]
    """The float8 linears that stay in high precision, because transformers reads no others for them in the format."""
    names: list[str]
    """The tensors of the model in its own order, a tied one once."""
    checkpoint: CheckpointNames
    ignore: list[str]
    """The modules whose matrices stay in high precision, under the names of the model and of the checkpoint."""
    format: WeightFormat
    ragged: list[str]
    """The weights whose last blocks are cut, because a dimension is no multiple of 128; none without such blocks."""
    cut_inputs: list[str]
    """The modules whose weights have columns that are no multiple of 128, named so, too; none without such blocks."""
    recipe: str
    report: ConversionReport

    def float8_weight(self, name: str) -> Tensor:
        """The parameter of a float8 linear or of float8 experts, as it is now."""
        owner, _, leaf = name.rpartition(".")
        parameter: Tensor = getattr(self.experts[name] if name in self.experts else self.linears[owner], leaf)
        return parameter

    @property
    def count(self) -> int:
        """How many matrices are stored in float8."""
        return len(self.linears) + sum(len(self.checkpoint.of(name)) for name in self.experts)


def plan_export(model: nn.Module, format: str, weights: Mapping[str, Tensor] | None) -> Plan:
    """Decide what an export of `model` writes; see `iter_float8_weights` for the arguments and the errors."""
    modules = [(plain_name(name), each) for name, each in model.named_modules()]
    linears = {name: each for name, each in modules if isinstance(each, Float8Linear)}
    linears = {name: each for name, each in linears.items() if not each.config.casts.weight.row.is_disabled}
    transposed = [name for name, each in linears.items() if getattr(each, "state_dict_is_transposed", False)]
    linears = {name: each for name, each in linears.items() if name not in transposed}
    kept = _kept_by_transformers(model, linears) if format == FP8 else []
    linears = {name: each for name, each in linears.items() if name not in kept}
    report, checkpoint = conversion_report(model), checkpoint_names(model, has_linears=format in _HAS_LINEARS)
    stacks = _float8_stacks(modules)
    experts = {name: each for name, each in stacks.items() if name in checkpoint.stacks}
    if transposed and not linears and not experts:
        raise ValueError(
            f"no server reads Conv1D weights in float8, and the model's float8 layers are such ({listed(transposed)}); "
            "save_pretrained writes them in high precision"
        )
    if format == COMFYUI and stacks:
        raise NotImplementedError(
            f"{COMFYUI}: ComfyUI reads no matrices of single experts, got {listed(list(stacks))}; leave them in high "
            "precision"
        )
    config, stored = _one_format(COMPRESSED_TENSORS if format == HIGH_PRECISION else format, linears, experts)
    names, tied = _names(model)
    if hasattr(model, "get_base_model") or any(".base_layer." in name for name in names):
        raise ValueError(
            "the model has adapters of PEFT, under names that no server loads; export model.merge_and_unload(), or "
            "model.get_base_model() where the adapters are prompts"
        )
    both = [name for name in tied if name.removesuffix(".weight") in linears or name in experts]
    if both:
        raise ValueError(
            f"a tied weight cannot be stored in float8: {listed(both)}; filter the linear out, or untie it"
        )
    if weights is not None:
        names = _names_of_given(names, weights, checkpoint, [*(f"{name}.weight" for name in linears), *experts])
    in_float8 = {*(f"{name}.weight" for name in linears), *experts}
    ignore = _ignored(model, names, tied, in_float8, checkpoint)
    if format == FP8 and is_of_transformers(model):
        _check_ends(linears, ignore)
    recipe = config.recipe_name.value if config.recipe_name else str(config)
    whole = [name for name in stacks if name not in experts] + _stacks_of_torchtitan(modules)
    sizes = {} if stored.block_size is None else _sizes(linears, experts, checkpoint)
    if stored.is_mx:
        if format not in (HIGH_PRECISION, COMFYUI):
            _check_groups(sizes)
        sizes = {}
    ragged = [name for name, size in sizes.items() if any(length % BLOCK_SIZE for length in size)]
    cut = [name if name in experts else f"{name}.weight" for name in ragged if sizes[name][1] % BLOCK_SIZE]
    cut_inputs = list(dict.fromkeys(module for name in cut for module in checkpoint.modules(name)))
    return Plan(linears, experts, whole, kept, names, checkpoint, ignore, stored, ragged, cut_inputs, recipe, report)


def _check_groups(sizes: Mapping[str, list[int]]) -> None:
    """Refuse weights whose rows groups do not divide: compressed-tensors reads none, and a row has no other scales."""
    cut = [f"{name} {size}" for name, size in sizes.items() if size[1] % GROUP_SIZE]
    if cut:
        raise NotImplementedError(
            f"MXFP8 has a scale for each {GROUP_SIZE} columns of a weight, expected a multiple of them, got "
            f"{listed(cut)}; use the format {BLOCKS}, which quantizes again, or leave these in high precision"
        )


def _float8_stacks(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, Float8Experts]:
    """The experts that multiply in float8, by the names of their weights."""
    stacks: dict[str, Float8Experts] = {}
    for prefix, module in modules:
        if isinstance(module, Float8Experts) and not module.float8_config.casts.weight.row.is_disabled:
            if getattr(module, "_is_expert_parallel", False):
                raise NotImplementedError(
                    f"{prefix or 'the model'}: expected all experts of a layer, got those of one rank of an expert "
                    "parallel model; save it with save_pretrained, load it without expert parallelism and export that"
                )
            stacks |= {f"{prefix}{'.' if prefix else ''}{leaf}": module for leaf in weights_of(module)}
    return stacks


def _stacks_of_torchtitan(modules: Iterable[tuple[str, nn.Module]]) -> list[str]:
    return [
        f"{prefix}{'.' if prefix else ''}{leaf}"
        for prefix, module in modules
        if isinstance(module, Float8GroupedMM)
        for leaf, weight in module.named_parameters(recurse=False)
        if weight.dim() > 2
    ]


def _one_format(
    format: str, linears: Mapping[str, Float8Linear], experts: Mapping[str, Float8Experts]
) -> tuple[Float8LinearConfig, WeightFormat]:
    """The config of all weights, and how `format` holds it."""
    configs = [each.config for each in linears.values()] + [each.float8_config for each in experts.values()]
    if not configs:
        raise ValueError("no linear of the model is in float8; convert it, or give a recipe")
    stored = {str(each): weight_format(format, each) for each in configs}
    if len(set(stored.values())) > 1:
        raise NotImplementedError(
            f"the float8 linears must have one recipe, got {'; '.join(stored)}; export them alone"
        )
    return configs[0], stored[str(configs[0])]


def _names_of_given(
    names: list[str], weights: Mapping[str, Tensor], checkpoint: CheckpointNames, float8: list[str]
) -> list[str]:
    """The names in the model of the tensors that a user gave, in their order."""
    given = checkpoint.in_model(names, weights)
    missing = [name for name in float8 if name not in given.values()]
    missing += [
        part
        for name in checkpoint.stacks
        if name in given.values() and name not in weights
        for part in checkpoint.of(name)
        if part not in weights
    ]
    if missing:
        raise ValueError(f"the weights lack those of linears of the model: {listed(missing)}")
    return list(dict.fromkeys(given.values()))


def _kept_by_transformers(model: nn.Module, linears: Iterable[str]) -> list[str]:
    """The linears that transformers never quantizes in fp8, whatever config.json says, as T5's `wo`."""
    patterns = getattr(model, "_keep_in_fp32_modules", None) if is_of_transformers(model) else None
    if not patterns:
        return []
    from transformers.quantizers.quantizers_utils import should_convert_module

    return [name for name in linears if not should_convert_module(name, list(patterns))]


def _ignored(
    model: nn.Module, names: list[str], tied: list[str], in_float8: set[str], checkpoint: CheckpointNames
) -> list[str]:
    """The modules whose matrices stay in high precision, under every name that a reader may have for them.

    transformers skips, in fp8, what is inside of such a module, too. So one that has a float8 linear, as a Mamba
    mixer, which has parameters of its own, is none of them: no reader multiplies by these. Nor is a name that others
    end with, which it skips, too.
    """
    tensors = model.state_dict(keep_vars=True)
    dims = {plain_name(name): tensor.dim() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}
    matrices = [name for name in (*names, *tied) if name not in in_float8 and (dims.get(name, 2) >= 2 or name in tied)]
    ignored = {module for name in matrices for module in _modules_in_readers(name, checkpoint)}
    quantized = {module for name in in_float8 for module in checkpoint.modules(name)}
    ends = {module[dot + 1 :] for module in quantized for dot, each in enumerate(module) if each == "."}
    ignored |= {module.removeprefix(checkpoint.base_prefix) for module in ignored} - ends  # of the base model alone
    while quantized:
        ignored -= quantized
        quantized = {module.rpartition(".")[0] for module in quantized if module}
    return sorted(ignored)


def _check_ends(linears: Iterable[str], ignore: list[str]) -> None:
    """Refuse what transformers would read in high precision, because a module that is so has the end of its name."""
    hidden = [name for name in linears if name.endswith(tuple(ignore))]
    if hidden:
        raise NotImplementedError(
            f"{FP8}: transformers skips a linear whose name ends as that of one in high precision: {listed(hidden)}; "
            f"leave these in high precision, too, or use the format {BLOCKS}"
        )


def _modules_in_readers(name: str, checkpoint: CheckpointNames) -> Iterator[str]:
    """The modules that have a tensor, and what readers look for instead of experts.

    transformers looks for the module of all experts, which it takes any `experts` for; vLLM and SGLang, in
    compressed-tensors, for the three linears of the first expert under the names that most architectures have.
    """
    found = checkpoint.modules(name)
    if name in checkpoint.stacks or name in checkpoint.whole_stacks:
        experts = name.rpartition(".")[0]
        found += [experts, checkpoint.renamed(f"{experts}.").removesuffix(".")]
        found += [f"{found[-1]}.0.{leaf}" for leaf in ("gate_proj", "up_proj", "down_proj")]
    found += [f"{each.partition('.experts.')[0]}.experts" for each in found if ".experts." in each]
    yield from found


def _sizes(
    linears: Mapping[str, Float8Linear], experts: Mapping[str, Float8Experts], checkpoint: CheckpointNames
) -> dict[str, list[int]]:
    """The rows and columns of each matrix in a checkpoint, by the names of linears and of stacks."""
    sizes = {name: list(each.weight.shape) for name, each in linears.items()}
    for name, each in experts.items():
        _, *size = getattr(each, name.rpartition(".")[2]).shape
        rows, columns = reversed(size) if name in checkpoint.transposed else size
        sizes[name] = [rows // len(checkpoint.stacks[name][0]), columns]
    return sizes


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of `model` without the names of wrappers; a sharded weight is a plain DTensor."""
    return {plain_name(name): tensor for name, tensor in model.state_dict().items()}


def frozen_weights(model: nn.Module) -> dict[str, FrozenFloat8Weight]:
    """The weights that are stored in float8, or this rank's shards of them, by their names without wrappers."""
    return {
        plain_name(f"{name}.weight".lstrip(".") if weight.name == "weight" else name): weight.local
        for name, weight in weights_under(model)
        if isinstance(weight.local, FrozenFloat8Weight)
    }


def _names(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of the tensors, each parameter once, and all names of the parameters that have several."""
    owners = [[plain_name(name) for name in names] for names in owners_of_parameters(model).values()]
    again = {name for names in owners for name in names[1:]}
    tied = [name for names in owners if len(names) > 1 for name in names]
    scales = {f"{name}{SCALE_SUFFIX}" for name in frozen_weights(model)}
    return [name for name in named_tensors(model) if name not in again | scales], tied

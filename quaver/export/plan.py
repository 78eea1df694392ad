"""Plans an export: which weights are stored in float8, how, and under which names, before a tensor is read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from quaver.conversion.report import ConversionReport, conversion_report
from quaver.experts.module import Float8Experts
from quaver.experts.module_weight import ModuleWeight, weights_under
from quaver.experts.seam import Float8GroupedMM
from quaver.export.checkpoint_names import CheckpointNames, checkpoint_names
from quaver.export.formats import FORMATS, format_named, weight_format
from quaver.export.formats.base import WeightFormat
from quaver.linear.frozen_weight import FrozenFloat8Weight
from quaver.recipes.config import Float8LinearConfig
from quaver.recipes.scale_layout import BLOCK_SIZE
from quaver.recipes.serving import serving_of
from quaver.runtime.names import listed, owners_of_parameters, plain_name


@dataclass(frozen=True)
class Plan:
    """The tensors that an export of a model writes, decided before a tensor is read."""

    float8: dict[str, ModuleWeight]
    """The weights that are stored in float8, of linears and of experts, by their names without wrappers."""
    whole_stacks: list[str]
    """The stacks of float8 experts that stay in high precision, because checkpoints hold no matrices of theirs."""
    kept: list[str]
    """The float8 linears that stay in high precision, because transformers reads no others for them in the format."""
    names: list[str]
    """The tensors of the model in its own order, a tied one once."""
    given: dict[str, str]
    """The name of each tensor among `weights` that a user gave, which may be those of a checkpoint."""
    checkpoint: CheckpointNames
    ignore: list[str]
    """The modules whose matrices stay in high precision, under the names of the model and of the checkpoint."""
    format: WeightFormat
    ragged: list[str]
    """The weights whose last blocks are cut, because a dimension is no multiple of 128; none without such blocks."""
    cut_inputs: list[str]
    """The modules whose weights have columns that are no multiple of 128, named so, too; none without such blocks."""
    recipe: str
    """The name of the recipe, or of the engine that has its forward; else its casts."""
    report: ConversionReport

    @property
    def count(self) -> int:
        """How many matrices are stored in float8."""
        return sum(len(self.checkpoint.of(name)) for name in self.float8)


def linear_of(name: str) -> str:
    """The name of the linear of a float8 weight; of experts, that of the stack."""
    return name.removesuffix(".weight")


def plan_export(model: nn.Module, format: str, weights: Mapping[str, Tensor] | None) -> Plan:
    """Decide what an export of `model` writes; see `iter_float8_weights` for the arguments and the errors."""
    kind = format_named(format)
    converted = {
        name: each for name, each in float8_weights(model).items() if not each.config.casts.weight.row.is_disabled
    }
    _check_experts(converted)
    stacks = [name for name, each in converted.items() if isinstance(each.module, Float8Experts)]
    transposed = [name for name, each in converted.items() if getattr(each.module, "state_dict_is_transposed", False)]
    linears = [linear_of(name) for name in converted if name not in (*stacks, *transposed)]
    kept = kind.left_out(model, linears, stacks)
    report, checkpoint = conversion_report(model), checkpoint_names(model, has_linears=kind.has_linears)
    whole = [name for name in stacks if name not in checkpoint.stacks]
    left_out = {*transposed, *whole, *(f"{name}.weight" for name in kept)}
    float8 = {name: each for name, each in converted.items() if name not in left_out}
    if transposed and not float8:
        raise ValueError(
            f"no server reads Conv1D weights in float8, and the model's float8 layers are such "
            f"({listed([linear_of(name) for name in transposed])}); save_pretrained writes them in high precision"
        )
    config, stored = _one_format(format, float8)
    names, tied = _names(model)
    if hasattr(model, "get_base_model") or any(".base_layer." in name for name in names):
        raise ValueError(
            "the model has adapters of PEFT, under names that no server loads; export model.merge_and_unload(), or "
            "model.get_base_model() where the adapters are prompts"
        )
    both = [name for name in tied if name in float8]
    if both:
        raise ValueError(
            f"a tied weight cannot be stored in float8: {listed(both)}; filter the linear out, or untie it"
        )
    given = {} if weights is None else _given(names, weights, checkpoint, float8)
    names = names if weights is None else list(given)
    ignore = _ignored(model, names, tied, float8, checkpoint)
    sizes = {name: _size(name, each, checkpoint) for name, each in float8.items()}
    stored.check(model, sizes, ignore)
    has_blocks = stored.block_size == (BLOCK_SIZE, BLOCK_SIZE)
    ragged = [name for name, size in sizes.items() if has_blocks and any(length % BLOCK_SIZE for length in size)]
    cut = (module for name in ragged if sizes[name][1] % BLOCK_SIZE for module in checkpoint.modules(name))
    return Plan(
        float8=float8 if format in FORMATS else {},
        whole_stacks=whole + _stacks_of_torchtitan(model),
        kept=kept,
        names=names,
        given=given,
        checkpoint=checkpoint,
        ignore=ignore,
        format=stored,
        ragged=[linear_of(name) for name in ragged],
        cut_inputs=list(dict.fromkeys(cut)),
        recipe=config.recipe_name.value if config.recipe_name else serving_of(config) or str(config),
        report=report,
    )


def _check_experts(float8: Mapping[str, ModuleWeight]) -> None:
    for name, weight in float8.items():
        if getattr(weight.module, "_is_expert_parallel", False):
            raise NotImplementedError(
                f"{name.rpartition('.')[0] or 'the model'}: expected all experts of a layer, got those of one rank of "
                "an expert parallel model; save it with save_pretrained, load it without expert parallelism and export "
                "that"
            )


def _stacks_of_torchtitan(model: nn.Module) -> list[str]:
    return [
        plain_name(f"{prefix}.{leaf}".lstrip("."))
        for prefix, module in model.named_modules()
        if isinstance(module, Float8GroupedMM)
        for leaf, weight in module.named_parameters(recurse=False)
        if weight.dim() > 2
    ]


def _one_format(format: str, float8: Mapping[str, ModuleWeight]) -> tuple[Float8LinearConfig, WeightFormat]:
    """The config of all weights, and how `format` holds it."""
    configs = {str(each.config): each.config for each in float8.values()}
    if not configs:
        raise ValueError("no linear of the model is in float8; convert it, or give a recipe")
    stored = [weight_format(format, each) for each in configs.values()]
    if any(each != stored[0] for each in stored):
        raise NotImplementedError(
            f"the float8 linears must have one recipe, got {'; '.join(configs)}; export them alone"
        )
    return next(iter(configs.values())), stored[0]


def _given(
    names: list[str], weights: Mapping[str, Tensor], checkpoint: CheckpointNames, float8: Iterable[str]
) -> dict[str, str]:
    """The name that a user gave each tensor, or the last matrix of a stack, by the names in the model."""
    given = {name: stored for stored, name in checkpoint.in_model(names, weights).items()}
    missing = [name for name in float8 if name not in given]
    missing += [
        part
        for name in checkpoint.stacks
        if name in given and name not in weights
        for part in checkpoint.of(name)
        if part not in weights
    ]
    if missing:
        raise ValueError(f"the weights lack those of linears of the model: {listed(missing)}")
    return given


def _ignored(
    model: nn.Module, names: list[str], tied: list[str], in_float8: Iterable[str], checkpoint: CheckpointNames
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
    base = checkpoint.conversions.base_prefix  # of a model that is loaded without its head
    ignored |= {module.removeprefix(base) for module in ignored} - ends
    while quantized:
        ignored -= quantized
        quantized = {module.rpartition(".")[0] for module in quantized if module}
    return sorted(ignored)


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


def _size(name: str, weight: ModuleWeight, checkpoint: CheckpointNames) -> Sequence[int]:
    """The rows and columns of each matrix of a float8 weight in a checkpoint."""
    size = list(weight.parameter.shape[-2:])
    rows, columns = reversed(size) if name in checkpoint.transposed else size
    return [rows // len(checkpoint.parts(name)[0]), columns]


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state dict of `model` without the names of wrappers; a sharded weight is a plain DTensor."""
    return {plain_name(name): tensor for name, tensor in model.state_dict().items()}


def float8_weights(model: nn.Module) -> dict[str, ModuleWeight]:
    """The weights of float8 modules by their names without wrappers."""
    return {
        plain_name(f"{name}.weight".lstrip(".") if weight.name == "weight" else name): weight
        for name, weight in weights_under(model)
    }


def frozen_weights(model: nn.Module) -> dict[str, FrozenFloat8Weight]:
    """The weights that `float8_weights` holds as codes, or this rank's shards of them."""
    found = {name: weight.local for name, weight in float8_weights(model).items()}
    return {name: local for name, local in found.items() if isinstance(local, FrozenFloat8Weight)}


def _names(model: nn.Module) -> tuple[list[str], list[str]]:
    """The names of the tensors, each parameter once, and all names of the parameters that have several."""
    owners = [[plain_name(name) for name in names] for names in owners_of_parameters(model).values()]
    again = {name for names in owners for name in names[1:]}
    tied = [name for names in owners if len(names) > 1 for name in names]
    return [name for name in named_tensors(model) if name not in again], tied

"""The names of a model's tensors in a Hugging Face checkpoint, which stores each expert of a mixture separately.

    in the model                              in the checkpoint, for each expert
    mlp.experts.gate_up_proj [E, 2 F, D]      mlp.experts.7.gate_proj.weight, mlp.experts.7.up_proj.weight [F, D]
    mlp.experts.down_proj [E, D, F]           mlp.experts.7.down_proj.weight [D, F]

The table shows the default names. transformers has a conversion mapping for each architecture: Mixtral's experts are
block_sparse_moe.experts.7.w1, w3 and w2. `save_pretrained` reverses this mapping, and so does this file, for models
with and without experts: model.language_model.layers is language_model.model.layers in LLaVA's checkpoints. Servers
load these names. Reading accepts all names that `from_pretrained` knows, legacy and multimodal ones included.

Some checkpoints hold a whole stack as one tensor: gate and up interleaved, with biases, or under other names (gpt-oss,
Granite, Qwen3-VL-MoE). llm-compressor writes some of these stacks as linears of each expert. Llama 4's experts are
stacks [E, K, N] in transformers' checkpoints. In compressed-tensors they are linears of each expert, which
transformers, vLLM and SGLang load.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quaver.experts.module import get_expert_weights, is_experts, is_transposed
from quaver.foreign.transformers import is_llama4_experts
from quaver.linear.class_change import get_class_parts
from quaver.runtime.module_names import strip_wrappers

PartNames = tuple[str, ...]
"""The names of the matrices of one expert; the stack concatenates their rows in this order."""

DIFFUSION_PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
"""Prefixes of the names of a diffusion model in files that hold several models."""

FLOAT32_LEAF = "e_score_correction_bias"
"""The last part of the name of a bias that routers add to scores. No export rounds it."""

_PART_LEAVES = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class CheckpointNames:
    """The names of a model's tensors in a checkpoint. Names in the model are without wrappers."""

    stacks: dict[str, list[PartNames]]
    """The parts of each expert, by the name of the stack in the model."""
    transposed: set[str]
    """The stacks that the model holds as [E, K, N]; each matrix is [N, K] in the checkpoint."""
    whole_stacks: list[str]
    """The stacks that checkpoints hold as one tensor."""
    conversions: _Conversions
    linears: dict[str, list[list[PartNames]]] = field(default_factory=dict)
    """The parts that a checkpoint may have instead of a whole stack, by the name of the stack; see `with_linears`."""

    def with_linears(self, stored: Container[str]) -> CheckpointNames:
        """Return these names, where whole stacks whose linears are among `stored` become linears of each expert.

        llm-compressor writes such linears. `stored`: the names in the checkpoint.
        """
        variants = ((name, parts) for name, variants in self.linears.items() for parts in variants)
        stored_stacks = {name: parts for name, parts in variants if parts[0][0] in stored}
        whole_stacks = [name for name in self.whole_stacks if name not in stored_stacks]
        return replace(self, stacks=self.stacks | stored_stacks, whole_stacks=whole_stacks)

    def get_stored_name(self, name: str) -> str:
        """Return the stored name of a tensor that is not a stack, or of a module, whose `name` ends with a dot."""
        return self.conversions.get_stored_name(name)

    def get_parts(self, name: str) -> list[PartNames]:
        """Return the stored names of the parts of each matrix of a stack; any other tensor is one part."""
        stack = self.stacks.get(name)
        return [(self.get_stored_name(name),)] if stack is None else stack

    def get_stored_names(self, name: str) -> list[str]:
        """Return the stored name of a tensor, or the names of all parts of a stack."""
        return [part for parts in self.get_parts(name) for part in parts]

    def list_modules(self, name: str) -> list[str]:
        """Return the modules of a tensor, or of each matrix of a stack, by their names in model and checkpoint.

        vLLM and SGLang match `ignore` and `targets` of a config.json with the checkpoint's names, transformers with
        the model's.
        """
        unsplit = [] if name in self.stacks else [name]
        return list(dict.fromkeys(tensor.rpartition(".")[0] for tensor in (*unsplit, *self.get_stored_names(name))))

    def split_tensor(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """Return a tensor of the model by its stored name; for a stack, views [N, K] by the names of its parts."""
        if name not in self.stacks:
            return {self.get_stored_name(name): tensor}
        experts = tensor.mT if name in self.transposed else tensor
        return {
            part: rows
            for parts, matrix in zip(self.stacks[name], experts, strict=True)
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
        }

    def read_stack(self, name: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[str], Tensor]) -> Tensor:
        """Return a stack of the model; `read` returns the matrix with a stored name."""
        stack = torch.empty(tuple(shape), dtype=dtype, device="cpu")
        for part, matrix in self.split_tensor(name, stack).items():
            matrix.copy_(read(part))
        return stack

    def find_model_names(self, model_names: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
        """Return the name in the model of each stored tensor, or its own name if it is unknown.

        `stored` may have names of the model or of the checkpoint.
        """
        known = set(model_names)
        owners = {part: name for name in known for part in self.get_stored_names(name)}
        parts = {stored_part: part for part, stored_part in self.find_stored_parts(stored).items()}
        named = {name: name if name in known else owners.get(parts.get(name, name)) for name in stored}
        unmatched = known.difference(named.values())
        return {name: owner or self.conversions.find_other_name(name, unmatched) for name, owner in named.items()}

    def find_stored_parts(self, stored: Iterable[str]) -> dict[str, str]:
        """Return the name in `stored` of each part of the stacks. It may be the name in a larger or a smaller model."""
        parts = {part for stack in self.stacks.values() for parts in stack for part in parts}
        stored_by_part = {name: name for name in stored if name in parts}
        for name in stored:
            if name in stored_by_part:
                continue
            if part := next((candidate for candidate in list_other_names(name) if candidate in parts), None):
                stored_by_part.setdefault(part, name)
        return stored_by_part


def make_checkpoint_names(model: nn.Module, *, has_linears: bool = True) -> CheckpointNames:
    """Return the names of `model`'s tensors in a checkpoint.

    `has_linears`: whether the format may be compressed-tensors, where Llama 4's experts are linears.
    """
    model = getattr(model, "_orig_mod", model)
    experts = {strip_wrappers(name): module for name, module in model.named_modules() if is_experts(module)}
    conversions = _Conversions(model)
    stacks: dict[str, list[PartNames]] = {}
    linears: dict[str, list[list[PartNames]]] = {}
    transposed, whole_stacks = set(), []
    for prefix, module in experts.items():
        for leaf, weight in get_expert_weights(module).items():
            name, count = f"{prefix}{'.' if prefix else ''}{leaf}", weight.shape[0]
            parts = (
                conversions.find_parts(name, count)
                if conversions.has_mapping
                else _make_default_parts(prefix, leaf, module)
            )
            if parts is None and has_linears and is_llama4_experts(get_class_parts(module).original):
                matrices = _name_matrices(prefix, leaf, count)
                parts = [tuple(map(conversions.get_stored_name, names)) for names in matrices]
                transposed.add(name)
            if parts is None:
                whole_stacks.append(name)
                linears[name] = _list_linear_variants(prefix, leaf, module, conversions)
            else:
                stacks[name] = parts
    return CheckpointNames(stacks, transposed, whole_stacks, conversions, linears)


def _make_default_parts(prefix: str, leaf: str, module: nn.Module) -> list[PartNames] | None:
    is_plain = getattr(module, "is_concatenated", True) and not getattr(module, "has_bias", False)
    if is_transposed(module) or not is_plain:
        return None
    return _name_matrices(prefix, leaf, getattr(module, leaf).shape[0])


def _list_linear_variants(
    prefix: str, leaf: str, module: nn.Module, conversions: _Conversions
) -> list[list[PartNames]]:
    """Return the variants of a whole stack as linears: gate and up each, or one linear for each expert.

    Granite's `input_linear.weight`, a stack of gate and up, becomes `input_linear.7.weight` or, in older files,
    `input_linear.experts.7.weight`.
    """
    parts = _make_default_parts(prefix, leaf, module)
    if parts is None:
        return []
    base = conversions.get_stored_name(f"{prefix}.{leaf}".lstrip(".")).removesuffix(".weight")
    variants: list[list[PartNames]] = [[tuple(map(conversions.get_stored_name, names)) for names in parts]]
    for infix in ("", ".experts"):
        variants.append([(f"{base}{infix}.{index}.weight",) for index in range(len(parts))])
    return variants


def _name_matrices(prefix: str, leaf: str, count: int) -> list[PartNames]:
    dot = "." if prefix else ""
    return [tuple(f"{prefix}{dot}{index}.{part}.weight" for part in _PART_LEAVES[leaf]) for index in range(count)]


class _Conversions:
    """transformers' conversion mapping of a model, reversed as `save_pretrained` does; empty for other models.

    Like `save_pretrained`, it adds a prefix that `from_pretrained` removed.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.has_mapping = is_transformers_model(model)
        base = self._model.base_model_prefix if self.has_mapping else ""
        self.base_prefix = f"{base}." if base else ""
        """The prefix of names in the base model, which may be loaded without its head."""
        self._converters: list[Any] = []
        self._renamings: list[Any] = []
        if self.has_mapping:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import PrefixChange, WeightConverter

            conversions = [
                conversion
                for conversion in get_model_conversion_mapping(self._model, add_legacy=False)
                if not isinstance(conversion, PrefixChange)
            ]
            loaded = getattr(model, "_weight_conversions", None)
            if loaded is not None:  # from_pretrained made the model
                conversions += [conversion for conversion in loaded if isinstance(conversion, PrefixChange)]
            for conversion in reversed(conversions):
                is_converter = isinstance(conversion, WeightConverter)
                (self._converters if is_converter else self._renamings).append(conversion.reverse_transform())

    def get_stored_name(self, name: str) -> str:
        """Return the stored name of a whole tensor. A tensor that a converter computes keeps its name."""
        return name if self._find_converter(name) else self._apply_renamings(name)

    def find_other_name(self, name: str, known: set[str]) -> str:
        """Return the name among `known` into which `from_pretrained` reads the tensor `name`, else `name`."""
        candidates = [name, *list_other_names(name)]
        if self.has_mapping:
            from transformers.core_model_loading import rename_source_key

            renamings, converters = self._forward_conversions
            prefix = self._model.base_model_prefix
            names = dict.fromkeys(known, True)
            matches = (rename_source_key(candidate, renamings, converters, prefix, names) for candidate in candidates)
            candidates = [candidate for candidate, pattern in matches if pattern is None]
        return next((candidate for candidate in candidates if candidate in known), name)

    @functools.cached_property
    def _forward_conversions(self) -> tuple[list[Any], list[Any]]:
        """The renamings and the converters with which `from_pretrained` reads checkpoints, legacy ones included."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        conversions = get_model_conversion_mapping(self._model)
        converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
        return [conversion for conversion in conversions if not isinstance(conversion, WeightConverter)], converters

    def _apply_renamings(self, name: str) -> str:
        for renaming in self._renamings:
            name = renaming.rename_source_key(name)[0]
        return name

    def _find_converter(self, name: str) -> tuple[Any, str, str] | None:
        for converter in self._converters:
            target, pattern = converter.rename_source_key(name)
            if pattern is not None:
                return converter, target, pattern
        return None

    def find_parts(self, name: str, count: int) -> list[PartNames] | None:
        """Return the parts of each expert of a stack; None unless each part is a contiguous range of rows [N, K].

        Converts a stack whose elements are their row numbers, and reads off which rows each part has.
        """
        match = self._find_converter(name)
        if match is None:
            return None
        converter, target, pattern = match
        if len(converter.source_patterns) > 1:  # it needs several stacks at once, as Ernie 4.5 VL's does
            return None
        rows = torch.arange(count * _TRACED_ROWS, device="cpu").view(count, _TRACED_ROWS, 1)
        converter.add_tensor(target, name, pattern, rows)
        split = converter.convert(target, model=self._model, config=self._model.config)
        names_by_row = {_find_first_row(part): self._apply_renamings(part_name) for part_name, part in split.items()}
        if None in names_by_row or len(split) % count:
            return None
        parts_per_expert = len(split) // count
        starts = range(0, _TRACED_ROWS, _TRACED_ROWS // parts_per_expert)
        return [tuple(names_by_row[index * _TRACED_ROWS + row] for row in starts) for index in range(count)]


_TEXT_PARTS = ("model.language_model.", "language_model.model.", "language_model.", "text_model.")
"""Parts of names in a multimodal model that names in its text model lack."""


def list_other_names(name: str) -> list[str]:
    """Return the names that a tensor may have in a part of the model, such as its text model, and the reverse."""
    in_text = [name.replace(part, "", 1) for part in _TEXT_PARTS if part in name]
    without_prefix = [name.removeprefix(prefix) for prefix in DIFFUSION_PREFIXES if name.startswith(prefix)]
    return [*in_text, *without_prefix, *(f"{prefix}{name}" for prefix in DIFFUSION_PREFIXES)]


_TRACED_ROWS = 4
"""Rows of an expert in the stack that `_Conversions.find_parts` converts: two each for gate and up."""


def _find_first_row(part: Tensor | list[Tensor]) -> int | None:
    """Return the number of the first row if the rows are consecutive, else None."""
    rows = part[0] if isinstance(part, list) else part
    first = int(rows.flatten()[0])
    expected = torch.arange(first, first + rows.shape[0], device="cpu")
    return first if rows.dim() == 2 and rows.shape[1] == 1 and torch.equal(rows[:, 0], expected) else None


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether transformers, 5.0 or newer, has a conversion mapping for `model`."""
    if not any(cls.__module__.startswith("transformers.") for cls in type(model).__mro__):
        return False
    if importlib.util.find_spec("transformers.conversion_mapping") is None:
        return False
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)

"""The names of a model's tensors in a Hugging Face checkpoint, which stores each expert of a mixture by itself.

    in the model                              in the checkpoint, for each expert
    mlp.experts.gate_up_proj [E, 2 F, D]      mlp.experts.7.gate_proj.weight, mlp.experts.7.up_proj.weight [F, D]
    mlp.experts.down_proj [E, D, F]           mlp.experts.7.down_proj.weight [D, F]

transformers knows the names of each architecture (Mixtral's are block_sparse_moe.experts.7.w1, w3 and w2), and writes
them in `save_pretrained`: its conversion mapping, reversed, gives those of the table and of everything else in a model
with experts. Servers load these names. Experts of other models have the names of the table.

A stack stays as it is where its checkpoints hold no matrices by expert: gate and up interleaved, biases, other names
(gpt-oss, Granite, Qwen3-VL-MoE); llm-compressor writes some of them as linears of each expert. Llama 4's are stacks
[E, K, N] in transformers' checkpoints, and linears of each expert in those of compressed-tensors, for which
transformers makes such linears; vLLM and SGLang load their names. A model of transformers without experts has the names
of its mapping, too: model.language_model.layers is language_model.model.layers in LLaVA's checkpoints. Those that
`from_pretrained` knows are read, older names and a multimodal model's for its text included.
"""

from __future__ import annotations

import functools
import importlib.util
import typing
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from quaver.experts.module import is_experts, is_transposed, weights_of
from quaver.runtime.names import plain_name

Parts = tuple[str, ...]
"""The names of the matrices of one expert, whose rows follow each other in the stack."""

PREFIXES = ("model.diffusion_model.", "model.model.", "net.")
"""Prefixes of the names of a diffusion model in files that hold other models, too."""

KEPT_IN_FLOAT32 = "e_score_correction_bias"
"""The end of the name of what no export rounds: routers add it to scores to choose experts."""

_LEAVES = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class CheckpointNames:
    """The names in a checkpoint; see the top of the file. Names of the model are without wrappers."""

    stacks: dict[str, list[Parts]]
    """The parts of each expert, by the name of the stack in the model."""
    transposed: set[str]
    """The stacks that the model holds as [E, K, N]; each matrix is [N, K] in the checkpoint."""
    whole_stacks: list[str]
    """The stacks that checkpoints hold as the model does."""
    conversions: _Conversions
    linears: dict[str, list[list[Parts]]] = field(default_factory=dict)
    """Of `whole_stacks`: the parts that a checkpoint may have instead; see `with_linears`."""

    def with_linears(self, stored: Container[str]) -> CheckpointNames:
        """These names, with the linears of each expert that llm-compressor writes where `stored` has them for a stack.

        `stored`: the names in the checkpoint.
        """
        options = ((name, parts) for name, each in self.linears.items() for parts in each if parts[0][0] in stored)
        found = dict(options)
        whole = [name for name in self.whole_stacks if name not in found]
        return replace(self, stacks=self.stacks | found, whole_stacks=whole)

    def renamed(self, name: str) -> str:
        """The name of a tensor that is no stack, or of a module with a dot at its end."""
        return self.conversions.renamed(name)

    def parts(self, name: str) -> list[Parts]:
        """The names of the parts of each matrix of a stack; another tensor is one part."""
        stack = self.stacks.get(name)
        return [(self.renamed(name),)] if stack is None else stack

    def of(self, name: str) -> list[str]:
        """The names of a tensor of the model: one, or one for each matrix of a stack."""
        return [part for parts in self.parts(name) for part in parts]

    def modules(self, name: str) -> list[str]:
        """The modules that a tensor, or each matrix of a stack, belongs to, by both names.

        vLLM and SGLang match `ignore` and `targets` of a config.json with the checkpoint's names, transformers with
        the model's.
        """
        own = [] if name in self.stacks else [name]
        return list(dict.fromkeys(each.rpartition(".")[0] for each in (*own, *self.of(name))))

    def matrices(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A tensor of the model by its names in the checkpoint, as views: of a stack, a matrix [N, K] for each."""
        if name not in self.stacks:
            return {self.renamed(name): tensor}
        experts = tensor.mT if name in self.transposed else tensor
        return {
            part: rows
            for parts, matrix in zip(self.stacks[name], experts, strict=True)
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
        }

    def stacked(self, name: str, shape: Sequence[int], dtype: torch.dtype, read: Callable[[str], Tensor]) -> Tensor:
        """A stack of the model, made of what `read` gives for its names in the checkpoint."""
        stack = torch.empty(tuple(shape), dtype=dtype)
        for part, matrix in self.matrices(name, stack).items():
            matrix.copy_(read(part))
        return stack

    def in_model(self, model_names: Iterable[str], stored: Iterable[str]) -> dict[str, str]:
        """The name in the model of each stored tensor, which may have either name; its own for an unknown one."""
        known = set(model_names)
        owners = {each: name for name in known for each in self.of(name)}
        parts = {each: part for part, each in self.stored_parts(stored).items()}
        named = {each: each if each in known else owners.get(parts.get(each, each)) for each in stored}
        free = known.difference(named.values())
        return {each: name or self.conversions.other_name(each, free) for each, name in named.items()}

    def stored_parts(self, stored: Iterable[str]) -> dict[str, str]:
        """The stored name of each matrix of the stacks: its own, or that in a larger model or in one of its parts."""
        parts = {part for stack in self.stacks.values() for parts in stack for part in parts}
        found = {each: each for each in stored if each in parts}
        for each in stored:
            if each not in found and (part := next((name for name in other_names(each) if name in parts), None)):
                found.setdefault(part, each)
        return found


def checkpoint_names(model: nn.Module, *, has_linears: bool = True) -> CheckpointNames:
    """The names of `model`'s tensors in a checkpoint.

    `has_linears`: whether the checkpoint may be one of compressed-tensors, in which Llama 4's experts are linears.
    """
    model = getattr(model, "_orig_mod", model)
    experts = {plain_name(name): each for name, each in model.named_modules() if is_experts(each)}
    conversions = _Conversions(model)
    stacks: dict[str, list[Parts]] = {}
    linears: dict[str, list[list[Parts]]] = {}
    transposed, whole_stacks = set(), []
    for prefix, module in experts.items():
        for leaf, weight in weights_of(module).items():
            name = f"{prefix}{'.' if prefix else ''}{leaf}"
            parts = conversions.parts(name, weight.shape[0]) if conversions.is_known else _default(prefix, leaf, module)
            if parts is None and has_linears and _class_before(module) == "Llama4TextExperts":
                parts = [tuple(map(conversions.renamed, each)) for each in _matrices(prefix, leaf, weight.shape[0])]
                transposed.add(name)
            if parts is None:
                whole_stacks.append(name)
                linears[name] = _linears(prefix, leaf, module, conversions)
            else:
                stacks[name] = parts
    return CheckpointNames(stacks, transposed, whole_stacks, conversions, linears)


def _class_before(experts: nn.Module) -> str:
    """The name of the class that they had before a conversion."""
    return str(getattr(experts, "_converted_from", type(experts)).__name__)


def _default(prefix: str, leaf: str, module: nn.Module) -> list[Parts] | None:
    is_plain = getattr(module, "is_concatenated", True) and not getattr(module, "has_bias", False)
    if is_transposed(module) or not is_plain:
        return None
    return _matrices(prefix, leaf, getattr(module, leaf).shape[0])


def _linears(prefix: str, leaf: str, module: nn.Module, conversions: _Conversions) -> list[list[Parts]]:
    """The parts of a whole stack in a checkpoint that has linears: gate and up by themselves, or one linear an expert.

    Granite's `input_linear.weight`, a stack of gate and up, becomes `input_linear.7.weight` or, in older files,
    `input_linear.experts.7.weight`.
    """
    parts = _default(prefix, leaf, module)
    if parts is None:
        return []
    base = conversions.renamed(f"{prefix}.{leaf}".lstrip(".")).removesuffix(".weight")
    found: list[list[Parts]] = [[tuple(map(conversions.renamed, each)) for each in parts]]
    for infix in ("", ".experts"):
        found.append([(f"{base}{infix}.{index}.weight",) for index in range(len(parts))])
    return found


def _matrices(prefix: str, leaf: str, count: int) -> list[Parts]:
    dot = "." if prefix else ""
    return [tuple(f"{prefix}{dot}{index}.{each}.weight" for each in _LEAVES[leaf]) for index in range(count)]


class _Conversions:
    """transformers' conversion mapping of a model, reversed as `save_pretrained` reverses it; none for other models.

    A prefix that `from_pretrained` removed is added again, as `save_pretrained` adds it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = typing.cast(Any, model)
        self.is_known = is_of_transformers(model)
        base = self._model.base_model_prefix if self.is_known else ""
        self.base_prefix = f"{base}." if base else ""
        """The prefix of the base model, which may be loaded alone, in the names of the model."""
        self._converters: list[Any] = []
        self._renamings: list[Any] = []
        if self.is_known:
            from transformers.conversion_mapping import get_model_conversion_mapping
            from transformers.core_model_loading import PrefixChange, WeightConverter

            found = [
                each
                for each in get_model_conversion_mapping(self._model, add_legacy=False)
                if not isinstance(each, PrefixChange)
            ]
            loaded = getattr(model, "_weight_conversions", None)
            if loaded is not None:  # from_pretrained made the model
                found += [each for each in loaded if isinstance(each, PrefixChange)]
            for each in reversed(found):
                of_kind = self._converters if isinstance(each, WeightConverter) else self._renamings
                of_kind.append(each.reverse_transform())

    def renamed(self, name: str) -> str:
        """The name of a tensor that is stored whole; the model's own where transformers computes it from others."""
        return name if self._converter(name) else self._apply_renamings(name)

    def other_name(self, name: str, known: set[str]) -> str:
        """The name in the model that `from_pretrained` reads a tensor of a checkpoint into; its own for none."""
        candidates = [name, *other_names(name)]
        if self.is_known:
            from transformers.core_model_loading import rename_source_key

            renamings, converters = self._forwards
            prefix = self._model.base_model_prefix
            names = dict.fromkeys(known, True)
            found = (rename_source_key(each, renamings, converters, prefix, names) for each in candidates)
            candidates = [each for each, pattern in found if pattern is None]
        return next((each for each in candidates if each in known), name)

    @functools.cached_property
    def _forwards(self) -> tuple[list[Any], list[Any]]:
        """The renamings and the converters by which `from_pretrained` reads checkpoints, old ones included."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        found = get_model_conversion_mapping(self._model)
        converters = [each for each in found if isinstance(each, WeightConverter)]
        return [each for each in found if not isinstance(each, WeightConverter)], converters

    def _apply_renamings(self, name: str) -> str:
        for each in self._renamings:
            name = each.rename_source_key(name)[0]
        return name

    def _converter(self, name: str) -> tuple[Any, str, str] | None:
        """The converter of a tensor, with the target and the pattern that it matches."""
        for each in self._converters:
            target, pattern = each.rename_source_key(name)
            if pattern is not None:
                return each, target, pattern
        return None

    def parts(self, name: str, count: int) -> list[Parts] | None:
        """The parts of a stack's experts; None where they are no rows of [N, K] that follow each other.

        The converter itself says what it makes of a stack: it gets one whose elements are the numbers of their rows.
        """
        found = self._converter(name)
        if found is None:
            return None
        converter, target, pattern = found
        if len(converter.source_patterns) > 1:  # it needs several stacks at once, as Ernie 4.5 VL's does
            return None
        rows = torch.arange(count * _ROWS).view(count, _ROWS, 1)
        converter.add_tensor(target, name, pattern, rows)
        made = converter.convert(target, model=self._model, config=self._model.config)
        first_rows = {_first_row(each): self._apply_renamings(part) for part, each in made.items()}
        if None in first_rows or len(made) % count:
            return None
        height = len(made) // count
        return [
            tuple(first_rows[row] for row in range(index * _ROWS, (index + 1) * _ROWS, _ROWS // height))
            for index in range(count)
        ]


_TEXT_PARTS = ("model.language_model.", "language_model.model.", "language_model.", "text_model.")
"""Parts of the names of a multimodal model that the names of its text model lack."""


def other_names(name: str) -> list[str]:
    """The names that a tensor of a larger model may have in a part of it, as its model of text, or the reverse."""
    in_text = [name.replace(part, "", 1) for part in _TEXT_PARTS if part in name]
    without = [name.removeprefix(prefix) for prefix in PREFIXES if name.startswith(prefix)]
    return [*in_text, *without, *(f"{prefix}{name}" for prefix in PREFIXES)]


_ROWS = 4
"""How many rows an expert has in the stack that a converter is asked with: two for each of gate and up."""


def _first_row(made: Tensor | list[Tensor]) -> int | None:
    """The number of the first row, of rows in sequence; None for others."""
    rows = made[0] if isinstance(made, list) else made
    first = int(rows.flatten()[0])
    expected = torch.arange(first, first + rows.shape[0])
    return first if rows.dim() == 2 and rows.shape[1] == 1 and torch.equal(rows[:, 0], expected) else None


def is_of_transformers(model: nn.Module) -> bool:
    """Whether transformers has names for `model`; it converts checkpoints since 5.0."""
    if not any(each.__module__.startswith("transformers.") for each in type(model).__mro__):
        return False
    if importlib.util.find_spec("transformers.conversion_mapping") is None:
        return False
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel)

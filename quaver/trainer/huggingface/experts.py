"""Experts in Hugging Face's files: a matrix for each expert there, one 3-D weight for all in a checkpoint.

quaver/export/checkpoint_names.py has the names.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from quaver.export.checkpoint_names import Parts, checkpoint_names
from quaver.trainer.config import Model
from quaver.trainer.model import Llama

Stacks = dict[str, list[Parts]]
"""The names in files of the matrices of each expert, by the name of the checkpoint's weight."""


def stacks_of(model: Model) -> Stacks:
    """The weights of a model that files hold expert by expert."""
    with torch.device("meta"):
        return checkpoint_names(Llama(model)).stacks


def names_in_files(stacks: Stacks, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The tensors of a checkpoint's tensor by their names in files, as views; one of its own name but for experts."""
    if name not in stacks:
        return {name: tensor}
    return {
        part: rows
        for parts, matrix in zip(stacks[name], tensor, strict=True)
        for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True)
    }


def stacked(stacks: Stacks, name: str, like: Tensor, read: Callable[[str], Tensor]) -> Tensor:
    """A checkpoint's tensor of the shape and dtype of `like`, of what `read` gives for names in files."""
    if name not in stacks:
        return read(name).to(like.dtype)
    stack = torch.empty(like.shape, dtype=like.dtype)
    for part, place in names_in_files(stacks, name, stack).items():
        place.copy_(read(part))
    return stack


def without_width(model: Model) -> dict[str, Tensor]:
    """The shared experts of no width that GLM-4.5 has where a mixture has none."""
    if not model.n_experts or model.n_shared_experts:
        return {}
    prefixes = [f"model.layers.{layer}.mlp.shared_experts" for layer in range(model.n_layers)]
    shapes = {"gate_proj": (0, model.dim), "up_proj": (0, model.dim), "down_proj": (model.dim, 0)}
    return {f"{prefix}.{name}.weight": torch.empty(shape) for prefix in prefixes for name, shape in shapes.items()}

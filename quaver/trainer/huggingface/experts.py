"""Experts in Hugging Face's files: a matrix for each expert there, one 3-D weight for all in a checkpoint.

<layer>.mlp.experts.gate_up_proj [E, 2 F, D]    <layer>.mlp.experts.<e>.gate_proj.weight, .up_proj.weight [F, D]
<layer>.mlp.experts.down_proj    [E, D, F]      <layer>.mlp.experts.<e>.down_proj.weight [D, F]
"""

import re
from collections.abc import Callable

import torch
from torch import Tensor

from quaver.trainer.config import Model

_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
_MATRIX = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")


def names_in_files(name: str, stack: Tensor) -> dict[str, Tensor]:
    """The tensors of a checkpoint's tensor by their names in files, as views; one of its own name but for experts."""
    match = _STACK.fullmatch(name)
    if match is None:
        return {name: stack}
    prefix, kind = match.groups()
    parts = {"down": stack} if kind == "down_proj" else dict(zip(("gate", "up"), stack.chunk(2, dim=1), strict=True))
    return {
        f"{prefix}.{expert}.{part}_proj.weight": matrices[expert]
        for expert in range(len(stack))
        for part, matrices in parts.items()
    }


def name_of_stack(name: str) -> str:
    """The checkpoint's tensor that holds the tensor of a file."""
    match = _MATRIX.fullmatch(name)
    if match is None:
        return name
    prefix, _, part = match.groups()
    return f"{prefix}.{'down_proj' if part == 'down' else 'gate_up_proj'}"


def stacked(name: str, like: Tensor, read: Callable[[str], Tensor]) -> Tensor:
    """A checkpoint's tensor of the shape and dtype of `like`, of what `read` gives for names in files."""
    parts = names_in_files(name, torch.empty_like(like, device="meta"))
    if list(parts) == [name]:
        return read(name).to(like.dtype)
    stack = torch.empty(like.shape, dtype=like.dtype)
    for part, place in names_in_files(name, stack).items():
        place.copy_(read(part))
    return stack


def without_width(model: Model) -> dict[str, Tensor]:
    """The shared experts of no width that GLM-4.5 has where a mixture has none."""
    if not model.n_experts or model.n_shared_experts:
        return {}
    prefixes = [f"model.layers.{layer}.mlp.shared_experts" for layer in range(model.n_layers)]
    shapes = {"gate_proj": (0, model.dim), "up_proj": (0, model.dim), "down_proj": (model.dim, 0)}
    return {f"{prefix}.{name}.weight": torch.empty(shape) for prefix in prefixes for name, shape in shapes.items()}

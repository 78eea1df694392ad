"""`find_first_differences`: the layers whose outputs differ between two models, and those where it begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from quaver.recipes.sqnr import compute_sqnr_db
from quaver.runtime.module_names import join_names, strip_wrappers
from quaver.runtime.warnings import warn_user


@dataclass(frozen=True)
class Difference:
    """A layer whose output differs between two models."""

    layer: str
    sqnr_db: float
    """The SQNR of the second model's output, with the first model's as the reference."""
    is_origin: bool
    """Whether its inputs are bit-identical, so that the layer itself causes the difference."""


@torch.no_grad()
def find_first_differences(model: nn.Module, other: nn.Module, *args: Any, **kwargs: Any) -> list[Difference]:
    """Call both models with the same arguments, and list the layers whose outputs differ, in the order of the forward.

    Layers are the modules without children. The inputs and outputs of all layers of `model` are held in memory, so use
    a short prompt. Compare in eval mode; the mode of the models is not changed. If a layer runs several times, its last
    run counts. A UserWarning names the layers that only one model has.

    Raises:
        ValueError: no layer of the two models has the same name.
    """
    recorded: dict[str, tuple[list[Tensor], list[Tensor]]] = {}
    differences: dict[str, Difference] = {}

    def record(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        recorded[name] = [tensor.clone() for tensor in inputs], [tensor.clone() for tensor in outputs]

    def compare(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> None:
        differences.pop(name, None)
        if name not in recorded or _are_equal(recorded[name][1], outputs):
            return
        pairs = [pair for pair in zip(recorded[name][1], outputs, strict=False) if pair[0].shape == pair[1].shape]
        worst = min((compute_sqnr_db(*pair) for pair in pairs if pair[0].is_floating_point()), default=float("nan"))
        differences[name] = Difference(name, worst, _are_equal(recorded[name][0], inputs))

    _observe_layers(model, record, args, kwargs)
    names, other_names = _find_layers(model).keys(), _find_layers(other).keys()
    if not names & other_names:
        raise ValueError("expected two models with layers of the same names, got none in common")
    if only_in_one := sorted(names ^ other_names):
        warn_user(f"layers of one of the two models are not compared: {join_names(only_in_one)}")
    _observe_layers(other, compare, args, kwargs)
    return list(differences.values())


def _find_layers(model: nn.Module) -> dict[str, nn.Module]:
    modules = model.named_modules()
    return {strip_wrappers(name): module for name, module in modules if not list(module.children())}


def _observe_layers(
    model: nn.Module,
    observe: Callable[[str, list[Tensor], list[Tensor]], None],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Call `model`, and `observe` with the name, inputs and outputs of each layer."""

    def hook(name: str) -> Callable[..., None]:
        return lambda _, inputs, named, output: observe(name, _list_tensors((inputs, named)), _list_tensors(output))

    layers = _find_layers(model)
    handles = [layer.register_forward_hook(hook(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()


def _list_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _are_equal(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(map(torch.equal, left, right))

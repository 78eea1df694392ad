"""Checks of the options that optimizers with states in float8 share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from quaver.optim.state import STORAGES


def check_shared_options(group: dict[str, Any]) -> None:
    """Raise ValueError for an invalid lr, eps, weight decay or seed, an unsupported option, or an unsupported dtype."""
    for name in ("lr", "eps", "weight_decay"):
        if not is_number_below(math.inf, group[name]):
            raise ValueError(f"{name}: expected a finite number, 0 or more, got {group[name]!r}")
    if type(group["seed"]) is not int or not 0 <= group["seed"] < 2**63:
        raise ValueError(f"seed: expected a number from 0 to 2^63 - 1, got {group['seed']!r}")
    check_torch_options(group, "capturable", "differentiable")
    check_same_algorithm(group)
    for parameter in group["params"]:
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"expected parameters in float32 or bfloat16, got {parameter.dtype}")


def is_number_below(limit: float, value: object) -> bool:
    """Return whether `value` is a real number, or a tensor with one, from 0 to below `limit`."""
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return isinstance(number, Real) and not isinstance(number, bool) and 0 <= float(number) < limit


def check_torch_options(group: Mapping[str, Any], *names: str) -> None:
    """Raise ValueError if a param group sets options of torch's optimizers that are not supported here."""
    for name in names:
        if group.get(name):
            raise ValueError(f"{name}: expected False, got {group[name]!r}; this optimizer does not support it")


def check_same_algorithm(group: Mapping[str, Any]) -> None:
    """Raise ValueError if a param group of torch's optimizer asks for another algorithm."""
    check_torch_options(group, "amsgrad", "maximize")
    if group["weight_decay"] and not group.get("decoupled_weight_decay", True):
        raise ValueError(
            f"weight_decay: expected the decoupled one of AdamW, got {group['weight_decay']} of torch.optim.Adam, "
            "which adds it to the gradient"
        )


def check_storages(group: dict[str, Any], *moments: str) -> None:
    """Raise ValueError for an unknown storage of these moments or of masters."""
    for name, storages in (*((moment, STORAGES) for moment in moments), ("masters", STORAGES[1:])):
        if group[name] not in storages:
            raise ValueError(f"{name}: expected one of {', '.join(storages)}, got {group[name]!r}")

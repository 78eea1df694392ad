"""Names of modules and parameters: without wrappers, of the modules around, of tied parameters, and as a short list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from torch import nn

_WRAPPERS = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def plain_name(name: str) -> str:
    """A name without what torch.compile, checkpoint wrappers and FSDP1 add to it."""
    return _WRAPPERS.sub("", name)


def modules_around(name: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """The names of the modules around `name` that run a forward, the nearest first; "" is the root.

    `modules`: the named modules of the root.
    """
    parts = name.split(".") if name else []
    for length in reversed(range(len(parts))):
        around = ".".join(parts[:length])
        if not isinstance(modules[around], nn.ModuleList | nn.ModuleDict):
            yield around


def owners_of_parameters(model: nn.Module) -> dict[int, list[str]]:
    """The names of each parameter, by its id: several of a tied one."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    return owners


def tied_modules(model: nn.Module) -> set[str]:
    """The names of the modules that share a parameter with another."""
    tied = (names for names in owners_of_parameters(model).values() if len(names) > 1)
    return {name.rpartition(".")[0] for names in tied for name in names}


def owners_of_weights(model: nn.Module) -> dict[int, list[str]]:
    """The names of the modules that hold each parameter called `weight`, by the parameter's id."""
    return {
        key: holders
        for key, names in owners_of_parameters(model).items()
        if (holders := [name.rpartition(".")[0] for name in names if name.rpartition(".")[2] == "weight"])
    }


def without_numbers(name: str) -> str:
    """A module's name with "*" for each number of a layer, but for one that the name begins with."""
    return _LAYER_NUMBER.sub("*", name)


def listed(names: Sequence[str], separator: str = ", ") -> str:
    """The first three of `names` and the number of the others, for a message."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return separator.join(names[:3]) + more

"""Names of modules and parameters: removing wrappers, enclosing modules, tied parameters, and lists for messages."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import nn

_WRAPPERS = re.compile(
    r"\b(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|_forward_module|_original_module)\."
)
_FABRIC_ALIAS = re.compile(r"\b_original_module\.")
"""Part of the second name that Lightning Fabric's wrapper gives to each parameter in it."""
_LAYER_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


def strip_wrappers(name: str) -> str:
    """Return a name without the parts, also the last, that torch.compile, checkpoint wrappers, FSDP1 and Fabric add."""
    return _WRAPPERS.sub("", f"{name}.")[:-1]


def iter_enclosing_modules(name: str, modules: Mapping[str, nn.Module]) -> Iterator[str]:
    """Yield the names of the modules that contain `name` and run a forward, the innermost first; "" is the root.

    `modules`: the named modules of the root.
    """
    parts = name.split(".") if name else []
    for length in reversed(range(len(parts))):
        ancestor = ".".join(parts[:length])
        if not isinstance(modules[ancestor], nn.ModuleList | nn.ModuleDict):
            yield ancestor


def find_parameter_names(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter by the parameter's id; a tied parameter has several names."""
    names_by_id: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names = names_by_id.setdefault(id(parameter), [])
        if not names or not _FABRIC_ALIAS.search(name):
            names.append(name)
    return names_by_id


def find_tied_modules(model: nn.Module) -> set[str]:
    """Return the names of the modules that share a parameter with another module."""
    tied = (names for names in find_parameter_names(model).values() if len(names) > 1)
    return {name.rpartition(".")[0] for names in tied for name in names}


def find_weight_modules(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of the modules that hold each parameter called `weight`, by the parameter's id."""
    return {
        parameter_id: module_names
        for parameter_id, names in find_parameter_names(model).items()
        if (module_names := [name.rpartition(".")[0] for name in names if name.rpartition(".")[2] == "weight"])
    }


def mask_layer_numbers(name: str) -> str:
    """Replace layer numbers in a module's name by "*", except at the beginning."""
    return _LAYER_NUMBER.sub("*", name)


def suggest_name(name: object, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown `name`: the choice that it begins or resembles, or ""."""
    choices = list(choices)
    completions = [choice for choice in choices if name and choice.startswith(str(name).lower())]
    matches = completions or difflib.get_close_matches(str(name).lower(), choices, n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def format_module_name(name: str) -> str:
    """Return the name of a module for a message; the root, whose name is empty, is "the module"."""
    return name or "the module"


def quote_module_name(name: str) -> str:
    """Return the name of a module in quotes, for a sentence: the name of a root's child may be a number."""
    return repr(name) if name else format_module_name(name)


def join_names(names: Sequence[str], separator: str = ", ") -> str:
    """Return the first three of `names` and the number of remaining names, for a message; see `format_module_name`."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return separator.join(map(format_module_name, names[:3])) + more

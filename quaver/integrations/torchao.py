"""Runs programs that import torchao.float8 on quaver: replaces torchao's names, in torchao and in its importers.

    python -m quaver.integrations.torchao train.py --its --arguments       # or -m package.module
    quaver.integrations.torchao.install()                                  # inside a program

This covers Accelerate (`mixed_precision="fp8"`), transformers' Trainer on top of it, axolotl, LLaMA-Factory, NeMo
AutoModel and torchtitan. torchao must be installed, because these programs check for it. torchao's configs and enums
are not replaced, because its functions compare them; quaver accepts them by value. torchao's quantization and
prototypes keep the names that they imported before.
"""

from __future__ import annotations

import gc
import importlib
import os
import runpy
import sys
from dataclasses import replace
from types import FunctionType, ModuleType
from typing import Any

from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from quaver.conversion.check import is_torchao_linear
from quaver.conversion.convert import ModuleFilter
from quaver.conversion.convert import convert_to_float8_training as _convert
from quaver.linear.module import Float8Linear
from quaver.recipes.config import Float8LinearConfig, Float8LinearRecipeName, resolve_config
from quaver.runtime.module_names import quote_module_name

USAGE = "usage: python -m quaver.integrations.torchao script.py [arguments], or -m module [arguments]"
TORCHAO_MODULES = tuple(
    "torchao.float8" + path
    for path in ("", ".config", ".float8_linear", ".float8_linear_utils", ".float8_tensor_parallel", ".fsdp_utils")
)
"""The modules with torchao's training API; the other modules of `torchao.float8` are internal tools."""
_CONFIG_MODULE = "torchao.float8.config"
"""The module whose classes are not replaced."""


def convert_to_float8_training(
    module: nn.Module,
    *,
    module_filter_fn: ModuleFilter | None = None,
    config: Float8LinearConfig | Float8LinearRecipeName | str | None = None,
) -> nn.Module:
    """Run quaver's `convert_to_float8_training`, adapted to Accelerate.

    Accelerate asks for a float8 all-gather by default, even without FSDP2, and makes the optimizer before the
    conversion. Without FSDP2 this function turns the float8 all-gather off: it would have no effect except for new
    parameters, which the optimizer does not hold.

    Raises:
        RuntimeError: torchao has converted the model.
        AssertionError: `module` is a linear with children, as in torchao.
    """
    for name, child in module.named_modules():
        if is_torchao_linear(child):
            raise RuntimeError(
                f"{quote_module_name(name)} was converted by torchao: call install() before the conversion"
            )
    if isinstance(module, nn.Linear) and next(module.children(), None) is not None:
        raise AssertionError("Does not support a root nn.Linear with children")  # torchao's callers expect this error
    state = _get_accelerate_state()
    if state is not None and not state.is_fsdp2:
        config = replace(resolve_config(config), enable_fsdp_float8_all_gather=False)
    return _convert(module, config=config, module_filter_fn=module_filter_fn)


def install() -> None:
    """Replace the names of `torchao.float8` by quaver's, there and in all modules that imported them.

    Prints one line on the first rank, and another after the first step of an optimizer if no linear is in float8. A
    second call does nothing.

    Raises:
        RuntimeError: torchao is missing, or a module imported or derived from a name of `torchao.float8` that quaver
            cannot replace.
    """
    if is_installed():
        return
    replacements = _find_replacements()
    importers = [
        module
        for name, module in [*sys.modules.items()]
        if isinstance(module, ModuleType) and not name.startswith(("torchao.", "quaver."))
    ]
    _check_importers(importers, replacements)
    for path in TORCHAO_MODULES:
        module = importlib.import_module(path)
        for name in _import_counterpart(path).__all__:
            if id(vars(module).get(name)) in replacements:
                setattr(module, name, replacements[id(vars(module)[name])][1])
    for module in importers:
        for name, value in [*vars(module).items()]:
            if id(value) in replacements:
                setattr(module, name, replacements[id(value)][1])
    if os.environ.get("RANK", "0") == "0":
        print(f"quaver replaced {len(replacements)} classes and functions of torchao.float8", file=sys.stderr)
        _report_at_first_step()


def is_installed() -> bool:
    """Return whether `install()` has replaced torchao's names in this process."""
    package = sys.modules.get("torchao.float8")
    return package is not None and vars(package).get("convert_to_float8_training") is convert_to_float8_training


def get_accelerate_precision() -> str | None:
    """Return the `mixed_precision` of this process's `Accelerator`, or the environment's before there is one."""
    state = _get_accelerate_state()
    return os.environ.get("ACCELERATE_MIXED_PRECISION") if state is None else state.mixed_precision


def main(arguments: list[str]) -> None:
    """Run a script, or a module after `-m`, with torchao's names replaced. Its arguments follow its name."""
    by_module, command = arguments[:1] == ["-m"], arguments[arguments[:1] == ["-m"] :]
    if not command or command[0].startswith("-"):
        sys.exit(USAGE)
    if not by_module and not os.path.isfile(command[0]):
        sys.exit(f"error: no file {command[0]}; {USAGE}")
    sys.argv = command
    try:
        install()
    except RuntimeError as error:
        sys.exit(f"error: {error}")
    if by_module:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def _import_counterpart(path: str) -> ModuleType:
    return importlib.import_module(path.replace("torchao", "quaver.compat", 1))


def _is_definition(value: object) -> bool:
    """Return whether `value` is a class or a function. Looks at its type, because attributes of some objects warn."""
    return issubclass(type(value), type | FunctionType)


def _find_replacements() -> dict[int, tuple[Any, Any]]:
    """Return pairs of torchao's and quaver's class or function, by the id of torchao's."""
    replacements: dict[int, tuple[Any, Any]] = {}
    for path in TORCHAO_MODULES:
        try:
            module = importlib.import_module(path)
        except ImportError as error:
            raise RuntimeError(f"cannot import {path}: pip install torchao ({error})") from error
        for name in _import_counterpart(path).__all__:
            old, new = vars(module).get(name), getattr(_import_counterpart(path), name)
            if _is_definition(old) and old.__module__ in TORCHAO_MODULES and old.__module__ != _CONFIG_MODULE:
                replacements[id(old)] = (old, convert_to_float8_training if new is _convert else new)
    return replacements


def _check_importers(importers: list[ModuleType], replacements: dict[int, tuple[Any, Any]]) -> None:
    for old in [old for old, _ in replacements.values() if isinstance(old, type)]:
        derived: type
        for derived in old.__subclasses__():
            if not derived.__module__.startswith("torchao."):
                raise RuntimeError(
                    f"{derived.__module__}.{derived.__name__} derives from torchao's {old.__name__}: call install() "
                    f"before {derived.__module__} is imported"
                )
    for module in importers:
        for name, value in [*vars(module).items()]:
            if not _is_definition(value) or value.__module__ not in TORCHAO_MODULES or id(value) in replacements:
                continue
            if value.__module__ != _CONFIG_MODULE or value.__name__ not in _import_counterpart(_CONFIG_MODULE).__all__:
                raise RuntimeError(
                    f"{module.__name__} has imported {value.__module__}.{name}, for which quaver has no counterpart; "
                    "run this program on torchao"
                )


def _report_at_first_step() -> None:
    """Print a warning after the first step of an optimizer if no object of the process is a Float8Linear."""

    def report(optimizer: Any, args: Any, kwargs: Any) -> None:
        handle.remove()
        if any(issubclass(type(value), Float8Linear) for value in gc.get_objects()):
            return
        precision, line = get_accelerate_precision(), "quaver: an optimizer has stepped, and no linear is in float8"
        if precision != "fp8" and _get_accelerate_state() is not None:
            line += f": Accelerate's mixed_precision is {precision!r}; with fp8 it converts"
            line += ", which TrainingArguments(bf16=True) turns off: leave bf16 out" if precision == "bf16" else ""
        print(line, file=sys.stderr)

    handle = register_optimizer_step_post_hook(report)


def _get_accelerate_state() -> Any:
    module = sys.modules.get("accelerate.state")
    return module.AcceleratorState() if module is not None and module.is_initialized() else None


if __name__ == "__main__":
    # Import this module by its name: other modules of the process must not see a second copy of __main__.
    importlib.import_module("quaver.integrations.torchao").main(sys.argv[1:])

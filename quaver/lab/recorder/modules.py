"""Tracks the module in which code runs: in forward, in backward, and in a recomputation during backward.

Hooks track the forward. The backward needs no hooks: autograd numbers its nodes in order of creation, so the sequence
numbers at which the forward entered and left each module tell which module created the node that runs.

Dynamo would compile hooks on a compiled module, or inside it, into its graph and recompile it. So a compiled module
gets no hooks and counts as one opaque module.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from torch import nn

from quaver.lab.recorder.storages import iter_plain_parts
from quaver.torch_private.autograd import current_node, get_sequence_number, next_sequence_number
from quaver.torch_private.compiler import OptimizedModule
from quaver.torch_private.memory import storage_key

OUTSIDE_MODULES = ""
"""The name for code outside of all modules."""

_NO_SEQUENCE_NUMBER = 1 << 63
"""AccumulateGrad nodes have larger sequence numbers, since they belong to a parameter and not to a forward."""


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of `module` run compiled code."""
    return isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


def iter_visible_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `model` and its modules with their names, each once, without the insides of compiled modules.

    The model itself is named by its class.
    """
    seen: set[nn.Module] = set()
    pending = [(OUTSIDE_MODULES, model)]
    while pending:
        path, module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        yield path or type(module).__name__, module
        if not is_compiled(module):
            children = reversed(list(module.named_children()))
            pending += [(f"{path}.{child_name}" if path else child_name, child) for child_name, child in children]


class ModuleTracker:
    """Context manager that tracks the module in which code runs.

    A subclass that follows compiled code overrides `follows_compiled_code`.
    """

    follows_compiled_code = False

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.stack: list[str] = []
        """The modules whose forward runs, the innermost last. In backward, the modules of a recomputation."""
        self.compiled: set[str] = set()
        """The names of the compiled modules that are followed."""
        self._sequence_numbers: list[int] = []
        self._module_names: list[str] = []
        self._exit_stack = ExitStack()
        self._owners: dict[int, str] = {}
        self._modules: dict[str, nn.Module] = {}
        self._lines: dict[int, str] = {}

    def __enter__(self) -> ModuleTracker:
        for name, module in iter_visible_modules(self.model):
            if not is_compiled(module):
                self._hook(name, module)
            self._modules[name] = module
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(id(parameter), name)
        return self

    def __exit__(self, *error: object) -> None:
        self._exit_stack.close()
        self.stack.clear()

    @property
    def current(self) -> str:
        """The module in which code runs now; `OUTSIDE_MODULES` for none."""
        if self.stack:
            return self.stack[-1]
        node = current_node()
        return OUTSIDE_MODULES if node is None else self.find_creating_module(node)

    def find_creating_module(self, node: Any) -> str:
        """Return the module whose forward created an autograd node; for AccumulateGrad, the parameter's owner."""
        number = get_sequence_number(node)
        if number >= _NO_SEQUENCE_NUMBER:
            return self._owners.get(id(getattr(node, "variable", None)), OUTSIDE_MODULES)
        index = bisect_right(self._sequence_numbers, number)
        return self._module_names[index - 1] if index else OUTSIDE_MODULES

    def find_parameter(self, key: int) -> str:
        """Return the name of the current module's parameter with the storage `key`, or an empty string."""
        module = self._modules.get(self.current)
        for name, parameter in () if module is None else module.named_parameters(recurse=False):
            if any(storage_key(part.untyped_storage()) == key for part in iter_plain_parts(parameter)):
                return f"{self.current}.{name}"
        return ""

    def record_line(self, line: str) -> None:
        """Record that the forward called an operator from `line`, which may have created an autograd node."""
        self._lines.setdefault(next_sequence_number() - 1, line)

    def find_line_of_node(self) -> str:
        """Return the forward's line that created the autograd node that runs; empty if it is unknown."""
        node = current_node()
        return "" if node is None else self._lines.get(get_sequence_number(node), "")

    def _hook(self, name: str, module: nn.Module) -> None:
        def enter(_: nn.Module, inputs: Any) -> None:
            self.stack.append(name)
            self._mark()

        def leave(_: nn.Module, inputs: Any, output: Any) -> None:
            if self.stack and self.stack[-1] == name:
                self.stack.pop()
                self._mark()

        self._exit_stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
        # always_call, since a checkpoint ends its recomputation early by raising an error that it catches
        self._exit_stack.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _mark(self) -> None:
        self._sequence_numbers.append(next_sequence_number())
        self._module_names.append(self.stack[-1] if self.stack else OUTSIDE_MODULES)

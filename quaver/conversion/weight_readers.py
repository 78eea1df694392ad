"""Modules whose forward reads the weight of a linear below them, as `F.linear(x, self.qkv.weight, bias)` does.

Before a step nothing else tells that such a linear may never be called. What is read is the source of the forward, and
of the methods that it calls; code without source says nothing.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from operator import attrgetter
from types import CodeType
from typing import Any

from torch import nn

_FACTS = frozenset({"dtype", "device", "shape", "size", "ndim", "dim", "numel", "requires_grad", "is_cuda", "is_meta"})
"""Attributes of a weight that code reads without multiplying by it."""
_CHECKS = frozenset({"isinstance", "hasattr", "getattr"})


def readers_of_weights(model: nn.Module) -> dict[int, str]:
    """By the id of each linear: the method of a module above it that reads its weight, as "Attention.forward"."""
    readers = {}
    for module in model.modules():
        for forward in filter(None, [type(module).forward, vars(module).get("forward")]):
            cls: Any = type(module)
            for path, method in _weights_read(cls, _code_of(forward)):
                try:
                    child = attrgetter(path)(module)
                except AttributeError:  # in a branch that this instance does not take
                    continue
                if isinstance(child, nn.Linear):
                    readers[id(child)] = f"{cls.__name__}.{method}"
    return readers


def _code_of(function: Callable[..., Any]) -> CodeType | None:
    """The code of a function or method, under its wrappers; None for one of torch's own, and where it has none."""
    function = inspect.unwrap(function)
    is_torchs = getattr(function, "__module__", None) is None or function.__module__.startswith("torch.")
    return None if is_torchs else getattr(function, "__code__", None)


@functools.cache
def _weights_read(cls: type, forward: CodeType | None) -> list[tuple[str, str]]:
    """The paths of modules whose weights `forward` and the methods of `cls` that it calls read, and which one reads."""
    found: list[tuple[str, str]] = []
    left, seen = [forward], set()
    while left:
        code = left.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        left += [_code_of(each) for name in code.co_names if inspect.isfunction(each := getattr(cls, name, None))]
        if "weight" in code.co_names:
            found += [(path, code.co_name) for path in _paths(code)]
    return found


def _paths(code: CodeType) -> Iterator[str]:
    """The paths from the method's first argument to the modules whose `weight` it reads for more than a fact of it."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):
        return
    parents = {child: parent for parent in ast.walk(tree) for child in ast.iter_child_nodes(parent)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "weight" and isinstance(node.ctx, ast.Load):
            parent = parents[node]
            is_asked = isinstance(parent, ast.Attribute) and parent.attr in _FACTS
            is_checked = isinstance(parent, ast.Call) and getattr(parent.func, "id", "") in _CHECKS
            owner, _, path = ast.unparse(node.value).partition(".")
            if owner in code.co_varnames[:1] and path.replace(".", "").isidentifier() and not is_asked | is_checked:
                yield path

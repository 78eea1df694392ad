"""Finds modules whose forward reads the weight of a linear below them, such as `F.linear(x, self.qkv.weight, bias)`.

Before a step nothing else shows that such a linear may never be called. This file parses the source of the forward and
of the methods that it calls. Code without source is skipped.
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
    """Return the method that reads the weight of a linear below it, such as "Attention.forward", by the linear's id."""
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
    """Return the code of a function or method without its wrappers; None for torch's functions and without code."""
    function = inspect.unwrap(function)
    is_torchs = getattr(function, "__module__", None) is None or function.__module__.startswith("torch.")
    return None if is_torchs else getattr(function, "__code__", None)


@functools.cache
def _weights_read(cls: type, forward: CodeType | None) -> list[tuple[str, str]]:
    """Return the paths of modules whose weights `forward`, or a method that it calls, reads, each with the reader."""
    reads: list[tuple[str, str]] = []
    pending, seen = [forward], set()
    while pending:
        code = pending.pop()
        if code is None or code in seen:
            continue
        seen.add(code)
        methods = (getattr(cls, name, None) for name in code.co_names)
        pending += [_code_of(method) for method in methods if inspect.isfunction(method)]
        if "weight" in code.co_names:
            reads += [(path, code.co_name) for path in _paths(code)]
    return reads


def _paths(code: CodeType) -> Iterator[str]:
    """Yield the paths from `self` to modules whose `weight` a method reads, not only its `_FACTS`."""
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

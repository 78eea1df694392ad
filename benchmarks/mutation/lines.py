"""Finds the code of the package that only a GPU runs, by evaluating its conditions for a CPU.

`quaver/runtime/devices.py` answers the conditions as in `CPU_ANSWERS`; other conditions are unknown. Code is a GPU's if
a known condition excludes it on a CPU: branches, statements after an early return, operands of `and` and `or`, arms of
a conditional expression. The bodies of functions that only such code names are a GPU's too, and those of the modules in
`GPU_MODULES`. A function that returns one known value on every path of a CPU has that value in its callers' conditions.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

CPU_ANSWERS = {"is_cpu": True, "is_cuda": False, "is_cuda_device": False, "has_cuda": False, "is_capturing": False}
"""The answers of devices.py's functions and of tensors without a GPU."""
GPU_MODULES = ("kernels/triton_*.py", "kernels/native_mm.py", "experts/gpu_gemm.py")
"""Patterns of modules whose functions run on a GPU only."""
CALLED_BY_VALUE = ("_run_trial_as_constant",)
"""Functions that are passed as arguments and called on a GPU only."""
SKIPPED_FILES = "runtime/devices.py", "torch_private/"
"""Files that are not read: they have the answers themselves, and names of torch."""
DEVICE_QUERIES = {
    "lab/bench/": "times a GPU and asks what it is",
    "lab/memory/": "measures by CUDA's allocator",
    "lab/plan/": "asks what the GPU here is",
    "lab/recorder/": "measures by CUDA's allocator",
    "roofline/": "asks what the GPU here is",
    "lab/runs/": "stores random states of a device; NCCL, and a device for each rank",
    "lab/trainer/": "the allocator's peaks, history and snapshots, and the profiler of a device",
}
"""Folders that query a device, with the query; reported separately, since a virtual GPU has no memory or clock."""


@dataclass(frozen=True)
class Known:
    """The value of an expression on a CPU."""

    value: Any
    is_of_device: bool = False
    """Whether it follows from an answer of the CPU."""


UNKNOWN = Known("unknown")


@dataclass
class Source:
    """One file of the package."""

    path: Path
    text: str
    gpu_code: list[ast.AST] = field(default_factory=list)
    """The outermost statements and expressions that only a GPU takes."""
    deciding_conditions: list[tuple[ast.expr, int]] = field(default_factory=list)
    """Conditions with a known value on a CPU, and the first line that each excludes."""

    @property
    def queries_device(self) -> bool:
        """Whether the file is one of DEVICE_QUERIES."""
        return self.path.relative_to(ROOT / "quaver").as_posix().startswith(tuple(DEVICE_QUERIES))

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    def list_bodies(self) -> list[ast.stmt]:
        """Return the statements of the functions."""
        return [statement for function in iter_functions(self.tree) for statement in function.body]

    def list_lines(self) -> set[int]:
        """Return the lines of statements and expressions that only a GPU runs, as a tracer reports them."""
        expressions = {node.lineno for node in self.gpu_code if isinstance(node, ast.expr)}
        return expressions | _list_lines(self.gpu_code)

    def list_body_lines(self) -> set[int]:
        """Return the lines of `list_bodies()`."""
        return _list_lines(self.list_bodies())


def _list_lines(nodes: Iterable[ast.AST]) -> set[int]:
    statements = (child for node in nodes for child in ast.walk(node) if isinstance(child, ast.stmt))
    return {statement.lineno for statement in statements if not _is_docstring(statement)}


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class _Reader:
    """Finds the code of functions that a CPU never runs, and the values that they return on a CPU."""

    def __init__(self, source: Source, answers: dict[str, Known]) -> None:
        self.source, self.answers = source, answers
        self.returns: list[list[Known]] = []
        self.returned: dict[str, list[Known]] = defaultdict(list)
        """The values of each function on a CPU; several functions may have one name."""

    def read_function(self, node: ast.FunctionDef) -> Known:
        """Read a function, and return its value on a CPU, or UNKNOWN."""
        self.returns.append([])
        before = len(self.source.gpu_code)
        if not self.read_block(node.body, {}):
            self.returns[-1].append(Known(None))
        value = _merge_known(self.returns.pop())
        return Known(value.value, True) if value is not UNKNOWN and len(self.source.gpu_code) > before else value

    def read_block(self, statements: list[ast.stmt], known: dict[str, Known]) -> bool:
        """Read statements, and return whether a CPU always leaves the block in them."""
        for index, statement in enumerate(statements):
            if self.read_statement(statement, known):
                if rest := statements[index + 1 :]:
                    self.source.gpu_code.extend(rest)
                    if isinstance(statement, ast.If) and self.find_value(statement.test, known).is_of_device:
                        self.source.deciding_conditions.append((statement.test, rest[0].lineno))
                return True
        return False

    def read_statement(self, node: ast.stmt, known: dict[str, Known]) -> bool:
        """Read one statement, and return whether a CPU always leaves the block in it."""
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            known.pop(node.name, None)
            for decorator in node.decorator_list:
                self.read_expression(decorator, known)
            if isinstance(node, ast.ClassDef):
                self.read_block(node.body, {})
            else:
                self.returned[node.name].append(self.read_function(node))
            return False
        if isinstance(node, ast.If):
            return self.read_condition(node, known)
        if isinstance(node, (ast.For, ast.While)):
            self.forget_assigned(node, known)
            self.read_expression(node.iter if isinstance(node, ast.For) else node.test, known)
            self.read_block(node.body, dict(known))
            self.read_block(node.orelse, dict(known))
            return False
        if isinstance(node, (ast.With, ast.Try)):
            for item in getattr(node, "items", []):
                self.read_expression(item.context_expr, known)
            ends = self.read_block(node.body, known)
            for handler in getattr(node, "handlers", []):
                ends = self.read_block(handler.body, dict(known)) and ends
            self.forget_assigned(node, known)
            self.read_block(getattr(node, "orelse", []) + getattr(node, "finalbody", []), known)
            return ends
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.read_expression(child, known)
        if isinstance(node, ast.Return) and self.returns:
            self.returns[-1].append(Known(None) if node.value is None else self.find_value(node.value, known))
        self.forget_assigned(node, known)
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            known[node.targets[0].id] = self.find_value(node.value, known)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            known[node.target.id] = self.find_value(node.value, known)
        return isinstance(node, (ast.Return, ast.Raise, ast.Continue, ast.Break))

    def read_condition(self, node: ast.If, known: dict[str, Known]) -> bool:
        self.read_expression(node.test, known)
        test = self.find_value(node.test, known)
        if not test.is_of_device:
            branches = dict(known), dict(known)
            ends = [self.read_block(body, copy) for body, copy in zip((node.body, node.orelse), branches, strict=True)]
            self.forget_assigned(node, known)
            return all(ends)
        taken, other = (node.body, node.orelse) if test.value else (node.orelse, node.body)
        if other:
            self.source.gpu_code.extend(other)
            self.source.deciding_conditions.append((node.test, other[0].lineno))
        return self.read_block(taken, known)

    def read_expression(self, node: ast.expr, known: dict[str, Known]) -> None:
        """Find the operands that a CPU does not evaluate."""
        if isinstance(node, ast.IfExp):
            self.read_expression(node.test, known)
            test = self.find_value(node.test, known)
            if test.is_of_device:
                other = node.orelse if test.value else node.body
                self.source.gpu_code.append(other)
                self.source.deciding_conditions.append((node.test, other.lineno))
                self.read_expression(node.body if test.value else node.orelse, known)
                return
            self.read_expression(node.body, known)
            self.read_expression(node.orelse, known)
            return
        if isinstance(node, ast.BoolOp):
            stops_at = isinstance(node.op, ast.Or)
            for index, operand in enumerate(node.values):
                self.read_expression(operand, known)
                value = self.find_value(operand, known)
                if value.is_of_device and bool(value.value) is stops_at and index + 1 < len(node.values):
                    rest = node.values[index + 1 :]
                    self.source.gpu_code.extend(rest)
                    self.source.deciding_conditions.append((operand, rest[0].lineno))
                    return
            return
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self.read_expression(child, known)

    def forget_assigned(self, node: ast.AST, known: dict[str, Known]) -> None:
        for child in ast.walk(node):
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                known.pop(child.id, None)

    def find_value(self, node: ast.expr, known: dict[str, Known]) -> Known:
        """Return the value of an expression on a CPU."""
        if isinstance(node, ast.Constant):
            return Known(node.value)
        if isinstance(node, ast.Name):
            return known.get(node.id, UNKNOWN)
        if isinstance(node, ast.NamedExpr):
            return self.find_value(node.value, known)
        if isinstance(node, ast.Attribute):
            if node.attr in ("is_cpu", "is_cuda"):
                return Known(CPU_ANSWERS[node.attr], True)
            if node.attr == "type" and ast.unparse(node.value).endswith("device"):
                return Known("cpu", True)
            return Known(ast.unparse(node)) if node.attr.isupper() else UNKNOWN  # a member of an enum
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in CPU_ANSWERS or ast.unparse(node.func) == "torch.cuda.is_available":
                return Known(CPU_ANSWERS.get(name, False), True)
            return self.answers.get(name, UNKNOWN)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            operand = self.find_value(node.operand, known)
            return operand if operand is UNKNOWN else Known(not operand.value, operand.is_of_device)
        if isinstance(node, ast.BoolOp):  # `x or True` is true, whatever x is
            values = [self.find_value(operand, known) for operand in node.values]
            ends_with = isinstance(node.op, ast.Or)
            ends = [value for value in values if value is not UNKNOWN and bool(value.value) is ends_with]
            return ends[0] if ends else UNKNOWN if UNKNOWN in values else values[-1]
        if isinstance(node, ast.IfExp):
            test, arms = (
                self.find_value(node.test, known),
                [self.find_value(arm, known) for arm in (node.body, node.orelse)],
            )
            return _merge_known(arms) if test is UNKNOWN else _merge_condition(arms[0 if test.value else 1], test)
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            pair = self.find_value(node.left, known), self.find_value(node.comparators[0], known)
            if (
                pair[1].value != "meta"
                and UNKNOWN not in pair
                and isinstance(node.ops[0], (ast.Is, ast.Eq, ast.IsNot, ast.NotEq))
            ):
                equal = pair[0].value == pair[1].value
                return Known(
                    equal is isinstance(node.ops[0], (ast.Is, ast.Eq)), any(side.is_of_device for side in pair)
                )
        return UNKNOWN


def _merge_condition(known: Known, condition: Known) -> Known:
    return known if known is UNKNOWN else Known(known.value, known.is_of_device or condition.is_of_device)


def _merge_known(values: list[Known]) -> Known:
    """Return the value that all have in common, else UNKNOWN."""
    if UNKNOWN in values or len({(type(known.value), known.value) for known in values}) != 1:
        return UNKNOWN
    return Known(values[0].value, any(known.is_of_device for known in values))


def read_package(root: Path = ROOT / "quaver") -> dict[str, Source]:
    """Return every file of the package by its path below `root`, with the code that only a GPU runs."""
    sources = {}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(SKIPPED_FILES):
            sources[name] = Source(path, path.read_text(encoding="utf-8"))
    answers: dict[str, Known] = {}
    while True:
        returned = defaultdict(list)
        for source in sources.values():
            source.gpu_code, source.deciding_conditions = [], []
            reader = _Reader(source, answers)
            reader.read_block(source.tree.body, {})
            for function, values in reader.returned.items():
                returned[function].extend(values)
        merged = {name: value for name, values in returned.items() if (value := _merge_known(values)).is_of_device}
        if merged == answers:
            break
        answers = merged
    for name, source in sources.items():
        if any(Path(name).match(pattern) for pattern in GPU_MODULES):
            source.gpu_code = [statement for function in iter_functions(source.tree) for statement in function.body]
    _add_gpu_functions(sources)
    return sources


def read_library(root: Path = ROOT / "quaver") -> dict[str, Source]:
    """Return every file of the library by its path below `root`."""
    names = [path.relative_to(root).as_posix() for path in sorted(root.rglob("*.py"))]
    return {
        name: Source(root / name, (root / name).read_text("utf-8")) for name in names if not name.startswith("lab/")
    }


def iter_functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the outermost functions and methods."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef):
            yield node
        elif isinstance(node, (ast.ClassDef, ast.If, ast.Try, ast.With)):
            yield from iter_functions(node)


def _add_gpu_functions(sources: dict[str, Source]) -> None:
    """Add the bodies of functions that only a GPU's code names, until there are no more."""
    named: dict[tuple[str, str], list[int]] = defaultdict(list)
    for file, source in sources.items():
        for node in ast.walk(source.tree):
            for name in _list_names(node):
                named[file if name.startswith("_") else "", name].append(id(node))
    while True:
        on_gpu = {id(child) for source in sources.values() for node in source.gpu_code for child in ast.walk(node)}
        added = False
        for file, source in sources.items():
            for function in iter_functions(source.tree):
                uses = named[file if function.name.startswith("_") else "", function.name]
                is_gpu = function.name in CALLED_BY_VALUE or (uses and on_gpu.issuperset(uses))
                if is_gpu and id(function.body[-1]) not in on_gpu:
                    source.gpu_code.extend(function.body)
                    added = True
        if not added:
            return


def _list_names(node: ast.AST) -> list[str]:
    """Return the names by which a node may call a function; a string may be one."""
    if isinstance(node, ast.Constant):
        return [node.value] if isinstance(node.value, str) and node.value.isidentifier() else []
    return [node.id] if isinstance(node, ast.Name) else [node.attr] if isinstance(node, ast.Attribute) else []

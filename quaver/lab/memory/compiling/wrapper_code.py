"""Rewrites Inductor's Python wrapper code so that it runs without kernels and reports the origin of each buffer.

The wrapper is a Python function `call`. It allocates buffers, calls kernels and operators with them, reuses the memory
of dead buffers, and deletes buffers. Its statements are rewritten as follows:

    buf1 = empty_strided_cpu(size, stride, dtype)  ->  buf1 = origin_7.allocate(size, stride, dtype, {"buf0": buf0})
    cpp_fused_abs_0(buf0, buf1)                        origin_8.call(cpp_fused_abs_0, buf0, buf1)
    buf2 = torch.ops.aten.x.default(buf1)              buf2 = origin_9.call(torch.ops.aten.x.default, buf1)
    buf3 = buf1; del buf1  # reuse                     buf3 = layout_of(buf1); del buf1
                                                       buf3 = origin_10.allocate(*buf3, {"buf2": buf2})
    return (buf2, primals_1, buf3)                     return returned((buf2, primals_1, buf3))

Each `origin_` is a `BufferOrigin` with the buffer's operator, module and source line. In braces are the tensors that
the buffer's first kernel reads. Reused memory is released and allocated again: the bytes are equal, and the new
row has the new buffer's origin.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import Any

RETURNED = "returned"
RECEIVED = "received"
"""The names of the functions that the rewritten `call` calls with its results, and with its arguments."""
LAYOUT_OF = "layout_of"
"""The name of a function that returns a view's size, stride and dtype."""

_ALLOCATE_FUNCTION = "empty_strided_cpu"
_REINTERPRET_FUNCTION = "reinterpret_tensor"
_BUFFER_NAME = re.compile(r"buf\d+")
_KERNEL_NAME = re.compile(r"(?:cpp|triton_[a-z]+)_(fused\w*?)(?:_\d+)?")
_OPERATOR_PREFIXES = ("extern_kernels.", "torch.ops.", "aten.", "inductor_ops.")
_UNUSED_FUNCTIONS = ("get_args", "benchmark_compiled_module")

AddOrigin = Callable[[str, str], str]
"""Adds a `BufferOrigin` to the code's namespace and returns its name there. The arguments are the names of the buffer
and of the first kernel that writes it; either may be empty."""


def rewrite(source: str, add_origin: AddOrigin) -> ast.Module:
    """Rewrite wrapper code. Its namespace must also have AsyncCompile, RECEIVED, RETURNED and LAYOUT_OF."""
    tree = ast.parse(source)
    tree.body = [statement for statement in tree.body if not _imports_compiler(statement)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name not in _UNUSED_FUNCTIONS:
            _Rewriter(_find_first_writes(node.body), add_origin, node.name == "call").visit_FunctionDef(node)
    return ast.fix_missing_locations(tree)


def name_operator(function: str) -> str:
    """Return a fused kernel's name without kind and number, as "fused_abs_amax"; empty for any other function."""
    match = _KERNEL_NAME.fullmatch(function)
    return match[1] if match else ""


class _Rewriter(ast.NodeTransformer):
    def __init__(self, writes: dict[str, ast.Call], add_origin: AddOrigin, is_entry: bool) -> None:
        self._writes, self._add_origin, self._is_entry = writes, add_origin, is_entry
        self._written = {id(call): buffer for buffer, call in reversed(writes.items())}
        self._assigned: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        node.body = list(self._rewrite_body(node.body))
        if self._is_entry:
            node.body[:0] = _parse_statements(f"{RECEIVED}({node.args.args[-1].arg})")
        return node

    def visit_Expr(self, node: ast.Expr) -> ast.Expr:
        if isinstance(node.value, ast.Call) and _runs_on_buffers(node.value):
            node.value = self._rewrite_call(self._written.get(id(node.value), ""), node.value)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.Assign:
        target, value = _get_id(node.targets[0]), node.value
        if isinstance(value, ast.Call) and _BUFFER_NAME.fullmatch(target):
            if _get_id(value.func) == _ALLOCATE_FUNCTION:
                arguments = ", ".join([*map(ast.unparse, value.args), self._read_for(target)])
                node.value = _parse_expression(f"{self._name_origin(target)}.allocate({arguments})")
            elif _get_id(value.func) != _REINTERPRET_FUNCTION:
                node.value = self._rewrite_call(target, value)
        return node

    def visit_Return(self, node: ast.Return) -> ast.Return:
        if self._is_entry and node.value is not None:
            node.value = _parse_expression(f"{RETURNED}({ast.unparse(node.value)})")
        return node

    def _rewrite_body(self, statements: list[ast.stmt]) -> Iterator[ast.stmt]:
        is_deletion_of_reused = False
        for statement, following in _pair_with_next(statements):
            old = _find_reused_buffer(statement, following)
            if old:
                yield from self._reallocate(statement, old)
            elif not is_deletion_of_reused:
                yield self.visit(statement)
            self._assigned |= _list_targets(statement) - {old}
            is_deletion_of_reused = bool(old)

    def _reallocate(self, statement: Any, old: str) -> list[ast.stmt]:
        """Return statements that get the layout of the new buffer, delete the old one, and allocate the new one."""
        new, view = _get_id(statement.targets[0]), ast.unparse(statement.value)
        self._assigned.discard(old)
        allocation = f"{self._name_origin(new)}.allocate(*{new}, {self._read_for(new)})"
        return _parse_statements(f"{new} = {LAYOUT_OF}({view})\ndel {old}\n{new} = {allocation}")

    def _rewrite_call(self, written: str, call: ast.Call) -> ast.Call:
        origin = self._add_origin(written, name_operator(_get_id(call.func)))
        return ast.Call(_parse_expression(f"{origin}.call"), [call.func, *call.args], call.keywords)

    def _read_for(self, buffer: str) -> str:
        """Return the source of a dict of the assigned arguments of the first call that writes to `buffer`."""
        call = self._writes.get(buffer)
        arguments = [] if call is None else [*call.args, *(keyword.value for keyword in call.keywords)]
        names = list(dict.fromkeys(name for name in _list_names(arguments) if name in self._assigned))
        return f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"

    def _name_origin(self, buffer: str) -> str:
        call = self._writes.get(buffer)
        return self._add_origin(buffer, "" if call is None else name_operator(_get_id(call.func)))


def _find_first_writes(statements: list[ast.stmt]) -> dict[str, ast.Call]:
    writes: dict[str, ast.Call] = {}
    unwritten: dict[str, str] = {}  # by the name of the buffer or of a view of it
    for statement, following in _pair_with_next(statements):
        value = getattr(statement, "value", None)
        if isinstance(value, ast.Call) and _runs_on_buffers(value):
            for buffer in {unwritten[name]: None for name in _list_buffers(value) if name in unwritten}:
                writes[buffer] = value
                unwritten = {name: viewed for name, viewed in unwritten.items() if viewed != buffer}
        elif isinstance(statement, ast.Assign):
            target = _get_id(statement.targets[0])
            is_allocation = isinstance(value, ast.Call) and _get_id(value.func) == _ALLOCATE_FUNCTION
            if is_allocation or _find_reused_buffer(statement, following):
                unwritten[target] = target
            elif _is_view(value) and _list_buffers(statement.value)[0] in unwritten:
                unwritten[target] = unwritten[_list_buffers(statement.value)[0]]
    return writes


def _pair_with_next(statements: list[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt | None]]:
    return zip(statements, [*statements[1:], None], strict=True)


def _find_reused_buffer(statement: ast.stmt, following: ast.stmt | None) -> str:
    """Return the buffer whose memory a line "new = old; del old" reuses; empty for any other line."""
    if not isinstance(statement, ast.Assign) or not isinstance(following, ast.Delete):
        return ""
    new, old = _get_id(statement.targets[0]), _get_id(following.targets[0])
    is_line = statement.lineno == following.lineno and bool(_BUFFER_NAME.fullmatch(new))
    return old if is_line and _is_view(statement.value) and _list_buffers(statement.value) == [old] else ""


def _is_view(value: Any) -> bool:
    is_view = isinstance(value, ast.Name) or (
        isinstance(value, ast.Call) and _get_id(value.func) == _REINTERPRET_FUNCTION
    )
    return is_view and bool(_list_buffers(value))


def _runs_on_buffers(call: ast.Call) -> bool:
    """Return whether this calls a kernel or an operator, and not a check or an allocation."""
    return bool(name_operator(_get_id(call.func))) or ast.unparse(call.func).startswith(_OPERATOR_PREFIXES)


def _list_buffers(value: ast.AST) -> list[str]:
    return [node.id for node in ast.walk(value) if isinstance(node, ast.Name) and _BUFFER_NAME.fullmatch(node.id)]


def _list_names(values: list[ast.expr]) -> list[str]:
    return [node.id for value in values for node in ast.walk(value) if isinstance(node, ast.Name)]


def _list_targets(statement: ast.stmt) -> set[str]:
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    return set(_list_names([target for target in targets if isinstance(target, ast.Name | ast.Tuple)]))


def _imports_compiler(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.ImportFrom) and any(alias.name == "AsyncCompile" for alias in statement.names)


def _get_id(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def _parse_statements(source: str) -> list[ast.stmt]:
    return ast.parse(source).body


def _parse_expression(source: str) -> ast.expr:
    return ast.parse(source, mode="eval").body

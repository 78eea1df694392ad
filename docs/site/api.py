"""Writes the pages of docs/api/ from signatures and docstrings: `python docs/site/api.py`.

A page names what it documents in comments, `<!-- api: quaver.float8_linear -->`, and this fills each up to the next
`<!-- end -->`. Source files are parsed and not imported, so no library that an integration needs has to be installed.
"""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "api"
ENTRY = re.compile(r"<!-- api: (\S+) -->\n.*?<!-- end -->", re.DOTALL)
SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises)( \(.+\))?:")
LINE_LENGTH = 100

Definition = ast.ClassDef | ast.FunctionDef


def filled(page: str) -> str:
    """Return the text of a page with each entry written anew."""
    return ENTRY.sub(lambda match: f"<!-- api: {match[1]} -->\n{_entry(match[1])}\n<!-- end -->", page)


def _entry(path: str) -> str:
    body, name = _definition(path)
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, Definition) and node.name == name:
            return "\n\n".join(_of_definition(node, name, "##"))
        if _target(node) == name:
            return "\n\n".join([f"## {name}", _code(ast.unparse(node)), *_prose(_string(following))])
    raise ValueError(f"no definition of {path}")


def _definition(path: str) -> tuple[list[ast.stmt], str]:
    """Return the body of the module that defines `path`, following imports, and the name that it has there."""
    module, _, name = path.rpartition(".")
    file = ROOT / module.replace(".", "/")
    body = ast.parse((file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text("utf-8")).body
    for node in ast.walk(ast.Module(body, [])):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _definition(f"{node.module}.{alias.name}")
    return body, name


def _of_definition(node: Definition, name: str, heading: str) -> Iterator[str]:
    yield f"{heading} {name}"
    if isinstance(node, ast.FunctionDef):
        is_property = any(ast.unparse(decorator).endswith("property") for decorator in node.decorator_list)
        yield _code(f"{name}: {ast.unparse(node.returns)}" if is_property and node.returns else _signature(node, name))
        yield from _prose(ast.get_docstring(node))
        return
    methods = [each for each in node.body if isinstance(each, ast.FunctionDef) and not _is_setter(each)]
    constructor = next((method for method in methods if method.name == "__init__"), None)
    if constructor:
        yield _code(_signature(constructor, name))
    yield from _prose(ast.get_docstring(node))
    yield from _prose(ast.get_docstring(constructor) if constructor else None)
    fields = [_field(each, following) for each, following in zip(node.body, [*node.body[1:], None], strict=True)]
    if any(fields):
        yield "\n".join(filter(None, fields))
    for method in methods:
        if not method.name.startswith("_"):
            yield from _of_definition(method, f"{node.name}.{method.name}", "###")


def _is_setter(node: ast.FunctionDef) -> bool:
    return any(ast.unparse(decorator).endswith(".setter") for decorator in node.decorator_list)


def _field(node: ast.stmt, following: ast.stmt | None) -> str:
    """Return a line for a public field of a class or a member of an enum, "" for other statements."""
    name = _target(node)
    if not name or name.startswith("_"):
        return ""
    text = " ".join((_string(following) or "").split())
    return f"- `{ast.unparse(node)}`{': ' if text else ''}{text}"


def _target(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    return ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else ""


def _string(node: ast.stmt | None) -> str | None:
    """Return the docstring that follows an assignment."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return None


def _signature(node: ast.FunctionDef, name: str) -> str:
    """Return the signature without `self` and private arguments, a line for each argument where it is long."""
    result = f" -> {ast.unparse(node.returns)}" if node.returns and node.name != "__init__" else ""
    positional = [*node.args.posonlyargs, *node.args.args]
    defaults = [*[None] * (len(positional) - len(node.args.defaults)), *node.args.defaults]
    words = [_argument(*pair) for pair in zip(positional, defaults, strict=True)]
    words = words[1:] if positional and positional[0].arg in ("self", "cls") else words
    if node.args.vararg:
        words.append(f"*{ast.unparse(node.args.vararg)}")
    elif node.args.kwonlyargs:
        words.append("*")
    words += [_argument(*pair) for pair in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)]
    words += [f"**{ast.unparse(node.args.kwarg)}"] if node.args.kwarg else []
    words = [word for word in words if not word.startswith("_")]
    line = f"{name}({', '.join(words)}){result}"
    return line if len(line) <= LINE_LENGTH else "\n    ".join([f"{name}(", *(f"{w}," for w in words)]) + f"\n){result}"


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    equals = " = " if argument.annotation else "="
    return ast.unparse(argument) + (f"{equals}{ast.unparse(default)}" if default else "")


def _code(text: str) -> str:
    """Return a block of code, with the double quotes of the repository's formatter."""
    text = text if '"' in text else text.replace("'", '"')
    return f"```python\n{text}\n```"


def _prose(docstring: str | None) -> list[str]:
    """Return the docstring as Markdown, with its sections as lists."""
    lines: list[str] = []
    kind = ""
    for line in (docstring or "").splitlines():
        section = SECTION.fullmatch(line)
        if section:
            kind = section[1]
            lines += ["", f"**{kind}{section[2] or ''}**", ""]
            continue
        kind = kind if not line or line.startswith(" ") else ""
        item = line.removeprefix("    ") if kind else line
        has_items = kind in ("Args", "Attributes", "Raises")
        lines.append(f"- {item}" if has_items and item and not item.startswith(" ") else item)
    return [re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()] if lines else []


if __name__ == "__main__":
    for path in PAGES.glob("*.md"):
        path.write_text(filled(path.read_text("utf-8")), "utf-8")

"""Docstrings and comments of the package refer to files, and to names of other modules, that exist."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "quaver"
FILES = sorted(PACKAGE.rglob("*.py"))
OBJECTS = "autograd codes config data experts model module numerics optimizer saved torchao transformers"
"""Files of these names exist, but in a sentence the word is a variable, a section of settings or another package."""


def list_definitions(path: Path) -> set[str]:
    """Return the names that a file defines, those of its classes included; not what it imports."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    return names | {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}


DEFINITIONS = {path: list_definitions(path) for path in FILES}
BY_MODULE = defaultdict[str, set[str]](set)
for path, definitions in DEFINITIONS.items():
    BY_MODULE[path.stem] |= definitions


def find_stale_references(text: str) -> list[str]:
    """Return the references in a docstring or comment that lead nowhere."""
    stale = []
    for module, name in re.findall(r"`([a-z_]+)\.(\w+)[(`]", text):
        if module in BY_MODULE and module not in OBJECTS.split() and name not in BY_MODULE[module]:
            stale.append(f"{module}.{name}")
    for name, file in re.findall(r"`(\w+)`s? (?:\((?:in )?|in |of )((?:\w+/)*\w+\.py)\b", text):
        paths = [path for path in FILES if path.as_posix().endswith(f"/{file}")]
        if paths and not any(name in DEFINITIONS[path] for path in paths):
            stale.append(f"{name} ({file})")
    for file in re.findall(r"(?<![\w/.])(?!torch)((?:[a-z]\w*/)*[a-z]\w*\.py)\b(?!:)", text):
        if not any(path.as_posix().endswith(f"/{file}") for path in FILES) and not (PACKAGE.parent / file).exists():
            stale.append(file)
    return stale


def test_references_of_docstrings_and_comments_resolve():
    stale = []
    for path in FILES:
        tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
        texts = [t.string for t in tokens if t.type == tokenize.COMMENT or t.string.startswith(('"""', 'r"""'))]
        stale += [f"{path}: {reference}" for text in texts for reference in find_stale_references(text)]
    assert stale == []


def test_stale_references_are_found():
    assert find_stale_references(
        "`gemm.no_name`, `gemm.float8_mm`, `no_name` (linear/gemm.py), `float8_mm` in gemm.py, no_file.py"
    ) == ["gemm.no_name", "no_name (linear/gemm.py)", "no_file.py"]

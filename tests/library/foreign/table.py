"""The table of docs/integrations.md: feature x library, from what the tests of this folder say that they prove.

`python -m tests.library.foreign.table` writes it into the page; `test_table.py` compares the two.
"""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[2] / "docs" / "integrations.md"
BEGIN, END = "<!-- written by tests/library/foreign/table.py -->\n", "<!-- end -->\n"
FEATURES = (
    "train",
    "accumulate",
    "checkpointing",
    "compile",
    "DDP",
    "FSDP2",
    "FSDP2, float8 gather",
    "save, resume",
    "reload",
    "resume elsewhere",
    "best model",
    "after a failed run",
    "evaluate",
    "evaluate in a step",
    "EMA swap",
    "heads",
    "adapters before",
    "adapters after",
    "merge",
    "reference model",
)
LIBRARIES = (
    "transformers' Trainer",
    "TRL",
    "PEFT",
    "Accelerate",
    "Accelerate, mixed_precision=fp8",
    "Lightning's Trainer",
    "Fabric",
)


def proves(library, *features):
    """Marks a test that shows that these features of a library work with a converted model."""
    return lambda test: test


def refuses(library, feature, sentence):
    """Marks a test that shows that this feature is refused; the sentence says it to users."""
    return lambda test: test


def lacks(library, *features, sentence):
    """Says of features that a library has nothing of its own for them, and why, so that no test can show them."""


def marks() -> Iterator[tuple[str, list[str], str]]:
    """Every mark in this folder: its kind, the library with the features, and the sentence or nothing."""
    for path in sorted(FOLDER.glob("test_*.py")):
        tree = ast.parse(path.read_text())
        decorators = [each for node in ast.walk(tree) for each in getattr(node, "decorator_list", [])]
        statements = [node.value for node in tree.body if isinstance(node, ast.Expr)]
        for call in decorators + statements:
            kind = getattr(call.func, "id", "") if isinstance(call, ast.Call) else ""
            if kind in ("proves", "refuses", "lacks"):
                words = [ast.literal_eval(argument) for argument in call.args]
                sentence = "".join(ast.literal_eval(each.value) for each in call.keywords)
                yield (
                    kind,
                    words[:2] if kind == "refuses" else words,
                    sentence or (words[2] if kind == "refuses" else ""),
                )


def table() -> str:
    """The table in Markdown. Raises ValueError for a mark of no row or column, or that another contradicts."""
    cells: dict[tuple[str, str], list[str]] = {}
    sentences: list[str] = []
    for kind, (library, *features), sentence in marks():
        if library not in LIBRARIES or not set(features) <= set(FEATURES):
            raise ValueError(f"no row {library} or column {features} in the table")
        if sentence:
            named = f"{library}, {features[0]}" if kind == "refuses" else library
            numbered = f"{len(sentences) + 1}. {named}: {sentence}"
            sentences.append(textwrap.fill(numbered, 120, subsequent_indent="   "))
        word = {"proves": "works", "refuses": f"refused ({len(sentences)})", "lacks": f"({len(sentences)})"}[kind]
        for feature in features:
            cells.setdefault((library, feature), []).append(word)
    for (library, feature), words in cells.items():
        if len({each.split("(")[0] for each in words} & {"", "works"}) > 1:
            raise ValueError(f"{library} is marked both as lacking {feature} and as proved")
    rows = [["", *LIBRARIES], ["---"] * (len(LIBRARIES) + 1)]
    for feature in FEATURES:
        found = (cells.get((library, feature), ["–"]) for library in LIBRARIES)
        rows.append([feature, *(", ".join(dict.fromkeys(words)) for words in found)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *sentences]) + "\n"


def on_the_page(page: str) -> str:
    """What stands between the marks of the page."""
    return page.split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])

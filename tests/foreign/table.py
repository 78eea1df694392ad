"""The table of docs/integrations.md: library x feature, from what the tests of this folder say that they prove.

`python -m tests.foreign.table` writes it into the page; `test_table.py` compares the two.
"""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "integrations.md"
BEGIN, END = "<!-- written by tests/foreign/table.py -->\n", "<!-- end -->\n"
FEATURES = (
    "train",
    "accumulate",
    "checkpointing",
    "compile",
    "DDP",
    "FSDP2",
    "FSDP2, float8 gather",
    "save, resume",
    "resume elsewhere, best model",
    "after a failed run",
    "evaluate",
    "reference model",
    "adapters first",
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


def marks() -> Iterator[tuple[str, list[str]]]:
    """Every mark in this folder: the decorator's name with its arguments."""
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for call in getattr(node, "decorator_list", []):
                if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("proves", "refuses"):
                    yield call.func.id, [ast.literal_eval(argument) for argument in call.args]


def table() -> str:
    """The table in Markdown. Raises ValueError for a mark of an unknown library or feature."""
    cells: dict[tuple[str, str], str] = {}
    sentences: list[str] = []
    for kind, (library, *rest) in marks():
        features = rest if kind == "proves" else rest[:1]
        if library not in LIBRARIES or not set(features) <= set(FEATURES):
            raise ValueError(f"no row {library} or column {features} in the table")
        if kind == "refuses":
            sentence = f"{len(sentences) + 1}. {library}, {features[0]}: {rest[1]}"
            sentences.append(textwrap.fill(sentence, 120, subsequent_indent="   "))
        for feature in features:
            works = "works" if kind == "proves" else f"refused ({len(sentences)})"
            cells[library, feature] = ", ".join(dict.fromkeys(filter(None, [cells.get((library, feature)), works])))
    rows = [["", *FEATURES], ["---"] * (len(FEATURES) + 1)]
    rows += [[library, *(cells.get((library, feature), "–") for feature in FEATURES)] for library in LIBRARIES]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *sentences]) + "\n"


def on_the_page(page: str) -> str:
    """What stands between the marks of the page."""
    return page.split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2])

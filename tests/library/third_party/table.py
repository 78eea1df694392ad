"""Writes the table of docs/integrations.md, feature x library, from the marks of these tests and from LACKS.

`python -m tests.library.third_party.table` writes it into the page; `test_table.py` compares the two.
"""

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[2] / "docs" / "integrations.md"
BEGIN, END = "<!-- written by tests/library/third_party/table.py -->\n", "<!-- end -->\n"
PARTS_OF_A_MODEL = ("heads", "adapters before", "adapters after", "merge", "reference model")
FEATURES = (
    *("train", "accumulate", "checkpointing", "compile", "DDP", "FSDP2", "FSDP2, float8 gather"),
    *("save, resume", "reload", "resume elsewhere", "best model", "after a failed run"),
    *("evaluate", "evaluate in a step", "EMA swap", *PARTS_OF_A_MODEL),
)
LIBRARIES = ("transformers' Trainer", "TRL", "PEFT", "Accelerate", "Accelerate, mixed_precision=fp8")
LIBRARIES += ("Lightning's Trainer", "Fabric")
LACKS = {library: ("best model", *PARTS_OF_A_MODEL) for library in (*LIBRARIES[3:5], "Fabric")}
LACKS |= {"transformers' Trainer": PARTS_OF_A_MODEL[1:], "Lightning's Trainer": PARTS_OF_A_MODEL}
LACKS |= {"TRL": ("heads", "adapters before", "merge")}
"""Features that a library does not have, so that no test can show them."""


def proves(library, *features):
    """Marks a test that shows that these features of a library work with a converted model."""
    return lambda test: test


def refuses(library, feature, sentence):
    """Marks a test that shows that this feature is refused; the sentence says it to users."""
    return lambda test: test


def read_marks() -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the arguments of each mark in this folder."""
    for path in sorted(FOLDER.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for decorator in getattr(node, "decorator_list", []):
                name = getattr(decorator.func, "id", "") if isinstance(decorator, ast.Call) else ""
                if name in ("proves", "refuses"):
                    yield name, [ast.literal_eval(argument) for argument in decorator.args]


def write_table() -> str:
    """Return the table in Markdown.

    Raises ValueError for a mark outside of the table, and for a cell that no test shows or that LACKS contradicts.
    """
    proved = {(library, feature) for kind, (library, *words) in read_marks() if kind == "proves" for feature in words}
    refused = [words for kind, words in read_marks() if kind == "refuses"]
    notes = {(library, feature): number for number, (library, feature, _) in enumerate(refused, 1)}
    lacked = {(library, feature) for library, features in LACKS.items() for feature in features}
    cells = {(library, feature) for library in LIBRARIES for feature in FEATURES}
    if (proved | notes.keys()) & lacked or proved | notes.keys() | lacked != cells:
        raise ValueError("a library either lacks a feature or has a test that proves or refuses it, and nothing else")

    def word(cell: tuple[str, str]) -> str:
        if cell not in notes:
            return "works" if cell in proved else "–"
        return f"works, except ({notes[cell]})" if cell in proved else f"refused ({notes[cell]})"

    rows = [["", *LIBRARIES], ["---"] * (len(LIBRARIES) + 1)]
    rows += [[feature, *(word((library, feature)) for library in LIBRARIES)] for feature in FEATURES]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    sentences = (
        textwrap.fill(f"{number}. {library}, {feature}: refused {sentence}", 120, subsequent_indent="   ")
        for number, (library, feature, sentence) in enumerate(refused, 1)
    )
    return "\n".join([*lines, "", *sentences]) + "\n"


def find_table(page: str) -> str:
    """Return what stands between the marks of the page."""
    return page.split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + write_table() + END + rest.partition(END)[2])

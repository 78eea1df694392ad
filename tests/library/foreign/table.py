"""Writes the table of docs/integrations.md, feature x library, from the marks of these tests and from LACKS.

`python -m tests.library.foreign.table` writes it into the page; `test_table.py` compares the two.
"""

import ast
import textwrap
from collections.abc import Iterable, Iterator
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

PARTS_OF_A_MODEL = ("heads", "adapters before", "adapters after", "merge", "reference model")
LACKS = {
    "transformers' Trainer": (PARTS_OF_A_MODEL[1:], "adapters are PEFT's, and reference models TRL's."),
    "TRL": (("heads", "adapters before", "merge"), "as with transformers' Trainer and PEFT, which it uses."),
    "Accelerate": (
        ("best model", *PARTS_OF_A_MODEL),
        "it prepares the model that it gets, and knows neither parts of it nor a best one.",
    ),
    "Accelerate, mixed_precision=fp8": (
        ("best model", *PARTS_OF_A_MODEL),
        "as Accelerate; it leaves the first and the last linear in high precision.",
    ),
    "Lightning's Trainer": (PARTS_OF_A_MODEL, "the module is the user's, with what it consists of."),
    "Fabric": (("best model", *PARTS_OF_A_MODEL), "the model and the loop are the user's."),
}
"""Features for which a library has nothing, and why: no test can show them."""


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
    """Return the table in Markdown. Raises ValueError for a mark of no row or column, or that LACKS contradicts."""
    cells: dict[tuple[str, str], list[str]] = {}
    sentences: list[str] = []

    def fill(library: str, features: Iterable[str], word: str, sentence: str = "") -> None:
        if library not in LIBRARIES or not set(features) <= set(FEATURES):
            raise ValueError(f"no row {library} or column {features} in the table")
        if sentence:
            sentences.append(textwrap.fill(f"{len(sentences) + 1}. {sentence}", 120, subsequent_indent="   "))
        for feature in features:
            cells.setdefault((library, feature), []).append(word.format(len(sentences)))

    for kind, (library, *words) in read_marks():
        if kind == "proves":
            fill(library, words, "works")
        else:
            fill(library, words[:1], "refused ({})", f"{library}, {words[0]}: {words[1]}")
    for library, (features, sentence) in LACKS.items():
        for feature in features:
            if (library, feature) in cells:
                raise ValueError(f"{library} is marked both as lacking {feature} and as proved")
        fill(library, features, "({})", f"{library}: {sentence}")
    rows = [["", *LIBRARIES], ["---"] * (len(LIBRARIES) + 1)]
    for feature in FEATURES:
        words_by_library = (cells.get((library, feature), ["–"]) for library in LIBRARIES)
        rows.append([feature, *(", ".join(dict.fromkeys(words)) for words in words_by_library)])
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *sentences]) + "\n"


def find_table(page: str) -> str:
    """Return what stands between the marks of the page."""
    return page.split(BEGIN)[1].split(END)[0]


if __name__ == "__main__":
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + write_table() + END + rest.partition(END)[2])

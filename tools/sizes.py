"""Prints the lines of code of each folder of the library, of the lab, and of the tests: `make sizes`."""

from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SOURCES = {".py", ".c", ".h"}


def count_lines_by_folder(root: Path) -> Counter[str]:
    """Return the lines of Python and C below `root`, by its direct subfolder; "" for files in `root` itself."""
    counted: Counter[str] = Counter()
    for path in root.rglob("*"):
        if path.suffix in SOURCES and path.is_file():
            folders = path.relative_to(root).parts[:-1]
            counted[folders[0] if folders else ""] += len(path.read_text(encoding="utf-8").splitlines())
    return counted


def count_lines_of_halves() -> tuple[Counter[str], Counter[str]]:
    """Return the lines of the library and of the lab, by folder."""
    library, lab = count_lines_by_folder(REPOSITORY / "quaver"), count_lines_by_folder(REPOSITORY / "quaver" / "lab")
    del library["lab"]
    return library, lab


def main() -> None:
    """Print the tables."""
    library, lab = count_lines_of_halves()
    tests = count_lines_by_folder(REPOSITORY / "tests")
    for title, counted in (("quaver", library), ("quaver/lab", lab), ("tests", tests)):
        print(f"| lines | `{title}/` |\n|---|---|")
        for folder, count in counted.most_common():
            print(f"| {count:,} | `{folder or '.'}` |")
        print(f"| {counted.total():,} | all |\n")
    print(f"{tests.total() / (library + lab).total():.3f} lines of tests for a line of the package")


if __name__ == "__main__":
    main()

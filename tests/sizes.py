"""The lines of each folder of the package, and of the tests: `make sizes`."""

from collections import Counter
from pathlib import Path

SOURCES = {".py", ".c", ".h"}


def lines_by_folder(root: Path) -> Counter[str]:
    """Lines of Python and C below `root`, by the first folder in it; "" for files of `root` itself."""
    counted: Counter[str] = Counter()
    for path in root.rglob("*"):
        if path.suffix in SOURCES and path.is_file():
            folders = path.relative_to(root).parts[:-1]
            counted[folders[0] if folders else ""] += len(path.read_text(encoding="utf-8").splitlines())
    return counted


def main() -> None:
    """Print the tables."""
    repository = Path(__file__).parents[1]
    package, tests = lines_by_folder(repository / "quaver"), lines_by_folder(repository / "tests")
    for title, counted in (("quaver", package), ("tests", tests)):
        print(f"| lines | `{title}/` |\n|---|---|")
        for folder, count in counted.most_common():
            print(f"| {count:,} | `{folder or '.'}` |")
        print(f"| {counted.total():,} | all |\n")
    print(f"{tests.total() / package.total():.3f} lines of tests for a line of the package")


if __name__ == "__main__":
    main()

"""Prints the minutes of each folder and the slowest files and tests, from pytest's JUnit XML: `make minutes`."""

import re
import sys
from collections import Counter
from pathlib import PurePosixPath
from xml.etree import ElementTree

MAX_ROWS = 25
"""The most rows of the tables of files and of tests."""


def get_test_path(case: ElementTree.Element) -> PurePosixPath:
    """Return the file of a test, relative to tests/. For a module that is skipped whole, `name` is the module."""
    module = case.get("classname") or case.get("name", "")
    return PurePosixPath(*module.split(".")[1:]).with_suffix(".py")


def main(xml: str) -> None:
    """Print the tables."""
    cases = list(ElementTree.parse(xml).iter("testcase"))
    folders, files, tests = Counter(), Counter(), Counter()
    for case in cases:
        path, seconds = get_test_path(case), float(case.get("time", 0))
        folders[path.parent] += seconds
        files[path] += seconds
        tests[f"`{path}` {re.sub(r'^test_', '', case.get('name', ''))}"] += seconds
    print(f"{len(cases)} tests, {folders.total() / 60:.1f} minutes of one process\n\n| minutes | folder |\n|---|---|")
    for folder, seconds in folders.most_common():
        print(f"| {seconds / 60:.1f} | `{folder}` |")
    for title, counted in (("file", files), ("test", tests)):
        print(f"\n| s | {title} |\n|---|---|")
        for name, seconds in counted.most_common(MAX_ROWS):
            print(f"| {seconds:.0f} | {name} |")


if __name__ == "__main__":
    main(sys.argv[1])

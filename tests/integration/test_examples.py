"""Every example runs, fits in 50 lines, and prints something."""

import runpy
from pathlib import Path

import pytest

from tests.isolated import Forked

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


def execute(path: Path) -> None:
    runpy.run_path(str(path), run_name="__main__")


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example(path):
    assert len(path.read_text().splitlines()) < 50
    done = Forked(execute, path).finished()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_there_are_examples():
    assert EXAMPLES

"""A small part of benchmarks/reliability.py; `make nightly` runs all of it."""

import runpy
import sys
from pathlib import Path

import pytest

from tests.isolated import Forked


def as_a_module(words: list[str]) -> None:
    sys.argv = ["benchmarks.reliability", *words]
    runpy.run_module("benchmarks.reliability", run_name="__main__")


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc to find the ranks of a launcher")
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(["--part", "phases", "--tries", "11"], id="a kill at each step of a save"),
        pytest.param(["--part", "disks", "--tries", "3", "--part", "damage"], id="little", marks=pytest.mark.nightly),
        pytest.param([], id="everything", marks=[pytest.mark.nightly, pytest.mark.timeout(7200)]),
    ],
)
def test_every_try_holds(words):
    process = Forked(as_a_module, words)
    _, error = process.communicate(timeout=7200)
    assert process.returncode == 0, error

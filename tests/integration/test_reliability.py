"""A small part of benchmarks/reliability.py; `make nightly` runs all of it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


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
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.reliability", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr

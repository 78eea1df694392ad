"""Tests that the library works without the extra `quaver[train]`, and that each verb says what to install."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from quaver.lab.cli import TRAIN_EXTRA_MODULES, VERBS

ROOT = Path(__file__).parents[2]

BLOCK = f"""
import sys
for name in {TRAIN_EXTRA_MODULES}:
    sys.modules[name] = None
"""
"""Imports of these modules fail as if they were not installed."""

README = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

PROGRAM = f"""{BLOCK}
import quaver.export, quaver.optim, quaver.activations, quaver.compat.float8
for block in {README}:
    exec(block, {{}})
print("the library works", file=sys.stderr)

from quaver.lab.cli import main
for verb in {[verb for verb in VERBS if verb != "doctor"]}:
    print(verb, main([verb, "--help"]))
print("doctor", main(["doctor", "--no-compile"]))
print("doctor --model", main(["doctor", "--model", "nowhere"]))
"""
"""The parts of the library, the programs of the README and the verbs: one process, which imports everything anew."""


@pytest.fixture(scope="module")
def process():
    """Run `PROGRAM`, and return its process when it has ended."""
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, check=False)


def test_train_extra_lists_the_packages_of_the_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = [re.match(r"[\w.-]+", requirement)[0].replace("-", "_") for requirement in extras["train"]]
    assert sorted(names) == sorted(TRAIN_EXTRA_MODULES)


def test_the_library_needs_no_extra(process):
    assert any("convert_to_float8_training" in block for block in README)
    assert "the library works" in process.stderr, process.stderr


def test_each_verb_says_what_to_install(process):
    assert process.returncode == 0, process.stderr
    codes = dict(re.findall(r"^(doctor --model|[a-z-]+) (\d)$", process.stdout, re.M))
    assert codes == {verb: "0" if verb == "doctor" else "2" for verb in [*VERBS, "doctor --model"]}
    assert "float8 matmuls on cpu" in process.stdout
    errors = [line for line in process.stderr.splitlines() if line.startswith("quaver: error")]
    assert len(errors) == len(VERBS)  # of all but doctor, and of doctor --model
    for line in errors:
        assert re.fullmatch(r"quaver: error: quaver [a-z-]+ needs \w+, which is not installed: pip install .*", line)
    assert "Traceback" not in process.stderr

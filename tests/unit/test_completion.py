"""The completion script in bash: verbs, flags, and values that have choices."""

import shutil
import subprocess

import pytest

from quaver.cli import VERBS, completion

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    """What bash offers for the last of some words."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "complete.sh").write_text(completion.script())

    def offered(*words: str) -> list[str]:
        line = (
            'source ./complete.sh; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _quaver; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-c", line, "-", *words], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        return done.stdout.split()

    return offered


def test_verbs(completed):
    assert completed("quaver", "") == [*VERBS, "complete.sh"]
    assert completed("quaver", "me") == ["memory"]
    assert completed("quaver", "bench", "g") == ["gemm"]


def test_flags(completed):
    assert completed("quaver", "train", "--training.st") == ["--training.steps"]
    assert completed("quaver", "report", "--to") == ["--top"]
    assert "--shapes" in completed("quaver", "bench", "linear", "--s")


@pytest.mark.parametrize("between", [(), ("=",)])
def test_values(completed, between):
    """bash makes a word of an equals sign."""
    values = completed("quaver", "train", "--float8.recipe_name", *between, "mx")
    assert values == ["mxfp8", "mxfp8_with_gw_hp"]
    assert completed("quaver", "train", "--optimizer.name", *between, "M") == ["Muon"]


def test_files(completed):
    assert completed("quaver", "train", "comp") == ["complete.sh"]

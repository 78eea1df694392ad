"""The completion script in bash and in zsh: verbs, flags, values that have choices, and files."""

import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest

from quaver.lab.cli import VERBS, completion


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the script."""
    folder = tmp_path_factory.mktemp("completion")
    (folder / "complete.sh").write_text(completion.script())
    return folder


@pytest.fixture(scope="module")
def completed(folder):
    """What bash offers for the last of some words."""
    if shutil.which("bash") is None:
        pytest.skip("no bash")

    def offered(*words: str) -> list[str]:
        line = (
            'source ./complete.sh; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _quaver; printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(["bash", "-c", line, "-", *words], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        return done.stdout.split()

    return offered


def test_verbs(completed):
    assert completed("quaver", "") == [*VERBS]
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


ON_TAB = {
    "quaver me": "quaver memory ",
    "quaver bench g": "quaver bench gemm ",
    "quaver train --training.st": "quaver train --training.steps ",
    "quaver train --optimizer.name M": "quaver train --optimizer.name Muon ",
    "quaver train --optimizer.name=M": "quaver train --optimizer.name=Muon ",
    "quaver train comp": "quaver train complete.sh ",
}


@pytest.mark.parametrize("shell", [["bash", "--norc", "-i"], ["zsh", "-f", "-i"]], ids=lambda shell: shell[0])
def test_the_tab_key(shell, folder):
    """In a terminal. An x is typed behind it, which stands behind the space that ends a whole word."""
    if shutil.which(shell[0]) is None:
        pytest.skip(f"no {shell[0]}")
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(shell[0], shell, {**os.environ, "TERM": "dumb", "COLUMNS": "120", "INPUTRC": os.devnull})

    def shown_after(text: str, expected: str) -> str:
        os.write(terminal, text.encode())
        shown, end = "", time.monotonic() + 60
        while expected not in shown and time.monotonic() < end:
            if select.select([terminal], [], [], 0.1)[0]:
                shown = re.sub(".\b", "", shown + os.read(terminal, 1 << 16).decode(errors="replace"))
        return shown

    try:
        assert "sourced" in shown_after("PS1='> '; . ./complete.sh; echo sour''ced\r", "sourced")
        for typed, expected in ON_TAB.items():
            assert f"{expected}x" in shown_after(f"{typed}\tx", f"{expected}x")
            os.write(terminal, b"\x15")  # Ctrl-U empties the line
    finally:
        os.close(terminal)
        os.waitpid(child, 0)

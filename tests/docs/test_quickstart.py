"""Runs every command of docs/quickstart.md in a clone, in order."""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from quaver.lab.runs.json_lines import read_json_lines
from tests.command_line import quaver, quaver_on_ranks
from tests.isolated import Forked

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "quickstart.md"
QUAVER, PYTHON = ".venv/bin/quaver", ".venv/bin/python"
TORCHRUN = [PYTHON, "-m", "torch.distributed.run"]
SMALLER = {"seq_len = 256": "seq_len = 64", "n_layers = 4": "n_layers = 1", "\ndim = 256": "\ndim = 64"}
SMALLER |= {"hidden_dim = 768": "hidden_dim = 192"}
"""Replacements in the debug model's config, with which the commands take a fifth of the time."""


def list_commands() -> list[str]:
    """Return the lines of the page's shell blocks."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def set_up(clone: Path) -> None:
    """Stand in for what `make` installs: the environment of this test, in the place where `make` looks for it."""
    binaries = clone / ".venv" / "bin"
    binaries.mkdir(parents=True)
    # Scripts, because a symbolic link to Python would look for its packages next to the link.
    (binaries / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (binaries / "quaver").write_text(f'#!/bin/sh\nexec {sys.executable} -m quaver "$@"\n')
    for path in binaries.iterdir():
        path.chmod(0o755)
    (clone / ".venv" / ".base").touch()
    config = clone / "train_configs" / "llama3_debug.toml"
    text = config.read_text()
    for large, small in SMALLER.items():
        assert text.count(large) == 1
        text = text.replace(large, small)
    config.write_text(text)


def run_script(path: str) -> None:
    runpy.run_path(path, run_name="__main__")


def run(command: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run a line of the page; `quaver`, its ranks and scripts start as forks, without the seconds that imports take.

    test_train_distributed.py starts torchrun itself, at night.
    """
    argv = shlex.split(command)
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "COLUMNS": "200"}
    forked = {"cwd": folder, "environment": environment}
    if argv[0] == QUAVER:
        return quaver(argv[1:], **forked).finished()
    if argv[:3] == TORCHRUN:
        ranks = int(argv[argv.index("--nproc-per-node") + 1])
        started = quaver_on_ranks(ranks, argv[argv.index("quaver") + 1 :], **forked)
        finished = [rank.finished() for rank in started]
        return next((rank for rank in finished if rank.returncode), finished[0])
    if argv[0] == PYTHON:
        return Forked(run_script, *argv[1:], **forked).finished()
    environment = {**os.environ, **environment}
    options = {"shell": True, "cwd": folder, "env": environment, "timeout": 300}
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("needs the repository, to clone it")
    folder = tmp_path_factory.mktemp("newcomer")
    clone_command, enter, *rest = list_commands()
    assert (clone_command, enter) == ("git clone https://github.com/quaver-float8/quaver", "cd quaver")
    clone = folder / "quaver"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    set_up(clone)
    for command in rest:
        process = run(command, clone)
        assert process.returncode == 0, f"{command}\n{process.stdout[-2000:]}\n{process.stderr[-2000:]}"
        assert "Traceback" not in process.stderr, command
        assert "Warning" not in process.stderr, command
    return clone


def test_every_command_runs(clone):
    assert len(list_commands()) >= 10


def test_the_files_that_the_page_names_exist(clone):
    runs = clone / "runs"
    for file in ("config.toml", "metrics.jsonl", "curves.png", "conversion_report.json", "checkpoint"):
        assert (runs / "first" / file).exists()
    assert list((runs / "look" / "memory_snapshot").rglob("*.png"))
    assert list((runs / "look" / "profile_trace").rglob("*.json.gz"))
    assert (clone / "exported" / "model.safetensors").exists()


def read_losses(clone, run):
    """Return the step and the loss of each record of a run that has a loss."""
    records = read_json_lines(clone / "runs" / run / "metrics.jsonl")
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "step"]


def test_the_resumed_run_is_whole(clone):
    assert [step for step, _ in read_losses(clone, "mine")] == list(range(1, 19))
    lines = (clone / "runs" / "mine" / "provenance.jsonl").read_text().splitlines()
    assert [json.loads(line)["from_step"] for line in lines] == [0, 12, 16]


def test_training_further_begins_where_the_first_run_ended(clone):
    """The loss is far below log(256) = 5.5, that of new weights, but not equal: the text differs."""
    (_, mine), (_, further) = read_losses(clone, "mine")[-1], read_losses(clone, "further")[0]
    assert abs(further - mine) < 0.5 * abs(5.5 - mine)

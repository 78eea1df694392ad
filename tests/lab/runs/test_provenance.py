"""Tests what a run and a measurement record of their source: the command, versions and the commit."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quaver.lab.runs import provenance
from quaver.lab.runs.provenance import collect_provenance, describe_measurement, find_git_revision
from quaver.lab.runs.ranks import Ranks
from quaver.lab.trainer.run_setup import set_up_run

ROOT = Path(__file__).parents[3]


def test_provenance_names_the_commit_of_the_source():
    about = collect_provenance(torch.device("cpu"))
    assert about["command"] == sys.argv
    assert about["environment"]["torch"] == torch.__version__
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        assert about["git"]["commit"] == head.stdout.strip()


def test_the_first_rank_of_a_run_asks_for_the_provenance(tiny_config):
    setup = set_up_run(tiny_config, Ranks())
    assert setup.to_record()["provenance"]["command"] == sys.argv
    assert replace(setup, ranks=Ranks(1, 1, 2)).to_record()["provenance"] is None


def test_a_folder_that_no_checkout_tracks_has_no_revision(tmp_path):
    """quaver may be installed in an environment inside the checkout of another project."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    inside = tmp_path / "site-packages"
    inside.mkdir()
    (inside / "file.py").touch()
    assert find_git_revision(inside) is None


def test_asking_for_the_revision_writes_nothing_into_the_checkout(tmp_path):
    def git(*argv: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@n", *argv], check=True)

    git("init", "-q")
    (tmp_path / "file.py").write_text("x")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    os.utime(tmp_path / "file.py", (1, 1))  # `git status` would refresh the index
    before = (tmp_path / ".git" / "index").read_bytes()
    assert find_git_revision(tmp_path)["is_modified"] is False
    assert (tmp_path / ".git" / "index").read_bytes() == before


@pytest.mark.parametrize("fails", ["exec sleep 60", "exit 1"])
def test_changes_are_unknown_if_git_fails(tmp_path, monkeypatch, fails):
    git = tmp_path / "git"
    git.write_text(f"#!/bin/sh\ncase $* in *status*) {fails};; *) echo 0123;; esac\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(provenance, "GIT_TIMEOUT_S", 2)
    assert find_git_revision(tmp_path) == {"commit": "0123", "is_modified": None}


@pytest.mark.parametrize(
    ("revision", "commit"),
    [
        (None, "unknown"),
        ({"commit": "0123456789", "is_modified": False}, "0123456"),
        ({"commit": "0123456789", "is_modified": True}, "0123456+"),
        ({"commit": "0123456789", "is_modified": None}, "0123456?"),
    ],
)
def test_results_name_versions_the_command_and_the_commit(revision, commit, monkeypatch):
    monkeypatch.setattr(provenance, "find_git_revision", lambda folder: revision)
    monkeypatch.setattr("sys.argv", ["quaver", "bench", "gemm", "--output", "a b"])
    about = describe_measurement(torch.device("cpu"))
    assert (about["torch"], about["threads"]) == (torch.__version__, torch.get_num_threads())
    assert (about["command"], about["commit"]) == ("quaver bench gemm --output 'a b'", commit)

"""Tests replace_file, and the lock that it shares with write_new_folder."""

import errno
import signal
import subprocess
import sys

import pytest

from quaver.runtime.files import replace_file, write_new_folder

WRITERS = (replace_file, write_new_folder)
KILLED = """
import os, sys
from pathlib import Path
from quaver.runtime.files import replace_file, write_new_folder
with {0}(Path(sys.argv[1])) as partial:
    (partial / "left" if partial.is_dir() else partial).write_text("left")
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("exists", [True, False])
def test_a_symlink_stays_one_and_its_target_is_replaced(tmp_path, exists):
    target, link = tmp_path / "elsewhere" / "0123", tmp_path / "plot.png"
    target.parent.mkdir()
    if exists:
        target.write_text("old")
        target.chmod(0o640)
    link.symlink_to(target)
    with replace_file(link) as partial:
        assert (partial.parent, partial.suffix) == (target.parent, ".png")
        partial.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert not exists or target.stat().st_mode & 0o777 == 0o640
    assert [file.name for file in target.parent.iterdir()] == ["0123"]


@pytest.mark.parametrize("write", WRITERS)
def test_a_second_writer_is_refused_and_the_first_one_ends(tmp_path, write):
    path = tmp_path / "out"
    with write(path) as partial:
        file = partial / "file" if partial.is_dir() else partial
        file.write_text("first")
        with pytest.raises(BlockingIOError, match="another process is writing .*out"), write(path):
            pass
    assert (path / "file" if path.is_dir() else path).read_text() == "first"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("write", WRITERS)
def test_the_next_writer_removes_what_a_killed_one_left(tmp_path, write):
    path = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", KILLED.format(write.__name__), path], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2  # the partial file or folder, and the lock
    with write(path) as partial:
        (partial / "file" if partial.is_dir() else partial).write_text("new")
    assert [file.name for file in tmp_path.rglob("*")] == (["out", "file"] if path.is_dir() else ["out"])


def test_an_error_names_the_file_and_not_its_lock(tmp_path):
    path = tmp_path / "missing" / "out"
    with pytest.raises(FileNotFoundError) as error, replace_file(path):
        pass
    assert error.value.filename == str(path)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch, caplog):
    def fail(descriptor, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    with replace_file(tmp_path / "out") as partial:
        partial.write_text("new")
    assert "has no locks" in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == ["out"]

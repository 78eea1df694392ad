"""Impossible settings and odd files: one line that names the setting or the file, and never a hang."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quaver.cli import main
from quaver.trainer.data.documents import SourceFile
from tests.command_line import TEXT, TINY

pytestmark = pytest.mark.timeout(60)
"""A reader that waits for a FIFO fails."""

SETTINGS = {
    "--job.dump_folder=~nosuchuser/runs": "'~nosuchuser/runs' begins with the home of a user that does not exist",
    "--data=~nosuchuser/text": "'~nosuchuser/text' begins with the home of",
    "--data.tokenizer=~nosuchuser/tokenizer.json": "'~nosuchuser/tokenizer.json' begins with the home of",
    "--data.cache_folder=~nosuchuser/cache": "'~nosuchuser/cache' begins with the home of",
    "--checkpoint.initial_load_path=~nosuchuser/step": "'~nosuchuser/step' begins with the home of",
    "--resume=~nosuchuser/run": "'~nosuchuser/run' begins with the home of",
    "--data={fifo}": "fifo",
    "--data.tokenizer={fifo}": "fifo",
    "--checkpoint.initial_load_path={fifo}": "fifo",
    "--resume={fifo}": "fifo",
    "{fifo}": "fifo",
    "{nested}": "nested.toml",
    "{latin}": "latin.toml",
}


@pytest.fixture
def where(tmp_path: Path) -> list[str]:
    (tmp_path / "text.txt").write_text(TEXT)
    words = [*TINY, "--training.steps=1", "--float8.no-enable_float8_linear"]
    return [*words, f"--data={tmp_path / 'text.txt'}", f"--job.dump_folder={tmp_path / 'runs'}"]


@pytest.mark.parametrize("word", SETTINGS)
def test_an_impossible_input_is_one_line(word, where, tmp_path, refused):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "nested.toml").write_text("a = " + "[" * 100_000)
    (tmp_path / "latin.toml").write_bytes(b'[data]\npath = "\xe9"\n')
    given_word = word.format(**{path.stem: path for path in tmp_path.iterdir()})
    words = [given_word, *where] if word.startswith("{") or "resume" in word else [*where, given_word]
    assert SETTINGS[word] in refused("train", *words)


def test_a_file_name_that_is_not_utf8_is_data_like_any_other(where, tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    (tmp_path / "text.txt").rename(Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xe9.txt")))
    assert main(["train", *where, f"--data={folder}", "--job.name=odd"]) == 0
    assert json.loads((tmp_path / "runs" / "odd" / "data.json").read_text())["files"] == 1


def test_a_setting_that_is_not_utf8_is_refused(where, tmp_path, refused):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    (tmp_path / "text.txt").rename(Path(folder) / "text.txt")
    assert "data.path must be in UTF-8, got '" in refused("train", *where, f"--data={folder}")


def test_a_model_larger_than_the_memory_is_one_line(where, monkeypatch, refused):
    monkeypatch.setattr("quaver.cli.train.build", lambda setup: torch.empty(2**60))
    assert "this machine lacks the memory" in refused("train", *where)


def test_a_text_that_shrinks_while_it_is_read_is_one_line(where, monkeypatch, refused):
    found = SourceFile.of

    def longer(name, path):
        return replace(found(name, path), size=10 + path.stat().st_size)

    monkeypatch.setattr(SourceFile, "of", longer)
    assert "text.txt' became shorter while it was read" in refused("train", *where)

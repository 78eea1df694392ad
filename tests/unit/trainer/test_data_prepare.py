"""`quaver prepare-data`: what it makes is what a run finds, and what it says is so."""

import json
import re
from pathlib import Path

import pytest

from quaver.cli import main
from quaver.trainer.data import load as load_module


@pytest.fixture
def config(tmp_path: Path, text_folder: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(
        f'[data]\npath = "{text_folder}"\ncache_folder = "{tmp_path / "kept"}"\n'
        '[training]\nseq_len = 32\nsteps = 1\nlocal_batch_size = 2\ndevice = "cpu"\n'
        "[validation]\nsteps = 1\n[float8]\nenable_float8_linear = false\n"
        "[model]\ndim = 32\nn_layers = 1\nn_heads = 4\nn_kv_heads = 2\nhidden_dim = 48\n"
        f'[job]\nname = "r"\ndump_folder = "{tmp_path / "runs"}"\n'
    )
    return path


def test_a_run_finds_what_was_prepared(config, tmp_path, capsys, monkeypatch):
    assert main(["prepare-data", str(config)]) == 0
    said = capsys.readouterr().out
    monkeypatch.setattr(load_module, "_build", None)  # a second build fails
    assert main(["train", str(config)]) == 0
    origin = json.loads((tmp_path / "runs" / "r" / "data.json").read_text())
    assert f"train        {origin['train_documents']} documents, {origin['train_tokens']:,} tokens" in said
    assert f"validation   1 documents, {origin['validation_tokens']:,} tokens" in said
    assert "tokenizer    bytes: 256 tokens, 0 ends a document" in said
    assert f"sha256       {origin['sha256']}" in said
    assert f"cached in    {origin['cache']}" in said


def test_content_that_was_changed_on_the_disk_is_noticed_and_made_again(config, tmp_path, capsys):
    assert main(["prepare-data", str(config)]) == 0
    (tokens,) = (tmp_path / "kept").glob("*/train.tokens")
    content = tokens.read_bytes()
    tokens.write_bytes(content[:500] + b"?" + content[501:])
    first = capsys.readouterr().out
    assert main(["prepare-data", str(config)]) == 0
    second = capsys.readouterr().out
    assert "are damaged (train.tokens is not what was written); making them again" in second
    assert tokens.read_bytes() == content
    assert re.findall("sha256 .*", first) == re.findall("sha256 .*", second)
    assert main(["prepare-data", str(config)]) == 0
    assert "damaged" not in capsys.readouterr().out


def test_places_of_corrupt_items_are_listed(config, text_folder, capsys):
    (text_folder / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    assert main(["prepare-data", str(config)]) == 0
    assert "left out     0 empty, 1 corrupt\n  latin.txt: not UTF-8" in capsys.readouterr().out


def test_bad_input_is_one_line_and_exit_code_2(config, refused):
    assert "data.tokenizer 'none' does not exist" in refused("prepare-data", config, "--data.tokenizer=none")

"""Tests that commands check the files they write before the work, lose no other file, and fail in one line."""

import json
import os
from pathlib import Path

import pytest

from quaver.lab.cli import main
from quaver.lab.output_file import Output, check_outputs, write_result
from quaver.runtime.errors import InputError


def test_an_output_is_checked_and_neither_made_nor_changed(tmp_path):
    path, link = tmp_path / "new" / "x.json", tmp_path / "link.json"
    link.symlink_to(path)
    for output in (path, link):
        check_outputs(Output(output))
    assert list(tmp_path.iterdir()) == [link]
    write_result({"environment": {}}, link)
    os.utime(path, (1, 1))
    for output in (path, link):
        check_outputs(Output(output))
    assert (json.loads(path.read_text()), path.stat().st_mtime) == ({"environment": {}}, 1)
    assert list(path.parent.iterdir()) == [path]


def test_an_output_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "x.json"
    file.touch()
    with pytest.raises(InputError, match=f"^--png: cannot write {file}/a/b: {file} is not a folder$"):
        check_outputs(Output(file / "a" / "b", "--png", "PNG picture"))
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    for fifo in (tmp_path / "fifo", tmp_path / "link"):
        with pytest.raises(InputError, match=f"^--output must be a file to write, got {fifo}, which waits for"):
            check_outputs(Output(fifo))
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    for path, nearest in ((file, tmp_path), (tmp_path / "a" / "b", tmp_path), (Path("/dev/null"), "/dev/null")):
        with pytest.raises(InputError, match=f"^--output: cannot write {path}: {nearest} is not writable$"):
            check_outputs(Output(path))


@pytest.mark.parametrize(
    "command",
    [
        "memory {config} --quick --output {config}",
        "memory {config} --output {tmp}/x.json --html {config}",
        "memory {config} --output {tmp}/x.json --html {tmp}/new/../x.json",
        "plan {config} --output {config}",
        "plan {config} --output {tmp}/new.toml --write {tmp}/new.toml",
        "plan {config} --explain 1 --output {tmp}/p.png --png {tmp}/p.png",
        "report {run} --html {run}/metrics.jsonl",
        "report {run} --html {run}/config.toml",
        "memory {config} --output {tmp}/x.json --png {run}/curves.png",
        "bench gemm --device cpu --shapes 16 --rounds 1 --output {config}",
        "bench ledger --model {config} --output {tmp}/ledger.png",
        "bench roofline --model llama-8b --output {config}",
    ],
)
def test_an_output_replaces_no_input_and_no_other_output(command, tmp_path, run_refused):
    config, run = tmp_path / "c.toml", tmp_path / "run"
    run.mkdir()
    config.write_text("[model]\nn_layers = 2\n")
    (run / "config.toml").write_text("")
    (run / "metrics.jsonl").write_text('{"step": 1, "model": "a", "loss": 1.0}\n')
    (run / "curves.png").write_bytes(b"\x89PNG\r\n")
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    option = "--" + command.format(tmp="", config="", run="").rpartition(" --")[2].split()[0]
    assert run_refused(*command.format(tmp=tmp_path, config=config, run=run).split()).startswith(
        f"quaver: error: {option}"
    )
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


@pytest.mark.parametrize(
    "command", ["memory --quick", "memory --traffic", "plan --gpus 1 --explain 1 --model.n_layers 1"]
)
def test_a_command_that_shows_writes_no_file(command, tmp_path, monkeypatch, run_quaver):
    monkeypatch.chdir(tmp_path)
    run_quaver(*command.split())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a" * 250 + ".json", "é" * 125 + ".json"])
def test_an_output_has_a_name_as_long_as_the_file_system_takes(name, tmp_path):
    path = tmp_path / "new" / name
    check_outputs(Output(path))
    write_result({"environment": {}}, path)
    assert list(path.parent.iterdir()) == [path]
    for longer in (path.with_name(f"a{name}"), tmp_path / f"a{name}" / "x.json"):
        with pytest.raises(InputError, match="^--output: expected names of at most 255 bytes, got "):
            check_outputs(Output(longer))


def test_an_output_that_fails_late_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "replace", lambda *paths: os.rename(tmp_path / "gone", tmp_path / "x"))
    output = tmp_path / "x.json"
    assert main(["bench", "gemm", "--device=cpu", "--shapes=16", "--rounds=1", f"--output={output}"]) == 4
    line = f"quaver: error: --output: cannot write {output}: No such file or directory\n"
    assert capsys.readouterr().err == line

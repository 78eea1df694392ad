"""Tests that impossible settings and odd files end in one line that names them, and never in a hang."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quaver.lab.cli import main, report, train
from quaver.lab.data.documents import SourceFile
from tests.command_line import TEXT, TINY

pytestmark = pytest.mark.timeout(60)
"""A reader that waits for a FIFO fails."""

COMMANDS = {
    "--job.dump_folder=~nosuchuser/runs": "'~nosuchuser/runs' begins with the home of a user that does not exist",
    "--data=~nosuchuser/text": "'~nosuchuser/text' begins with the home of",
    "--data.tokenizer=~nosuchuser/tokenizer.json": "'~nosuchuser/tokenizer.json' begins with the home of",
    "--data.cache_folder=~nosuchuser/cache": "'~nosuchuser/cache' begins with the home of",
    "--checkpoint.initial_load_path=~nosuchuser/step": "'~nosuchuser/step' begins with the home of",
    "--resume=~nosuchuser/run": "'~nosuchuser/run' begins with the home of",
    "--job.dump_folder=a\0b": "'a\\x00b' has a NUL character",
    "--job.name=a\0b": "job.name must be the name of one folder",
    "--job.name=a\x1b]0;b": "job.name must be the name of one folder",
    "--data.cache_folder=a\0b": "'a\\x00b' has a NUL character",
    "--resume=a\0b": "'a\\x00b' has a NUL character",
    "--metrics.enable_tensorboard --metrics.save_tb_folder=a\0b": "a folder inside the run folder",
    "--metrics.enable_tensorboard --metrics.save_tb_folder=metrics.jsonl/x": "must be a folder, with a name",
    "--metrics.enable_tensorboard --metrics.save_tb_folder=./checkpoint": "not in that of another setting",
    "--metrics.enable_tensorboard --metrics.save_tb_folder=checkpoint/tb": "not in that of another setting",
    "--data={fifo}": "fifo' is neither a file nor a folder",
    "--data.tokenizer={fifo}": "fifo",
    "--checkpoint.initial_load_path={fifo}": "fifo",
    "--resume={fifo}": "fifo",
    "{fifo}": "fifo' is not a regular file",
    "{nested}": "nested.toml",
    "{latin}": "latin.toml",
    "--resume=": "--resume must be the folder of a run, got ''",
    "--resume={nowhere}": "has no config.toml",
    "--resume={run}": "--resume sets job.dump_folder, got --job.dump_folder",
    "--checkpoint.resume=auto": "job.name must be set",
    "--checkpoint.resume=must": "job.name must be set",
    "--checkpoint.initial_load_path=.": "is not a checkpoint",
    "--checkpoint.async_mode=async_with_pinned_mem": "disabled or async on a device",
    "--dry-run --ranks 0": "--ranks must be at least 1",
    "--dry-run --ranks 3 --parallelism.tensor_parallel_degree 2": "must be the number of processes = 3",
    "--dry-run --checkpoint.initial_load_path nowhere": "is not a checkpoint: the folder does not exist; give",
    "--dry-run --float8.filter_fqns nothing": "is part of no linear's name",
    "--dry-run --float8.layer_recipes nope=rowwise": "error: float8.layer_recipes: 'nope' is not a linear",
    "--dry-run --ranks 2 --parallelism.tensor_parallel_degree 2 --float8.recipe_name blockwise": (
        "tensor_parallel_degree = 2: model.layers.0.self_attn.k_proj: tensor parallelism expects parts of whole "
        "blocks, a multiple of 128 features on each rank, got 64 (out_features 128 on 2 ranks); 256 in all"
    ),
    "--dry-run --no-dry-run --ranks 1": "--ranks must not be given unless --dry-run is given",
}


@pytest.fixture
def run_argv(tmp_path: Path) -> list[str]:
    """Return the argv of a run of one step on a text."""
    (tmp_path / "text.txt").write_text(TEXT)
    argv = [*TINY, "--training.steps=1", "--float8.no-enable_float8_linear"]
    return [*argv, f"--data={tmp_path / 'text.txt'}", f"--job.dump_folder={tmp_path / 'runs'}"]


@pytest.mark.parametrize("command", COMMANDS)
def test_an_impossible_input_is_one_line(command, run_argv, tmp_path, run_refused):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "nested.toml").write_text("a = " + "[" * 100_000)
    (tmp_path / "latin.toml").write_bytes(b'[data]\npath = "\xe9"\n')
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    files = {path.stem: path for path in tmp_path.iterdir()}
    argv = command.format(**files, nowhere=tmp_path / "nowhere").split()
    if "--dry-run" not in command:
        argv = [*argv, *run_argv] if command.startswith(("{", "--resume")) else [*run_argv, *argv]
    assert COMMANDS[command] in run_refused("train", *argv)


def test_a_file_name_that_is_not_utf8_is_data_like_any_other_and_an_image_is_none(run_argv, tmp_path, capsys):
    folder = tmp_path / "text"
    folder.mkdir()
    (tmp_path / "text.txt").rename(Path(os.fsdecode(os.fsencode(folder) + b"/\xff\xe9.txt")))
    (folder / "image.png").write_bytes(b"\0")
    assert main(["train", *run_argv, f"--data={folder}", "--job.name=odd"]) == 0
    assert "2 files (left out: 1, such as image.png: a 0 byte, so not text), " in capsys.readouterr().out
    assert json.loads((tmp_path / "runs" / "odd" / "data.json").read_text())["corrupt"] == 1


def test_a_setting_that_is_not_utf8_is_refused(run_argv, tmp_path, run_refused):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    (tmp_path / "text.txt").rename(Path(folder) / "text.txt")
    assert "data.path must be in UTF-8, got '" in run_refused("train", *run_argv, f"--data={folder}")


def test_control_characters_of_a_path_reach_no_terminal(tmp_path, run_refused):
    assert run_refused("import", f"{tmp_path}\x1b", tmp_path / "out").isprintable()


def test_a_model_larger_than_the_memory_is_one_line(run_argv, monkeypatch, run_refused):
    monkeypatch.setattr(train, "build_run", lambda *_: torch.empty(2**60))
    assert "this machine lacks the memory (can't allocate memory: you tried" in run_refused("train", *run_argv)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_a_full_gpu_or_machine_is_one_line(error, monkeypatch, run_refused):
    def fail(_: list[str]) -> int:
        raise error

    monkeypatch.setattr(report, "main", fail)
    line = f"this machine lacks the memory{f' ({error})' if str(error) else ''}; make the model or the batch smaller"
    assert line in run_refused("report", "runs/a")


def test_a_text_that_shrinks_while_it_is_read_is_one_line(run_argv, monkeypatch, run_refused):
    describe = SourceFile.from_path

    def describe_as_longer(name, path):
        return replace(describe(name, path), size=10 + path.stat().st_size)

    monkeypatch.setattr(SourceFile, "from_path", describe_as_longer)
    assert "text.txt' became shorter while it was read" in run_refused("train", *run_argv)

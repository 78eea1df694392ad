"""A run folder has one writer, and a resume that is refused leaves every byte of it."""

import hashlib
import json
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from quaver.cli import main
from quaver.trainer.config import Float8, TrainConfig
from quaver.trainer.metrics import read_metrics
from quaver.trainer.run_lock import HOLDER, RunLock
from quaver.trainer.train import prepare, train
from tests.isolated import Forked
from tests.unit.trainer.runs import changed, run_to_end


@pytest.fixture
def config(resumable_config: TrainConfig) -> TrainConfig:
    return replace(resumable_config, float8=Float8(recipe_name="delayed", delayed_history_len=3))


def resumed(config: TrainConfig, steps: int) -> TrainConfig:
    return changed(config, training={"steps": steps}, checkpoint={"resume": "must"})


def digest(folder: Path) -> dict[str, str]:
    """Return the sha256 of each file below `folder`, and the names of its folders."""
    files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*"))}
    return {
        name: hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "" for name, path in files.items()
    }


def acquire_and_sleep(folder: Path) -> None:
    lock = RunLock(folder)
    lock.acquire()
    (folder.parent / "held").touch()
    time.sleep(600)


@contextmanager
def held(folder: Path) -> Iterator[Forked]:
    """A process that holds the lock of `folder`, and is killed in the end."""
    holder = Forked(acquire_and_sleep, folder)
    while not (folder.parent / "held").exists():
        assert holder.poll() is None, holder.communicate()
        time.sleep(0.01)
    yield holder
    holder.send_signal(signal.SIGKILL)
    holder.communicate()


def test_a_run_holds_its_lock_until_it_has_ended_and_a_second_resume_changes_nothing(config, refused):
    first = prepare(config)
    before = digest(first.folder.path)
    line = refused("train", "--resume", first.folder.path, "--checkpoint.resume=auto", "--training.steps=6")
    assert f"process {os.getpid()} on host {platform.node()}" in line
    assert digest(first.folder.path) == before
    train(first)
    assert first.checkpoints.folder.steps() == [2, 4]
    assert not (first.folder.path / HOLDER).exists()
    assert run_to_end(resumed(config, 6)).began_at_step == 4


def test_the_lock_of_a_killed_run_is_taken_over_with_one_line(config, capsys):
    folder = run_to_end(config).folder.path
    with held(folder) as holder:
        pass
    assert json.loads((folder / HOLDER).read_text())["pid"] == holder.pid
    capsys.readouterr()
    assert run_to_end(resumed(config, 6)).began_at_step == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert f"was killed: process {holder.pid} on host {platform.node()}" in line


@pytest.mark.parametrize("holder", ["", "[]", "{", '{"pid": 1}', '{"host": "elsewhere", "pid": 1}'])
def test_a_damaged_or_foreign_holder_file_does_not_keep_a_run_from_its_folder(tmp_path, capsys, holder):
    (tmp_path / HOLDER).write_text(holder)
    RunLock(tmp_path).acquire()
    assert "took over the lock" in capsys.readouterr().err


def test_refused_resumes_leave_every_byte(config, tmp_path, refused):
    whole = run_to_end(changed(config, training={"steps": 6}, job={"name": "whole"}))
    folder = run_to_end(config).folder.path
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "text.txt").write_text("a")
    before = digest(folder)
    recipe = ["--float8.recipe_name=rowwise", "--float8.delayed_history_len=16"]
    for words, what in (
        ([*recipe, "--checkpoint.load_step=4"], "rowwise"),
        ([*recipe, "--checkpoint.load_step=2"], "rowwise"),
        (["--float8.enable_float8_linear=false", "--float8.recipe_name=tensorwise"], ""),
        (["--job.compare=true", "--training.steps=8"], "bfloat16"),
        (["--model.dim=64"], "model.dim must be 32"),
        (["--model.n_layers=3"], "model.n_layers must be 2"),
        (["--model.vocab_size=300"], "model.vocab_size"),
        (["--data.tokenizer=no-such-tokenizer"], "no-such-tokenizer"),
        ([f"--data={tmp_path / 'missing.txt'}"], "missing.txt"),
        ([f"--data={tmp_path / 'small'}"], "small"),
        (["--checkpoint.load_step=3"], "it has 2, 4"),
        (["--checkpoint.load_step=-2"], "checkpoint.load_step"),
        (["--training.steps=0"], "training.steps"),
        (["--training.no_such_setting=1"], "no_such_setting"),
        (["--parallelism.data_parallel_shard_degree=2"], "parallelism"),
    ):
        assert what in refused("train", "--resume", str(folder), *words)
        assert digest(folder) == before, words
    shard = next((folder / "checkpoint" / "step-00000004").rglob("*.distcp"))
    content = shard.read_bytes()
    shard.write_bytes(content[: len(content) // 2])
    damaged = digest(folder)
    refused("train", "--resume", str(folder), "--training.steps=6")
    assert digest(folder) == damaged
    shard.write_bytes(content)
    assert main(["train", "--resume", str(folder), "--training.steps=6"]) == 0
    keys = ("step", "loss", "grad_norm", "validation_loss")
    got, expected = (
        [[record.get(key) for key in keys] for record in read_metrics(path / "metrics.jsonl")]
        for path in (folder, whole.folder.path)
    )
    assert got == expected

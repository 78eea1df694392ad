"""Tests how runs go on or end without a stdout, a disk or their folder, and that each error of an output is told."""

import json
import os
import shutil
import threading
from pathlib import Path

import pytest

from quaver.lab.cli import main
from quaver.lab.runs.checkpoint_folder import CheckpointFolder
from quaver.lab.trainer import training_run
from quaver.lab.trainer.train import train
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.lab.trainer.training_run import prepare_run
from tests.lab.trainer.runs import list_checkpoints, run_to_end, with_settings


def read_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def fail_in_step_3(model: TrainedModel, step: int) -> None:
    if step == 3:
        raise RuntimeError("a bug")


def test_a_failed_save_is_told_when_another_error_ends_the_run(resumable_config, monkeypatch, before_each_step, capsys):
    run, has_begun = prepare_run(resumable_config), threading.Event()

    def fail_late(*_: object) -> None:
        has_begun.wait(60)
        raise OSError("no space")

    monkeypatch.setattr(CheckpointFolder, "publish", fail_late)
    before_each_step(fail_in_step_3)
    before_each_step(lambda model, step: has_begun.set() if step == 3 else None)
    with pytest.raises(RuntimeError, match="^a bug$"):
        train(run)
    reason = json.loads((run.folder.path / "summary.json").read_text())["reason"]
    assert reason.startswith("RuntimeError: a bug; the checkpoint of step 2 could not be written")
    assert "the checkpoint of step 2 could not be written" in capsys.readouterr().out


def open_closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize(
    "open_bad", [open_closed_pipe, lambda: os.open("/dev/full", os.O_WRONLY)], ids=["pipe", "full"]
)
def test_a_run_goes_on_without_its_stdout(tiny_config, monkeypatch, capsys, open_bad):
    with os.fdopen(open_bad(), "w") as bad:
        monkeypatch.setattr("sys.stdout", bad)
        run = run_to_end(with_settings(tiny_config, training={"steps": 2}))
    assert list_checkpoints(run.folder.path) == ["step-00000002"]
    assert "the run continues without display" in read_error_line(capsys)


@pytest.mark.parametrize("name", [".partial.summary.json", "curves.png"])
def test_an_error_that_ended_the_run_does_not_hide_one_of_its_outputs(tiny_config, before_each_step, capsys, name):
    run = prepare_run(tiny_config)
    blocked = run.folder.path / name

    def block(model: TrainedModel, step: int) -> None:
        (blocked / "in the way").mkdir(parents=True)
        raise RuntimeError("a bug")

    before_each_step(block)
    with pytest.raises(RuntimeError, match="^a bug$"):
        train(run)
    file = run.folder.path / name.removeprefix(".partial.")
    assert f"cannot write '{file}': Is a directory" in capsys.readouterr().out


@pytest.fixture
def one_step_run(tiny_config):
    """Train for one step. Return the run's folder, and a function that resumes to a later step."""
    config = with_settings(tiny_config, training={"steps": 1}, lr_scheduler={"schedule": "constant"})
    folder = run_to_end(config).folder.path
    return folder, lambda steps: main(["train", "--resume", str(folder), f"--training.steps={steps}"])


@pytest.mark.parametrize("name", ["metrics.jsonl", ".partial.curves.png"])
def test_a_full_disk_ends_the_run_with_one_line(name, drawn_curves, one_step_run, monkeypatch, capsys):
    folder, resume_to = one_step_run

    def fill_disk(*_: object) -> list[str]:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to("/dev/full")
        return []

    kept = Path(shutil.copy(folder / "metrics.jsonl", folder / "kept"))
    with monkeypatch.context() as patch:
        patch.setattr(training_run, "begin_folder", fill_disk)
        capsys.readouterr()
        assert resume_to(2) == 4
    assert f"{folder / name.removeprefix('.partial.')}': No space left on device" in read_error_line(capsys)
    assert list_checkpoints(folder)[0] == "step-00000001"
    (folder / "metrics.jsonl").unlink()
    kept.rename(folder / "metrics.jsonl")
    assert resume_to(3) == 0
    assert list_checkpoints(folder)[-1] == "step-00000003"


def test_a_removed_folder_ends_the_run_with_one_line(one_step_run, before_each_step, capsys):
    folder, resume_to = one_step_run
    before_each_step(lambda model, step: shutil.rmtree(folder))
    capsys.readouterr()
    assert resume_to(2) == 4
    assert "was removed while the run trained" in read_error_line(capsys)

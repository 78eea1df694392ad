"""Runs that lose their terminal, their disk or their folder: what they save, and the one line that they end with."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from quaver.cli import main
from quaver.trainer.run_lock import HOLDER
from quaver.trainer.train import prepare, train
from quaver.trainer.trained_model import TrainedModel
from tests.command_line import TEXT, TINY


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps, with checkpoints after two and four."""
    parent = tmp_path_factory.mktemp("finished")
    (parent / "text.txt").write_text(TEXT)
    words = [*TINY, "--training.steps=4", "--float8.no-enable_float8_linear", f"--data={parent / 'text.txt'}"]
    words += ["--checkpoint.interval=2", "--checkpoint.keep_latest_k=0", "--lr_scheduler.schedule=constant"]
    assert main(["train", *words, f"--job.dump_folder={parent}", "--job.name=run"]) == 0
    return parent / "run"


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Makes an action happen before a step is trained."""

    def at_step(number: int, action: Callable[[], None]) -> None:
        original = TrainedModel.train_step

        def train_step(model, step, batches, **options):
            if step == number:
                action()
            return original(model, step, batches, **options)

        monkeypatch.setattr(TrainedModel, "train_step", train_step)

    return at_step


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def resume(folder: Path, steps: int) -> int:
    return main(["train", "--resume", str(folder), f"--training.steps={steps}"])


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def closed_pipe() -> int:
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("open_bad", [closed_pipe, lambda: os.open("/dev/full", os.O_WRONLY)], ids=["pipe", "full"])
def test_a_run_goes_on_without_its_stdout(resumable_config, monkeypatch, capsys, open_bad):
    with os.fdopen(open_bad(), "w") as bad:
        monkeypatch.setattr("sys.stdout", bad)
        run = prepare(resumable_config)
        assert train(run)["status"] == "finished"
    assert checkpoints(run.folder.path) == ["step-00000002", "step-00000004"]
    assert "the run continues without display" in error_line(capsys)


def test_a_closed_terminal_ends_the_run_with_a_checkpoint(resumable_config, at_step):
    run = prepare(resumable_config)

    def close_terminal() -> None:
        os.kill(os.getpid(), signal.SIGHUP)  # the shell
        os.kill(os.getpid(), signal.SIGHUP)  # the kernel

    at_step(3, close_terminal)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup, under which these tests may run, ignores it
    try:
        assert train(run)["status"] == "interrupted"
    finally:
        signal.signal(signal.SIGHUP, before)
    assert checkpoints(run.folder.path) == ["step-00000002", "step-00000003"]


def test_nohup_is_respected(resumable_config, at_step):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        at_step(3, lambda: os.kill(os.getpid(), signal.SIGHUP))
        assert train(prepare(resumable_config))["status"] == "finished"
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize(("name", "file"), [("metrics.jsonl", "metrics.jsonl"), (".curves.png", "curves.png")])
def test_a_full_disk_ends_the_run_with_one_line_and_it_resumes(folder, monkeypatch, capsys, drawn_curves, name, file):
    kept = folder / "kept"
    shutil.copy(folder / "metrics.jsonl", kept)
    capsys.readouterr()
    begin = "quaver.trainer.train.begin_folder"
    with monkeypatch.context() as patch:

        def fill_disk(_setup: object) -> None:
            (folder / name).unlink(missing_ok=True)
            (folder / name).symlink_to("/dev/full")

        patch.setattr(begin, fill_disk)
        assert resume(folder, 5) == 4
    line = error_line(capsys)
    assert f"{folder / file}': No space left on device" in line
    assert checkpoints(folder)[:2] == ["step-00000002", "step-00000004"]
    (folder / "metrics.jsonl").unlink()
    kept.rename(folder / "metrics.jsonl")
    assert resume(folder, 7) == 0
    assert checkpoints(folder)[-1] == "step-00000007"


def test_a_removed_run_folder_ends_the_run_with_one_line(folder, capsys, at_step):
    capsys.readouterr()
    at_step(6, lambda: shutil.rmtree(folder))
    assert resume(folder, 9) == 4
    assert "was removed while the run trained" in error_line(capsys)


def garbage(metrics: Path) -> None:
    metrics.write_bytes(b'{"step": 1, "ru\n' + metrics.read_bytes())


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


REFUSED = {
    "garbage in the metrics": ("metrics.jsonl", garbage, "", "line 1 of '{path}' is not a record"),
    "metrics that are a FIFO": ("metrics.jsonl", fifo, "", "'{path}' is not a file"),
    "a checkpoint folder that is the metrics": (
        *("metrics.jsonl", Path.touch),
        *("--checkpoint.folder=metrics.jsonl", "checkpoint.folder must be a folder"),
    ),
    "a checkpoint folder that is a file": (
        *("notes", Path.touch),
        *("--checkpoint.folder=notes", "checkpoint.folder must be a folder"),
    ),
    "a number that no checkpoint could record": (
        *("notes", Path.touch),
        *("--training.max_norm=1e999", "training.max_norm must be finite, got inf"),
    ),
}
"""What is wrong: a file of the run, what happens to it, a flag, the error."""


@pytest.mark.timeout(60)  # a reader that waits for a FIFO fails
@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_cannot_be_resumed_is_one_line_and_stays_as_it_was(folder, refused, case):
    name, spoil, flag, message = REFUSED[case]
    spoil(folder / name)
    before = {path: path.is_file() and path.read_bytes() for path in folder.rglob("*") if path.name != HOLDER}
    line = refused("train", "--resume", folder, "--training.steps=5", *flag.split())
    assert message.format(path=folder / name) in line
    assert before == {path: path.is_file() and path.read_bytes() for path in before}


def test_a_lock_file_that_is_a_fifo_does_not_hold_a_run(folder):
    fifo(folder / HOLDER)
    assert resume(folder, 5) == 0

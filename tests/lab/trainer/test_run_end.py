"""Tests how runs continue or end after steps that are not finite or hang, and after a lost terminal, disk or folder."""

import copy
import ctypes
import json
import logging
import math
import os
import re
import shutil
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quaver.lab.cli import main
from quaver.lab.report.facts import list_facts
from quaver.lab.report.run import read_runs
from quaver.lab.runs.checkpoint import Checkpointer
from quaver.lab.runs.checkpoint_folder import CheckpointFolder
from quaver.lab.runs.errors import OutputFailures
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import Comm, Float8
from quaver.lab.trainer import training_run
from quaver.lab.trainer.alarms import RunAlarms
from quaver.lab.trainer.nonfinite import NonFiniteError
from quaver.lab.trainer.process import (
    PR_GET_PDEATHSIG,
    Watchdog,
    catch_stop_signals,
    silence_other_ranks,
    use_determinism,
)
from quaver.lab.trainer.run_end import RunEnd
from quaver.lab.trainer.train import train
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.lab.trainer.training_run import TrainingRun, prepare_run
from tests.isolated import Forked
from tests.lab.trainer.runs import changed, read_losses, run_to_end
from tests.steps import assert_same


@pytest.fixture
def spoil(before_each_step) -> Callable[[TrainingRun, set[int]], None]:
    """Return a function that makes the embedding of a run return inf in the given steps."""

    def spoil(run: TrainingRun, bad_steps: set[int]) -> None:
        steps = []
        before_each_step(lambda model, step: steps.append(step))
        run.models[0].model.model.embed_tokens.register_forward_hook(
            lambda module, _, output: output * math.inf if module.training and steps[-1] in bad_steps else output
        )

    return spoil


def list_checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoint").iterdir())


def read_error_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_the_peak_of_a_skipped_step_is_measured_in_a_later_one(tiny_config, spoil):
    whole = run_to_end(changed(tiny_config, training={"steps": 3}))
    run = prepare_run(changed(tiny_config, training={"steps": 3, "nonfinite": "skip"}, job={"name": "skips"}))
    spoil(run, {2})
    train(run)
    assert run.models[0].peak == whole.models[0].peak


def test_a_skipped_step_changes_nothing_but_the_data(tiny_config, spoil, before_each_step, capsys):
    config = replace(tiny_config, float8=Float8(recipe_name="delayed"))
    run, states = prepare_run(changed(config, training={"nonfinite": "skip"})), []

    spoil(run, {3})
    before_each_step(
        lambda model, step: states.append(copy.deepcopy({**model.model.state_dict(), **model.scaling.state_dict()}))
    )
    summary = train(run)
    assert (summary["status"], summary["models"]["delayed"]["skipped_steps"]) == ("finished", 1)
    assert dict(list_facts(read_runs([run.folder.path])[0]))["skipped steps"] == "1"
    assert_same(states[2], states[3])  # at the begin of steps 3 and 4
    assert all(value.isfinite().all() for value in run.models[0].scaling.state_dict().values())
    records = [record for record in read_json_lines(run.folder.metrics_path) if record["kind"] != "validation"]
    kinds = [(record["step"], record["kind"]) for record in records]
    assert kinds == [(1, "step"), (2, "step"), (3, "skipped_step"), (4, "step")]
    assert "output of model.embed_tokens" in records[2]["reason"]
    assert run.progress.skipped_steps == {"delayed": 1}
    assert run.progress.consumed_sequences == 4 * config.training.step_batch_size
    printed = capsys.readouterr().out
    assert "skipped: " in printed
    assert re.search("skipped steps +1 ", printed)


def test_too_many_skipped_steps_in_a_row_end_the_run(tiny_config, spoil):
    run = prepare_run(changed(tiny_config, training={"steps": 9, "nonfinite": "skip", "max_nonfinite_steps": 2}))
    spoil(run, {1, 2, 4, 5, 6})
    with pytest.raises(NonFiniteError, match=r"step 6 .*training\.max_nonfinite_steps = 2 of them were skipped"):
        train(run)
    assert run.progress.step == 5


SAVED = "the checkpoint of step 2 is from before that step"
EARLIER = "give an earlier checkpoint.load_step, or begin again"


@pytest.mark.parametrize(
    ("compare", "bad_step", "ruined", "saved", "message"),
    [
        (False, 3, False, ["step-00000002"], f"; {SAVED}; if it fails again, {EARLIER}"),
        (False, 3, True, [], "; the weights are not finite, and are not saved"),
        (True, 2, False, [], "training.nonfinite = skip"),  # the baseline has taken the step, the float8 model has not
    ],
)
def test_a_run_that_is_not_finite_leaves_a_record_and_the_step_before(
    tiny_config, spoil, before_each_step, compare, bad_step, ruined, saved, message
):
    config = changed(tiny_config, job={"compare": compare}, float8={"enable_float8_linear": compare})
    run = prepare_run(config)
    spoil(run, {bad_step})
    weight = next(run.models[0].model.parameters())
    before_each_step(lambda model, step: weight.data.fill_(math.inf) if ruined and step == bad_step else None)
    with pytest.raises(NonFiniteError, match=f"step {bad_step} .*model.embed_tokens.*; lower optimizer.lr.*") as error:
        train(run)
    assert str(error.value).endswith(message)
    folder = run.folder.path
    assert (list_checkpoints(folder) if (folder / "checkpoint").exists() else []) == saved
    last = read_json_lines(run.folder.metrics_path)[-1]
    assert (last["kind"], last["step"], last["model"]) == ("nonfinite_step", bad_step, run.models[0].name)
    assert "model.embed_tokens" in last["reason"]


def test_weights_whose_validation_is_not_finite_are_not_saved(tiny_config):
    run = prepare_run(changed(tiny_config, checkpoint={"interval": 1}, validation={"freq": 2}))
    run.models[0].model.model.embed_tokens.register_forward_hook(
        lambda module, _, output: output if module.training else output * math.nan
    )
    with pytest.raises(NonFiniteError, match="the validation loss is nan; .* are not saved$"):
        train(run)
    assert list_checkpoints(run.folder.path) == ["step-00000001"]


def test_a_validation_that_fails_leaves_the_model_in_training(tiny_config, monkeypatch):
    (model,) = prepare_run(tiny_config).models
    monkeypatch.setattr(model, "compute_loss", lambda batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.validate([None])
    assert model.model.training


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


def test_steps_within_their_timeout_write_no_stacks(tmp_path, capsys):
    watchdog = Watchdog(tmp_path / "stacks-rank0.txt")
    with watchdog.watch(5, "step"):
        pass
    with watchdog.watch(0, "step"):
        time.sleep(0.02)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""


def train_slowly(stacks: Path) -> None:
    """Run Python code with deep stacks, compiled and called again and again."""

    def recurse(n):
        return 0 if n == 0 else 1 + recurse(n - 1)

    def compile_and_call(n):
        name = f"f{n % 7}"
        exec(
            f"def {name}(n):\n    return recurse(n) + sum(x for x in range(5))\n{name}({n % 30})", {"recurse": recurse}
        )

    with Watchdog(stacks).watch(0.002, "step 1"):
        n = 0
        # Rarely, because the watchdog's thread gets the GIL at each read, and in between after 5 ms.
        while n % 2000 or not stacks.exists() or stacks.read_text().count("Current thread") < 300:
            compile_and_call(n := n + 1)


def test_reading_stacks_does_not_crash_a_slow_step(tmp_path):
    """Stacks read while Python code runs would end the process by a segmentation fault after some hundred reads."""
    path = tmp_path / "stacks-rank0.txt"
    process = Forked(train_slowly, path).finished()
    assert process.returncode == 0, process.stderr
    assert "compile_and_call" in path.read_text()


def test_a_step_that_is_stuck_leaves_its_stack_and_the_run_goes_on(tiny_config, monkeypatch, before_each_step, capsys):
    run = prepare_run(replace(changed(tiny_config, training={"steps": 3}), comm=Comm(watchdog_seconds=1)))
    path = run.folder.get_stacks_path(0)

    def hang_in_step_2(model: TrainedModel, step: int) -> None:
        while step == 2 and not (path.exists() and "in hang_in_step_2" in path.read_text()):
            time.sleep(0.01)

    before_each_step(hang_in_step_2)
    monkeypatch.setattr(training_run, "SLOW_PHASE_FACTOR", 30)
    assert train(run)["status"] == "finished"
    line = f"quaver: step 2 of bfloat16 on rank 0 takes longer than 1 s; its stacks are in {path}"
    assert capsys.readouterr().err.splitlines().count(line) == 1  # other steps may be late, too, on a busy machine


@pytest.mark.parametrize(
    ("owner", "method", "steps_before", "phase"),
    [
        (Ranks, "holds_on_any", 0, "the agreement before step 1"),
        (RunAlarms, "pop_fallbacks", 1, "the fallback after step 1"),
        (TrainedModel, "validate", 1, "the validation after step 1"),
        (Checkpointer, "save", 1, "the checkpoint of step 1"),
        (OutputFailures, "raise_on_all_ranks", 1, "the agreement after the last step"),
    ],
)
def test_a_phase_that_is_stuck_leaves_its_stack(
    tiny_float8_config, monkeypatch, capsys, owner, method, steps_before, phase
):
    numerics = {"every": 1, "on_alarm": "fallback"}
    config = changed(tiny_float8_config, job={"compare": False}, training={"steps": 1}, numerics=numerics)
    run = prepare_run(replace(config, comm=Comm(watchdog_seconds=1)))
    path = run.folder.get_stacks_path(0)
    work = getattr(owner, method)

    def hang_and_work(*arguments: object) -> object:
        deadline = time.monotonic() + 60
        while run.progress.step == steps_before and time.monotonic() < deadline:
            if path.exists() and "in hang_and_work" in path.read_text():
                break
            time.sleep(0.01)
        return work(*arguments)

    monkeypatch.setattr(owner, method, hang_and_work)
    monkeypatch.setattr(training_run, "SLOW_PHASE_FACTOR", 1)
    assert train(run)["status"] == "finished"
    assert f"quaver: {phase} on rank 0 takes longer than 1 s; its stacks are in {path}" in capsys.readouterr().err


def test_deterministic_algorithms_are_on_in_the_run_alone(tiny_config, before_each_step):
    modes, losses = [], []
    before_each_step(lambda model, step: modes.append(torch.are_deterministic_algorithms_enabled()))
    for name, deterministic in (("plain", False), ("deterministic", True)):
        config = changed(tiny_config, job={"name": name}, float8={"enable_float8_linear": True})
        run = run_to_end(changed(config, training={"steps": 2, "deterministic": deterministic}))
        losses.append(read_losses(run.folder.metrics_path))
    assert modes == [False] * 2 + [True] * 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert losses[0] == losses[1]


def test_operations_without_a_deterministic_algorithm_are_refused():
    with use_determinism(True), pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)


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
        run = run_to_end(changed(tiny_config, training={"steps": 2}))
    assert list_checkpoints(run.folder.path) == ["step-00000002"]
    assert "the run continues without display" in read_error_line(capsys)


@pytest.mark.parametrize(("disposition", "last"), [(signal.SIG_DFL, 3), (signal.SIG_IGN, 4)], ids=["plain", "nohup"])
def test_a_closed_terminal_ends_the_run_with_a_checkpoint_but_under_nohup(
    resumable_config, before_each_step, disposition, last, capsys
):
    def close_terminal(model: TrainedModel, step: int) -> None:
        for _ in range(2 if step == 3 else 0):  # by the shell and by the kernel
            os.kill(os.getpid(), signal.SIGHUP)

    before_each_step(close_terminal)
    before = signal.signal(signal.SIGHUP, disposition)
    try:
        run = prepare_run(changed(resumable_config, job={"name": "my run"}))
        assert train(run)["status"] == ("interrupted" if last == 3 else "finished")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (f"resume with: quaver train --resume '{run.folder.path}'\n" in capsys.readouterr().out) == (last == 3)
    assert list_checkpoints(run.folder.path) == ["step-00000002", f"step-0000000{last}"]


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2) is Linux")
@pytest.mark.parametrize("has_launcher", [True, False])
def test_a_rank_stops_if_its_launcher_has_ended_and_is_not_killed_after_its_run(monkeypatch, has_launcher):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with catch_stop_signals(os.getppid() if has_launcher else -1) as requests:
        assert requests.must_stop == (not has_launcher)
        assert read_death_signal() == signal.SIGTERM
    assert read_death_signal() == 0


def read_death_signal() -> int:
    number = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number)) == 0
    return number.value


def test_a_signal_while_the_summary_is_written_ends_nothing(tiny_config, monkeypatch):
    """A scheduler's signal may reach this rank after another rank's has ended the steps."""
    write, received = RunEnd.write_summary, []
    monkeypatch.setattr(RunEnd, "write_summary", lambda end: (signal.raise_signal(signal.SIGTERM), write(end)))
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("the launcher's handler"))
    try:
        run = run_to_end(tiny_config)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == []
    assert json.loads((run.folder.path / "summary.json").read_text())["status"] == "finished"


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


def test_a_second_ctrl_c_ends_at_once(tiny_config, drawn_curves, before_each_step):
    run = prepare_run(tiny_config)
    before_each_step(lambda model, step: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    summary = train(run)  # before the first record: the curves are empty, and drawn
    assert (summary["status"], summary["steps"]) == ("interrupted", 0)
    assert run.folder.curves_path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.fixture
def one_step_run(tiny_config):
    """Train for one step. Return the run's folder, and a function that resumes to a later step."""
    config = changed(tiny_config, training={"steps": 1}, lr_scheduler={"schedule": "constant"})
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


def test_the_first_rank_alone_shows_the_warnings_of_torch(caplog):
    for is_first in (True, False):
        caplog.clear()
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            with silence_other_ranks(is_first):
                warnings.warn("of every rank", stacklevel=1)
                logging.getLogger("torch").warning("of every rank")
                logging.getLogger("quaver").warning("of this rank")
        assert [str(warning.message) for warning in shown] == ["of every rank"] * is_first
        assert [record.name for record in caplog.records] == ["torch", "quaver"][not is_first :]


def wait_in_a_collective(rank: int, port: int, folder: Path) -> None:
    """Rank 0 waits for rank 1, which does not come before rank 0 has raised."""
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with Ranks(rank, rank, 2).open_process_group(torch.device("cpu"), timeout_seconds=1):
        if rank == 0:
            with pytest.raises(RuntimeError, match="(?i)timed? ?out"):
                torch.distributed.all_reduce(torch.ones(1))
            (folder / "raised").touch()
        while not (folder / "raised").exists():
            time.sleep(0.02)
        os._exit(0)


@pytest.mark.nightly
def test_a_collective_raises_after_its_timeout(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    ranks = [Forked(wait_in_a_collective, rank, port, tmp_path) for rank in range(2)]
    processes = [rank.finished() for rank in ranks]
    assert [process.returncode for process in processes] == [0, 0], processes
    assert (tmp_path / "raised").exists()

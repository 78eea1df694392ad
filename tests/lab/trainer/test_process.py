"""Tests what a run does to its process: handlers of signals, deterministic algorithms, warnings of other ranks."""

import ctypes
import json
import logging
import os
import signal
import sys
import warnings

import pytest
import torch

from quaver.lab.trainer import run_end
from quaver.lab.trainer.process import PR_GET_PDEATHSIG, catch_stop_signals, silence_other_ranks, use_determinism
from quaver.lab.trainer.summary import summarize
from quaver.lab.trainer.train import train
from quaver.lab.trainer.trained_model import TrainedModel
from quaver.lab.trainer.training_run import prepare_run
from tests.lab.trainer.runs import list_checkpoints, read_losses, run_to_end, with_settings


def test_deterministic_algorithms_are_on_in_the_run_alone(tiny_config, before_each_step):
    modes, losses = [], []
    before_each_step(lambda model, step: modes.append(torch.are_deterministic_algorithms_enabled()))
    for name, deterministic in (("plain", False), ("deterministic", True)):
        config = with_settings(tiny_config, job={"name": name}, float8={"enable_float8_linear": True})
        run = run_to_end(with_settings(config, training={"steps": 2, "deterministic": deterministic}))
        losses.append(read_losses(run.folder.metrics_path))
    assert modes == [False] * 2 + [True] * 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert losses[0] == losses[1]


def test_operations_without_a_deterministic_algorithm_are_refused():
    with use_determinism(enabled=True), pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)


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
        run = prepare_run(with_settings(resumable_config, job={"name": "my run"}))
        assert train(run)["status"] == ("interrupted" if last == 3 else "finished")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert (f"resume with: quaver train --resume '{run.folder.path}'\n" in capsys.readouterr().out) == (last == 3)
    assert list_checkpoints(run.folder.path) == ["step-00000002", f"step-0000000{last}"]


@pytest.mark.skipif(sys.platform != "linux", reason="prctl(2) is Linux")
@pytest.mark.parametrize("has_launcher", [True, False])
def test_a_rank_stops_if_its_launcher_has_ended_and_is_not_killed_after_its_run(monkeypatch, has_launcher):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with catch_stop_signals(os.getppid() if has_launcher else -1) as request:
        assert request.must_stop == (not has_launcher)
        assert read_death_signal() == signal.SIGTERM
    assert read_death_signal() == 0


def read_death_signal() -> int:
    number = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number)) == 0
    return number.value


def test_a_signal_while_the_summary_is_written_ends_nothing(tiny_config, monkeypatch):
    """A scheduler's signal may reach this rank after another rank's has ended the steps."""
    received = []
    monkeypatch.setattr(
        run_end, "summarize", lambda *args, **kwargs: signal.raise_signal(signal.SIGTERM) or summarize(*args, **kwargs)
    )
    before = signal.signal(signal.SIGTERM, lambda *_: received.append("the launcher's handler"))
    try:
        run = run_to_end(tiny_config)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert received == []
    assert json.loads((run.folder.path / "summary.json").read_text())["status"] == "finished"


def test_a_second_ctrl_c_ends_at_once(tiny_config, drawn_curves, before_each_step):
    run = prepare_run(tiny_config)
    before_each_step(lambda model, step: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    summary = train(run)  # before the first record: the curves are empty, and drawn
    assert (summary["status"], summary["steps"]) == ("interrupted", 0)
    assert run.folder.curves_path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_first_rank_alone_shows_the_warnings_of_torch(caplog):
    for is_first in (True, False):
        caplog.clear()
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            with silence_other_ranks(is_first=is_first):
                warnings.warn("of every rank", stacklevel=1)
                logging.getLogger("torch").warning("of every rank")
                logging.getLogger("quaver").warning("of this rank")
        assert [str(warning.message) for warning in shown] == ["of every rank"] * is_first
        assert [record.name for record in caplog.records] == ["torch", "quaver"][not is_first :]

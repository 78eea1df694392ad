"""Tests metrics of a run: the median step time, spikes of the loss, and loggers."""

import pytest
import torch

from quaver.lab.settings import Metrics
from quaver.lab.trainer.loggers import check_loggers
from quaver.lab.trainer.step_statistics import (
    SPIKE_MIN_STEPS,
    SPIKE_WINDOW,
    append_recent_loss,
    compute_median_after_warmup,
    is_spike,
)
from quaver.lab.trainer.train import train
from quaver.lab.trainer.training_run import prepare_run
from tests.lab.trainer.runs import read_steps


def test_median_leaves_out_the_warm_up():
    assert compute_median_after_warmup([9.0, 9.0, 9.0, 1.0, 2.0, 3.0]) == 2.0
    assert compute_median_after_warmup([5.0]) == 5.0


def test_a_late_step_whose_memory_is_measured_is_not_timed(tiny_config):
    run = prepare_run(tiny_config)
    (model,) = run.models
    batches = run.data.make_step_batches(tiny_config.training, 0, run.dims)
    for step in range(1, 6):
        model.train_step(step, batches, measure_memory=step in (1, 5))
    assert len(model.step_seconds) == 4


def test_a_spike_stands_out_from_the_noise_and_from_a_spike_before_it():
    generator = torch.Generator().manual_seed(0)
    recent: list[float] = []
    false_alarms = 0
    for value in (2 + 0.05 * torch.randn(500, generator=generator)).tolist():
        false_alarms += is_spike(value, recent, 6.0)
        append_recent_loss(value, recent)
    assert false_alarms == 0
    assert len(recent) == SPIKE_WINDOW
    assert is_spike(2.5, recent, 6.0)
    append_recent_loss(2.5, recent)
    assert is_spike(2.5, recent, 6.0)
    assert not is_spike(1.5, recent, 6.0), "a lower loss is no spike"
    assert not is_spike(2.5, recent, 0.0)
    assert not is_spike(9.0, recent[: SPIKE_MIN_STEPS - 1], 6.0)


def test_losses_that_hardly_differ_have_no_spike_in_their_last_digits():
    assert not is_spike(2.0001, [2.0] * SPIKE_WINDOW, 6.0)
    assert is_spike(2.1, [2.0] * SPIKE_WINDOW, 6.0)


def test_a_spike_is_in_the_log(tiny_config, monkeypatch, capsys):
    run = prepare_run(tiny_config)
    run.progress.recent_losses["bfloat16"] = [1.0] * SPIKE_MIN_STEPS
    train(run)
    assert [record["loss_spike"] for record in read_steps(run.folder.metrics_path)] == [True] * 4
    assert "is a spike" in capsys.readouterr().out


def test_a_logger_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="metrics.enable_wandb must be false without the package wandb"):
        check_loggers(Metrics(enable_wandb=True))
    check_loggers(Metrics())

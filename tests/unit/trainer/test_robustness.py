"""Steps that are not finite, steps that hang, deterministic algorithms: what a run does about each."""

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quaver.trainer import train as train_module
from quaver.trainer.config import Comm, Float8
from quaver.trainer.errors import NonFiniteError
from quaver.trainer.metrics import read_metrics
from quaver.trainer.process import determinism, watchdog
from quaver.trainer.train import Run, prepare, train
from quaver.trainer.trained_model import TrainedModel
from tests.isolated import Forked
from tests.unit.trainer.runs import changed


def spoil(run: Run, monkeypatch: pytest.MonkeyPatch, bad_steps: set[int]) -> None:
    """Make the embedding put out an inf in these steps, whatever its weights are."""
    original = TrainedModel.train_step

    def train_step(model, step, batches, **options):
        hook = None
        if step in bad_steps:
            hook = model.model.model.embed_tokens.register_forward_hook(lambda m, i, output: output * math.inf)
        try:
            return original(model, step, batches, **options)
        finally:
            if hook:
                hook.remove()

    monkeypatch.setattr(TrainedModel, "train_step", train_step)


def weights(run: Run) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in run.models[0].model.parameters()]


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_a_skipped_step_changes_nothing_but_the_data(tiny_config, monkeypatch, capsys, recipe):
    config = changed(
        replace(tiny_config, float8=Float8(recipe_name=recipe)), training={"steps": 4, "nonfinite": "skip"}
    )
    run = prepare(config)
    before, scales = [], []
    original = TrainedModel.train_step

    def look(model, step, batches, **options):
        before.append(weights(run))
        scales.append({name: value.clone() for name, value in model.scaling.state_dict().items()})
        return original(model, step, batches, **options)

    spoil(run, monkeypatch, {3})
    spoiled = TrainedModel.train_step
    original = spoiled
    monkeypatch.setattr(TrainedModel, "train_step", look)
    summary = train(run)
    assert summary["status"] == "finished"
    for old, new in zip(before[2], before[3], strict=True):  # at the begin of steps 3 and 4
        assert torch.equal(old, new)
    assert scales[2].keys() == scales[3].keys()
    assert all(torch.equal(scales[2][name], scales[3][name]) for name in scales[2])
    assert all(value.isfinite().all() for value in run.models[0].scaling.state_dict().values())
    records = [record for record in read_metrics(run.folder.metrics) if "validation_loss" not in record]
    assert [record["step"] for record in records] == [1, 2, 3, 4]
    assert "output of model.embed_tokens" in records[2]["skipped"]
    assert "loss" not in records[2]
    assert run.progress.skipped_steps == {recipe: 1}
    assert run.progress.consumed_sequences == 4 * config.training.step_batch_size
    assert "skipped: " in capsys.readouterr().out


def test_too_many_skipped_steps_in_a_row_end_the_run(tiny_config, monkeypatch):
    config = changed(tiny_config, training={"steps": 9, "nonfinite": "skip", "max_nonfinite_steps": 2})
    run = prepare(config)
    spoil(run, monkeypatch, {1, 2, 4, 5, 6})
    with pytest.raises(NonFiniteError, match=r"step 6 .*training\.max_nonfinite_steps = 2 were skipped"):
        train(run)
    assert run.progress.step == 5


def test_a_step_that_is_stuck_leaves_its_stack(tmp_path, capsys):
    path = tmp_path / "stacks-rank0.txt"

    def the_step_that_hangs() -> None:
        time.sleep(0.5)

    with watchdog(path) as watching, watching.step(0.1, "step 3"):
        the_step_that_hangs()
    assert "the_step_that_hangs" in path.read_text()
    (line,) = capsys.readouterr().err.splitlines()
    assert "step 3 takes longer than 0.1 s" in line
    assert str(path) in line


def test_steps_in_time_leave_nothing(tmp_path, capsys):
    with watchdog(tmp_path / "stacks-rank0.txt") as watching:
        for _ in range(3):
            with watching.step(5, "step"):
                pass
        with watching.step(0, "step"):
            time.sleep(0.02)
    assert not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""


def train_slowly(stacks: Path) -> None:
    """A step of Python code that is compiled and called without end, and of deep stacks."""

    def deep(n):
        return 0 if n == 0 else 1 + deep(n - 1)

    def compiles_and_calls(n):
        exec(f"def f{n % 7}(n):\n    return deep(n) + sum(x for x in range(5))\nf{n % 7}({n % 30})", {"deep": deep})

    with watchdog(stacks) as watching, watching.step(0.002, "step 1"):
        until, n = time.monotonic() + 2.5, 0
        while time.monotonic() < until:
            compiles_and_calls(n := n + 1)


def test_a_step_that_is_slow_and_not_stuck_survives_its_stacks(tmp_path):
    """Stacks read while Python code runs would end the process by a segmentation fault within a second or so."""
    path = tmp_path / "stacks-rank0.txt"
    done = Forked(train_slowly, path).finished()
    assert done.returncode == 0, done.stderr
    assert "compiles_and_calls" in path.read_text()


def test_a_run_is_watched_and_goes_on(tiny_config, monkeypatch, capsys):
    config = replace(changed(tiny_config, training={"steps": 3}), comm=Comm(watchdog_seconds=1))
    run = prepare(config)
    original = TrainedModel.train_step

    def slow(model, step, batches, **options):
        time.sleep(1.2 if step == 2 else 0)
        return original(model, step, batches, **options)

    monkeypatch.setattr(TrainedModel, "train_step", slow)
    monkeypatch.setattr(train_module, "FIRST_STEP_PATIENCE", 30)
    assert train(run)["status"] == "finished"
    assert "in slow" in (run.paths.stacks(0)).read_text()
    assert "step 2 of bfloat16 on rank 0 takes longer than 1 s" in capsys.readouterr().err


def test_deterministic_algorithms_are_on_in_the_run_alone(tiny_float8_config, monkeypatch):
    seen = []
    original = TrainedModel.train_step

    def look(model, step, batches, **options):
        seen.append(torch.are_deterministic_algorithms_enabled())
        return original(model, step, batches, **options)

    monkeypatch.setattr(TrainedModel, "train_step", look)
    runs = []
    for name, deterministic in (("plain", False), ("deterministic", True)):
        config = changed(tiny_float8_config, job={"name": name})
        run = prepare(changed(config, training={"steps": 2, "deterministic": deterministic}))
        train(run)
        runs.append([r["loss"] for r in read_metrics(run.folder.metrics) if "loss" in r])
    assert seen == [False] * 4 + [True] * 4
    assert not torch.are_deterministic_algorithms_enabled()
    assert runs[0] == runs[1]


def test_what_has_no_deterministic_algorithm_is_refused_inside():
    with determinism(True), pytest.raises(RuntimeError, match="deterministic"):
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2), accumulate=False)

"""Tests [numerics] of a run: the record in its folder, what loggers get, resuming, and steps that are not finite."""

import sys
import types
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from quaver import Float8Linear
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.runs.run_folder import RunFolder
from quaver.lab.settings import Metrics, TrainConfig
from quaver.lab.trainer.loggers import Loggers
from quaver.lab.trainer.nonfinite import NonFiniteError
from quaver.lab.trainer.train import train
from quaver.lab.trainer.training_run import prepare_run
from quaver.numerics.record import Record
from quaver.runtime.errors import NotWrittenError
from tests.lab.trainer.runs import read_numbers, run_to_end, with_settings


@pytest.fixture
def watched_config(tiny_config: TrainConfig) -> TrainConfig:
    """Return a config of one layer: the samples of each linear take the time."""
    float8, numerics = {"enable_float8_linear": True, "recipe_name": "rowwise"}, {"every": 2, "extras_every": 2}
    return with_settings(tiny_config, model={"n_layers": 1}, float8=float8, numerics=numerics)


def find_tensor(record: Record, linear: str, operand: str) -> int:
    """Return the column of the first cast of an operand."""
    name = (f"model.layers.0.{linear}", operand)
    return [(tensor["layer"], tensor["operand"]) for tensor in record.tensors].index(name)


@pytest.mark.parametrize("recipe", [pytest.param("rowwise", marks=pytest.mark.nightly), "delayed"])
def test_a_run_has_a_record_and_the_losses_of_one_without(watched_config, recipe):
    watched_config = with_settings(watched_config, float8={"recipe_name": recipe}, job={"compare": True})
    run = run_to_end(watched_config)
    plain = run_to_end(with_settings(watched_config, job={"name": "plain"}, numerics={"every": 0, "extras_every": 20}))
    assert read_numbers(run) == read_numbers(plain)
    assert not plain.folder.numerics_path.exists()
    record = Record.read(run.folder.path)
    assert record.steps.tolist() == [1, 2, 4]
    assert sorted(record.histograms) == [0, 1, 2]
    linears = [name for name, module in run.models[0].model.named_modules() if isinstance(module, Float8Linear)]
    assert list(dict.fromkeys(tensor["layer"] for tensor in record.tensors)) == linears
    assert all(linear.probes is None for linear in run.models[0].model.modules() if isinstance(linear, Float8Linear))


def test_a_resumed_run_has_the_record_of_one_that_was_not_interrupted(watched_config):
    short = with_settings(
        watched_config, job={"name": "short"}, training={"steps": 3}, lr_scheduler={"schedule": "constant"}
    )
    whole = run_to_end(with_settings(short, job={"name": "whole"}, training={"steps": 4}))
    run = run_to_end(short)
    with run.folder.numerics_path.open("a") as file:
        file.write('{"kind": "sample", "step": 9}\n{"kind": "sam')  # a killed run had come further
    resumed = run_to_end(with_settings(short, training={"steps": 4}, checkpoint={"resume": "must"}))
    expected, record = (Record.read(run.folder.path) for run in (whole, resumed))
    assert record.steps.tolist() == expected.steps.tolist() == [1, 2, 4]
    for name, values in expected.statistics.items():
        np.testing.assert_array_equal(record.statistics[name], values)
    assert [header["step"] for header in record.headers] == [1, 4]


def test_a_nonfinite_step_is_sampled_as_it_is_repeated(watched_config):
    watched_config = with_settings(watched_config, training={"nonfinite": "skip"}, numerics={"every": 100})
    run = prepare_run(watched_config)
    layer = run.models[0].model.model.layers[0].mlp.up_proj
    is_bad = lambda: run.models[0].model.training and run.progress.step == 2  # noqa: E731
    layer.register_forward_pre_hook(lambda _, inputs: (inputs[0] * float("inf"),) if is_bad() else None)
    train(run)
    record = Record.read(run.folder.path)
    assert record.steps.tolist() == [1, 3]
    counts = record.statistics["nonfinite"][:, find_tensor(record, "mlp.up_proj", "input")]
    assert counts[1] > 0
    assert counts[0] == 0


def test_a_run_that_stops_has_a_sample_of_its_last_step(watched_config):
    run = prepare_run(with_settings(watched_config, numerics={"every": 100}))
    with torch.no_grad():
        run.models[0].model.model.layers[0].mlp.down_proj.weight[0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="step 1 has .* first in weight of model.layers.0.mlp.down_proj"):
        train(run)
    record = Record.read(run.folder.path)
    assert record.steps.tolist() == [1]
    assert record.statistics["nonfinite"][0, find_tensor(record, "mlp.down_proj", "weight")] == 1


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Return a stand-in with wandb's calls: the package is large, and its service needs a network or a home."""
    wandb: Any = types.ModuleType("wandb")
    wandb.logged, wandb.options, wandb.finished, wandb.axes = [], {}, [], {}
    run = types.SimpleNamespace(
        log=lambda scalars: wandb.logged.append({**scalars, "id": wandb.options["id"]}),
        finish=lambda: wandb.finished.append(True),
        define_metric=lambda name, step_metric: wandb.axes.update({name: step_metric}),
    )
    wandb.init = lambda **options: wandb.options.update(options) or run
    wandb.__spec__ = types.SimpleNamespace(name="wandb")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    return wandb


def test_loggers_get_every_number(watched_config, wandb):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = {"enable_tensorboard": True, "enable_wandb": True, "wandb_project": "p"}
    run = run_to_end(with_settings(watched_config, metrics=loggers))
    events = EventAccumulator(str(run.folder.path / "tb")).Reload()

    def read_tensorboard(name: str) -> dict[int, float]:
        return {event.step: event.value for event in events.Scalars(name)}

    def read_wandb(name: str) -> dict[int, float]:
        return {entry["step"]: entry[name] for entry in wandb.logged if name in entry}

    records = read_json_lines(run.folder.metrics_path)
    for name in ("loss", "validation_loss"):
        expected = {record["step"]: record[name] for record in records if name in record}
        assert read_wandb(f"rowwise/{name}") == expected
        assert read_tensorboard(f"rowwise/{name}") == pytest.approx(expected)
    record, name = Record.read(run.folder.path), "model.layers.0.mlp.up_proj.input.row"
    column = record.statistics["amax"][:, find_tensor(record, "mlp.up_proj", "input")]
    amaxes = dict(zip([1, 2, 4], column, strict=True))
    assert read_wandb(f"numerics/amax/{name}") == amaxes
    assert read_tensorboard(f"numerics/amax/{name}") == pytest.approx(amaxes)
    assert (wandb.options["project"], wandb.options["name"], wandb.options["resume"]) == ("p", "tiny", "allow")
    assert wandb.options["config"]["model"]["dim"] == 32
    assert wandb.axes == {"*": "step"}
    assert wandb.finished == [True]


def test_no_run_of_wandb_has_a_step_twice(resumable_config, wandb, capsys):
    config, ids = with_settings(resumable_config, metrics={"enable_wandb": True}), []
    for steps, load_step in ((4, -1), (6, -1), (7, 2)):
        resume = {"resume": "auto", "load_step": load_step}
        run_to_end(with_settings(config, training={"steps": steps}, checkpoint=resume))
        ids.append(wandb.options["id"])
    assert ids[0] == ids[1] != ids[2]
    assert f"Weights & Biases: a new run, {ids[2]}, begins after step 2\n" in capsys.readouterr().out
    steps = [(entry["id"], entry["step"]) for entry in wandb.logged if "bfloat16/loss" in entry]
    assert steps == [(ids[0], step) for step in range(1, 7)] + [(ids[2], step) for step in range(3, 8)]
    other = run_to_end(with_settings(config, job={"dump_folder": config.job.dump_folder + "2"}))  # of the same name
    assert wandb.options["id"] not in ids
    (other.folder.path / "wandb_id.txt").write_text("")  # of a run that was killed while it wrote the id
    run_to_end(with_settings(config, job={"dump_folder": config.job.dump_folder + "2"}, checkpoint={"resume": "must"}))
    assert wandb.options["id"]


@pytest.mark.parametrize("method", ["init", "log", "finish"])
def test_a_run_goes_on_without_wandb_if_it_fails(watched_config, wandb, capsys, method):
    calls = []

    def fail(*arguments: object, **options: object) -> None:
        calls.append(arguments)
        raise RuntimeError("the service is down\nat all")

    setattr(wandb if method == "init" else wandb.init(), method, fail)
    run = run_to_end(with_settings(watched_config, metrics={"enable_wandb": True}))
    line = "quaver: the run goes on without Weights & Biases, which failed: RuntimeError: the service is down\n"
    assert capsys.readouterr().err == line
    assert len(calls) == 1
    assert len(read_json_lines(run.folder.metrics_path)) == 6


def test_tensorboard_shows_a_step_that_a_resumed_run_repeats_once(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume_step, steps in ((None, [1, 2, 3, 4, 5]), (None, [1, 2, 3]), (1, [2, 3, 4])):  # the first saved nothing
        folder, config = RunFolder(tmp_path, resume_step), Metrics(enable_tensorboard=True)
        with closing(Loggers()) as loggers:
            loggers.open(config, folder, {})
            for step in steps:
                loggers.log(step, {"loss": 1.0})
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4]


@pytest.mark.parametrize("method", ["__init__", "add_scalar"])
def test_a_run_goes_on_without_tensorboard_if_it_fails(watched_config, monkeypatch, capsys, method):
    tensorboard = pytest.importorskip("torch.utils.tensorboard")

    def fail(*_: object, **options: object) -> None:
        raise TypeError("no scalar\nat all")

    monkeypatch.setattr(tensorboard.SummaryWriter, method, fail)
    run_to_end(with_settings(watched_config, metrics={"enable_tensorboard": True}))
    line = "quaver: the run goes on without TensorBoard, which failed: TypeError: no scalar\n"
    assert capsys.readouterr().err == line


def test_a_record_that_cannot_be_written_ends_the_run(watched_config):
    run = prepare_run(watched_config)
    run.folder.numerics_path.mkdir()
    with pytest.raises(NotWrittenError, match=r"cannot write .*numerics.jsonl"):
        train(run)

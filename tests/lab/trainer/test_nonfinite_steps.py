"""Tests runs with steps that are not finite: what is skipped, recorded and saved."""

import copy
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from quaver.lab.report.facts import list_facts
from quaver.lab.report.run import read_runs
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.settings import Float8
from quaver.lab.trainer.nonfinite import NonFiniteError
from quaver.lab.trainer.train import train
from quaver.lab.trainer.training_run import TrainingRun, prepare_run
from tests.lab.trainer.runs import list_checkpoints, run_to_end, with_settings
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


def test_the_peak_of_a_skipped_step_is_measured_in_a_later_one(tiny_config, spoil):
    whole = run_to_end(with_settings(tiny_config, training={"steps": 3}))
    run = prepare_run(with_settings(tiny_config, training={"steps": 3, "nonfinite": "skip"}, job={"name": "skips"}))
    spoil(run, {2})
    train(run)
    assert run.models[0].peak_memory == whole.models[0].peak_memory


def test_a_skipped_step_changes_nothing_but_the_data(tiny_config, spoil, before_each_step, capsys):
    config = replace(tiny_config, float8=Float8(recipe_name="delayed"))
    run, states = prepare_run(with_settings(config, training={"nonfinite": "skip"})), []

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
    assert re.search(r"skipped: loss (nan|inf|\d+\.\d{4}) and gradient norm ", printed)
    assert re.search("skipped steps +1 ", printed)


def test_too_many_skipped_steps_in_a_row_end_the_run(tiny_config, spoil):
    run = prepare_run(with_settings(tiny_config, training={"steps": 9, "nonfinite": "skip", "max_nonfinite_steps": 2}))
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
        (True, 2, False, [], "; step 1 is not saved, because the other model has taken the next one"),
    ],
)
def test_a_nonfinite_run_leaves_a_record_and_the_step_before(
    tiny_config, spoil, before_each_step, compare, bad_step, ruined, saved, message
):
    config = with_settings(tiny_config, job={"compare": compare}, float8={"enable_float8_linear": compare})
    run = prepare_run(config)
    spoil(run, {bad_step})
    weight = next(run.models[0].model.parameters())
    before_each_step(lambda model, step: weight.data.fill_(math.inf) if ruined and step == bad_step else None)
    with pytest.raises(NonFiniteError, match=f"step {bad_step} .*model.embed_tokens.*; lower optimizer.lr.*") as error:
        train(run)
    assert str(error.value).endswith(message)
    folder = run.folder.path
    assert (list_checkpoints(folder) if (folder / "checkpoint").exists() else []) == saved
    assert dict(list_facts(read_runs([folder])[0]))["steps"] == str(bad_step - 1)
    last = read_json_lines(run.folder.metrics_path)[-1]
    assert (last["kind"], last["step"], last["model"]) == ("nonfinite_step", bad_step, run.models[0].name)
    assert "model.embed_tokens" in last["reason"]


def test_weights_whose_validation_is_not_finite_are_not_saved(tiny_config):
    run = prepare_run(with_settings(tiny_config, checkpoint={"interval": 1}, validation={"freq": 2}))
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

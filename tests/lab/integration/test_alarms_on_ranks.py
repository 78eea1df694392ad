"""Tests that after an alarm every rank of a run changes the recipe, or stops, after the same step."""

import json
from unittest.mock import patch

import pytest
import torch

from quaver.lab.cli import train
from quaver.lab.runs.checkpoint_folder import CheckpointFolder, read_record
from quaver.lab.trainer.training_run import build_run
from tests.lab.integration.train_on_ranks import LIMIT_S, TINY, train_here
from tests.ranks import run

LAYER = "model.layers.0.mlp.up_proj"
WATCHED = [*TINY, "--model.n_layers=1", "--training.global_batch_size=4", "--checkpoint.enable", "--numerics.every=1"]


def build_broken(*built):
    """Return a run in which one channel of a linear's input is 2^20 times larger, on the rank that has it."""
    broken = build_run(*built)
    scale = torch.ones(32)
    scale[5] = 2.0**20
    broken.models[0].model.get_submodule(LAYER).register_forward_pre_hook(lambda _, inputs: (inputs[0] * scale,))
    return broken


def train_broken(cases, prefix):
    """Without guards on hooks Dynamo gives each block the code of one that has none."""
    guarded = torch._dynamo.config.patch(skip_nnmodule_hook_guards=False)
    with patch.object(train, "build_run", build_broken), guarded:
        return train_here(cases, prefix)


@pytest.mark.parametrize(
    "compiles", [[], pytest.param(["--training.compile"], marks=pytest.mark.nightly)], ids=["eager", "compiled"]
)
def test_two_ranks_fall_back_together(tmp_path, compiles):
    argv = [*WATCHED, *compiles, f"--job.dump_folder={tmp_path}", "--job.name=falls", "--numerics.on_alarm=fallback"]
    results = run(2, train_broken, [("falls", argv)], f"alarms {tmp_path}", timeout=LIMIT_S)
    assert [ended for ended, *_ in results] == [{"falls": (0, 1)}] * 2, results
    record = read_record(CheckpointFolder(tmp_path / "falls" / "checkpoint").get_path(3))
    assert record["progress"]["fallbacks"] == {LAYER: "high_precision"}
    lines = [json.loads(line) for line in (tmp_path / "falls" / "numerics.jsonl").read_text().splitlines()]
    headers = [line for line in lines if line["kind"] == "header"]
    has_layer = [any(tensor["layer"] == LAYER for tensor in header["tensors"]) for header in headers]
    assert has_layer == [True, False]
    assert [line["step"] for line in lines if line["kind"] == "sample"] == [1, 2, 3]


def test_two_ranks_stop_together_and_note_that_each_validates_on_all_batches(tmp_path):
    argv = [
        *WATCHED,
        "--validation.steps=3",
        f"--job.dump_folder={tmp_path}",
        "--job.name=stops",
        "--numerics.on_alarm=stop",
    ]
    results = run(2, train_broken, [("stops", argv)], f"alarms {tmp_path}", timeout=LIMIT_S)
    assert [ended["stops"][0] for ended, *_ in results] == [5, 5], results
    (note,) = json.loads((tmp_path / "stops" / "summary.json").read_text())["notes"]
    assert note.startswith("each rank validates on all batches: validation.steps = 3 is not a multiple of 2 ")

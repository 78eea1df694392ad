"""Tests that a file that one rank cannot write ends the run on all ranks, with one line and exit code 4."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter

from quaver.lab.trainer.trained_model import TrainedModel
from tests.command_line import TEXT, TINY
from tests.lab.integration.train_on_ranks import LIMIT_S, train_here
from tests.ranks import run

SNAPSHOT = "memory_snapshot/step-000002/tensorwise-rank1.json"
CASES = {
    # name: (the rank that makes a folder of this name before step 2, or whose disk is full, the last step, the line)
    "NaN": (0, "NaN", 2, "cannot write step 2 to '{run}/metrics.jsonl': JSON has no infinity and no NaN"),
    "removed": (0, "", 2, "the run folder {run!r} was removed while the run trained; the run ends"),
    "snapshot": (1, SNAPSHOT, 2, f"rank 1: cannot write '{{run}}/{SNAPSHOT}': Is a directory"),
    "numerics": (0, "numerics.jsonl", 2, "cannot write '{run}/numerics.jsonl': Is a directory"),
    "summary": (0, ".partial.summary.json", 3, "cannot write '{run}/summary.json': Is a directory"),
    "shard": (1, None, 3, "the checkpoint of step 2 could not be written to '{run}/checkpoint': No space left"),
}


def obstruct(runs: Path, name: str) -> None:
    rank, file, _, _ = CASES[name]
    if dist.get_rank() != rank:
        return
    if file is None:
        FileSystemWriter.write_data = fill_disk
        return
    if not file:
        shutil.rmtree(runs / name)
        return
    (runs / name / file).unlink(missing_ok=True)
    (runs / name / file).mkdir(parents=True)


def fill_disk(*_: object) -> None:
    raise OSError(28, "No space left on device")


def train_obstructed(runs: Path, cases: list[tuple[str, list[str]]], prefix: str) -> tuple[dict, str, str, dict]:
    train_step, steps = TrainedModel.train_step, {}

    def obstruct_and_train(model: TrainedModel, step: int, batches: object, **options: object) -> object:
        name = model.config.job.name
        if step == 2:
            obstruct(runs, name)
        steps[name] = step
        result = train_step(model, step, batches, **options)
        return replace(result, lr=math.nan) if name == "NaN" and step == 2 else result

    with (
        patch.object(TrainedModel, "train_step", obstruct_and_train),
        patch.object(FileSystemWriter, "write_data", FileSystemWriter.write_data),
    ):
        return *train_here(cases, prefix), steps


def test_what_one_rank_cannot_write_ends_all_ranks_with_one_line(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    runs = tmp_path / "runs"
    argv = [*TINY, f"--data={tmp_path / 'text.txt'}", f"--job.dump_folder={runs}", "--training.steps=3"]
    argv += ["--model.n_layers=1", "--checkpoint.interval=2"]
    options = {
        "snapshot": ["--profiling.enable_memory_snapshot", "--profiling.memory_snapshot_step=2"],
        "numerics": ["--numerics.every=1"],
    }
    cases = [(name, [*argv, f"--job.name={name}", *options.get(name, [])]) for name in CASES]
    results = run(2, train_obstructed, runs, cases, "output errors", timeout=LIMIT_S)
    for ended, _, _, steps in results:
        assert {name: code for name, (code, _) in ended.items()} == dict.fromkeys(CASES, 4)
        assert steps == {name: last for name, (_, _, last, _) in CASES.items()}
    lines = [f"quaver: error: {line.format(run=str(runs / name))}" for name, (*_, line) in CASES.items()]
    lines[-1] += " on device; there is no earlier one"
    assert [stderr.splitlines() for _, _, stderr, _ in results] == [lines, []]
    assert not (runs / "removed").exists()

"""Tests the trainer on a GPU: exact resumes, snapshots, traces, and memory as the allocator counts it."""

import json
import pickle

import pytest
import torch

from quaver.lab.cli import main
from quaver.lab.runs.json_lines import read_json_lines
from quaver.lab.trainer.memory import measure_peak
from tests.command_line import TEXT
from tests.gpu.device import DEVICE, needs_silicon

pytestmark = [pytest.mark.gpu, needs_silicon("what its allocator and its profiler record")]

SMALL = [
    *("--model.dim=256", "--model.n_layers=2", "--model.hidden_dim=768", "--training.seq_len=128"),
    *("--training.local_batch_size=2", "--training.device=cuda", "--validation.freq=1000", "--validation.steps=1"),
    *("--lr_scheduler.schedule=constant", "--lr_scheduler.warmup_steps=2", "--metrics.log_freq=1", "--deterministic"),
]


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 2)
    return [*SMALL, f"--data={text}", f"--job.dump_folder={tmp_path / 'runs'}"]


def read_records(run):
    return [record for record in read_json_lines(run / "metrics.jsonl") if "loss" in record]


def read_numbers(run):
    return [(record["step"], record["loss"], record["grad_norm"]) for record in read_records(run)]


@pytest.mark.parametrize("async_mode", ["async", "async_with_pinned_mem"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "delayed"])
def test_a_run_goes_on_to_the_bit(arguments, tmp_path, recipe, async_mode):
    arguments += [f"--float8.recipe_name={recipe}", f"--checkpoint.async_mode={async_mode}", "--checkpoint.interval=2"]
    assert main(["train", *arguments, "--job.name=a", "--training.steps=4"]) == 0
    assert main(["train", f"--resume={tmp_path / 'runs' / 'a'}", "--training.steps=8"]) == 0
    assert main(["train", *arguments, "--job.name=b", "--training.steps=8"]) == 0
    assert read_numbers(tmp_path / "runs" / "a") == read_numbers(tmp_path / "runs" / "b")


def test_records_have_both_peaks_of_the_allocator(arguments, tmp_path):
    assert main(["train", *arguments, "--job.name=a", "--training.steps=3", "--compare"]) == 0
    for record in read_records(tmp_path / "runs" / "a"):
        assert 0 < record["memory_active_bytes"] <= record["memory_reserved_bytes"]
        assert 0 < record["memory_active_share"] <= record["memory_reserved_share"] < 1
    summary = json.loads((tmp_path / "runs" / "a" / "summary.json").read_text())
    assert summary["bfloat16_peak"]["source"].startswith(("data sheet of", "unknown device; measured"))
    assert summary["comparison"]["peak_memory_ratio"] is not None


def test_a_run_writes_snapshots_and_traces(arguments, tmp_path):
    arguments += ["--job.name=a", "--training.steps=6", "--profiling.enable_profiling", "--profiling.profile_freq=6"]
    arguments += ["--profiling.enable_memory_snapshot", "--profiling.memory_snapshot_step=3"]
    assert main(["train", *arguments]) == 0
    run = tmp_path / "runs" / "a"
    (snapshot,) = (run / "memory_snapshot").rglob("*.pickle")
    assert pickle.loads(snapshot.read_bytes())["segments"]
    assert list((run / "profile_trace").rglob("*.json.gz"))


def test_compiled_blocks_train_and_go_on(arguments, tmp_path):
    arguments = [*arguments, "--training.compile", "--job.name=a"]
    assert main(["train", *arguments, "--training.steps=3"]) == 0
    assert main(["train", f"--resume={tmp_path / 'runs' / 'a'}", "--training.steps=5"]) == 0
    assert [step for step, *_ in read_numbers(tmp_path / "runs" / "a")] == [1, 2, 3, 4, 5]
    assert all(torch.tensor(loss).isfinite() for _, loss, _ in read_numbers(tmp_path / "runs" / "a"))


def test_growth_is_added_to_what_is_resident_and_others_do_not_count():
    device = torch.device(DEVICE)
    other = torch.zeros(1 << 20, device=device)
    own = torch.zeros(2 << 20, device=device)
    with measure_peak([own], device=device, is_countable=False) as peak:
        torch.zeros(4 << 20, device=device)
    assert peak.peak_bytes == 4 * (6 << 20)
    assert peak.source == "torch.cuda.max_memory_allocated"
    assert other.numel() == 1 << 20

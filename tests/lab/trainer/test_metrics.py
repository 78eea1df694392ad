"""What a run records besides its losses: provenance, memory, utilization, loggers, the settings page."""

import json
import os
import subprocess
import sys
import tracemalloc
import types
from contextlib import closing
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch import nn

from quaver.lab.runs.errors import CheckpointError
from quaver.lab.runs.json_lines import JsonLines, read_metrics, rewound_metrics
from quaver.lab.runs.run_folder import git_revision, provenance
from quaver.lab.settings import Metrics, TrainConfig
from quaver.lab.settings.docs import configuration_page
from quaver.lab.trainer.flops import MASKED, utilization
from quaver.lab.trainer.memory import describe_memory, device_memory, measure_peak, storage_bytes
from quaver.lab.trainer.metrics import (
    SPIKE_MIN_STEPS,
    SPIKE_WINDOW,
    check_loggers,
    is_spike,
    median_after_warmup,
    remember,
)
from quaver.lab.trainer.train import train
from quaver.lab.trainer.training_run import prepare
from quaver.roofline.device_specs import PeakFlops

ROOT = Path(__file__).parents[3]


def test_the_page_of_settings_is_what_the_dataclasses_say():
    """If this fails: python -m quaver.lab.settings.docs docs/configuration.md"""
    page = configuration_page()
    assert (ROOT / "docs" / "configuration.md").read_text() == page
    config = TrainConfig()
    for section in fields(config):
        assert f"## [{section.name}]" in page
        for setting in fields(getattr(config, section.name)):
            rows = page.split(f"## [{section.name}]")[1].split("## [")[0].splitlines()
            (row,) = (line for line in rows if line.startswith(f"`{setting.name}` |"))
            assert len(row.split("|")[2].strip()) > 10, f"{section.name}.{setting.name} has no help"


def test_provenance_names_the_commit_of_the_source():
    about = provenance(torch.device("cpu"))
    assert about["command"] == sys.argv
    assert about["environment"]["torch"] == torch.__version__
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        assert about["git"]["commit"] == head.stdout.strip()


def test_a_folder_that_no_checkout_tracks_has_no_revision(tmp_path):
    """As where quaver is installed in an environment inside somebody else's checkout."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    inside = tmp_path / "site-packages"
    inside.mkdir()
    (inside / "file.py").touch()
    assert git_revision(inside) is None


def test_asking_for_the_revision_writes_nothing_into_the_checkout(tmp_path):
    def git(*words: str) -> None:
        subprocess.run(["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@n", *words], check=True)

    git("init", "-q")
    (tmp_path / "file.py").write_text("x")
    git("add", ".")
    git("commit", "-q", "-m", "x")
    os.utime(tmp_path / "file.py", (1, 1))  # `git status` would refresh the index
    before = (tmp_path / ".git" / "index").read_bytes()
    assert git_revision(tmp_path)["is_modified"] is False
    assert (tmp_path / ".git" / "index").read_bytes() == before


def test_utilization_against_both_peaks_by_hand():
    """100 FLOPs in float8 and 100 in bfloat16 a token, a million tokens a second: 2e8 FLOP/s."""
    used = utilization({"float8": 100, "bfloat16": 100}, 1e6, PeakFlops(1e9, "", 2e9))
    assert used == {"tflops": 2e-4, "mfu": pytest.approx(0.2), "mfu_by_precision": pytest.approx(0.1 + 0.05)}
    only = utilization({"bfloat16": 200}, 1e6, PeakFlops(1e9, ""))
    assert only["mfu_by_precision"] == pytest.approx(only["mfu"])
    unknown = utilization({"float8": 100, "bfloat16": 100}, 1e6, PeakFlops(1e9, ""))
    assert unknown["mfu_by_precision"] is None
    assert utilization({"float32": 200}, 1e6, PeakFlops(1e9, "", 2e9))["mfu_by_precision"] is None
    long = utilization({"bfloat16": 120, MASKED: 80}, 1e7, PeakFlops(1.2e9, ""))
    assert long["mfu_by_precision"] == pytest.approx(1.0)
    assert long["mfu"] == pytest.approx(200 / 120)  # as usual
    measured = PeakFlops(1e9, "", float32_flops_per_s=4e9)  # a CPU without bfloat16 instructions
    used = utilization({"float32": 300, "bfloat16": 100}, 1e6, measured)
    assert used["mfu_by_precision"] == pytest.approx(0.075 + 0.1)


def test_memory_of_a_cpu():
    before = device_memory(torch.device("cpu"))["memory_rss_bytes"]
    held = torch.ones(64 << 20, dtype=torch.uint8)
    after = device_memory(torch.device("cpu"))
    assert after["memory_rss_bytes"] >= before
    assert after["memory_rss_bytes"] > held.numel()
    assert 0 < after["memory_rss_share"] < 1
    assert "rss" in describe_memory(after)


def test_memory_of_a_gpu_has_both_peaks(monkeypatch):
    stats = {"active_bytes.all.peak": 3 << 30, "reserved_bytes.all.peak": 4 << 30, "num_alloc_retries": 1}
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: stats)
    properties = types.SimpleNamespace(total_memory=8 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    record = device_memory(torch.device("cuda"))
    assert record["memory_active_share"] == 3 / 8
    assert record["memory_reserved_share"] == 1 / 2
    assert record["memory_retries"] == 1
    assert describe_memory(record) == "3.00 GiB (38%) active, 4.00 GiB (50%) reserved"


def test_resident_tensors_count_a_shared_storage_once():
    weight = torch.zeros(256)
    assert storage_bytes([weight, weight.view(16, 16), torch.zeros(256)]) == 2 * 1024


def test_the_allocators_log_has_the_peak_of_the_counted_tensors():
    layers = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 64, bias=False))
    peaks = []
    for countable in (True, False):
        layers.zero_grad()
        with measure_peak(layers.parameters(), device=torch.device("cpu"), countable=countable) as peak:
            layers(torch.zeros(32, 64)).sum().backward()
        peaks.append(peak)
    assert all(each.exact for each in peaks)
    assert peaks[0].source == "tensors of one step, exact"
    assert peaks[1].source == "tensors of one step, from the CPU allocator's log"
    assert peaks[1].peak_bytes == pytest.approx(peaks[0].peak_bytes, abs=64)  # scalars


def test_median_leaves_out_the_warm_up():
    assert median_after_warmup([9.0, 9.0, 9.0, 1.0, 2.0, 3.0]) == 2.0
    assert median_after_warmup([5.0]) == 5.0


def test_a_spike_stands_out_from_the_noise_and_from_a_spike_before_it():
    generator = torch.Generator().manual_seed(0)
    recent: list[float] = []
    false_alarms = 0
    for value in (2 + 0.05 * torch.randn(500, generator=generator)).tolist():
        false_alarms += is_spike(value, recent, 6.0)
        remember(value, recent)
    assert false_alarms == 0
    assert len(recent) == SPIKE_WINDOW
    assert is_spike(2.5, recent, 6.0)
    remember(2.5, recent)
    assert is_spike(2.5, recent, 6.0)
    assert not is_spike(1.5, recent, 6.0), "a lower loss is no spike"
    assert not is_spike(2.5, recent, 0.0)
    assert not is_spike(9.0, recent[: SPIKE_MIN_STEPS - 1], 6.0)


def test_losses_that_hardly_differ_have_no_spike_in_their_last_digits():
    assert not is_spike(2.0001, [2.0] * SPIKE_WINDOW, 6.0)
    assert is_spike(2.1, [2.0] * SPIKE_WINDOW, 6.0)


def test_a_spike_is_in_the_log(tiny_config, monkeypatch, capsys):
    run = prepare(tiny_config)
    run.progress.recent_losses["bfloat16"] = [1.0] * SPIKE_MIN_STEPS
    train(run)
    assert [record["loss_spike"] for record in read_metrics(run.folder.metrics) if "loss" in record] == [True] * 4
    assert "is a spike" in capsys.readouterr().out


def test_json_lines_refuse_what_json_lacks(tmp_path):
    with closing(JsonLines(tmp_path / "m.jsonl")) as metrics:
        metrics.write({"step": 1, "loss": 0.5})
        with pytest.raises(ValueError, match="JSON"):
            metrics.write({"step": 2, "loss": float("nan")})
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1, "loss": 0.5}]


def rewind(*paths: Path, step: int) -> None:
    with rewound_metrics(paths, step):
        pass


def test_rewinding_takes_later_steps_and_half_a_line_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step}) for step in (1, 2, 3)]
    path.write_text("\n".join(lines) + '\n{"step": 4, "lo')
    rewind(path, step=3)
    assert [record["step"] for record in read_metrics(path)] == [1, 2, 3]
    rewind(path, step=1)
    assert [record["step"] for record in read_metrics(path)] == [1]
    rewind(tmp_path / "none.jsonl", step=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


DAMAGE = {
    "garbage": "garbage",
    "bytes": "\xff\xfe",
    "no object": "[]",
    "no step": '{"run": "bfloat16", "loss": 1}',
    "no number of a step": '{"step": null}',
    "an infinite step": '{"step": 1e999, "run": "bfloat16"}',
    "a negative step": '{"step": -1, "run": "bfloat16"}',
    "a run that is no name": '{"step": 1, "run": 3}',
    "a loss that is text": '{"step": 1, "run": "bfloat16", "loss": "low"}',
    "NaN": '{"step": 1, "run": "bfloat16", "loss": NaN}',
    "deep nesting": "[" * 100_000,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_record_is_named_and_no_file_is_changed(tmp_path, damage):
    good, bad = tmp_path / "metrics.jsonl", tmp_path / "float8_scales.jsonl"
    good.write_text('{"step": 1}\n{"step": 2}\n')
    bad.write_bytes(b'{"step": 1}\n' + DAMAGE[damage].encode("latin-1") + b"\n")
    with pytest.raises(CheckpointError, match="line 2 of .*float8_scales.jsonl' is not a record"):
        rewind(good, bad, step=1)
    assert good.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert len(list(tmp_path.iterdir())) == 2


def test_a_record_is_read_without_half_a_line_and_a_damaged_one_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.5, "more": [1]}\n{"step": 2, "lo')
    assert read_metrics(path) == [{"step": 1, "loss": 2.5, "more": [1]}]
    path.write_text('{"step": 1}\n[]\n')
    with pytest.raises(CheckpointError, match=r"line 2 of .*metrics.jsonl' is not a record of a step; remove the line"):
        read_metrics(path)


def test_rewinding_holds_one_record_at_a_time(tmp_path):
    path = tmp_path / "float8_scales.jsonl"
    values = {f"model.layers.{index}.mlp.down_proj.input": 1.5 for index in range(200)}
    path.write_text("".join(json.dumps({"step": step, "amax": values}) + "\n" for step in range(1, 501)))
    assert path.stat().st_size > 4_000_000
    tracemalloc.start()
    try:
        rewind(path, step=400)
        rewinding = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rewinding < 500_000


def test_a_logger_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="metrics.enable_wandb must be false without the package wandb"):
        check_loggers(Metrics(enable_wandb=True))
    check_loggers(Metrics())

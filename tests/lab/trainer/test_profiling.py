"""Tests which steps write which files under [profiling], what a trace contains, and that no files are left over."""

import gzip
import json
import os
import signal
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from quaver import Float8Linear
from quaver.kernels import cpu
from quaver.lab.runs.errors import OutputFailures
from quaver.lab.runs.ranks import Ranks
from quaver.lab.settings import Profiling as ProfilingConfig
from quaver.lab.settings import TrainConfig, Training
from quaver.lab.trainer import profiling as profiling_module
from quaver.lab.trainer.profiling import Profiler
from quaver.runtime.errors import NotWrittenError

CPU = torch.device("cpu")
EVERY_STEP = {"enable_profiling": True, "profile_freq": 1, "profiler_warmup": 0}
PHASES = ("quaver::amax", "quaver::cast", "quaver::gemm")


def build_model(recipe="tensorwise"):
    up = Float8Linear(64, 96, dtype=torch.bfloat16, config=recipe)
    first, down = (nn.Linear(size, 64, dtype=torch.bfloat16) for size in (64, 96))
    return nn.Sequential(first, up, nn.ReLU(), down)


def train_step(model, optimizer=None):
    model(torch.randn(32, 64, dtype=torch.bfloat16)).square().mean().backward()
    if optimizer:
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def profile_first_step(folder, *, recipe="tensorwise", **profiling):
    """Yield a model, and profile the block as its first step. Raises NotWrittenError for what could not be written."""
    config, failures, model = make_config(**EVERY_STEP, **profiling), OutputFailures(Ranks()), build_model(recipe)
    optimizer = torch.optim.SGD(model.parameters())
    with Profiler(config, folder, 0, CPU, failures) as profiler, profiler.profile(1, recipe, model, optimizer):
        yield model
    failures.raise_on_all_ranks()


def make_config(**profiling) -> TrainConfig:
    return TrainConfig(training=Training(steps=20, device="cpu"), profiling=ProfilingConfig(**profiling))


def list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_traces_can_go_to_a_nested_folder_of_the_run(tmp_path):
    with profile_first_step(tmp_path, save_traces_folder="profiles/traces") as model:
        train_step(model)
    assert list_files(tmp_path) == ["profiles/traces/step-000001/tensorwise-rank0.json.gz"]


def test_the_steps_of_each_model_write_their_files(tmp_path):
    traces = {"enable_profiling": True, "profile_freq": 4, "profiler_warmup": 1, "profiler_active": 2}
    config = make_config(**traces, enable_memory_snapshot=True, memory_snapshot_step=2)
    models = {name: build_model() for name in ("tensorwise", "bfloat16")}
    optimizers = {name: torch.optim.AdamW(model.parameters()) for name, model in models.items()}
    with Profiler(config, tmp_path, 1, CPU, OutputFailures(Ranks())) as profiler:
        for step in range(1, 9):
            for name, model in models.items():
                with profiler.profile(step, name, model, optimizers[name]):
                    train_step(model, optimizers[name])
        assert [step for step in range(1, 9) if not profiler.is_traced(step)] == [1, 5]
    traces = [f"profile_trace/step-{s:06d}/{n}-rank1.json.gz" for s in (3, 4, 7, 8) for n in sorted(models)]
    timelines = [f"memory_snapshot/step-000002/{n}-rank1.{e}" for n in sorted(models) for e in ("json", "png")]
    assert list_files(tmp_path) == timelines + traces
    report = json.loads((tmp_path / timelines[-2]).read_text())
    assert (report["schema"], report["model"], report["step"], report["rank"]) == (4, "tensorwise", 2, 1)
    assert report["config"]["profiling"]["memory_snapshot_step"] == 2
    assert report["peak_bytes"] == sum(row["bytes"] for row in report["at_peak"]) > 0


def test_nothing_is_done_or_left_where_nothing_is_asked(tmp_path):
    model, before = build_model(), signal.getsignal(signal.SIGUSR1)
    with Profiler(TrainConfig(), tmp_path, 0, CPU, OutputFailures(Ranks())) as profiler:
        assert signal.getsignal(signal.SIGUSR1) == before
        for step in range(1, 13):
            with profiler.profile(step, "tensorwise", model, torch.optim.SGD(model.parameters())):
                assert not any(module._forward_hooks for module in model.modules())
    assert list_files(tmp_path) == []


def test_a_file_that_cannot_be_written_is_an_output_error(tmp_path):
    (tmp_path / "profile_trace").write_text("in the way")
    with pytest.raises(NotWrittenError, match="cannot write .*profile_trace"), profile_first_step(tmp_path) as model:
        train_step(model)


def test_a_trace_that_torch_could_not_write_whole_is_an_output_error(tmp_path, monkeypatch):
    def write_a_part(profiler, path):
        Path(path).write_text('{"traceEvents": [{"name": "a"}')

    for export in (write_a_part, lambda profiler, path: None):  # a full disk, and one that was full before
        monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", export)
        with pytest.raises(NotWrittenError, match="gz': .*incomplete trace"), profile_first_step(tmp_path) as model:
            train_step(model)
        assert list_files(tmp_path) == []


def test_a_trace_that_fills_the_disk_leaves_no_file(tmp_path, monkeypatch):
    def fill_disk(trace, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(profiling_module.shutil, "copyfileobj", fill_disk)
    with pytest.raises(NotWrittenError, match="No space"), profile_first_step(tmp_path) as model:
        train_step(model)
    assert list_files(tmp_path) == []


def test_errors_of_the_step_itself_pass_through_unchanged(tmp_path):
    snapshot = {"enable_memory_snapshot": True, "memory_snapshot_step": 1}
    with pytest.raises(FileNotFoundError, match="mine"), profile_first_step(tmp_path, **snapshot) as model:
        raise FileNotFoundError("mine")
    assert list_files(tmp_path) == []
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("pure", [False, True])
@pytest.mark.parametrize(("recipe", "casts", "amaxes"), [("tensorwise", 4, 3), ("rowwise", 5, 6)])
def test_a_trace_has_the_phases_of_one_linear(tmp_path, monkeypatch, recipe, casts, amaxes, pure):
    if pure:
        monkeypatch.setattr(cpu, "HAS_EXTENSION", False)
    with profile_first_step(tmp_path, recipe=recipe) as model:
        train_step(model)
    with gzip.open(tmp_path / f"profile_trace/step-000001/{recipe}-rank0.json.gz") as opened:
        counts = Counter(event["name"] for event in json.load(opened)["traceEvents"] if event.get("ph") == "X")
    # The C extension reads the amax in the cast. The weight's second tensorwise cast has the scale of the first. The
    # rowwise casts of an input for two matmuls are one, with two amaxes.
    expected = {"quaver::cast": casts, "quaver::gemm": 3}
    if pure or not cpu.HAS_EXTENSION:
        expected["quaver::amax"] = amaxes
    assert {name: count for name, count in counts.items() if name in PHASES} == expected


def test_sigusr1_asks_for_the_next_step_of_each_model(tmp_path):
    before = signal.getsignal(signal.SIGUSR1)
    config = make_config(enable_memory_snapshot=True, memory_snapshot_step=0)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters())
    with Profiler(config, tmp_path, 0, CPU, OutputFailures(Ranks())) as profiler:
        for step in range(1, 6):
            for name in ("a", "b"):
                with profiler.profile(step, name, model, optimizer):
                    train_step(model, optimizer)
                    if (step, name) == (2, "a"):
                        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == before
    assert [name for name in list_files(tmp_path) if name.endswith("json")] == [
        "memory_snapshot/step-000002/b-rank0.json",
        "memory_snapshot/step-000003/a-rank0.json",
    ]


def test_cuda_snapshots_are_written_when_asked_and_when_out_of_memory(tmp_path, monkeypatch):
    histories = []
    monkeypatch.setattr(profiling_module, "record_memory_history", lambda **options: histories.append(options))
    monkeypatch.setattr(profiling_module, "dump_snapshot", lambda file: Path(file).write_bytes(b"snapshot"))
    device = torch.device("cuda", 0)
    config = make_config(enable_memory_snapshot=True, memory_snapshot_step=2)
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters())
    with Profiler(config, tmp_path, 0, device, OutputFailures(Ranks())) as profiler:
        assert [history["max_entries"] > 0 for history in histories] == [True]
        for step in range(1, 5):
            with profiler.profile(step, "tensorwise", model, optimizer):
                if step == 3:
                    os.kill(os.getpid(), signal.SIGUSR1)
        with pytest.raises(torch.OutOfMemoryError), profiler.profile(5, "tensorwise", model, optimizer):
            raise torch.OutOfMemoryError("full")
    folder = "memory_snapshot/step-00000"
    names = ("2/tensorwise-rank0", "3/tensorwise-rank0", "5/tensorwise-rank0-out-of-memory")
    assert list_files(tmp_path) == [f"{folder}{name}.pickle" for name in names]
    assert histories[-1] == {"enabled": None, "device": device}

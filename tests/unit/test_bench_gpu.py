"""make gpu without a GPU: what it would run, how it runs it, and what it says where there is none."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from benchmarks import gpu
from quaver.trainer.config.flags import split_flags


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_there_is_one_line_and_exit_code_2(tmp_path):
    command = [sys.executable, str(gpu.ROOT / "benchmarks" / "gpu.py")]
    environment = {**os.environ, "OUT": str(tmp_path / "out")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == f"make gpu needs a GPU, and torch {torch.__version__} sees none on this machine\n"
    assert not (tmp_path / "out").exists()


def test_parts_are_chosen_by_name(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.main(["gemm", "matmul"]) == 2
    assert capsys.readouterr().err.startswith("make gpu: unknown part 'matmul'; choose from doctor, tests, ")
    ran = []
    monkeypatch.setattr(gpu, "run", lambda words, limit_s, log: ran.append(words) or "exit code 1")
    assert gpu.main(["gemm", "cast"]) == 1
    assert [words[3] for words in ran] == ["gemm", "cast"]
    assert "FAILED: gemm (exit code 1), cast (exit code 1)" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "gpu.json").read_text())["parts"]) == {"gemm", "cast"}


def test_all_parts_fit_in_nine_minutes(tmp_path):
    todo = gpu.parts(tmp_path)
    assert sum(part.seconds for part in todo) <= 9 * 60
    assert len({part.name for part in todo}) == len(todo)
    verbs = {part.words[3] for part in todo if part.words[2:3] == ["bench"]}
    assert verbs == {"linear", "cast", "gemm", "host", "block", "train"}


@pytest.mark.parametrize("part", gpu.parts(gpu.ROOT), ids=lambda part: part.name)
def test_every_command_is_understood(part):
    if part.words[1] != "quaver.cli":
        assert importlib.util.find_spec(part.words[1])
        return
    verb, *words = part.words[2:]
    if verb == "doctor":
        assert words == ["--json"]
        return
    kind = words.pop(0)
    options_of_verb = getattr(importlib.import_module(f"quaver.bench.{kind}"), kind.capitalize())
    values, rest = split_flags(options_of_verb, words)
    assert options_of_verb(**values).device == "cuda"
    if rest:
        from quaver.trainer.config_io import load_config, parse_arguments

        config_path, flags = parse_arguments(rest)
        assert load_config(gpu.ROOT / config_path, flags).model.dim == 2048


def test_a_part_that_fails_or_takes_too_long_is_named_and_the_others_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "GRACE_S", 6)  # a busy machine takes seconds to start and to interrupt Python
    saves_at_interrupt = "import time\ntry:\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    print('saved')"
    todo = [
        gpu.Part("good", ["-c", "print('fine')"], 9),
        gpu.Part("bad", ["-c", "raise SystemExit(3)"], 0),
        gpu.Part("slow", ["-c", saves_at_interrupt], 0),
        gpu.Part("last", ["-c", "print('still here')"], 10),
    ]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell that runs make gpu with &
    start = time.monotonic()
    try:
        outcomes = gpu.run_all(todo, tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - start < 60
    assert [outcome["failure"] for outcome in outcomes.values()][:2] == ["", "exit code 3"]
    assert outcomes["slow"]["failure"].startswith("stopped after ")
    assert "saved" in (tmp_path / "gpu_slow.log").read_text()
    assert outcomes["last"]["failure"] == ""
    assert "still here" in capsys.readouterr().out
    json.dumps(outcomes)


def test_a_part_that_ignores_the_interrupt_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "GRACE_S", 1)
    stubborn = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(60)"
    start = time.monotonic()
    outcome = gpu.run_all([gpu.Part("stubborn", ["-c", stubborn], 2)], tmp_path)
    assert outcome["stubborn"]["failure"] == "stopped after 2 s"
    assert time.monotonic() - start < 10

"""Tests the alternating timer, inputs that are not in cache, and the results file."""

import json
import os
from contextlib import nullcontext
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from quaver.lab.bench import gemm, harness
from quaver.lab.bench.harness import Rotation, find_cache_bytes, time_alternating
from quaver.lab.bench.shapes import Shape, parse_shapes
from quaver.lab.cli import main

CPU = torch.device("cpu")


def test_contestants_take_turns(monkeypatch):
    order, now_s = [], [0.0]
    monkeypatch.setattr(harness, "time", SimpleNamespace(perf_counter=lambda: now_s[0]))

    def contestant(name):
        def run():
            now_s[0] += 0.003  # longer than the shortest sample, so that a sample is one call
            order.append(name)

        return run

    timings = time_alternating({name: contestant(name) for name in "abc"}, CPU, rounds=4, warmup=1)
    assert {timing.samples for timing in timings.values()} == {4}
    assert order[-12:] == list("abcbcacababc")
    assert [timing.median_us for timing in timings.values()] == pytest.approx([3000] * 3)


def test_without_until_done_the_clock_does_not_wait_for_the_device(monkeypatch):
    waits = []
    monkeypatch.setattr(harness, "synchronize", lambda device: waits.append(device))
    time_alternating({"a": lambda: None}, CPU, rounds=1, warmup=0)
    waits_until_done = len(waits)
    time_alternating({"a": lambda: None}, CPU, rounds=1, warmup=0, until_done=False)
    assert len(waits) == 2 * waits_until_done - 1


def test_a_rotation_is_larger_than_the_cache_and_takes_turns():
    size = 1 << 20
    rotation = Rotation(lambda: torch.empty(size, dtype=torch.uint8), size, CPU)
    cache = find_cache_bytes(CPU)
    assert len(rotation) * size >= min(2 * cache, 512 << 20) if cache else len(rotation) >= 64
    first_round = [rotation.next().data_ptr() for _ in range(len(rotation))]
    assert len(set(first_round)) == len(rotation)
    assert [rotation.next().data_ptr() for _ in range(len(rotation))] == first_round
    assert len(Rotation(lambda: 0, 1 << 40, CPU)) == 1
    assert len(Rotation(lambda: 0, 1, CPU)) == 256


@pytest.mark.parametrize("reported", [0, -1])
def test_a_cache_that_the_system_does_not_know_has_no_size(reported, monkeypatch):
    monkeypatch.setattr(os, "sysconf", lambda name: reported)
    assert find_cache_bytes(CPU) is None


def test_shapes_and_matrices_are_parsed():
    assert parse_shapes("64, 8x16x32, 64", tokens=1) == [Shape((64, 64, 64)), Shape((8, 16, 32))]
    layers = [str(layer) for layer in parse_shapes("llama-70b", tokens=512, divisor=8)]
    assert layers == [
        "512 x 1024 x 1024 (llama-70b/8 q,o)",
        "512 x 1024 x 128 (llama-70b/8 k,v)",
        "512 x 1024 x 3584 (llama-70b/8 gate,up)",
        "512 x 3584 x 1024 (llama-70b/8 down)",
    ]
    assert parse_shapes("64, 8x32", tokens=1, matrices=True) == [Shape((64, 64)), Shape((8, 32))]
    names = [str(matrix) for matrix in parse_shapes("llama-8b", tokens=16, divisor=4, matrices=True)]
    assert names == ["16 x 1024 (llama-8b/4 input)", "16 x 3584 (llama-8b/4 input)"]


@pytest.mark.parametrize("text", ["llama-9b", "1x2x3x4", "0", "axbxc", ""])
def test_shapes_that_mean_nothing_are_refused(text):
    with pytest.raises(ValueError, match="shape .*: expected a size such as 1024, M x K x N .* llama-8b, llama-70b"):
        parse_shapes(text, tokens=1)
    with pytest.raises(ValueError, match="matrix .*: expected a size such as 1024, rows x columns .* llama-70b"):
        parse_shapes(text, tokens=1, matrices=True)


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (KeyboardInterrupt(), 130, "quaver: interrupted\n"),
        (torch.OutOfMemoryError("too much"), 2, "quaver: error: this machine lacks the memory (too much); "),
        (NotImplementedError("no such scales"), 2, "quaver: error: no such scales\n"),
    ],
)
@pytest.mark.parametrize("finished", [2, 0])
def test_a_benchmark_that_ends_early_keeps_rows(error, code, line, finished, tmp_path, capsys, monkeypatch):
    output, calls = tmp_path / "gemm.json", count()

    def time_or_raise(*arguments, **options):
        if next(calls) == finished:
            raise error
        return time_alternating(*arguments, **options)

    monkeypatch.setattr(gemm, "time_alternating", time_or_raise)
    words = ["bench", "gemm", "--device", "cpu", "--shapes", "16", "--rounds", "1", "--output", str(output)]
    with pytest.raises(SystemExit) if isinstance(error, NotImplementedError) else nullcontext() as stopped:
        assert main(words) == code
    assert stopped is None or stopped.value.code == code
    printed = capsys.readouterr()
    assert printed.err.startswith(line)
    if not finished:
        assert not output.exists()
        return
    saved = json.loads(output.read_text())
    assert not saved["complete"]
    assert {row["gemm"] for row in saved["rows"]} == {"output", "grad_input"}
    assert "not complete" in printed.out

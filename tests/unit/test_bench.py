"""quaver bench: shapes, the alternating timer, and the command from end to end."""

import json
import re
import time
from pathlib import Path

import pytest
import torch

from quaver.bench import gemm, harness
from quaver.bench.harness import environment, time_alternating
from quaver.bench.results import writable
from quaver.bench.shapes import Shape, parse_shapes
from quaver.cli import main
from quaver.cli.bench import VERBS


def test_shapes_that_people_type():
    assert parse_shapes("64, 8x16x32", tokens=1) == [Shape("", 64, 64, 64), Shape("", 8, 16, 32)]
    layers = parse_shapes("llama-70b", tokens=512, divisor=8)
    assert Shape("llama-70b/8 down", 512, 3584, 1024) in layers
    assert len(layers) == 4


@pytest.mark.parametrize("text", ["llama-9b", "16x16", "0", "axbxc", ""])
def test_shapes_that_mean_nothing(text):
    with pytest.raises(ValueError, match="expected a size such as 1024, .* llama-8b, llama-70b"):
        parse_shapes(text, tokens=1)


def test_contestants_take_turns():
    order = []

    def contestant(name):
        def run():
            time.sleep(0.003)  # longer than a sample must last, so that a sample is one call
            order.append(name)

        return run

    timings = time_alternating({name: contestant(name) for name in "abc"}, torch.device("cpu"), rounds=4, warmup=1)
    assert {timing.samples for timing in timings.values()} == {4}
    assert order[-12:] == list("abcbcacababc")
    assert all(timing.median_us > 3000 for timing in timings.values())


def test_the_command_prints_and_saves_a_table(tmp_path, capsys):
    output = tmp_path / "new" / "linear.json"
    words = ["bench", "linear", "--shapes", "16", "--rounds", "2", "--modes", "eager", "--torchao", "no"]
    assert main([*words, "--recipes", "tensorwise", "rowwise", "--output", str(output)]) == 0
    result = json.loads(output.read_text())
    assert [(row["library"], row["recipe"]) for row in result["rows"]] == [
        ("bfloat16", ""),
        ("quaver", "tensorwise"),
        ("quaver", "rowwise"),
    ]
    assert result["environment"]["torch"] == torch.__version__
    assert result["rows"][0]["time_over_bfloat16"] == 1.0
    assert result["rows"][1]["timing"]["median_us"] > 0
    assert "16 x 16 x 16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["linear", "--shapes", "llama-9b"], "expected a size such as 1024"),
        (["linear", "--recipes", "rowise"], "unknown recipe 'rowise': expected one of tensorwise"),
        (["linear", "--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["linear", "--rounds", "many"], "--rounds must be an integer, got 'many'"),
        (["linear", "--threads", "-1"], "--threads must be not negative, got -1"),
        (["linear", "--modes", "fast"], "--modes must be one of eager, compiled, got 'fast'"),
        (["linear", "--output", "/dev/null/x.json"], "--output: cannot write /dev/null/x.json"),
        (["linear", "--output", "/dev"], "--output: expected a file to write, got the folder /dev"),
        (["linear", "--device", "cuda"], "sees no CUDA device"),
        (["cast", "--shapes", "1x2x3"], "expected a size such as 1024, rows x columns"),
        (["cast", "--casts", "rowise"], "--casts must be one of "),
        (["cast", "--output", "/dev/null/x.json"], "--output: cannot write /dev/null/x.json"),
        (["cast", "--shapes", "llama-8b", "--divisor", "5000"], "expected at most 4096, a width of llama-8b, got 5000"),
        (["gemm", "--shapes", "llama-8b", "--divisor", "5000"], "expected at most 4096, a width of llama-8b"),
        (["gemm", "--shapes", "8x8"], "expected a size such as 1024"),
        (["gemm", "--tokens", "-5"], "--tokens must be at least 1, got -5"),
        (["host", "--size", "0"], "--size must be at least 1, got 0"),
        (["block", "--model", "llama-9b"], "--model must be one of debug, llama-8b, llama-70b, got 'llama-9b'"),
        (["block", "--divisor", "3"], "--divisor: expected a divisor of debug's 4 heads, got 3"),
        (["block", "--tokens", "100", "--seq-len", "64"], "expected a multiple of --seq-len 64, got 100"),
        (["train", "--warmup", "1"], "--warmup: expected 2 or more, got 1"),
        (["train", "--training.stepz", "3"], "unknown flag: 'training.stepz'; did you mean 'training.steps'?"),
        (["train", "nowhere.toml"], "config file 'nowhere.toml' does not exist"),
        (["train", "--recipes", "rowise"], "unknown recipe 'rowise'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, capsys):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has what it should lack")
    with pytest.raises(SystemExit) as stop:
        main(["bench", *words])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_unknown_benchmark_is_one_line_with_the_nearest_name(capsys):
    assert main(["bench", "gem"]) == 2
    assert capsys.readouterr().err == "quaver: error: unknown benchmark 'gem'; did you mean 'gemm'?\n"
    assert main(["bench", "xyz"]) == 2
    assert "choose from linear, " in capsys.readouterr().err


def test_without_a_name_the_benchmarks_are_listed(capsys):
    assert main(["bench"]) == 2
    listed = capsys.readouterr().out
    assert all(f"  {verb}" in listed for verb in VERBS)
    assert main(["bench", "--help"]) == 0


def test_the_docs_have_every_benchmark():
    docs = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    assert all(f"quaver bench {verb}" in docs for verb in VERBS)


def test_an_output_is_tried_and_not_made(tmp_path):
    path = tmp_path / "new" / "x.json"
    assert writable(path) == path
    assert not path.exists()
    path.write_text("old")
    writable(path)
    assert path.read_text() == "old"


def test_an_interrupted_benchmark_keeps_what_it_has(tmp_path, capsys, monkeypatch):
    output, rounds = tmp_path / "gemm.json", []

    def interrupted(calls, device, *, rounds):
        raise KeyboardInterrupt

    words = ["bench", "gemm", "--device", "cpu", "--shapes", "16", "--rounds", "1", "--output", str(output)]
    once = gemm.time_alternating
    monkeypatch.setattr(
        gemm,
        "time_alternating",
        lambda *a, **k: (rounds.append(1), once(*a, **k))[1] if len(rounds) < 2 else interrupted(*a, **k),
    )
    assert main(words) == 130
    saved = json.loads(output.read_text())
    assert not saved["complete"]
    assert {row["gemm"] for row in saved["rows"]} == {"output", "grad_input"}
    assert "interrupted, not complete" in capsys.readouterr().out
    monkeypatch.setattr(gemm, "time_alternating", interrupted)
    assert main(words) == 130
    assert capsys.readouterr().err == "quaver: interrupted\n"


def test_results_name_the_machine_and_the_commit():
    about = environment(torch.device("cpu"))
    assert about["torch"] == torch.__version__
    assert re.fullmatch(r"[0-9a-f]{7}\+?|unknown", about["commit"])


def test_the_clock_stops_for_the_host_alone(monkeypatch):
    waits = []
    monkeypatch.setattr(harness, "synchronize", lambda device: waits.append(device))
    time_alternating({"a": lambda: None}, torch.device("cpu"), rounds=1, warmup=0)
    with_waiting = len(waits)
    time_alternating({"a": lambda: None}, torch.device("cpu"), rounds=1, warmup=0, until_done=False)
    assert len(waits) == 2 * with_waiting - 1

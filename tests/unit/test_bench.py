"""quaver bench: shapes, the alternating timer, and the command from end to end."""

import json
import time

import pytest
import torch

from quaver.bench.harness import time_alternating
from quaver.bench.shapes import Shape, parse_shapes
from quaver.cli import main


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
        (["--shapes", "llama-9b"], "expected a size such as 1024"),
        (["--recipes", "rowise"], "unknown recipe 'rowise': expected one of tensorwise"),
        (["--rounds", "0"], "expected 1 or more"),
        (["--output", "/dev/null/x.json"], "--output: cannot write /dev/null/x.json"),
        (["--device", "cuda"], "sees no CUDA device"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, message, capsys):
    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has what it should lack")
    with pytest.raises(SystemExit) as stop:
        main(["bench", "linear", *words])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
